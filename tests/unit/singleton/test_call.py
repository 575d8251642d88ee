"""The decisions about calls, made from facts: no caller, no broker and no node takes part."""

from dataclasses import replace
from typing import Any

import pytest

from django_redlock import QuorumUnavailableError
from django_redlock.singleton.call import Call, Joined, Refused, Sent, Skipped, send, send_owned, store
from django_redlock.singleton.ending import Execution
from django_redlock.singleton.questions import Claim, FreeSlot, InTurn, Look, Put, Result, ResultState, Send
from django_redlock.singleton.slot import Record, Seen

from .facts import (
    BOTH,
    CLAIMED,
    HELD,
    NAME,
    NEXT,
    OWN,
    QUEUED,
    RUN,
    SERIAL,
    Case,
    Facts,
    FakeSlot,
    by,
    held,
    scene,
    secret,
)

# The locks that are held, and the results of those who have them
WAITS, RUNS, HOLDS, CLAIMS = (by("other", state) for state in (QUEUED, "", HELD, CLAIMED))
HELD_NOW = by("other", HELD, left=21.0)  # of 30 seconds
LATER, NO_TASK, UNNAMED = by("other", QUEUED, left=9000.0), by("", kind="manual"), by("", CLAIMED)
OWN_RUN, KEPT = by("mine", own="e"), by("mine", QUEUED, own="e")
SAME, OTHERS = "1.0123456789", "1.9876543210"
PENDING, SAME_PENDING = (by("pending", QUEUED, name=NEXT, own="c", call=call) for call in (OTHERS, SAME))
PENDING_CLAIM = by("pending", CLAIMED, name=NEXT, own="c", call=OTHERS)
PENDING_LATER = by("pending", QUEUED, name=NEXT, own="c", call=OTHERS, left=9000.0)
OTHER_TASK = {NEXT: replace(by("pending", QUEUED, own="c")[NAME], fence=1)}
OF_ITS_GROUP = by("pending", QUEUED, name=NEXT, own="c", call=SAME, task="shop.other")
CONFIRMED = {NEXT: Seen("", 0.0, 0, split=(PENDING[NEXT], replace(PENDING[NEXT], left=10.0)))}
SPLIT = {NEXT: Seen("", 0.0, 0, split=(PENDING[NEXT], held("pending", QUEUED, secret=secret("d"), call="0.5")))}
STATES: dict[str, Any] = {state.name: {"other": Result(state), "pending": Result(state)} for state in ResultState}
NODES = (Look, Claim)

# Options
SKIP, RAISE, RERUN, REPLACE = ({"on_duplicate": how} for how in ("skip", "raise", "rerun", "replace"))
WANTS_ERROR = {"on_unavailable": {"enqueue": "raise"}}

# The number in the ticket of the message that is sent, and whether that has a slot
PLAIN, BARE, FIRST, SECOND = (0, True), (0, False), (1, True), (2, True)

