"""The decisions about messages, made from facts: no worker, no broker and no node takes part."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from django_redlock import LockTakenError
from django_redlock.core.names import GOES_ON, NOTE, SENDS
from django_redlock.singleton import questions as ask
from django_redlock.singleton.arrival import (
    Answer,
    Fail,
    Leave,
    Message,
    PutBack,
    Revoke,
    Run,
    TaskRow,
    arrive,
    cancel,
    enter,
    expire,
    occupy,
)
from django_redlock.singleton.options import Return, SingletonOptions
from django_redlock.singleton.slot import DuplicateTask, Seen
from django_redlock.singleton.ticket import Permit, Ticket, began_secret

from .facts import (
    BOTH,
    CLAIMED,
    HELD,
    NAME,
    NEXT,
    OWN,
    QUEUE,
    QUEUED,
    SERIAL,
    TICKET,
    Case,
    Facts,
    by,
    held,
    scene,
    secret,
)

# The locks that are held, and the results
OTHER, OTHER_WAITS, OTHER_HOLDS, OTHER_CLAIMS = (
    by("other"),
    by("other", QUEUED),
    by("other", HELD),
    by("other", CLAIMED),
)
OWN_RUN, OWN_SLOT, NO_TASK = by("mine", own="c"), by("mine", QUEUED, own="a"), by("", kind="manual")
OWN_QUEUE, OTHER_QUEUE = (
    by(who, QUEUED, name=f"queued:{NAME}", own=own) for who, own in (("mine", "a"), ("other", "b"))
)
DONE, BEGUN = (by("mine", NOTE, name=f"{what}:mine:0") for what in ("done", "begun"))
RECORD, NEWER = by("mine", QUEUED, name=NEXT, own="a", call="2.0"), by("mine", QUEUED, name=NEXT, call="3.9")
BEGAN = {"began:mine": held("mine", NOTE, secret=began_secret(OWN), call="2")}
CANCELLED = by("mine", NOTE, name="cancelled:mine")
ENDED, FAILED = (
    {"mine": ask.Result(ask.ResultState.SUCCESS, "value")},
    {"mine": ask.Result(ask.ResultState.FAILURE, ValueError("no"))},
)
SILENT = {"mine": ask.Result(ask.ResultState.SILENT, OSError("away"))}
AWAY, FULL = (ask.Take, ask.Look), ask.NotSent(OSError("full"), False)

# Messages, and options
UNSLOTTED = TICKET.without_slot
AGAIN: dict[str, Any] = {"redelivered": True, "late": True}
PENDING: dict[str, Any] = {"number": 2, "on_duplicate": "replace"}
WAIT, FOLLOW, FAIL = ({"on_overlap": how} for how in ("wait", "follow", "fail"))
JOINED = FOLLOW | {"joined": "other", "tries": 1}
ONCE = {"redelivery": "drop"}
ANYWAY, FAILS = ({"on_unavailable": {"run": how}} for how in ("run", "fail"))


def split(state: str) -> Seen:
    """Return what nodes say that do not agree on a lock."""
    return Seen("", 0.0, 0, split=(held("other", state, secret=secret("b")),))


CONFIRMED = Seen(
    *("", 0.0, 0),
    split=tuple(replace(held("other", state, secret=secret("b")), nodes=1) for state in (QUEUED, CLAIMED)),
    needed=2,
)


CASES = [
    Case("a message that is to run without a slot", Run, name="", locks=OTHER),
    Case("a first delivery, whose slot waits for it", Run, locks=OWN_SLOT),
    Case("a first delivery of a free key", Run, ticket=UNSLOTTED),
    Case("a copy while the first delivery runs", PutBack, **AGAIN, locks=OWN_RUN),
    Case(
        "a copy while the first runs and another copy waits",
        Leave,
        **AGAIN,
        locks=OWN_RUN | by("mine", NOTE, name="watch:mine", left=99.0),
    ),
    Case(
        "a copy while the first runs and another copy waits, or was lost with its process before it was sent",
        PutBack,
        **AGAIN,
        locks=OWN_RUN | by("mine", NOTE, name="watch:mine", left=9.0),
    ),
    Case("a copy after it has ended", Leave, **AGAIN, locks=DONE, results=ENDED),
    Case("a copy after it has ended, without results", Leave, **AGAIN, stores=False, locks=DONE),
    Case("a copy after it has ended, with its result stored only", Leave, **AGAIN, results=ENDED),
    Case("a copy of work that is done, but has no result yet", PutBack, **AGAIN, locks=DONE),
    Case("a copy of a run that has begun, and may have died", Run, **AGAIN, locks=BEGUN),
    Case(
        "a newer message of a pending call, an older one of which is done",
        Run,
        **AGAIN | PENDING,
        locks=RECORD | DONE,
        results=ENDED,
    ),
    Case("a copy of a pending call that must not run twice", Revoke, **PENDING | ONCE, locks=BEGAN),
    Case("a call of its queue comes before a pending call", PutBack, **PENDING | BOTH, locks=RECORD | OTHER_QUEUE),
    Case("a slot that waits is known to too few nodes", Run, locks={NAME: split(QUEUED)}),
    Case("a slot that waits is being confirmed", PutBack, locks={NAME: CONFIRMED}),
    Case("a slot of a run is known to too few nodes", PutBack, locks={NAME: split("")}),
    Case("a copy of a run that failed", Run, **AGAIN, results=FAILED),
    Case(
        "a copy of an attempt whose retry is being sent",
        PutBack,
        **AGAIN,
        stores=False,
        locks=by("mine", SENDS, name="done:mine:0"),
    ),
    Case(
        "a copy of an attempt that another message continues",
        Leave,
        **AGAIN,
        locks=by("mine", GOES_ON, name="done:mine:0"),
    ),
    Case("a message that its worker has kept, and a copy has run", Leave, kept=5.0, locks=DONE, results=ENDED),
    Case(
        "nodes fall silent after a live run of it was seen",
        PutBack,
        **AGAIN | ONCE | ANYWAY,
        locks=OWN_RUN | BEGUN,
        silent=(ask.Put,),
    ),
    Case("another run has the slot, and it waits", PutBack, **WAIT, locks=OTHER),
    Case("another run has the slot, and it is dropped", Revoke, locks=OTHER),
    Case("another run has the slot, and it follows", PutBack, **FOLLOW, locks=OTHER),
    Case("another run has the slot, and it fails", Fail, **FAIL, locks=OTHER),
    Case("another run has the slot, and it returns a value", Answer, on_overlap=Return(1), locks=OTHER),
    Case("another run has the slot, and it has waited enough", Revoke, **WAIT, waited=9.0, wait_for=9.0, locks=OTHER),
    Case("it was sent when any number could wait", PutBack, ticket=replace(UNSLOTTED, **SERIAL), locks=OTHER),
    Case("something that is no task has the slot", Revoke, locks=NO_TASK),
    Case("a run that is over holds the slot", Revoke, locks=OTHER_HOLDS),
    Case("another call has claimed the slot, and may never send", PutBack, **FAIL, locks=OTHER_CLAIMS),
    Case("runs have no slot, and another message waits", Revoke, **QUEUE, ticket=UNSLOTTED, locks=OTHER_WAITS),
    Case("runs have no slot, and its own message waits", Run, **QUEUE, locks=OWN_SLOT),
    Case("runs have no slot, and another message waits while it retries", Run, **QUEUE, retries=1, locks=OTHER_WAITS),
    Case("it was put back, and its id is that of a task that is over", Run, **WAIT, tries=1, results=ENDED),
    Case("a retry, whose slot waits for it", Run, retries=1, locks=OWN_SLOT),
    Case("a retry that another run has overtaken", PutBack, **FAIL, retries=1, locks=OTHER),
    Case("a message whose claim has lapsed, and whose key is free", Run),
    Case(
        "a message that has lost its ticket, and finds its own slot",
        Run,
        ticket=UNSLOTTED,
        carried=False,
        locks=OWN_SLOT,
    ),
    Case("the nodes do not answer", PutBack, silent=AWAY),
    Case("the nodes do not answer, and it runs anyway", Run, **ANYWAY, silent=AWAY),
    Case("the nodes do not answer, and it fails", Fail, **FAILS, silent=AWAY),
    Case("a copy of done work, and no nodes, where it would run", Leave, **AGAIN | ANYWAY, silent=AWAY, results=ENDED),
    Case("a copy of done work, and no nodes, where it would fail", Leave, **AGAIN | FAILS, silent=AWAY, results=ENDED),
    Case("a copy of failed work, and no nodes, where it runs", Run, **AGAIN | ANYWAY, silent=AWAY, results=FAILED),
    Case(
        "the nodes do not answer, and an older message may have run",
        Leave,
        **PENDING | ANYWAY,
        silent=AWAY,
        results=ENDED,
    ),
    Case("the nodes fall silent after the slot was taken", PutBack, **ONCE, late=True, silent=(ask.Put,)),
    Case("the nodes fall silent then, and it runs anyway", Run, **ONCE | ANYWAY, late=True, silent=(ask.Put,)),
    Case("the slot is lost before the body begins", PutBack, lost=True),
    Case("the slot is lost before the body begins, and it fails", Fail, **FAILS, lost=True),
    Case("the result backend is away before a first run", Run, results=SILENT),
    Case("the result backend is away, and a copy may be done", PutBack, **AGAIN, results=SILENT),
    Case("the result backend has been away for long", Run, **AGAIN, tries=10, results=SILENT),
    Case("the result backend is away, and a copy is done", PutBack, **AGAIN, tries=10, locks=DONE, results=SILENT),
    Case("its outcome cannot be stored", PutBack, locks=OTHER, cannot_store=True),
    Case("an older message of a pending call", Leave, **PENDING, locks=NEWER),
    Case("the message of a pending call that counts", Run, **PENDING, locks=RECORD),
    Case("the message of a pending call, and a run is before it", PutBack, **PENDING, locks=RECORD | OTHER),
    Case("a copy of the message of a pending call, which runs", PutBack, **PENDING, locks=BEGAN | OWN_RUN),
    Case("a copy of the message of a pending call, which has run", Leave, **PENDING, locks=BEGAN, results=ENDED),
    Case("it was put back, and the task it joined has succeeded", Answer, **JOINED, results={"other": ENDED["mine"]}),
    Case("it was put back, and the task it joined has failed", Fail, **JOINED, results={"other": FAILED["mine"]}),
    Case("it was put back, and the task it joined was lost", Run, **JOINED),
    Case("a message that must not run twice, and has begun", Revoke, **AGAIN | ONCE, locks=BEGUN),
    Case("a message that must not run twice, and runs", PutBack, **AGAIN | ONCE, locks=OWN_RUN | BEGUN),
    Case("a message that must not run twice, and has not begun", Run, **AGAIN | ONCE),
    Case("the broker refuses it, and delivers it again", PutBack, **WAIT, late=True, locks=OTHER, refuses=FULL),
    Case("the broker refuses it, and has forgotten it", Fail, **WAIT, locks=OTHER, refuses=FULL),
    Case("the broker refuses a copy, and has forgotten it", Leave, redelivered=True, locks=OWN_RUN, refuses=FULL),
    Case("a call that runs where it was made", Revoke, **WAIT, inline=True, ticket=UNSLOTTED, locks=OTHER),
]


def decided(**about: Any) -> tuple[Any, Facts]:
    """Return what is decided about a message, and the facts afterwards."""
    message, facts = scene(Message, **about)
    return facts.decide(arrive(message)), facts


def sent(**about: Any) -> Any:
    """Return the only message that is sent."""
    verdict, facts = decided(**about)
    assert isinstance(verdict, PutBack)
    (question,) = facts.asked_for(ask.Send)
    return question


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case) -> None:
    """Each situation ends as the pages say, and only a message that runs or is back keeps anything."""
    locks = case.about.get("locks", {})
    others = {name: seen for name, seen in locks.items() if seen.value and seen.holder.task_id != "mine"}

    verdict, facts = decided(**case.about)

    assert (type(verdict),) == case.expected
    assert others.items() <= facts.locks.items()
    sent = [question for question in facts.asked_for(ask.Send) if not facts.refuses]
    assert len(sent) == (isinstance(verdict, PutBack) and not verdict.unsent)
    if isinstance(verdict, Run) and verdict.execution.slot:
        assert facts.locks[NAME].secret == verdict.execution.slot.secret
    elif not isinstance(verdict, (Run, PutBack)):
        assert facts.locks.get(NAME, others.get(NAME)) in (others.get(NAME), locks.get(NAME))


def test_text_that_is_no_ticket_counts_as_lost() -> None:
    """A header may be garbled, or written by anybody; its message gets a ticket from its arguments."""
    parts = json.loads(TICKET.pack())
    garbled = ["garbled", "[" * 100_000, [*parts[:5], math.inf, *parts[6:]], [*parts[:8], 10**400, *parts[9:]]]
    garbled += [[*parts, 5, limit, None] for limit in (0, 10**9, 2.5, "3")]
    garbled += [[*parts, stamp, 1, None] for stamp in (math.nan, math.inf, -1, 0.5, 10**400, "1")]
    garbled += [[*parts, 5, 1, own] for own in (["hold_for"], "hold_for", {"lease": 5}, {"hold_for": "5"})]
    garbled += [[*parts, 5, 1, None, behind] for behind in (-2, 0.5, "3", 10**400)] + [[*parts, 5, 1, None, 0, 0]]
    for text in garbled:
        assert Ticket.unpack(text if isinstance(text, str) else json.dumps(text), "mine") is None
    for ticket in (
        TICKET,
        replace(TICKET, stamp=5, limit=3, own={"hold_for": 60.0}),
        replace(TICKET, stamp=5, behind=0),
    ):
        assert Ticket.unpack(ticket.pack(), "mine") == ticket


EXPIRY = [
    Case("it waits", True, locks=OWN_SLOT),
    Case("a copy of it runs", False, locks=OWN_RUN),
    Case("it counts", True, **PENDING, locks=RECORD),
    Case("a newer one counts", False, **PENDING, locks=NEWER),
    Case("nobody knows", False, silent=(ask.Look,)),
    Case("nodes are not waited for", True, **ANYWAY, silent=(ask.Look,)),
]


@pytest.mark.parametrize("case", EXPIRY, ids=str)
def test_message_that_expires(case: Case) -> None:
    """Its task ends with it, unless that lives on: in a run of another delivery, or in a newer message."""
    message, facts = scene(Message, **case.about)

    assert (facts.decide(expire(message.ticket, message.rules)),) == case.expected


def test_message_that_fails_tells_who_has_the_slot() -> None:
    """The error has the holder's id and state."""
    error = decided(**FAIL, locks=OTHER)[0].error

    assert (type(error), error.holder_id, error.state) == (DuplicateTask, "other", "running")


