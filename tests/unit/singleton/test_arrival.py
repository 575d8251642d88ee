"""The decisions about messages, made from facts: no worker, no broker and no node takes part."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from django_redlock import LockTakenError
from django_redlock.core.names import GOES_ON, NOTE
from django_redlock.singleton.arrival import (
    Answer,
    Fail,
    Leave,
    Message,
    PutBack,
    Revoke,
    Row,
    Run,
    arrive,
    cancel,
    enter,
    expire,
    occupy,
)
from django_redlock.singleton.options import Return, SingletonOptions
from django_redlock.singleton.questions import (
    InTurn,
    Look,
    NoteLength,
    Put,
    Refused,
    Report,
    Result,
    ResultState,
    Send,
    Take,
)
from django_redlock.singleton.slot import DuplicateTask, Seen
from django_redlock.singleton.ticket import Ticket, began_secret

from .facts import CLAIMED, HELD, QUEUED, RUNNING, Facts, held, secret

NAME, OWN = "task:shop.sync:shop_id=7", secret("a")
TICKET = Ticket(NAME, "default", "mine", OWN)
OTHER = {NAME: held("other", RUNNING, secret=secret("b"))}
OWN_RUN = {NAME: held("mine", RUNNING, secret=secret("c"))}
OWN_SLOT = {NAME: held("mine", QUEUED, secret=OWN)}
DONE = {"done:mine:0": held("mine", NOTE, secret=secret("d"))}
PENDING = replace(TICKET, number=2)
RECORD = {f"next:{NAME}": held("mine", QUEUED, secret=OWN, call="2.0123456789")}
NEWER = {f"next:{NAME}": held("mine", QUEUED, secret=secret("b"), call="3.9876543210")}
BEGAN = {"began:mine": held("mine", NOTE, secret=began_secret(OWN), call="2")}
SUCCESS, FAILURE = Result(ResultState.SUCCESS, "value"), Result(ResultState.FAILURE, ValueError("no"))
SILENT = Result(ResultState.SILENT, OSError("away"))


def split(state: str) -> Seen:
    """Return what nodes say that do not agree on a lock."""
    return Seen("", 0.0, 0, split=(held("other", state, secret=secret("b")),))


@dataclass
class Case:
    """
    One situation.

    Args:
        what: In words.
        verdict: What is decided.
        message: What the message has.
        rules: The options of the task.
        facts: All else.
    """

    what: str
    verdict: type
    message: dict[str, Any] = field(default_factory=dict)
    rules: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what


REPLACE, BOTH = {"on_duplicate": "replace"}, "until_and_while_executing"
SERIAL = {"scope": "while_executing"}
AGAIN = {"redelivered": True, "late": True}
CASES = [
    Case("a message that is to run without a slot", Run, {"ticket": replace(TICKET, name="")}, facts={"locks": OTHER}),
    Case("a first delivery, whose slot waits for it", Run, facts={"locks": OWN_SLOT}),
    Case("a first delivery of a free key", Run, {"ticket": TICKET.without_slot}),
    Case("a copy while the first delivery runs", PutBack, AGAIN, facts={"locks": OWN_RUN}),
    Case(
        "a copy while the first runs and another copy waits",
        Leave,
        AGAIN,
        facts={"locks": OWN_RUN | {"watch:mine": held("mine", NOTE, secret=secret("d"), left=9.0)}},
    ),
    Case("a copy after it has ended", Leave, AGAIN, facts={"locks": DONE, "results": {"mine": SUCCESS}}),
    Case("a copy after it has ended, without results", Leave, AGAIN | {"stores": False}, facts={"locks": DONE}),
    Case("a copy after it has ended, with its result stored only", Leave, AGAIN, facts={"results": {"mine": SUCCESS}}),
    Case("a copy of work that is done, but has no result yet", PutBack, AGAIN, facts={"locks": DONE}),
    Case(
        "a copy of a run that has begun, and may have died",
        Run,
        AGAIN,
        facts={"locks": {"begun:mine:0": DONE["done:mine:0"]}},
    ),
    Case(
        "a newer message of a pending call, an older one of which is done",
        Run,
        AGAIN | {"ticket": PENDING},
        REPLACE,
        {"locks": RECORD | DONE, "results": {"mine": SUCCESS}},
    ),
    Case(
        "a copy of a pending call that must not run twice",
        Revoke,
        {"ticket": PENDING},
        REPLACE | {"redelivery": "drop"},
        {"locks": BEGAN},
    ),
    Case(
        "a call of its queue comes before a pending call",
        PutBack,
        {"ticket": replace(PENDING, scope=BOTH)},
        REPLACE | {"scope": BOTH},
        {"locks": RECORD | {f"queued:{NAME}": held("other", QUEUED, secret=secret("b"))}},
    ),
    Case("a slot that waits is known to too few nodes", Run, facts={"locks": {NAME: split(QUEUED)}}),
    Case("a slot of a run is known to too few nodes", PutBack, facts={"locks": {NAME: split(RUNNING)}}),
    Case("a copy of a run that failed", Run, AGAIN, facts={"results": {"mine": FAILURE}}),
    Case(
        "a copy of an attempt that another message continues",
        Leave,
        AGAIN,
        facts={"locks": {"done:mine:0": held("mine", GOES_ON, secret=secret("d"))}},
    ),
    Case(
        "a message that its worker has kept, and a copy of which has run",
        Leave,
        facts={"kept": 5.0, "locks": DONE, "results": {"mine": SUCCESS}},
    ),
    Case("another run has the slot, and it waits", PutBack, rules={"on_overlap": "wait"}, facts={"locks": OTHER}),
    Case("another run has the slot, and it is dropped", Revoke, facts={"locks": OTHER}),
    Case("another run has the slot, and it follows", PutBack, rules={"on_overlap": "follow"}, facts={"locks": OTHER}),
    Case("another run has the slot, and it fails", Fail, rules={"on_overlap": "fail"}, facts={"locks": OTHER}),
    Case(
        "another run has the slot, and it returns a value",
        Answer,
        rules={"on_overlap": Return(1)},
        facts={"locks": OTHER},
    ),
    Case(
        "another run has the slot, and it has waited for long enough",
        Revoke,
        {"ticket": replace(TICKET, waited=9.0)},
        {"on_overlap": "wait", "wait_for": 9.0},
        {"locks": OTHER},
    ),
    Case(
        "something that is no task has the slot",
        Revoke,
        facts={"locks": {NAME: held("", kind="manual", secret=secret("b"))}},
    ),
    Case("a run that is over holds the slot", Revoke, facts={"locks": {NAME: held("other", HELD, secret=secret("b"))}}),
    Case(
        "another call has claimed the slot, and may never send",
        PutBack,
        rules={"on_overlap": "fail"},
        facts={"locks": {NAME: held("other", CLAIMED, secret=secret("b"))}},
    ),
    Case(
        "runs have no slot, and another message waits",
        Revoke,
        {"ticket": replace(TICKET, scope="until_executing", secret="")},
        {"scope": "until_executing"},
        {"locks": {NAME: held("other", QUEUED, secret=secret("b"))}},
    ),
    Case(
        "runs have no slot, and its own message waits",
        Run,
        {"ticket": replace(TICKET, scope="until_executing")},
        {"scope": "until_executing"},
        {"locks": OWN_SLOT},
    ),
    Case("a retry, whose slot waits for it", Run, {"retries": 1}, facts={"locks": OWN_SLOT}),
    Case("a retry that another run has overtaken", PutBack, {"retries": 1}, {"on_overlap": "fail"}, {"locks": OTHER}),
    Case("a message whose claim has lapsed, and whose key is free", Run),
    Case("a message whose claim has lapsed, and which another run has overtaken", Revoke, facts={"locks": OTHER}),
    Case(
        "a message that has lost its ticket, and finds its own slot",
        Run,
        {"carried": False, "ticket": TICKET.without_slot},
        facts={"locks": OWN_SLOT},
    ),
    Case("the nodes do not answer", PutBack, facts={"silent": (Take, Look)}),
    Case(
        "the nodes do not answer, and it runs anyway",
        Run,
        rules={"on_unavailable": {"run": "run"}},
        facts={"silent": (Take, Look)},
    ),
    Case(
        "the nodes do not answer, and it fails",
        Fail,
        rules={"on_unavailable": {"run": "fail"}},
        facts={"silent": (Take, Look)},
    ),
    Case(
        "the nodes do not answer, and an older message may have run",
        Leave,
        {"ticket": PENDING},
        {"on_unavailable": {"run": "run"}},
        {"silent": (Take, Look), "results": {"mine": SUCCESS}},
    ),
    Case(
        "the nodes fall silent after the slot was taken",
        PutBack,
        {"late": True},
        {"redelivery": "drop"},
        {"silent": (Put,)},
    ),
    Case(
        "the nodes fall silent after the slot was taken, and it runs anyway",
        Run,
        {"late": True},
        {"redelivery": "drop", "on_unavailable": {"run": "run"}},
        {"silent": (Put,)},
    ),
    Case("the slot is lost before the body begins", PutBack, facts={"lost": True}),
    Case(
        "the slot is lost before the body begins, and it fails",
        Fail,
        rules={"on_unavailable": {"run": "fail"}},
        facts={"lost": True},
    ),
    Case("the result backend is away before a first run", Run, facts={"results": {"mine": SILENT}}),
    Case("the result backend is away, and a copy may be done", PutBack, AGAIN, facts={"results": {"mine": SILENT}}),
    Case(
        "the result backend has been away for long, and a copy may be done",
        Run,
        AGAIN | {"ticket": replace(TICKET, tries=10)},
        facts={"results": {"mine": SILENT}},
    ),
    Case(
        "the result backend is away, and a copy is done",
        PutBack,
        AGAIN | {"ticket": replace(TICKET, tries=10)},
        facts={"locks": DONE, "results": {"mine": SILENT}},
    ),
    Case("its outcome cannot be stored", PutBack, facts={"locks": OTHER, "cannot_store": True}),
    Case(
        "an older message of a pending call", Leave, {"ticket": PENDING}, {"on_duplicate": "replace"}, {"locks": NEWER}
    ),
    Case(
        "the message of a pending call that counts",
        Run,
        {"ticket": PENDING},
        {"on_duplicate": "replace"},
        {"locks": RECORD},
    ),
    Case(
        "the message of a pending call, and a run is before it",
        PutBack,
        {"ticket": PENDING},
        {"on_duplicate": "replace"},
        {"locks": RECORD | OTHER},
    ),
    Case(
        "a copy of the message of a pending call, which runs",
        PutBack,
        {"ticket": PENDING},
        {"on_duplicate": "replace"},
        {"locks": BEGAN | OWN_RUN},
    ),
    Case(
        "a copy of the message of a pending call, which has run",
        Leave,
        {"ticket": PENDING},
        {"on_duplicate": "replace"},
        {"locks": BEGAN, "results": {"mine": SUCCESS}},
    ),
    Case(
        "a message that was put back, and whose joined task has succeeded",
        Answer,
        {"ticket": replace(TICKET, joined="other", tries=1)},
        {"on_overlap": "follow"},
        {"results": {"other": SUCCESS}},
    ),
    Case(
        "a message that was put back, and whose joined task has failed",
        Fail,
        {"ticket": replace(TICKET, joined="other", tries=1)},
        {"on_overlap": "follow"},
        {"results": {"other": FAILURE}},
    ),
    Case(
        "a message that was put back, and whose joined task was lost",
        Run,
        {"ticket": replace(TICKET, joined="other", tries=1)},
        {"on_overlap": "follow"},
    ),
    Case(
        "a message that must not run twice, and has begun",
        Revoke,
        AGAIN,
        {"redelivery": "drop"},
        {"locks": {"begun:mine:0": held("mine", NOTE, secret=secret("d"))}},
    ),
    Case(
        "a message that must not run twice, and runs",
        PutBack,
        AGAIN,
        {"redelivery": "drop"},
        {"locks": OWN_RUN | {"begun:mine:0": held("mine", NOTE, secret=secret("d"))}},
    ),
    Case("a message that must not run twice, and has not begun", Run, AGAIN, {"redelivery": "drop"}),
    Case(
        "the broker does not take it back, and delivers it again",
        PutBack,
        {"late": True},
        {"on_overlap": "wait"},
        {"locks": OTHER, "refuses": Refused(OSError("full"), False)},
    ),
    Case(
        "the broker does not take it back, and has forgotten it",
        Fail,
        {},
        {"on_overlap": "wait"},
        {"locks": OTHER, "refuses": Refused(OSError("full"), False)},
    ),
    Case(
        "the broker takes back no copy, and has forgotten it",
        Leave,
        {"redelivered": True},
        facts={"locks": OWN_RUN, "refuses": Refused(OSError("full"), False)},
    ),
    Case(
        "a call that runs where it was made, and another run has the slot",
        Revoke,
        {"inline": True, "ticket": TICKET.without_slot},
        {"on_overlap": "wait"},
        {"locks": OTHER},
    ),
]


def message(ticket: Ticket = TICKET, rules: Any = (), **more: Any) -> Message:
    return Message(ticket, SingletonOptions(**dict(rules)), **more)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case) -> None:
    """Each situation ends as the pages say, and only a message that runs or is back keeps anything."""
    facts = Facts(**{"locks": {}} | case.facts | {"locks": dict(case.facts.get("locks", {}))})
    arriving = Message(**{"ticket": TICKET, "rules": SingletonOptions(**case.rules)} | case.message)
    before = {name: seen for name, seen in facts.locks.items() if seen.value and seen.holder.task_id != "mine"}

    verdict = facts.decide(arrive(arriving))

    assert type(verdict) is case.verdict
    assert before.items() <= facts.locks.items()
    sent = [question for question in facts.asked_for(Send) if not facts.refuses]
    assert len(sent) == (isinstance(verdict, PutBack) and not verdict.unsent)
    if isinstance(verdict, Run) and verdict.execution.slot:
        assert facts.locks[NAME].secret == verdict.execution.slot.secret
    elif not isinstance(verdict, (Run, PutBack)):
        assert facts.locks.get(NAME, before.get(NAME)) in (before.get(NAME), case.facts.get("locks", {}).get(NAME))


@pytest.mark.parametrize(
    ("ticket", "locks", "how", "expires"),
    [
        (TICKET, OWN_SLOT, "retry", True),
        (TICKET, OWN_RUN, "retry", False),
        (PENDING, RECORD, "retry", True),
        (PENDING, NEWER, "retry", False),
        (TICKET, None, "retry", False),
        (TICKET, None, "run", True),
    ],
    ids=[
        "it waits",
        "a copy of it runs",
        "it counts",
        "a newer one counts",
        "nobody knows",
        "nodes are not waited for",
    ],
)
def test_message_that_expires(ticket: Ticket, locks: Any, how: Any, expires: bool) -> None:
    """Its task ends with it, unless that lives on: in a run of another delivery, or in a newer message."""
    facts = Facts(dict(locks or {}), silent=() if locks else (Look,))

    assert facts.decide(expire(ticket, SingletonOptions(on_unavailable={"run": how}))) is expires


def test_message_that_fails_tells_who_has_the_slot() -> None:
    """The error has the holder's id and state."""
    verdict = Facts(dict(OTHER)).decide(arrive(message(rules={"on_overlap": "fail"})))

    assert isinstance(verdict.error, DuplicateTask)
    assert (verdict.error.holder_id, verdict.error.state) == ("other", "running")