# How the call ends; the message that is sent; and of which task the call is a duplicate
CASES = [
    Case("the key is free", Sent, PLAIN, None),
    Case("any number may wait", Sent, BARE, None, **SERIAL, locks=RUNS),
    Case("another call waits", Joined, None, "other", locks=WAITS),
    Case("another call runs", Joined, None, "other", locks=RUNS),
    Case("a run that is over holds the slot", Joined, None, "other", locks=HOLDS, results=STATES["SUCCESS"]),
    Case("its result may not be stored yet", Joined, None, "other", locks=HELD_NOW),
    Case("it was over long ago, and its result is gone", Skipped, None, "other", locks=HOLDS),
    Case("it was, and nobody keeps results", Joined, None, "other", keeps_results=False, locks=HOLDS),
    Case("something that is no task has the slot", Skipped, None, None, locks=NO_TASK),
    Case("a run of a direct call has the slot", Skipped, None, None, locks=by("")),
    Case("another call waits, and it is skipped", Skipped, None, "other", **SKIP, locks=WAITS),
    Case("another call waits, and it raises", Refused, None, "other", **RAISE, locks=WAITS),
    Case("another call waits, and it raises in a schedule", Joined, None, "other", **RAISE, quiet=True, locks=WAITS),
    Case("another call waits, and it has links", Refused, None, "other", linked=True, locks=WAITS),
    Case("another one was revoked before its time", Sent, PLAIN, None, locks=LATER, results=STATES["REVOKED"]),
    Case("another call waits for its time", Joined, None, "other", locks=LATER),
    Case("another call is about to be sent, and never is", Sent, BARE, None, locks=CLAIMS),
    Case("the nodes do not answer", Sent, BARE, None, silent=NODES),
    Case("the key is free, and calls may follow", Sent, PLAIN, None, **RERUN),
    Case("another call runs, and it follows", Sent, FIRST, "other", **RERUN, locks=RUNS),
    Case("one with other arguments is pending", Sent, SECOND, "other", **RERUN, locks=RUNS | PENDING),
    Case("one with these arguments is pending", Joined, None, "other", **RERUN, locks=RUNS | SAME_PENDING),
    Case(
        "a pending call is about to be sent, with these arguments",
        Sent,
        SECOND,
        "other",
        **RERUN,
        locks=RUNS | by("pending", CLAIMED, name=NEXT, own="c", call=SAME),
    ),
    Case("one of another task is pending", Sent, BARE, "pending", **RERUN, locks=RUNS | OTHER_TASK),
    Case("one of another task of its group is pending", Sent, BARE, "pending", **RERUN, locks=RUNS | OF_ITS_GROUP),
    Case("the nodes disagree about the pending one", Sent, SECOND, "other", **RERUN, locks=RUNS | SPLIT),
    Case("the pending one is being confirmed", Sent, SECOND, "other", **RERUN, locks=RUNS | CONFIRMED),
    Case(
        "the pending one is split, and has begun",
        Sent,
        FIRST,
        "other",
        **RERUN,
        locks=RUNS | SPLIT | by("pending", "note", name="began:pending", call="1"),
    ),
    Case("another call runs, and it has links", Refused, None, "other", **RERUN, linked=True, locks=RUNS),
    Case(
        "a call was revoked before its time, and calls may follow",
        Sent,
        PLAIN,
        None,
        **RERUN,
        locks=LATER,
        results=STATES["REVOKED"],
    ),
    Case("a retry was revoked before its time", Sent, FIRST, None, **REPLACE, locks=LATER, results=STATES["REVOKED"]),
    Case("the key is free, and a later call may replace it", Sent, FIRST, None, **REPLACE),
    Case("another call runs, and it may be replaced", Sent, FIRST, "other", **REPLACE, locks=RUNS),
    Case("a call is pending, and it has links", Refused, None, "pending", **REPLACE, linked=True, locks=PENDING),
    Case("the key is free, and it has links", Sent, PLAIN, None, **REPLACE, linked=True),
    Case("a call waits, and it gives its arguments", Sent, SECOND, "pending", **REPLACE, locks=SAME_PENDING),
    Case(
        "a pending call was revoked before its time",
        Sent,
        FIRST,
        None,
        **REPLACE,
        locks=PENDING_LATER,
        results=STATES["REVOKED"],
    ),
    Case("a pending call is not confirmed", Sent, SECOND, "pending", **REPLACE, locks=PENDING_CLAIM),
    Case(
        "it was revoked before it was confirmed",
        Sent,
        FIRST,
        None,
        **REPLACE,
        locks=PENDING_CLAIM,
        results=STATES["REVOKED"],
    ),
    Case("the nodes do not answer a call that may be replaced", Sent, FIRST, None, **REPLACE, silent=NODES),
]


def decided(by: Any, **about: Any) -> tuple[Any, Facts]:
    """Return what is decided about a call, and the facts afterwards."""
    call, facts = scene(Call, **{"task": "shop.sync", "ttl": 60.0} | about)
    return facts.decide(by(call)), facts


def check(case: Case, verdict: Any, facts: Facts) -> None:
    sent = [(each.ticket.number, bool(each.ticket.secret)) for each in facts.asked_for(Send)]
    holder = verdict.holder.task_id if verdict.holder else None
    assert (type(verdict), sent, holder) == (case.expected[0], [case.expected[1]] * len(sent), case.expected[2])
    assert len(sent) == isinstance(verdict, Sent)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_verdict(case: Case) -> None:
    """Each situation ends as the pages say, and no more than one message is sent."""
    verdict, facts = decided(send, **case.about)

    check(case, verdict, facts)
    claims = facts.asked_for(Claim)
    assert [bool(each.call) for each in claims] == [each.ticket.trailing for each in claims]
    if isinstance(verdict, Joined):
        assert verdict.task_id == ("pending" if NEXT in facts.locks else "other")
    if isinstance(verdict, Sent) and case.expected[1][1] and not facts.silent:
        assert facts.locks[facts.asked_for(Send)[-1].ticket.waiting].secret == OWN