def test_expired_message_of_a_pending_call_takes_older_ones_with_it() -> None:
    """They have the same id, and a note keeps them from running in its place."""
    message, facts = scene(Message, **PENDING, locks=RECORD)

    facts.decide(expire(message.ticket, message.rules))

    assert list(facts.locks) == ["began:mine"]


# What is asked, taken and sent on the way


def test_message_that_is_put_back_says_what_it_has_met() -> None:
    """How often and for how long it has waited, whether it came again, whom it follows, and whether it watches."""
    waits = sent(**WAIT, locks=OTHER)
    assert (waits.pause, waits.ticket) == (10.0, replace(TICKET, tries=1, waited=10.0, stamp=1_000_000_000))
    for about, joined in (
        ({}, "other"),
        ({"stores": False}, ""),
        ({"joined": "first"}, "first"),
        ({"locks": NO_TASK}, ""),
    ):
        assert sent(**FOLLOW | {"locks": OTHER} | about).ticket.joined == joined
    copy = sent(**AGAIN, locks=OWN_RUN).ticket
    assert copy.watch
    assert copy.redelivered
    assert sent(**PENDING, locks=BEGAN | OWN_RUN).ticket.watch
    assert not sent(**PENDING, locks=RECORD | OWN_RUN).ticket.watch  # a run with older arguments