def test_expired_message_of_a_pending_call_takes_older_ones_with_it() -> None:
    """They have the same id, and a note keeps them from running in its place."""
    facts = Facts(dict(RECORD))

    facts.decide(expire(PENDING, SingletonOptions()))

    assert list(facts.locks) == ["began:mine"]


# What is asked, taken and sent on the way


def sent(arriving: Message, locks: Any, **facts: Any) -> Any:
    """Return the only message that is sent."""
    given = Facts(dict(locks), **facts)
    assert isinstance(given.decide(arrive(arriving)), PutBack)
    (question,) = given.asked_for(Send)
    return question


def test_message_that_is_put_back_says_what_it_has_met() -> None:
    """How often and for how long it has waited, whether it came again, whom it follows, and whether it watches."""
    follow = {"on_overlap": "follow"}
    waits = sent(message(rules={"on_overlap": "wait"}, luck=0.5), OTHER)
    assert (waits.pause, waits.ticket) == (2.0, replace(TICKET, tries=1, waited=2.0))
    assert sent(message(rules=follow), OTHER).ticket.joined == "other"
    assert sent(message(rules=follow, stores=False), OTHER).ticket.joined == ""
    assert sent(message(replace(TICKET, joined="first"), follow), OTHER).ticket.joined == "first"
    assert sent(message(rules=follow), {NAME: held("", kind="manual", secret=secret("b"))}).ticket.joined == ""
    assert sent(message(**AGAIN), OWN_RUN).ticket.watch
    assert sent(message(**AGAIN), OWN_RUN).ticket.redelivered
    assert sent(message(PENDING, REPLACE), BEGAN | OWN_RUN).ticket.watch
    assert not sent(message(PENDING, REPLACE), RECORD | OWN_RUN).ticket.watch  # a run with older arguments