@pytest.mark.parametrize(
    ("by", "about"),
    [
        ("send", {"silent": NODES}),
        ("send", {"locks": CLAIMS}),
        ("send", REPLACE | {"locks": SPLIT, "unheard": True}),
        ("store", {"silent": NODES}),
    ],
    ids=["silence", "a claim", "a record that stays split", "a row"],
)
def test_unknown_holder_is_an_error_if_the_caller_wants_one(by: str, about: Any) -> None:
    """With ``on_unavailable={"enqueue": "raise"}`` no message is sent, and no row stored, that may be one too many."""
    call, facts = scene(Call, task="shop.sync", ttl=60.0, **WANTS_ERROR, **about)

    with pytest.raises(QuorumUnavailableError):
        facts.decide(send(call) if by == "send" else store(call))
    assert facts.asked_for(Send) == []


def run_of(task_id: str = "mine", slot: bool = True, **more: Any) -> Any:
    return lambda: scene(Execution, slot=FakeSlot(NAME, RUN) if slot else None, task_id=task_id, **more)[0]


# Whether its message has a slot; which run makes the call; and which retry it is
OWNED = [
    Case("an id that was given", False, None, 0),
    Case("it continues the run", True, run_of(), 0, locks=OWN_RUN),
    Case("it continues a run that has lost its slot", False, run_of(), 0, locks=RUNS),
    Case("another message", False, run_of("other"), 0),
    Case("it continues a run that has no slot", True, run_of(slot=False), 1),
    Case("it waits in a queue of its own", True, run_of(), 1, **BOTH, locks=OWN_RUN),
    Case("any number may wait", False, run_of(), 1, **SERIAL, locks=OWN_RUN),
    Case("a retry for which the slot is kept", True, None, 1, locks=KEPT),
    Case("a retry that another run has overtaken", False, None, 1, locks=RUNS),
    Case("a retry whose slot is free", True, None, 1),
    Case("a retry of a run that was to have no slot", False, run_of(name=""), 1, locks=RUNS),
]


@pytest.mark.parametrize("case", OWNED, ids=str)
def test_call_whose_id_is_known_is_always_sent(case: Case) -> None:
    """It has the slot if it continues a run, or nobody else has that; a worker decides about it."""
    has_slot, make, retries = case.expected
    run = make() if make else None

    verdict, facts = decided(lambda call: send_owned(call, run, retries), **case.about)

    (question,) = facts.asked_for(Send)
    assert isinstance(verdict, Sent)
    assert bool(question.ticket.secret) is has_slot
    assert bool(question.ticket.name) is (not run or bool(run.ticket.name))  # else it goes on to run without a slot
    assert not run or run.over or not has_slot or not run.slot


def test_run_notes_that_it_sends_a_retry_before_its_slot_is_free() -> None:
    """A copy of its message may have the slot at that moment, and must not do the work again."""
    run = run_of(note="done:mine:0", remembered=60.0)()

    _, facts = decided(lambda call: send_owned(call, run, 1), **SERIAL, locks=OWN_RUN)

    assert [type(each) for each in facts.asked if isinstance(each, (Put, FreeSlot, Send))] == [Put, FreeSlot, Send]
    assert facts.locks["done:mine:0"].secret == run.noted