def test_copy_that_watches_is_announced_for_a_moment_until_it_is_sent() -> None:
    """If its process dies before that, the broker delivers the message again, and that copy has to watch instead."""
    _, facts = decided(**AGAIN, locks=OWN_RUN)
    steps = [question for question in facts.asked if isinstance(question, ask.Put | ask.Send)]

    assert [type(step) for step in steps] == [ask.Put, ask.Send, ask.Put]
    announced, copy, kept = steps
    assert announced.ttl == 10.0
    assert kept.ttl > copy.pause + 10.0
    assert kept.secret == copy.ticket.watch


def test_copy_waits_to_see_whether_another_one_was_sent() -> None:
    """It keeps its own place in the line of copies; a moment later, the other one is known to wait, or gone."""
    other = by("mine", NOTE, name="watch:mine", left=9.0)
    again = sent(**AGAIN, watch=secret("d"), locks=OWN_RUN | other)

    assert (again.pause, again.ticket.watch) == (9.1, secret("d"))


def test_message_keeps_its_slot_while_nodes_are_away() -> None:
    """If it had taken it, it claims it again for its own message; the task shows that it is tried again."""
    assert sent(**ONCE, late=True, locks=OWN_SLOT, silent=(ask.Put,)).claim == "claim"
    assert sent(silent=AWAY, silent_for=40.0).pause == 40.5  # when the nodes vote again
    assert sent(silent=AWAY, tries=5000).pause == 60.0
    for about, shown in (({}, True), (PENDING, False)):
        assert (decided(**about, silent=AWAY)[0].unanswered is not None) is shown