def test_message_keeps_its_slot_while_nodes_are_away() -> None:
    """If it had taken it, it claims it again for its own message; the task shows that it is tried again."""
    silent = sent(message(late=True, rules={"redelivery": "drop"}), OWN_SLOT, silent=(Put,))
    assert silent.claim == "claim"
    for ticket, shown in ((TICKET, True), (PENDING, False)):
        verdict = Facts(silent=(Take, Look)).decide(arrive(message(ticket)))
        assert (verdict.unanswered is not None) is shown


def test_messages_that_end_give_up_their_place() -> None:
    """The lock with which it waited is free after a run began, and after an end without one; else it is kept."""
    queue = {f"queued:{NAME}": held("mine", QUEUED, secret=OWN)}
    for rules, locks, kept in (
        ({}, queue, []),
        ({"on_overlap": "drop"}, queue | OTHER, [NAME]),
        ({}, queue | OTHER, [NAME, *queue]),
    ):
        facts = Facts(dict(locks))
        facts.decide(arrive(message(replace(TICKET, scope=BOTH), rules)))
        assert sorted(set(facts.locks) - {NAME}) == sorted(set(kept) - {NAME})


def test_older_message_ends_without_a_turn() -> None:
    """A newer one counts, so nothing is to be noted; the slot of the key may be that of the newer one."""
    facts = Facts(dict(NEWER))

    facts.decide(arrive(message(PENDING, REPLACE)))

    assert facts.asked_for(InTurn) == facts.asked_for(Put) == []
    facts = Facts(BEGAN | {}, results={"mine": SUCCESS})
    facts.decide(arrive(message(PENDING, REPLACE)))
    assert len(facts.asked_for(InTurn)) == 2  # it was the one that counts, so it is noted as over


