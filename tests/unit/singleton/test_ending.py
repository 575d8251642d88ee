"""The decisions about what runs and messages leave behind, made from facts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from django_redlock import QuorumUnavailableError
from django_redlock.core.names import GOES_ON, NOTE
from django_redlock.singleton.arrival import Message, interrupted
from django_redlock.singleton.ending import (
    Execution,
    end,
    free_dead,
    give_back,
    is_abandoned,
    leave_queue,
    note_done,
    requeue,
    shorten,
)
from django_redlock.singleton.options import SingletonOptions
from django_redlock.singleton.pending import begin, discard, keep, look_up
from django_redlock.singleton.questions import Free, Put, Release
from django_redlock.singleton.ticket import Ticket, began_secret

from .facts import QUEUED, RUNNING, Facts, FakeSlot, held, secret

NAME, NEXT, OWN, RUN = "task:shop.sync:shop_id=7", "next:task:shop.sync:shop_id=7", secret("a"), secret("e")
TICKET, PENDING = Ticket(NAME, "default", "mine", OWN), Ticket(NAME, "default", "mine", OWN, number=2)
RUNS = {NAME: held("mine", RUNNING, secret=RUN)}
WAITS = {NAME: held("mine", QUEUED, secret=OWN)}
OTHER = {NAME: held("other", RUNNING, secret=secret("b"))}
RECORD = {NEXT: held("mine", QUEUED, secret=OWN, call="2.x")}
NEWER = {NEXT: held("mine", QUEUED, secret=secret("b"), call="3.x")}
BOTH, QUEUE = "until_and_while_executing", "until_executing"
RULES = SingletonOptions()
HOLDS = SingletonOptions(hold_for=60.0)


def run_with(rules: SingletonOptions = RULES, slot: Any = None, ticket: Ticket = TICKET, **more: Any) -> Execution:
    return Execution(ticket, rules, slot or FakeSlot(NAME, RUN), since=990.0, **more)


def queued(scope: Any = BOTH, **more: Any) -> Ticket:
    return replace(TICKET, scope=scope, **more)


def left(decision: Any, locks: Any, **facts: Any) -> dict[str, tuple[str, str]]:
    """Return the state and the task of each lock that is left after a decision."""
    given = Facts(dict(locks), **facts)
    given.decide(decision)
    return {name: (seen.owner.state, seen.owner.ref) for name, seen in given.locks.items() if seen.owner}


FREE: dict[str, Any] = {}
STILL_RUNS, STILL_WAITS = {NAME: ("", "mine")}, {NAME: ("queued", "mine")}
ENDS: list[tuple[str, Callable[[], Any], Any, Any]] = [
    ("its slot is free", lambda: end(run_with()), RUNS, FREE),
    ("its slot is held for the rest of the time", lambda: end(run_with(HOLDS)), RUNS, {NAME: ("held", "mine")}),
    (
        "of a call that ran at once, nobody learns the id",
        lambda: end(run_with(HOLDS, inline=True)),
        RUNS,
        {NAME: ("held", "")},
    ),
    ("the body did not end, so nothing is held", lambda: end(run_with(HOLDS), hold=False), RUNS, FREE),
    ("the time has passed", lambda: end(run_with(SingletonOptions(hold_for=10.0))), RUNS, FREE),
    ("its slot is lost", lambda: end(run_with(HOLDS, FakeSlot(NAME, RUN, lost=True))), OTHER, {NAME: ("", "other")}),
    ("it was handed over", lambda: end(run_with(HOLDS, over=True)), WAITS, STILL_WAITS),
    (
        "it had no slot, and its message still has one",
        lambda: end(replace(run_with(in_queue=True), slot=None)),
        WAITS,
        FREE,
    ),
    ("it had no slot", lambda: end(replace(run_with(HOLDS), slot=None)), WAITS, STILL_WAITS),
    (
        "its process is stopped, and its message returns",
        lambda: end(run_with(returns=True), stopped=True),
        RUNS,
        {NAME: ("claimed", "mine")},
    ),
    ("its process is stopped, and its message does not", lambda: end(run_with(), stopped=True), RUNS, FREE),
    ("it returns, but was not stopped", lambda: end(run_with(returns=True)), RUNS, FREE),
    ("the slot returns to the message", lambda: give_back(run_with()), RUNS, {NAME: ("claimed", "mine")}),
    ("the message waits elsewhere", lambda: give_back(run_with(ticket=queued())), RUNS, STILL_RUNS),
    ("the slot was handed over before", lambda: give_back(run_with(over=True)), RUNS, STILL_RUNS),
    (
        "the slot is lost, and cannot return",
        lambda: give_back(run_with(slot=FakeSlot(NAME, RUN, lost=True))),
        OTHER,
        {NAME: ("", "other")},
    ),
    ("a slot that is not there cannot return", lambda: give_back(replace(run_with(), slot=None)), FREE, FREE),
    (
        "a message that has no slot while it waits gets none",
        lambda: give_back(run_with(ticket=TICKET.without_slot)),
        RUNS,
        STILL_RUNS,
    ),
    (
        "a note that it is done",
        lambda: note_done(run_with(note="done:mine:0", remembered=60.0)),
        FREE,
        {"done:mine:0": (NOTE, "mine")},
    ),
    (
        "a note that another message goes on",
        lambda: note_done(run_with(note="done:mine:0", goes_on=True), True),
        FREE,
        {"done:mine:0": (GOES_ON, "mine")},
    ),
    ("no note of what goes on by itself", lambda: note_done(run_with(note="done:mine:0", goes_on=True)), FREE, FREE),
    ("no note of what needs none", lambda: note_done(run_with()), FREE, FREE),
    (
        "the slot of its queue is free",
        lambda: leave_queue(queued(), RULES),
        {f"queued:{NAME}": held("mine", QUEUED, secret=OWN)},
        FREE,
    ),
    ("the slot of its queue is that of its run", lambda: leave_queue(TICKET, RULES), WAITS, STILL_WAITS),
    ("the slot of its queue is held", lambda: leave_queue(queued(QUEUE), HOLDS), WAITS, {NAME: ("held", "mine")}),
    ("the slot of its queue is not held for ever", lambda: leave_queue(queued(QUEUE), RULES), WAITS, FREE),
    (
        "a run of its own holds, so its queue is free",
        lambda: leave_queue(queued(), HOLDS),
        {f"queued:{NAME}": held("mine", QUEUED, secret=OWN)},
        FREE,
    ),
    ("its record is free, and not held", lambda: leave_queue(replace(PENDING, scope=QUEUE), HOLDS), RECORD, FREE),
    ("a dead child leaves nothing", lambda: free_dead(TICKET, RUN, RULES, False), RUNS, FREE),
    (
        "a dead child leaves nothing of a message that had not begun",
        lambda: free_dead(TICKET, RUN, RULES, False),
        WAITS,
        FREE,
    ),
    ("the message of a dead child comes back", lambda: free_dead(TICKET, RUN, RULES, True), RUNS, STILL_WAITS),
    (
        "the message of a dead child comes back, and another one runs",
        lambda: free_dead(TICKET, RUN, RULES, True),
        OTHER,
        {NAME: ("", "other")},
    ),
    (
        "the message of a dead child comes back to a queue of its own",
        lambda: free_dead(queued(), RUN, RULES, True),
        RUNS,
        FREE,
    ),
    (
        "a dead child of a pending call leaves a note",
        lambda: free_dead(PENDING, RUN, RULES, False),
        RECORD,
        {"began:mine": (NOTE, "mine")},
    ),
    (
        "the message of a dead child of a pending call comes back",
        lambda: free_dead(PENDING, RUN, RULES, True),
        RECORD | RUNS,
        STILL_WAITS,
    ),
    ("a child that will be killed", lambda: shorten(TICKET, RUN, RULES), RUNS, {NAME: ("", "mine")}),
    ("a child that will be killed, and has not begun", lambda: shorten(TICKET, RUN, RULES), WAITS, FREE),
    (
        "a child that will be killed, and another one runs",
        lambda: shorten(TICKET, RUN, RULES),
        OTHER,
        {NAME: ("", "other")},
    ),
    ("a row is put back", lambda: requeue(TICKET, RULES), FREE, STILL_WAITS),
    ("a row is put back, and any number may wait", lambda: requeue(queued("while_executing"), RULES), FREE, FREE),
    ("a message ends", lambda: discard(TICKET, RULES), WAITS, FREE),
    ("a pending call ends", lambda: discard(PENDING, RULES), RECORD, {"began:mine": (NOTE, "mine")}),
    (
        "a pending call ends that counts",
        lambda: discard(PENDING, RULES, counts=True),
        RECORD,
        {"began:mine": (NOTE, "mine")},
    ),
    ("an older message of a pending call ends", lambda: discard(PENDING, RULES), NEWER, {NEXT: ("queued", "mine")}),
]


@pytest.mark.parametrize(("what", "decision", "before", "after"), ENDS, ids=[each[0] for each in ENDS])
def test_what_is_left(what: str, decision: Any, before: Any, after: Any) -> None:
    """Each end leaves what the next one needs, and nothing of others is touched."""
    assert left(decision(), before) == after


def test_child_that_will_be_killed_can_neither_renew_its_slot_nor_give_it_on() -> None:
    """The slot ends by itself: it has a secret that the child does not know."""
    facts = Facts(dict(RUNS))

    facts.decide(shorten(TICKET, RUN, RULES))

    (put,) = facts.asked_for(Put)
    assert (put.ttl, facts.locks[NAME].secret == RUN) == (3.0, False)


@pytest.mark.parametrize(
    ("locks", "abandoned"),
    [
        (FREE, True),
        (RUNS, False),
        (OTHER, True),
        (WAITS, True),
        ({"alive:mine": held("mine", secret=secret("b"))}, False),
    ],
    ids=["nothing shows life", "its slot", "the slot of another row", "a row that waits", "its sign of life"],
)
def test_row_of_a_process_that_lives_is_not_abandoned(locks: Any, abandoned: bool) -> None:
    """The slot of its run shows that, or a lock of its own."""
    facts = Facts(dict(locks))

    assert facts.decide(is_abandoned(TICKET)) is abandoned
    assert facts.locks == locks


STAYS = {"late": True}


@pytest.mark.parametrize(
    ("message", "stopped", "locks", "after"),
    [
        ({}, False, WAITS, FREE),
        ({}, True, WAITS, FREE),
        (STAYS, True, WAITS, STILL_WAITS),
        (STAYS, False, WAITS, FREE),
        (STAYS | {"rules": SingletonOptions(redelivery="drop")}, True, WAITS, FREE),
        (STAYS | {"slot": FakeSlot(NAME, RUN)}, True, RUNS, {NAME: ("claimed", "mine")}),
        ({"slot": FakeSlot(NAME, RUN)}, True, RUNS, FREE),
        ({"is_back": True}, False, WAITS, STILL_WAITS),
        (
            {"ticket": replace(TICKET, watch=secret("d"))},
            False,
            {"watch:mine": held("mine", NOTE, secret=secret("d"))},
            FREE,
        ),
    ],
    ids=[
        "a failure",
        "a stop",
        "a stop of a message that returns",
        "a failure of a message that would return",
        "a stop of a message that must not run twice",
        "a stop of a message that returns and has its slot",
        "a stop of a message that has its slot",
        "a failure after it was put back",
        "a failure of a copy that watches",
    ],
)
def test_message_that_is_interrupted(message: Any, stopped: bool, locks: Any, after: Any) -> None:
    """Its slot is free, unless it returns to the broker, or is back in the queue."""
    assert left(interrupted(Message(**{"ticket": TICKET, "rules": RULES} | message), stopped), locks) == after


@pytest.mark.parametrize(("seen", "hold", "waits"), [(True, True, True), (False, True, False), (False, False, True)])
def test_release_is_waited_for_where_somebody_could_see_it(seen: bool, hold: bool, waits: bool) -> None:
    """A caller that has the result finds the slot free; nobody sees the end of a run whose result nobody stores."""
    facts = Facts(dict(RUNS))

    facts.decide(end(run_with(seen=seen), hold=hold))

    assert [each.wait for each in facts.asked_for(Release)] == [waits]


# The record of a pending call


@pytest.mark.parametrize(
    ("locks", "kept"),
    [(RECORD, True), (NEWER, False), (FREE, False), ({NEXT: replace(RECORD[NEXT], left=300.0)}, False)],
    ids=["its own", "that of a newer message", "none", "its own, for long"],
)
def test_record_of_a_message_that_waits_is_kept(locks: Any, kept: bool) -> None:
    """It lasts until the message comes back; a record that is gone is not made again."""
    facts = Facts(dict(locks))

    facts.decide(keep(facts.decide(look_up(PENDING)), 60.0))

    assert [each.strict for each in facts.asked_for(Put)] == [True] * kept


def test_record_is_freed_when_its_message_begins() -> None:
    """Afterwards a note says which message has begun; a record that nobody sees is freed unread."""
    for locks in (RECORD, FREE):
        facts = Facts(dict(locks))

        facts.decide(begin(facts.decide(look_up(PENDING)), RULES))

        assert {name: seen.secret for name, seen in facts.locks.items()} == {"began:mine": began_secret(OWN)}
        assert [each.secret for each in facts.asked_for(Free)] == [OWN]


def test_record_that_no_node_frees_keeps_its_message_from_beginning() -> None:
    """An older message would run in its place; a record that is seen on no node is no record any more."""
    facts = Facts(dict(RECORD), unheard=True)
    message = facts.decide(look_up(PENDING))
    with pytest.raises(QuorumUnavailableError):
        facts.decide(begin(message, RULES))
    facts = Facts(unheard=True)
    facts.decide(begin(facts.decide(look_up(PENDING)), RULES))

    assert list(facts.locks) == ["began:mine"]