def test_copy_that_runs_without_nodes_no_longer_watches() -> None:
    """Otherwise the next copy would leave it to this one, which may die."""
    _, facts = decided(**AGAIN | ANYWAY, watch=secret("d"), silent=AWAY)
    assert [(each.name, each.secret) for each in facts.asked_for(ask.Free)] == [("watch:mine", secret("d"))]


def test_messages_that_end_give_up_their_place() -> None:
    """The lock with which it waited is free after a run began, and after an end without one; else it is kept."""
    for about, kept in (
        ({"locks": OWN_QUEUE}, set()),
        ({"on_overlap": "drop", "locks": OWN_QUEUE | OTHER}, set()),
        ({"locks": OWN_QUEUE | OTHER}, OWN_QUEUE.keys()),
    ):
        assert decided(**BOTH | about)[1].locks.keys() - {NAME} == kept


def test_older_message_ends_without_a_turn() -> None:
    """A newer one counts, so nothing is to be noted; the slot of the key may be that of the newer one."""
    _, facts = decided(**PENDING, locks=NEWER)

    assert facts.asked_for(ask.InTurn) == facts.asked_for(ask.Put) == []
    _, facts = decided(**PENDING, locks=BEGAN, results=ENDED)
    assert len(facts.asked_for(ask.InTurn)) == 2  # it was the one that counts, so it is noted as over