def test_pending_call_begins() -> None:
    """It takes no slot over from itself; a copy of it may; without a run's slot, that of its queue is held."""
    facts = Facts(dict(RECORD))
    facts.decide(arrive(message(PENDING, REPLACE)))
    assert [each.ticket.secret for each in facts.asked_for(Take)] == [""]
    facts = Facts(BEGAN | {NAME: held("mine", QUEUED, secret=PENDING.begun.secret)})
    assert isinstance(facts.decide(arrive(message(PENDING, REPLACE))), Run)
    assert [each.ticket.secret for each in facts.asked_for(Take)] == [PENDING.begun.secret]
    for hold_for, left in ((0.0, ""), (60.0, HELD)):
        facts = Facts(dict(RECORD))
        rules = REPLACE | {"scope": "until_executing", "hold_for": hold_for}
        facts.decide(arrive(message(replace(PENDING, scope="until_executing"), rules)))
        assert (facts.locks[NAME].owner.state if NAME in facts.locks else "") == left


def test_record_of_a_pending_call_that_waits_is_kept() -> None:
    """It lasts until its message comes back; that of a copy that has begun is gone."""
    for locks, keeps in ((RECORD | OTHER, True), (BEGAN | OTHER, False)):
        facts = Facts(dict(locks))
        facts.decide(arrive(message(PENDING, REPLACE, lifetime=60.0)))
        assert [each.strict for each in facts.asked_for(Put) if each.name == f"next:{NAME}"] == [True] * keeps