ROWS = [
    Case("the key is free", Sent, PLAIN, None),
    Case("any number may wait", Sent, PLAIN, None, **SERIAL, locks=RUNS),
    Case("another row waits", Joined, None, "other", locks=WAITS, results=STATES["WAITS"]),
    Case("another row runs", Joined, None, "other", locks=RUNS, results=STATES["UNDERWAY"]),
    Case("another row waits, and it is skipped", Skipped, None, "other", **SKIP, locks=WAITS, results=STATES["WAITS"]),
    Case("another row waits, and it raises", Refused, None, "other", **RAISE, locks=WAITS, results=STATES["WAITS"]),
    Case("the row that waited is gone", Sent, PLAIN, None, locks=WAITS, results=STATES["GONE"]),
    Case("the row that waited has ended", Sent, PLAIN, None, locks=WAITS, results=STATES["REVOKED"]),
    Case(
        "the row that waited has left the queue, and its slot",
        Sent,
        PLAIN,
        None,
        scope="until_executing",
        locks=WAITS,
        results=STATES["UNDERWAY"],
    ),
    Case(
        "it is to be held, which it will be in a moment",
        Joined,
        None,
        "other",
        scope="until_executing",
        hold_for=60.0,
        locks=WAITS,
        results=STATES["UNDERWAY"],
    ),
    Case("the row runs without its slot", Joined, None, "other", locks=WAITS, results=STATES["UNDERWAY"]),
    Case("the row that held the slot is gone", Skipped, None, "other", locks=HOLDS, results=STATES["GONE"]),
    Case("nobody can tell what became of it", Joined, None, "other", locks=WAITS, results=STATES["UNKNOWN"]),
    Case("another process is storing a row", Sent, PLAIN, None, locks=UNNAMED),
    Case(
        "this transaction has stored a row",
        Joined,
        None,
        "other",
        locks=UNNAMED,
        here="other",
        results=STATES["WAITS"],
    ),
    Case("it was rolled back", Sent, PLAIN, None, locks=UNNAMED, here="other", results=STATES["GONE"]),
    Case("nobody can tell about it", Sent, PLAIN, None, locks=UNNAMED, here="other", results=STATES["UNKNOWN"]),
    Case("the nodes do not answer", Sent, PLAIN, None, silent=NODES),
]


@pytest.mark.parametrize("case", ROWS, ids=str)
def test_row(case: Case) -> None:
    """A row is stored, or its caller gets the answer to a duplicate."""
    verdict, facts = decided(store, **case.about)

    check(case, verdict, facts)
    if isinstance(verdict, Sent) and verdict.unanswered:
        assert facts.asked_for(Send)[0].claim is None


def test_turn_is_waited_for_only_where_a_record_may_change() -> None:
    """A first call of ``rerun`` takes the slot of its run at once; a pending call is a record."""
    for rules, turns in ((RERUN, 0), (REPLACE, 1)):
        assert len(decided(send, **rules)[1].asked_for(InTurn)) == turns


def test_call_waits_a_second_for_a_message_that_may_be_sent() -> None:
    """No longer: its caller may have died."""
    verdict, facts = decided(send, locks=CLAIMS)

    assert verdict.unanswered
    assert 0.8 < facts.now - 1000.0 <= 1.0


def test_call_takes_a_free_slot_whose_messages_are_away() -> None:
    """After a second, so that a message that comes back in time is not overtaken; then later calls join this one."""
    verdict, facts = decided(send, first=(1,))

    assert isinstance(verdict, Sent)
    assert not verdict.unanswered
    assert facts.asked_for(Send)[0].claim
    assert 0.8 < facts.now - 1000.0 <= 1.0
    assert isinstance(decided(send, first=(1,), locks=WAITS)[0], Joined)
    later = decided(send, first=(1,), ttl=9000.0)[0]  # a call with a countdown would keep them out for all that time
    assert isinstance(later, Sent)
    assert later.unanswered


@pytest.mark.parametrize(
    ("number", "counts"), [("1", True), ("999999999", True), ("1000000000", False), ("²", False), ("-1", False)]
)
def test_number_of_a_record_has_nine_digits_at_most(number: str, counts: bool) -> None:
    """What is no number of a message, or one that nobody reaches, describes no pending call."""
    record = by("id", QUEUED, call=f"{number}.0123456789")[NAME].record

    assert record == (Record("id", "0123456789", int(number), "shop.sync") if counts else None)


def test_record_that_another_call_has_made_meanwhile() -> None:
    """Nobody knows which of the two counts, so the message is sent without a slot."""
    for locks in (RUNS, {}):
        verdict, facts = decided(send, **REPLACE, locks=locks, meanwhile=by("third", QUEUED, name=NEXT, own="d"))
        assert isinstance(verdict, Sent)
        assert (verdict.unanswered is not None, len(facts.asked_for(Send))) == (bool(locks), 1)