def test_pending_call_begins() -> None:
    """It takes no slot over from itself; a copy of it may; without a run's slot, that of its queue is held."""
    own = scene(Message, **PENDING)[0].ticket.begun.secret
    for locks, adopts in ((RECORD, ""), (BEGAN | {NAME: held("mine", QUEUED, secret=own)}, own)):
        verdict, facts = decided(**PENDING, locks=locks)
        assert isinstance(verdict, Run)
        assert [each.ticket.secret for each in facts.asked_for(ask.Take)] == [adopts]
    for hold_for, left in ((0.0, []), (60.0, [HELD])):
        _, facts = decided(**PENDING | QUEUE, hold_for=hold_for, locks=RECORD)
        assert [seen.owner.state for name, seen in facts.locks.items() if name == NAME] == left


def test_record_of_a_pending_call_that_waits_is_kept() -> None:
    """It lasts until its message comes back; that of a copy that has begun is gone."""
    for locks, keeps in ((RECORD | OTHER, True), (BEGAN | OTHER, False)):
        _, facts = decided(**PENDING, lifetime=60.0, locks=locks)
        assert [each.strict for each in facts.asked_for(ask.Put) if each.name == NEXT] == [True] * keeps


# The runs that have the slot began at 1.0
PERMITS = {Permit(NAME, number + 1): held(f"run {number}", secret=secret("c")) for number in range(3)}
FREE_SOON = {Permit(NAME, 2): held("over", HELD, secret=secret("c"), left=0.4)}
QUEUED_BEHIND = [
    Case("the run ends in a moment", True, now=21.7, length=21.0),
    Case("the run goes on", False, now=11.7, length=21.0),
    Case("it takes longer than the last one", False, now=61.7, length=21.0),
    Case("it has just begun", True, now=1.3),
    Case("it has lasted for a while", False, now=3.0),
    Case("others come first", False, now=1.1, length=0.3, ahead=1),
    Case("others come first, and runs are very short", True, now=1.01, length=0.02, ahead=1),
    Case("three runs go on", False, now=1.1, length=1.4, limit=3, locks=OTHER | PERMITS),
    Case("one of three runs ends soon", True, now=2.1, length=1.4, limit=3, locks=OTHER | PERMITS),
    Case("one of three permits is free soon", True, now=9.0, length=9.9, limit=3, locks=OTHER | PERMITS | FREE_SOON),
    Case("runs of a minimum time go on", False, now=1.1, hold_for=9.9, limit=3, locks=OTHER | PERMITS),
    Case("one of three such runs ends soon", True, now=10.5, hold_for=9.9, limit=3, locks=OTHER | PERMITS),
    Case("it is, and the runs take longer", True, now=61.7, length=21.0, limit=3, locks=OTHER | PERMITS | FREE_SOON),
    Case("the run is over", False, now=1.1, length=0.1, locks=OTHER_HOLDS),
    Case("it is kept for a moment", True, now=1.1, locks=by("other", HELD, left=0.4)),
    Case("no task has the slot", False, now=1.1, locks=NO_TASK, waited=30.0),
    Case("the run that has the slot tells how long runs take", True, now=21.7, locks=by("other", call="21.0")),
]