@pytest.mark.parametrize(
    ("arriving", "holder", "facts", "waits"),
    [
        (message(replace(TICKET, scope="while_executing"), SERIAL), OTHER, {"length": 0.1}, True),
        (message(replace(TICKET, scope="while_executing"), SERIAL), OTHER, {"length": 0.3}, False),
        (message(replace(TICKET, scope="while_executing"), SERIAL), OTHER, {}, False),
        (message(replace(TICKET, scope="while_executing", tries=1), SERIAL), OTHER, {}, True),
        (message(replace(TICKET, scope="while_executing", tries=1), SERIAL), OTHER, {"length": 0.3}, False),
        (message(replace(TICKET, scope="while_executing"), SERIAL), OTHER, {"length": 0.1, "waits": True}, False),
        (
            message(replace(TICKET, scope="while_executing"), SERIAL),
            {NAME: held("other", HELD, secret=secret("b"))},
            {"length": 0.1},
            False,
        ),
        (message(TICKET, {"on_overlap": "wait"}), OTHER, {"length": 0.1}, False),
    ],
    ids=[
        "short runs",
        "long runs",
        "no run yet",
        "it has waited before",
        "it has waited, and runs are long",
        "another process waits",
        "the run is over",
        "runs do not follow each other",
    ],
)
def test_process_waits_for_short_runs(arriving: Message, holder: Any, facts: Any, waits: bool) -> None:
    """One process waits for the end of a short run itself, and runs its message then; all others put it back."""
    for ends_soon in (False, True):
        given = Facts(dict(holder), ends_soon=ends_soon, **facts)
        verdict = given.decide(arrive(replace(arriving)))
        assert [each.wait for each in given.asked_for(Take)] == [0.0, 0.5][: 1 + waits]
        assert isinstance(verdict, Run if waits and ends_soon else PutBack)
        assert len(given.asked_for(NoteLength)) == (waits and not ends_soon)


