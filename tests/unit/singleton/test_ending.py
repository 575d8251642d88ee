"""The decisions about what runs and messages leave behind, made from facts."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from django_redlock import QuorumUnavailableError
from django_redlock.core.names import GOES_ON, NOTE, SENDS
from django_redlock.singleton.arrival import Message, interrupted
from django_redlock.singleton.ending import (
    Execution,
    end,
    free_dead,
    free_waiting,
    give_back,
    is_abandoned,
    note_done,
    note_sending,
    requeue,
    shorten,
)
from django_redlock.singleton.pending import begin, discard, keep, look_up
from django_redlock.singleton.questions import Free, FreeSlot, LeaveLine, Look, NoteLength, Put
from django_redlock.singleton.ticket import Permit, began_secret

from .facts import BOTH, NAME, NEXT, OWN, QUEUE, QUEUED, RUN, SERIAL, TICKET, Case, Facts, FakeSlot, by, scene, secret

RUNS, WAITS, OTHER = by("mine", own="e"), by("mine", QUEUED, own="a"), by("other")
KEPT = by("mine", "held", own="e")
IN_QUEUE = by("mine", QUEUED, name=f"queued:{NAME}", own="a")
RECORD, NEWER = by("mine", QUEUED, name=NEXT, own="a", call="2.x"), by("mine", QUEUED, name=NEXT, call="3.x")
OTHERS_PERMIT: Any = {Permit(NAME, 2): OTHER[NAME]}
PENDING: dict[str, Any] = {"number": 2}
HOLDS: dict[str, Any] = {"hold_for": 60.0}
LOST: dict[str, Any] = {"slot": FakeSlot(NAME, RUN, lost=True)}
NO_SLOT: dict[str, Any] = {"slot": None}
NOTES: dict[str, Any] = {"note": "done:mine:0", "remembered": 60.0}

# What is left: the state and the task of each lock
FREE: dict[str, Any] = {}
STILL_RUNS, STILL_WAITS, OTHERS = {NAME: ("", "mine")}, {NAME: ("queued", "mine")}, {NAME: ("", "other")}
CLAIMED, HELD, HAS_BEGUN = {NAME: ("claimed", "mine")}, {NAME: ("held", "mine")}, {"began:mine": (NOTE, "mine")}


def run_of(**about: Any) -> tuple[Execution, Facts]:
    return scene(Execution, **{"slot": FakeSlot(NAME, RUN), "since": 990.0} | about)


def left(facts: Facts, decision: Any) -> dict[str, tuple[str, str]]:
    """Return the state and the task of each lock that is left after a decision."""
    facts.decide(decision)
    return {name: (seen.owner.state, seen.owner.ref) for name, seen in facts.locks.items() if seen.owner}


def decide(how: str, *about: Any) -> Any:
    """Begin a decision, as this module has it now: ``test_branches.py`` exchanges functions."""
    return {
        "end": end,
        "end, not over": partial(end, hold=False),
        "end, stopped": partial(end, stopped=True),
        "give back": give_back,
        "note": note_done,
        "note, goes on": lambda run: note_done(run, True),
        "note, sends": note_sending,
        "leave": free_waiting,
        "die": lambda ticket, rules: free_dead(ticket, RUN, rules, False),
        "die, to return": lambda ticket, rules: free_dead(ticket, RUN, rules, True),
        "shorten": lambda ticket, rules: shorten(ticket, RUN, rules),
        "requeue": requeue,
        "discard": discard,
        "discard, counts": partial(discard, counts=True),
    }[how](*about)


# The decision, and the locks that it leaves
RUN_ENDS = [
    Case("its slot is free", "end", FREE, locks=RUNS),
    Case("its slot is held for the rest of the time", "end", HELD, **HOLDS, locks=RUNS),
    Case("the body did not end, so nothing is held", "end, not over", FREE, **HOLDS, locks=RUNS),
    Case("the time has passed", "end", FREE, hold_for=10.0, locks=RUNS),
    Case("its slot is lost", "end", OTHERS, **HOLDS | LOST, locks=OTHER),
    Case("it was handed over", "end", STILL_WAITS, **HOLDS, over=True, locks=WAITS),
    Case("it had no slot, and its message still has one", "end", FREE, **NO_SLOT, still_waiting=True, locks=WAITS),
    Case("it had no slot", "end", STILL_WAITS, **HOLDS | NO_SLOT, locks=WAITS),
    Case("its process is stopped, and its message returns", "end, stopped", CLAIMED, returns=True, locks=RUNS),
    Case("its process is stopped, and its message does not", "end, stopped", FREE, locks=RUNS),
    Case(
        "its process is stopped, and its message returns without a slot",
        "end, stopped",
        FREE,
        **HOLDS,
        returns=True,
        secret="",
        locks=RUNS,
    ),
    Case("it returns, but was not stopped", "end", FREE, returns=True, locks=RUNS),
    Case("the slot returns to the message", "give back", CLAIMED, locks=RUNS),
    Case("the message waits elsewhere", "give back", STILL_RUNS, **BOTH, locks=RUNS),
    Case("the slot was handed over before", "give back", STILL_RUNS, over=True, locks=RUNS),
    Case("the slot is lost, and cannot return", "give back", OTHERS, **LOST, locks=OTHER),
    Case("a slot that is not there cannot return", "give back", FREE, **NO_SLOT),
    Case("a message that has no slot while it waits gets none", "give back", STILL_RUNS, secret="", locks=RUNS),
    Case("a note that it is done", "note", {"done:mine:0": (NOTE, "mine")}, **NOTES),
    Case(
        "a note that another message goes on",
        "note, goes on",
        {"done:mine:0": (GOES_ON, "mine")},
        **NOTES,
        goes_on=True,
    ),
    Case("a note that another message is being sent", "note, sends", {"done:mine:0": (SENDS, "mine")}, **NOTES),
    Case(
        "a note that it was sent",
        "note, goes on",
        {"done:mine:0": (GOES_ON, "mine")},
        **NOTES,
        locks=by("mine", SENDS, name="done:mine:0", own="d"),
        noted=secret("d"),
    ),
    Case("no note of what goes on by itself", "note", FREE, **NOTES, goes_on=True),
    Case("no note of what needs none", "note", FREE),
]


@pytest.mark.parametrize("case", RUN_ENDS, ids=str)
def test_what_a_run_leaves(case: Case) -> None:
    """Each end leaves what the next one needs, and nothing of others is touched."""
    decision, after = case.expected
    run, facts = run_of(**case.about)

    assert left(facts, decide(decision, run)) == after


MESSAGE_ENDS = [
    Case("the slot of its queue is free", "leave", FREE, **BOTH, locks=IN_QUEUE),
    Case("the slot of its queue is that of its run", "leave", STILL_WAITS, locks=WAITS),
    Case("the slot of its queue is held", "leave", HELD, **QUEUE | HOLDS, locks=WAITS),
    Case("the slot of its queue is not held for ever", "leave", FREE, **QUEUE, locks=WAITS),
    Case("a run of its own holds, so its queue is free", "leave", FREE, **BOTH | HOLDS, locks=IN_QUEUE),
    Case("its record is free, and not held", "leave", FREE, **PENDING | QUEUE | HOLDS, locks=RECORD),
    Case("a dead child leaves nothing", "die", FREE, locks=RUNS),
    Case("a dead child leaves nothing of a message that had not begun", "die", FREE, locks=WAITS),
    Case("the message of a dead child comes back", "die, to return", STILL_WAITS, locks=RUNS),
    Case("the message of a dead child comes back, and another one runs", "die, to return", OTHERS, locks=OTHER),
    Case("the message of a dead child comes back to a queue of its own", "die, to return", FREE, **BOTH, locks=RUNS),
    Case("a dead child of a pending call leaves a note", "die", HAS_BEGUN, **PENDING, locks=RECORD),
    Case("the message of its dead child comes back", "die, to return", STILL_WAITS, **PENDING, locks=RECORD | RUNS),
    Case("a child that will be killed", "shorten", STILL_RUNS, locks=RUNS),
    Case("a child that will be killed, and has not begun", "shorten", FREE, locks=WAITS),
    Case("a child that will be killed, and another one runs", "shorten", OTHERS, locks=OTHER),
    Case("a dead child had left its slot held", "die", HELD, locks=KEPT),
    Case("a dead child had left its slot held, and its message comes back", "die, to return", HELD, locks=KEPT),
    Case("a child that will be killed has left its slot held", "shorten", HELD, locks=KEPT),
    Case(
        "a dead child had left its permit held",
        "die",
        {Permit(NAME, 2): ("held", "mine")},
        **SERIAL,
        limit=3,
        locks={Permit(NAME, 2): KEPT[NAME]},
    ),
    Case("nodes do not say whose slot it is", "die", FREE, silent=(Look,), locks=RUNS),
    Case("a dead child had a permit", "die", FREE, **SERIAL, limit=3, locks={Permit(NAME, 2): RUNS[NAME]}),
    Case("a dead child had none", "die", {Permit(NAME, 2): ("", "other")}, **SERIAL, limit=3, locks=OTHERS_PERMIT),
    Case("a row is put back", "requeue", STILL_WAITS),
    Case("a row is put back, and any number may wait", "requeue", FREE, **SERIAL),
    Case("a message ends", "discard", FREE, locks=WAITS),
    Case("a pending call ends", "discard", HAS_BEGUN, **PENDING, locks=RECORD),
    Case("a pending call ends that counts", "discard, counts", HAS_BEGUN, **PENDING, locks=RECORD),
    Case("an older message of a pending call ends", "discard", {NEXT: ("queued", "mine")}, **PENDING, locks=NEWER),
]


@pytest.mark.parametrize("case", MESSAGE_ENDS, ids=str)
def test_what_a_message_leaves(case: Case) -> None:
    """Each end leaves what the next one needs, and nothing of others is touched."""
    decision, after = case.expected
    message, facts = scene(Message, **case.about)

    assert left(facts, decide(decision, message.ticket, message.rules)) == after


def test_child_that_will_be_killed_can_neither_renew_its_slot_nor_give_it_on() -> None:
    """The slot ends by itself: it has a secret that the child does not know."""
    message, facts = scene(Message, locks=RUNS)

    facts.decide(shorten(message.ticket, RUN, message.rules))

    (put,) = facts.asked_for(Put)
    assert (put.ttl, facts.locks[NAME].secret == RUN) == (3.0, False)
    message, facts = scene(Message, **SERIAL, limit=3, locks={Permit(NAME, 2): RUNS[NAME]})
    facts.decide(shorten(message.ticket, RUN, message.rules))
    (put,) = facts.asked_for(Put)
    assert (put.name, put.limit, put.strict, put.adopt) == (Permit(NAME, 2), 3, True, RUN)


@pytest.mark.parametrize("how", ["discard", "die", "shorten"])
def test_message_that_ends_before_it_reaches_a_process_gives_up_its_place(how: str) -> None:
    """If it was revoked, expires, or lost its child: the messages behind it do not wait for it."""
    for stamp, leaves in ((5, 1), (0, 0)):
        message, facts = scene(Message, **SERIAL, stamp=stamp, locks=OTHER)
        facts.decide(decide(how, message.ticket, message.rules))
        assert len(facts.asked_for(LeaveLine)) == leaves


def test_run_for_which_others_wait_notes_how_long_it_took() -> None:
    """By that, their messages come back in time."""
    for about, noted in (({"stamp": 5}, [10.0]), ({}, []), ({"stamp": 5} | NO_SLOT, [])):
        run, facts = run_of(**about, locks=RUNS)
        facts.decide(end(run))
        assert [each.seconds for each in facts.asked_for(NoteLength)] == noted


@pytest.mark.parametrize(
    ("locks", "abandoned"),
    [(FREE, True), (RUNS, False), (OTHER, True), (WAITS, True), (by("mine", name="alive:mine"), False)],
    ids=["nothing shows life", "its slot", "the slot of another row", "a row that waits", "its sign of life"],
)
def test_row_of_a_process_that_lives_is_not_abandoned(locks: Any, abandoned: bool) -> None:
    """The slot of its run shows that, or a lock of its own."""
    facts = Facts(dict(locks))

    assert facts.decide(is_abandoned(TICKET)) is abandoned
    assert facts.locks == locks


SLOT, STAYS = {"slot": FakeSlot(NAME, RUN)}, {"late": True}
INTERRUPTED = [
    Case("a failure", False, FREE, locks=WAITS),
    Case("a stop", True, FREE, locks=WAITS),
    Case("a stop of a message that returns", True, STILL_WAITS, **STAYS, locks=WAITS),
    Case("a failure of a message that would return", False, FREE, **STAYS, locks=WAITS),
    Case("a stop of a message that must not run twice", True, FREE, **STAYS, redelivery="drop", locks=WAITS),
    Case("a stop of a message that returns and has its slot", True, CLAIMED, **STAYS | SLOT, locks=RUNS),
    Case("a stop of a message that has its slot", True, FREE, **SLOT, locks=RUNS),
    Case("a failure after it was put back", False, STILL_WAITS, is_back=True, locks=WAITS),
    Case(
        "a failure of a copy that watches",
        False,
        FREE,
        watch=secret("d"),
        locks=by("mine", NOTE, name="watch:mine", own="d"),
    ),
]


@pytest.mark.parametrize("case", INTERRUPTED, ids=str)
def test_message_that_is_interrupted(case: Case) -> None:
    """Its slot is free, unless it returns to the broker, or is back in the queue."""
    stopped, after = case.expected
    message, facts = scene(Message, **case.about)

    assert left(facts, interrupted(message, stopped)) == after


@pytest.mark.parametrize(("seen", "hold", "waits"), [(True, True, True), (False, True, False), (False, False, True)])
def test_release_is_waited_for_where_somebody_could_see_it(seen: bool, hold: bool, waits: bool) -> None:
    """A caller that has the result finds the slot free; nobody sees the end of a run whose result nobody stores."""
    run, facts = run_of(locks=RUNS, seen=seen)

    facts.decide(end(run, hold=hold))

    assert [each.wait for each in facts.asked_for(FreeSlot)] == [waits]


# The record of a pending call


def look(**about: Any) -> tuple[Any, Any, Facts]:
    """Return what the nodes say about a pending call, the options, and the facts."""
    message, facts = scene(Message, **PENDING, **about)
    return facts.decide(look_up(message.ticket)), message.rules, facts


@pytest.mark.parametrize(
    ("locks", "kept"),
    [(RECORD, True), (NEWER, False), (FREE, False), ({NEXT: replace(RECORD[NEXT], left=300.0)}, False)],
    ids=["its own", "that of a newer message", "none", "its own, for long"],
)
def test_record_of_a_message_that_waits_is_kept(locks: Any, kept: bool) -> None:
    """It lasts until the message comes back; a record that is gone is not made again."""
    found, _, facts = look(locks=locks)

    facts.decide(keep(found, 60.0))

    assert [each.strict for each in facts.asked_for(Put)] == [True] * kept


def test_record_is_freed_when_its_message_begins() -> None:
    """Afterwards a note says which message has begun; a record that nobody sees is freed unread."""
    for locks in (RECORD, FREE):
        found, rules, facts = look(locks=locks)

        facts.decide(begin(found, rules))

        assert {name: seen.secret for name, seen in facts.locks.items()} == {"began:mine": began_secret(OWN)}
        assert [each.secret for each in facts.asked_for(Free)] == [OWN]


def test_record_that_no_node_frees_keeps_its_message_from_beginning() -> None:
    """An older message would run in its place; a record that is seen on no node is no record any more."""
    found, rules, facts = look(locks=RECORD, unheard=True)
    with pytest.raises(QuorumUnavailableError):
        facts.decide(begin(found, rules))
    found, rules, facts = look(unheard=True)
    facts.decide(begin(found, rules))

    assert list(facts.locks) == ["began:mine"]