@pytest.mark.parametrize("case", QUEUED_BEHIND, ids=str)
def test_process_waits_for_the_end_of_a_run(case: Case) -> None:
    """One process waits for a moment, and its run follows at once; all others put their messages back."""
    (waits,) = case.expected
    for ends_soon in (False, True):
        verdict, facts = decided(**SERIAL | {"locks": OTHER} | case.about, ends_soon=ends_soon)
        runs = waits and ends_soon
        assert [each.wait for each in facts.asked_for(ask.Take)] == [0.0, 0.5][: 1 + waits] + [0.0] * (not runs)
        assert isinstance(verdict, Run if runs else PutBack)


FREE_FOR_OTHERS = [
    Case("they stay away", True, first=(2, 2)),
    Case("another one has come back", True, first=(2, 3)),
    Case("an earlier one has arrived since", True, first=(3, 3)),
    Case("one of them was served before", False, first=(1, 1)),
    Case("one of them has been served", False, first=(2, 1)),
    Case("all of them have been served", False, first=(2, 0)),
    Case("its turn is next", True, behind=1, first=(1, 1), length=0.02),
    Case("the slot was not free", False, behind=-1, first=(2, 2)),
    Case("it is in no queue", False, first=(None, None)),
    Case("the first may wait until no permit is taken", False, first=(2, 2), limit=3),
]


@pytest.mark.parametrize("case", FREE_FOR_OTHERS, ids=str)
def test_slot_that_stays_free_is_taken_before_messages_that_are_away(case: Case) -> None:
    """
    By the first message that comes back, if it was free as well when that was put back.

    It waits in its process to see whether one of them comes.
    """
    (overtakes,) = case.expected
    verdict, facts = decided(**SERIAL | {"waited": 30.0, "behind": 2} | case.about)
    assert isinstance(verdict, Run if overtakes else PutBack)
    assert any(each.barge for each in facts.asked_for(ask.Take)) is overtakes
    assert len(facts.asked_for(ask.LeaveLine)) == overtakes  # or it would come first for those behind it


def test_message_that_waits_keeps_its_place() -> None:
    """For its pause and a moment more, in the order in which workers got the messages."""
    verdict, facts = decided(**SERIAL, now=13.0, kept=2.0, length=30.0, locks=OTHER)
    assert [each.away for each in facts.asked_for(ask.Take)] == [3.0, verdict.pause + 3.0]
    (again,) = facts.asked_for(ask.Send)
    assert again.ticket.stamp == 11_000_000
    assert sent(**SERIAL, now=99.0, locks=OTHER, stamp=again.ticket.stamp).ticket.stamp == 11_000_000


def test_message_that_does_not_wait_has_no_place() -> None:
    """Nor has that of a pending call, with which no other one waits."""
    for about in ({}, FAIL, WAIT | {"inline": True}, PENDING):
        _, facts = decided(**about, locks=RECORD | OTHER)
        assert {each.away for each in facts.asked_for(ask.Take)} == {0.0}
        assert facts.asked_for(ask.LeaveLine) == []


def test_message_runs_if_the_slot_is_free_before_it_goes_back() -> None:
    verdict, facts = decided(**SERIAL, now=11.0, locks=OTHER, ends_late=True)

    assert isinstance(verdict, Run)
    assert facts.asked_for(ask.Send) == []


def test_message_that_ends_without_a_run_gives_up_its_place() -> None:
    """So the messages behind it do not wait for it."""
    for about, leaves in (({"waited": 9.0, "wait_for": 9.0}, 1), ({}, 0)):
        _, facts = decided(**SERIAL, **about, stamp=5, locks=OTHER)
        assert len(facts.asked_for(ask.LeaveLine)) == leaves


def test_message_that_waited_in_line_is_not_away_for_long_if_nodes_fail_once() -> None:
    """However often it has been put back: the pauses grow from one failure to the next, and the nodes have answered."""
    waits = sent(**SERIAL, tries=7, now=11.0, locks=OTHER).ticket

    assert sent(**SERIAL, tries=waits.tries, silent=AWAY).pause == 2.0