def test_overlap_is_reported_once() -> None:
    """Not again each time that the message comes back, and not for a pending call, which is expected to wait."""
    wait = {"on_overlap": "wait"}
    for arriving, effects in (
        (message(rules=wait), ["task mine is put back to wait for its slot"]),
        (message(rules={"on_overlap": "fail"}), ["task mine fails"]),
        (message(rules=wait, inline=True), ["task mine is dropped"]),
        (message(rules={"on_overlap": "fail"}, inline=True), ["task mine fails"]),
        (message(replace(TICKET, waited=2.0), wait), []),
        (message(PENDING, REPLACE), []),
    ):
        facts = Facts(dict(OTHER))
        facts.decide(arrive(arriving))
        assert [each.effect for each in facts.asked_for(Report)] == effects


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
    run = message(**about).run()

    assert (run.note, run.remembered if note else 60.0) == (note, remembered)


# Direct calls, and rows


@pytest.mark.parametrize(
    ("rules", "facts", "verdict", "slot"),
    [
        ({}, {}, Run, True),
        ({}, {"locks": dict(OTHER)}, Fail, False),
        ({}, {"silent": (Take,)}, Fail, False),
        ({"on_unavailable": {"run": "run"}}, {"silent": (Take,)}, Run, False),
    ],
)
def test_direct_call(rules: Any, facts: Any, verdict: type, slot: bool) -> None:
    """It runs with its slot, or fails at once; without nodes it runs only if the options say so."""
    found = Facts(**facts).decide(enter(message(rules=rules)))

    assert isinstance(found, verdict)
    assert not isinstance(found, Run) or bool(found.execution.slot) is slot


