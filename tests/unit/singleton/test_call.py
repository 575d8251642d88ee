"""The decisions about calls, made from facts: no caller, no broker and no node takes part."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from django_redlock import QuorumUnavailableError
from django_redlock.singleton.call import Call, Joined, Refused, Sent, Skipped, send, send_owned, store
from django_redlock.singleton.ending import Execution
from django_redlock.singleton.options import SingletonOptions
from django_redlock.singleton.questions import Claim, InTurn, Look, Result, ResultState, Send
from django_redlock.singleton.slot import Seen
from django_redlock.singleton.ticket import Ticket, began_name

from .facts import CLAIMED, HELD, QUEUED, RUNNING, Facts, FakeSlot, held, secret

NAME, NEXT, OWN = "task:shop.sync:shop_id=7", "next:task:shop.sync:shop_id=7", secret("a")
TICKET = Ticket(NAME, "default", "mine", OWN)
WAITS = {NAME: held("other", QUEUED, secret=secret("b"))}
LATER = {NAME: held("other", QUEUED, secret=secret("b"), left=9000.0)}  # after its countdown
RUNS = {NAME: held("other", RUNNING, secret=secret("b"))}
SAME, OTHERS = "1.0123456789", "1.9876543210"
PENDING = {NEXT: held("pending", QUEUED, secret=secret("c"), call=OTHERS)}
SAME_PENDING = {NEXT: held("pending", QUEUED, secret=secret("c"), call=SAME)}
OTHER_TASK = {NEXT: replace(held("pending", QUEUED, secret=secret("c")), fence=1)}
SPLIT = {NEXT: Seen("", 0.0, 0, split=(held("pending", QUEUED, secret=secret("c"), call=OTHERS),))}
RERUN, REPLACE = {"on_duplicate": "rerun"}, {"on_duplicate": "replace"}
REVOKED, GONE = Result(ResultState.REVOKED), Result(ResultState.GONE)
NODES = (Look, Claim)


@dataclass
class Case:
    """
    One situation.

    Args:
        what: In words.
        answer: How the call ends.
        rules: The options of the task.
        call: What the call has.
        facts: All else.
        sent: The number in the ticket of its message, and whether that has a slot; None if no message is sent.
        holder: The task of which it is a duplicate; None if there is none. As a rule, a call that was not sent is one.
    """

    what: str
    answer: type
    rules: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    sent: tuple[int, bool] | None = None
    holder: str | None = ""

    def __post_init__(self) -> None:
        if self.holder == "":
            self.holder = None if self.answer is Sent else "other"

    def __str__(self) -> str:
        return self.what


CASES = [
    Case("the key is free", Sent, sent=(0, True)),
    Case(
        "any number may wait",
        Sent,
        {"scope": "while_executing"},
        {"ticket": replace(TICKET, scope="while_executing")},
        {"locks": RUNS},
        (0, False),
    ),
    Case("another call waits", Joined, facts={"locks": WAITS}),
    Case("another call runs", Joined, facts={"locks": RUNS}),
    Case("a run that is over holds the slot", Joined, facts={"locks": {NAME: held("other", HELD, secret=secret("b"))}}),
    Case(
        "a run that was over long ago holds the slot, and its result is gone",
        Skipped,
        call={"time": 1000.0},
        facts={"locks": {NAME: held("other", HELD, secret=secret("b"))}},
    ),
    Case(
        "the same, of a task whose results nobody keeps",
        Joined,
        call={"time": 1000.0, "keeps_results": False},
        facts={"locks": {NAME: held("other", HELD, secret=secret("b"))}},
    ),
    Case(
        "something that is no task has the slot",
        Skipped,
        facts={"locks": {NAME: held("", kind="manual", secret=secret("b"))}},
        holder=None,
    ),
    Case(
        "a run of a direct call has the slot",
        Skipped,
        facts={"locks": {NAME: held("", RUNNING, secret=secret("b"))}},
        holder=None,
    ),
    Case("another call waits, and it is skipped", Skipped, {"on_duplicate": "skip"}, facts={"locks": WAITS}),
    Case("another call waits, and it raises", Refused, {"on_duplicate": "raise"}, facts={"locks": WAITS}),
    Case(
        "another call waits, and it raises in a schedule",
        Joined,
        {"on_duplicate": "raise"},
        {"quiet": True},
        {"locks": WAITS},
    ),
    Case("another call waits, and it has links", Refused, call={"linked": True}, facts={"locks": WAITS}),
    Case(
        "another call waits for its time, and was revoked",
        Sent,
        facts={"locks": LATER, "results": {"other": REVOKED}},
        sent=(0, True),
    ),
    Case("another call waits for its time", Joined, facts={"locks": LATER}),
    Case(
        "another call is about to be sent, and never is",
        Sent,
        facts={"locks": {NAME: held("other", CLAIMED, secret=secret("b"))}},
        sent=(0, False),
    ),
    Case("the nodes do not answer", Sent, facts={"silent": NODES}, sent=(0, False)),
    Case("the key is free, and calls may follow", Sent, RERUN, sent=(0, True)),
    Case("another call runs, and it follows", Sent, RERUN, facts={"locks": RUNS}, sent=(1, True), holder="other"),
    Case(
        "another call runs, and one with other arguments is pending",
        Sent,
        RERUN,
        facts={"locks": RUNS | PENDING},
        sent=(2, True),
        holder="other",
    ),
    Case(
        "another call runs, and one with these arguments is pending",
        Joined,
        RERUN,
        facts={"locks": RUNS | SAME_PENDING},
    ),
    Case(
        "a pending call is about to be sent, with these arguments",
        Sent,
        RERUN,
        facts={"locks": RUNS | {NEXT: held("pending", CLAIMED, secret=secret("c"), call=SAME)}},
        sent=(2, True),
        holder="other",
    ),
    Case(
        "another call runs, and one of another task is pending",
        Sent,
        RERUN,
        facts={"locks": RUNS | OTHER_TASK},
        sent=(0, False),
        holder="pending",
    ),
    Case(
        "another call runs, and the nodes disagree about the pending one",
        Sent,
        RERUN,
        facts={"locks": RUNS | SPLIT},
        sent=(2, True),
        holder="other",
    ),
    Case(
        "another call runs, and the pending one is split and has begun",
        Sent,
        RERUN,
        facts={"locks": RUNS | SPLIT | {began_name("pending"): held("pending", "note", secret=secret("d"), call="1")}},
        sent=(1, True),
        holder="other",
    ),
    Case("another call runs, and it has links", Refused, RERUN, {"linked": True}, {"locks": RUNS}),
    Case(
        "a call of its key was revoked before its time, and calls may follow",
        Sent,
        RERUN,
        facts={"locks": LATER, "results": {"other": REVOKED}},
        sent=(0, True),
    ),
    Case("the key is free, and a later call may replace it", Sent, REPLACE, sent=(1, True)),
    Case(
        "another call runs, and it may be replaced",
        Sent,
        REPLACE,
        facts={"locks": RUNS},
        sent=(1, True),
        holder="other",
    ),
    Case(
        "a call is pending, and it has links", Refused, REPLACE, {"linked": True}, {"locks": PENDING}, holder="pending"
    ),
    Case("the key is free, and it has links", Sent, REPLACE, {"linked": True}, sent=(0, True)),
    Case(
        "a call waits, and it gives its arguments",
        Sent,
        REPLACE,
        facts={"locks": SAME_PENDING},
        sent=(2, True),
        holder="pending",
    ),
    Case(
        "a pending call was revoked before its time",
        Sent,
        REPLACE,
        facts={
            "locks": {NEXT: replace(held("pending", QUEUED, secret=secret("c"), call=OTHERS), left=9000.0)},
            "results": {"pending": REVOKED},
        },
        sent=(1, True),
    ),
    Case(
        "the nodes do not answer a first call that may be replaced",
        Sent,
        REPLACE,
        facts={"silent": NODES},
        sent=(1, True),
    ),
]


def call_with(case: Case) -> tuple[Call, Facts]:
    facts = Facts(**case.facts | {"locks": dict(case.facts.get("locks", {}))})
    return Call(
        **{"task": "shop.sync", "ticket": TICKET, "rules": SingletonOptions(**case.rules), "ttl": 60.0} | case.call
    ), facts


def check(case: Case, verdict: Any, facts: Facts) -> None:
    sent = [(each.ticket.number, bool(each.ticket.secret)) for each in facts.asked_for(Send)]
    assert type(verdict) is case.answer
    assert sent == ([case.sent] if case.sent else [])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case) -> None:
    """Each situation ends as the pages say, and no more than one message is sent."""
    call, facts = call_with(case)

    verdict = facts.decide(send(call))

    check(case, verdict, facts)
    assert (verdict.holder.task_id if verdict.holder else None) == case.holder
    assert [bool(each.call) for each in facts.asked_for(Claim)] == [
        each.ticket.trailing for each in facts.asked_for(Claim)
    ]
    if isinstance(verdict, Joined):
        assert verdict.task_id == ("pending" if NEXT in facts.locks else "other")
    if isinstance(verdict, Sent) and case.sent and case.sent[1] and not facts.silent:
        question = facts.asked_for(Send)[-1]
        assert facts.locks[question.ticket.waiting].secret == OWN


@pytest.mark.parametrize(
    "locks", [None, {NAME: held("other", CLAIMED, secret=secret("b"))}], ids=["silence", "a claim"]
)
def test_unknown_holder_is_an_error_if_the_caller_wants_one(locks: Any) -> None:
    """With ``on_unavailable={"enqueue": "raise"}`` no message is sent that may be one too many."""
    case = Case(
        "", Sent, {"on_unavailable": {"enqueue": "raise"}}, facts={"locks": locks} if locks else {"silent": NODES}
    )
    call, facts = call_with(case)

    with pytest.raises(QuorumUnavailableError):
        facts.decide(send(call))
    assert facts.asked_for(Send) == []


def run_of(task_id: str = "mine", name: str = NAME, slot: bool = True, **more: Any) -> Execution:
    ticket = replace(TICKET, task_id=task_id, name=name, **more)
    return Execution(ticket, SingletonOptions(), FakeSlot(NAME, secret("e")) if slot else None)


QUEUES = replace(TICKET, scope="until_and_while_executing")


@pytest.mark.parametrize(
    ("ticket", "run", "retries", "locks", "has_slot"),
    [
        (TICKET, None, 0, {}, False),
        (TICKET, run_of(), 0, {NAME: held("mine", RUNNING, secret=secret("e"))}, True),
        (TICKET, run_of(), 0, RUNS, False),
        (TICKET, run_of("other"), 0, {}, False),
        (TICKET, run_of(slot=False), 1, {}, True),
        (QUEUES, run_of(), 1, {NAME: held("mine", RUNNING, secret=secret("e"))}, True),
        (
            replace(TICKET, scope="while_executing"),
            run_of(),
            1,
            {NAME: held("mine", RUNNING, secret=secret("e"))},
            False,
        ),
        (TICKET, None, 1, {NAME: held("mine", QUEUED, secret=secret("e"))}, True),
        (TICKET, None, 1, RUNS, False),
        (TICKET, None, 1, {}, True),
    ],
    ids=[
        "an id that was given",
        "it continues the run",
        "it continues a run that has lost its slot",
        "another message",
        "it continues a run that has no slot",
        "it waits in a queue of its own",
        "any number may wait",
        "a retry for which the slot is kept",
        "a retry that another run has overtaken",
        "a retry whose slot is free",
    ],
)
def test_call_whose_id_is_known_is_always_sent(
    ticket: Ticket, run: Any, retries: int, locks: Any, has_slot: bool
) -> None:
    """It has the slot if it continues a run, or nobody else has that; a worker decides about it."""
    facts, run = Facts(dict(locks)), run and replace(run)

    verdict = facts.decide(send_owned(Call("shop.sync", ticket, SingletonOptions(), 60.0), run, retries))

    (question,) = facts.asked_for(Send)
    assert isinstance(verdict, Sent)
    assert bool(question.ticket.secret) is has_slot
    assert not run or run.over or not has_slot or not run.slot


def test_call_that_continues_a_run_without_a_slot_has_none() -> None:
    """A run that was sent to run without a slot leaves others alone, also over a retry."""
    facts = Facts(dict(RUNS))

    facts.decide(send_owned(Call("shop.sync", TICKET, SingletonOptions(), 60.0), run_of(name=""), 1))

    assert [(each.ticket.name, each.ticket.secret) for each in facts.asked_for(Send)] == [("", "")]


READY, STARTED, UNKNOWN = (Result(ResultState[name]) for name in ("WAITS", "UNDERWAY", "UNKNOWN"))
UNNAMED = {NAME: held("", CLAIMED, secret=secret("b"))}
ROWS = [
    Case("the key is free", Sent, sent=(0, True)),
    Case(
        "any number may wait",
        Sent,
        {"scope": "while_executing"},
        {"ticket": replace(TICKET, scope="while_executing")},
        {"locks": RUNS},
        (0, True),
    ),
    Case("another row waits", Joined, facts={"locks": WAITS, "results": {"other": READY}}),
    Case("another row runs", Joined, facts={"locks": RUNS, "results": {"other": STARTED}}),
    Case(
        "another row waits, and it is skipped",
        Skipped,
        {"on_duplicate": "skip"},
        facts={"locks": WAITS, "results": {"other": READY}},
    ),
    Case(
        "another row waits, and it raises",
        Refused,
        {"on_duplicate": "raise"},
        facts={"locks": WAITS, "results": {"other": READY}},
    ),
    Case("the row that waited is gone", Sent, facts={"locks": WAITS, "results": {"other": GONE}}, sent=(0, True)),
    Case("the row that waited has ended", Sent, facts={"locks": WAITS, "results": {"other": REVOKED}}, sent=(0, True)),
    Case(
        "the row that waited has left the queue, and its slot",
        Sent,
        {"scope": "until_executing"},
        {"ticket": replace(TICKET, scope="until_executing")},
        {"locks": WAITS, "results": {"other": STARTED}},
        (0, True),
    ),
    Case(
        "the row runs without having taken its slot over", Joined, facts={"locks": WAITS, "results": {"other": STARTED}}
    ),
    Case(
        "the row that held the slot is gone",
        Skipped,
        facts={"locks": {NAME: held("other", HELD, secret=secret("b"))}, "results": {"other": GONE}},
    ),
    Case("nobody can tell what became of the row", Joined, facts={"locks": WAITS, "results": {"other": UNKNOWN}}),
    Case("another process is storing a row", Sent, facts={"locks": UNNAMED}, sent=(0, True)),
    Case(
        "this transaction has stored a row",
        Joined,
        facts={"locks": UNNAMED, "here": "other", "results": {"other": READY}},
    ),
    Case(
        "this thread has stored a row that was rolled back",
        Sent,
        facts={"locks": UNNAMED, "here": "other", "results": {"other": GONE}},
        sent=(0, True),
    ),
    Case(
        "nobody can tell what became of a row of this thread",
        Sent,
        facts={"locks": UNNAMED, "here": "other", "results": {"other": UNKNOWN}},
        sent=(0, True),
    ),
    Case("the nodes do not answer", Sent, facts={"silent": NODES}, sent=(0, True)),
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_row(case: Case) -> None:
    """A row is stored, or its caller gets the answer to a duplicate."""
    call, facts = call_with(case)

    verdict = facts.decide(store(call))

    check(case, verdict, facts)
    if isinstance(verdict, Sent) and verdict.unanswered:
        assert facts.asked_for(Send)[0].claim is None


def test_row_is_not_stored_without_nodes_if_the_caller_wants_an_error() -> None:
    """With ``on_unavailable={"enqueue": "raise"}`` the caller learns that nobody knows."""
    call, facts = call_with(Case("", Sent, {"on_unavailable": {"enqueue": "raise"}}, facts={"silent": NODES}))

    with pytest.raises(QuorumUnavailableError):
        facts.decide(store(call))
    assert facts.asked_for(Send) == []


def test_turn_is_waited_for_only_where_a_record_may_change() -> None:
    """A first call of ``rerun`` takes the slot of its run at once; a pending call is a record."""
    for rules, turns in ((RERUN, 0), (REPLACE, 1)):
        call, facts = call_with(Case("", Sent, rules))
        facts.decide(send(call))
        assert len(facts.asked_for(InTurn)) == turns


def test_call_waits_a_second_for_a_message_that_may_be_sent() -> None:
    """No longer: its caller may have died."""
    call, facts = call_with(Case("", Sent, facts={"locks": {NAME: held("other", CLAIMED, secret=secret("b"))}}))

    verdict = facts.decide(send(call))

    assert verdict.unanswered
    assert 0.8 < facts.now - 1000.0 <= 1.0


def test_record_that_another_call_has_made_meanwhile() -> None:
    """Nobody knows which of the two counts, so the message is sent without a slot."""
    for locks in (RUNS, {}):
        call, facts = call_with(
            Case(
                "",
                Sent,
                REPLACE,
                facts={"locks": locks, "meanwhile": {NEXT: held("third", QUEUED, secret=secret("d"))}},
            )
        )
        verdict = facts.decide(send(call))
        assert isinstance(verdict, Sent)
        assert (verdict.unanswered is not None, len(facts.asked_for(Send))) == (bool(locks), 1)