def test_message_that_waits_for_a_limited_time_comes_back_in_time() -> None:
    """At the end of it, it looks once more; whoever waits in no queue is the last."""
    assert sent(**SERIAL, wait_for=9.0, waited=8.0, now=2.0, length=30.0, locks=OTHER).pause == 1.0
    assert sent(**SERIAL, now=2.0, length=1.0, ahead=None, locks=OTHER).pause == 600.0


def test_message_that_waits_for_another_kind_of_holder_looks_ever_more_rarely() -> None:
    """Such as runs under another limit, or a lock: however long runs of its own take, nobody knows when that ends."""
    pauses = [sent(**SERIAL, length=5.0, waited=waited, locks=by("", HELD)).pause for waited in (1.0, 20.0, 5000.0)]

    assert pauses == [0.25, 5.0, 10.0]


def test_message_that_waits_alone_comes_back_in_time() -> None:
    """Nobody comes before the message of a pending call; and no claim lasts as long as a run."""
    assert sent(**PENDING, now=2.0, length=3.0, locks=RECORD | OTHER).pause <= 3.0
    for waited in (0.0, 12.0, 5000.0):
        assert sent(now=2.0, length=600.0, waited=waited, locks=OTHER_CLAIMS).pause <= 10.0


def test_run_with_a_permit_is_found_among_all() -> None:
    """A message that is delivered again waits for its run, whichever permit that has."""
    permit: Any = {Permit(NAME, 2): held("mine", secret=secret("c"))}
    about: Any = SERIAL | {"limit": 3}
    message, facts = scene(Message, **about, locks=permit)
    assert facts.decide(expire(message.ticket, message.rules)) is False
    assert isinstance(decided(**about, locks={NAME: split(QUEUED)})[0], PutBack)  # no message waits with a permit
    for more, verdict in ((AGAIN, PutBack), ({"late": True}, PutBack), (ONCE | AGAIN, PutBack), ({}, Run)):
        found, facts = decided(**about | more, locks=dict(permit))
        assert isinstance(found, verdict)  # a copy, marked or not, does not take another permit beside its own run
        assert (NAME in facts.locks) is (verdict is Run)


def test_overlap_is_reported_once() -> None:
    """Not again each time that the message comes back, and not for a pending call, which is expected to wait."""
    for about, effects in (
        (WAIT, ["task mine is put back to wait for its slot"]),
        (FAIL, ["task mine fails"]),
        (WAIT | {"inline": True}, ["task mine is dropped"]),
        (FAIL | {"inline": True}, ["task mine fails"]),
        (WAIT | {"waited": 2.0}, []),
        (PENDING, []),
    ):
        assert [each.effect for each in decided(**about, locks=OTHER)[1].asked_for(ask.Report)] == effects


@pytest.mark.parametrize(
    ("about", "note", "remembered"),
    [
        ({}, "", 60.0),
        ({"late": True}, "done:mine:0", 60.0),
        ({"late": True, "stores": False}, "done:mine:0", 3600.0),
        ({"redelivered": True, "retries": 2}, "done:mine:2", 60.0),
        ({"delayed": True}, "done:mine:0", 60.0),
        ({"delayed": True, "ticket": replace(TICKET, tries=1)}, "", 60.0),
        ({"kept": 90.0, "stores": False}, "done:mine:0", 3600.0),
        ({"kept": 90.0}, "", 60.0),
        ({"late": True, "inline": True}, "", 60.0),
    ],
)
def test_run_leaves_a_note_where_a_copy_may_come(about: Any, note: str, remembered: float) -> None:
    """A copy may come of what is acknowledged late, has waited for long, or came twice before."""
    run = Message(**{"ticket": TICKET, "rules": SingletonOptions()} | about).run()

    assert (run.note, run.remembered if note else 60.0) == (note, remembered)


# Direct calls, and rows


@pytest.mark.parametrize(
    ("about", "verdict", "slot"),
    [
        ({}, Run, True),
        ({"locks": OTHER}, Fail, False),
        ({"silent": (ask.Take,)}, Fail, False),
        (ANYWAY | {"silent": (ask.Take,)}, Run, False),
    ],
)
def test_direct_call(about: Any, verdict: type, slot: bool) -> None:
    """It runs with its slot, or fails at once; without nodes it runs only if the options say so."""
    message, facts = scene(Message, **about)
    found = facts.decide(enter(message))

    assert isinstance(found, verdict)
    assert not isinstance(found, Run) or bool(found.execution.slot) is slot