CANCELLED = {"cancelled:mine": held("mine", NOTE, secret=secret("d"))}
SLOT_OF_OTHER_ROW = {NAME: held("other", QUEUED, secret=secret("b"))}
QUEUE, QUEUED_ROW = replace(TICKET, scope=BOTH, secret=""), {f"queued:{NAME}": held("mine", QUEUED, secret=OWN)}
ROW = TICKET.without_slot


@pytest.mark.parametrize(
    ("row", "facts", "verdict", "left"),
    [
        (Row(ROW, SingletonOptions()), {"locks": dict(OWN_SLOT)}, Run, {NAME: ""}),
        (Row(ROW, SingletonOptions()), {}, Run, {NAME: ""}),
        (Row(ROW, SingletonOptions()), {"locks": dict(SLOT_OF_OTHER_ROW)}, Run, {NAME: ""}),
        (Row(ROW, SingletonOptions()), {"locks": dict(CANCELLED)}, Revoke, {}),
        (Row(ROW, SingletonOptions(), over=True), {}, Revoke, {}),
        (Row(ROW, SingletonOptions(), within=frozenset({NAME})), {"locks": dict(OTHER)}, Fail, {NAME: ""}),
        (Row(ROW, SingletonOptions()), {"locks": dict(OTHER), "ends_soon": True}, Run, {NAME: ""}),
        (Row(QUEUE, SingletonOptions(scope=BOTH)), {"locks": dict(QUEUED_ROW)}, Run, {NAME: ""}),
        (
            Row(QUEUE, SingletonOptions(scope=BOTH)),
            {"locks": {f"queued:{NAME}": SLOT_OF_OTHER_ROW[NAME]}},
            Run,
            {NAME: "", f"queued:{NAME}": QUEUED},
        ),
        (Row(ROW, SingletonOptions(on_unavailable={"run": "fail"})), {"silent": (Look,)}, Fail, {}),
        (Row(ROW, SingletonOptions(on_unavailable={"run": "run"})), {"silent": (Look,)}, Run, {}),
    ],
    ids=[
        "its slot waits",
        "the key is free",
        "another row waits",
        "it was cancelled",
        "it is over",
        "it would wait for itself",
        "another run ends",
        "it leaves its queue",
        "another row stays in the queue",
        "without nodes it fails",
        "without nodes it runs",
    ],
)
def test_row(row: Row, facts: Any, verdict: type, left: Any) -> None:
    """A row takes its slot, also from any row that only waits, and waits in its worker for the end of a run."""
    given = Facts(**facts)

    assert isinstance(given.decide(occupy(replace(row))), verdict)
    states = {name: seen.owner.state for name, seen in given.locks.items() if seen.owner}
    assert {name: state for name, state in states.items() if not name.startswith("cancelled:")} == left


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
            if isinstance(question, Take) and note:
                self.locks["cancelled:mine"] = note
            if isinstance(question, Put) and question.name == "cancelled:mine" and withdrawn:
                raise LockTakenError(question.name)
            return super().answer(question)

    assert isinstance(Later().decide(occupy(Row(ROW, SingletonOptions()))), verdict)


def test_cancelling_a_row() -> None:
    """The row does not run if its slot was still there, or if nobody knows; else a worker was quicker."""
    for locks, unheard, cancelled in (
        (OWN_SLOT, False, True),
        (OWN_RUN, False, False),
        ({}, False, False),
        (OWN_SLOT, True, True),
    ):
        facts = Facts(dict(locks), unheard=unheard)
        assert facts.decide(cancel(TICKET, NAME, OWN_SLOT[NAME], 60.0)) is cancelled
        assert ("cancelled:mine" in facts.locks) is cancelled