RUNS = {NAME: ""}
ROWS = [
    Case("its slot waits", Run, RUNS, locks=OWN_SLOT),
    Case("the key is free", Run, RUNS),
    Case("another row waits", Run, RUNS, locks=OTHER_WAITS),
    Case("it was cancelled", Revoke, {}, locks=CANCELLED),
    Case("it is over", Revoke, {}, over=True),
    Case("it would wait for itself", Fail, RUNS, within=frozenset({NAME}), locks=OTHER),
    Case("another run ends", Run, RUNS, locks=OTHER, ends_soon=True),
    Case("it leaves its queue", Run, RUNS, **BOTH, locks=OWN_QUEUE),
    Case("another row stays in the queue", Run, RUNS | {f"queued:{NAME}": QUEUED}, **BOTH, locks=OTHER_QUEUE),
    Case("without nodes it fails", Fail, {}, **FAILS, silent=(ask.Look,)),
    Case("without nodes it runs", Run, {}, **ANYWAY, silent=(ask.Look,)),
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_row(case: Case) -> None:
    """A row takes its slot, also from any row that only waits, and waits in its worker for the end of a run."""
    row, facts = scene(TaskRow, ticket=UNSLOTTED, **case.about)

    verdict = facts.decide(occupy(row))

    states = {name: seen.owner.state for name, seen in facts.locks.items() if seen.owner}
    assert (type(verdict), {name: states[name] for name in states.keys() - CANCELLED}) == case.expected


@pytest.mark.parametrize(
    ("note", "withdrawn", "verdict"),
    [
        (CANCELLED["cancelled:mine"], False, Revoke),
        (CANCELLED["cancelled:mine"], True, Run),
        (None, False, Run),
        (split(NOTE), True, Revoke),
    ],
    ids=["not withdrawn", "withdrawn", "no note", "unknown to a quorum"],
)
def test_row_looks_again_before_it_begins(note: Any, withdrawn: bool, verdict: type) -> None:
    """It may have been cancelled while it took its slot; the caller withdraws the note if it came too late."""

    class Later(Facts):
        def answer(self, question: Any) -> Any:
            if isinstance(question, ask.Take) and note:
                self.locks["cancelled:mine"] = note
            if isinstance(question, ask.Put) and question.name == "cancelled:mine" and withdrawn:
                raise LockTakenError(question.name)
            return super().answer(question)

    assert isinstance(Later().decide(occupy(scene(TaskRow, ticket=UNSLOTTED)[0])), verdict)


def test_row_takes_a_permit_from_no_row() -> None:
    """A row that waits has the whole lock, from before a deploy with another scope."""
    for limit, adopted in ((1, secret("b")), (3, "")):
        row, facts = scene(TaskRow, **SERIAL, limit=limit, locks=OTHER_WAITS, ends_soon=True)
        assert isinstance(facts.decide(occupy(row)), Run)
        assert facts.asked_for(ask.Take)[0].ticket.secret == adopted


def test_row_that_ends_without_its_slot_gives_up_its_place() -> None:
    """So the rows behind it do not wait for it; one that has waited in no line has none to give up."""
    for about, leaves in (
        (SERIAL | {"locks": OTHER, "within": frozenset({NAME})}, 1),
        (ANYWAY | {"silent": (ask.Take,)}, 1),
        (ANYWAY | {"silent": (ask.Look,)}, 0),
        (SERIAL | {"locks": OTHER, "ends_soon": True}, 0),
        ({"scope": "until_executing"}, 0),
    ):
        row, facts = scene(TaskRow, **about)
        facts.decide(occupy(row))
        assert len(facts.asked_for(ask.LeaveLine)) == leaves
        assert len({(each.ticket.stamp, each.away) for each in facts.asked_for(ask.Take)}) <= 1


def test_cancelling_a_row() -> None:
    """The row does not run if its slot was still there, or if nobody knows; else a worker was quicker."""
    for about, cancelled in (
        ({"locks": OWN_SLOT}, True),
        ({"locks": OWN_RUN}, False),
        ({}, False),
        ({"locks": OWN_SLOT, "unheard": True}, True),
    ):
        facts = Facts(**about)
        assert facts.decide(cancel(TICKET, NAME, OWN_SLOT[NAME], 60.0)) is cancelled
        assert ("cancelled:mine" in facts.locks) is cancelled
