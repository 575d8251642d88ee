"""Wrong protocols of the slots of singleton tasks: the simulation has to catch each of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from django_redlock.celery import parent, task, worker
from django_redlock.celery.dispatch import SingletonResult
from django_redlock.core.acquisition import Acquisition, GaveUp
from django_redlock.core.attempt import Attempt
from django_redlock.core.node_state import decisions
from django_redlock.core.protocol import Kind, Outcome
from django_redlock.engine.manager import LockManager, fresh_secret
from django_redlock.exceptions import LockTakenError
from django_redlock.singleton import arrival, call, driver, ending, pending, slot
from django_redlock.singleton.driver import Nodes
from django_redlock.singleton.questions import Free, FreeSlot, Result, ResultOf, ResultState, Send
from django_redlock.singleton.slot import FREE, Holder, SlotState
from django_redlock.singleton.ticket import Ticket
from tests.machine import mutation
from tests.machine.mutation import Kill, Mutant, Wrong, always, returns

from .celery_parts import RecordingTask
from .profiles import PROFILES
from .schedule import run

ENOUGH = 1_000  # schedules of each profile after which a mutant counts as alive
FOR_LONG = 1e6  # seconds; longer than any schedule
LONGEST = 1_000.0  # seconds of virtual time; longer than any countdown


def overtakes_at_once(right: Any) -> Any:
    """Take a free slot although others come first."""

    def wait_in_process(message: arrival.Message, refusal: LockTakenError, is_short: bool) -> Iterator[Any]:
        if refusal.queued:
            return (yield from arrival._take_running(message, message.ticket, barge=True))
        return (yield from right(message, refusal, is_short))

    return wait_in_process


def decides(answer: Any) -> Wrong:
    """Replace a decision by one that asks nothing."""

    def decide(*about: Any, **options: Any) -> Iterator[Any]:
        return answer
        yield

    return lambda right: decide


@contextmanager
def no_turn(manager: Any, name: str, longest: float) -> Iterator[None]:
    yield


def with_record(changed: Callable[[Any, Any], Any]) -> Wrong:
    """Take a pending call over with another record."""
    return lambda right: lambda call, run, seen, record: right(call, run, seen, changed(call, record))


def forgets_the_record(right: Any) -> Any:
    def begin(message: Any, rules: Any) -> Any:
        return right(replace(message, ticket=replace(message.ticket, secret=fresh_secret()), record=FREE), rules)

    return begin


def forgets_the_note(right: Any) -> Any:
    def begin(message: Any, rules: Any) -> Iterator[Any]:
        yield Free(message.ticket.following, message.record.secret)

    return begin


def sees_nothing(right: Any) -> Any:
    def look(call: Any) -> Any:
        run, _ = yield from right(call)
        return run, FREE

    return look


def shared_token(right: Any) -> Any:
    return lambda nodes, question: right(nodes, replace(question, secret=question.ticket.secret))


def not_waiting(right: Any) -> Any:
    return lambda message, holder, follow: arrival._store_outcome(message, arrival.Revoke("Skipped."))


def accepted(right: Any) -> Any:
    return lambda result, holder, accepted: right(result, Holder(None, SlotState.RUNNING, None), accepted=True)


def quorums_only(right: Any) -> Any:
    """Take a record or a note for gone if no quorum of the nodes that answer has it."""

    def is_superseded(message: Any) -> bool:
        message.record, message.began = (replace(one, split=()) for one in (message.record, message.began))
        return bool(right(message))

    return is_superseded


def any_id(right: Any) -> Any:
    def is_superseded(message: Any) -> bool:
        others = (one.record for one in message.record.sightings)
        return any(record and record.task_id != message.ticket.task_id for record in others) or right(message)

    return is_superseded


def frees_only(right: Any) -> Any:
    def discard(ticket: Any, rules: Any) -> Iterator[Any]:
        yield Free(ticket.waiting, ticket.secret)

    return discard


def frees_what_it_sees(right: Any) -> Any:
    """Free a waiting call that was revoked, and do not note that its messages must not run."""

    def discard_seen(name: Any, seen: Any, ticket: Any, rules: Any) -> Iterator[Any]:
        yield Free(name, seen.secret)

    return discard_seen


def runs_as_well(right: Any) -> Any:
    def take_over(given: Any, run: Any, seen: Any, record: Any) -> Any:
        answer = yield Send(replace(given.ticket, secret="", number=0))
        return call.Sent(answer, seen.holder, "is sent")

    return take_over


def anybodys_word(right: Any) -> Any:
    """Take a lock for taken, and a call for a duplicate, on the word of a single node."""
    refused = lambda found: any(reply.kind is Kind.BUSY for reply in found.replies.values())  # noqa: E731
    return property(lambda found: right.__get__(found) or refused(found))


def gives_up(right: Any) -> Any:
    def contend(acquisition: Any) -> Iterator[None]:
        yield from ()

    return contend


def lets_it_fail(right: Any) -> Any:
    def without_nodes(message: Any, error: Any) -> Any:
        yield from ending.end(message.run(), hold=False)
        message.slot = None
        return arrival.Fail(error)

    return without_nodes


def asks_plainly(right: Any) -> Any:
    def stored(arrived: Any, question: Any) -> Result:
        state = arrived.task.backend.get_task_meta(question.task_id)["status"]
        return Result(ResultState.SUCCESS if state == "SUCCESS" else ResultState.ABSENT)

    return right | {ResultOf: stored}


def counts_as_queued(right: Any) -> Any:
    """Take a message that may not have been sent for one that was."""
    return lambda owner: SlotState.QUEUED if owner.state == SlotState.CLAIMED else right(owner)


def expires_anyway(right: Any) -> Any:
    def expire(ticket: Any, rules: Any) -> Any:
        yield from pending.discard(ticket, rules)
        return (yield from arrival._live_run(ticket)) is None

    return expire


def any_arguments(right: Any) -> Any:
    def has_these_arguments(call: Any, record: Any) -> Any:
        return bool(record.record)
        yield

    return has_these_arguments


NOWHERE = always(property(lambda message: False))


def for_few_votes(right: Any) -> Any:
    """Let one vote be enough for a permit."""

    def init(attempt: Any, wanted: Any, slugs: Any, secret: Any, rules: Any, *about: Any) -> None:
        if wanted.limit > 1:
            rules = copy(rules)
            vars(rules).update(needed=1, spare=rules.nodes - 1)
        right(attempt, wanted, slugs, secret, rules, *about)

    return init


def holds_by_itself(right: Any) -> Any:
    """Have the process of a run keep its slot for the rest of ``hold_for``."""

    def free_slot(nodes: Any, question: Any) -> Any:
        machine = RecordingTask.recorder.world.machine
        assert machine
        if not question.hold:
            return right[FreeSlot](nodes, question)

        def keep() -> None:
            machine.thread.sleep(question.hold)
            question.slot.release()

        machine.spawn(keep)
        return Outcome.HELD

    return right | {FreeSlot: free_slot}


def forgets_its_stamp(right: Any) -> Any:
    return lambda ticket: right(replace(ticket, stamp=0))


NOBODY_ELSE = always(property(lambda found: True))

MUTANTS = (
    Mutant(
        "split votes are joined",
        ("at once, one silent", "by name, one silent"),
        (GaveUp, "taken"),
        anybodys_word,
        also=((GaveUp, "agreed", NOBODY_ELSE), (Acquisition, "_contend", gives_up)),
    ),
    Mutant(
        "a minority is believed",
        ("one after another", "flapping"),
        (GaveUp, "taken"),
        anybodys_word,
        also=((GaveUp, "agreed", NOBODY_ELSE),),
    ),
    Mutant("the backend decides", ("backend away",), (worker.Arrival, "answers"), asks_plainly),
    Mutant("silence after the take fails", ("quorum away",), (arrival, "_without_nodes_after"), lets_it_fail),
    Mutant(
        "what has begun is dropped",
        ("workers die", "workers stop"),
        (arrival.Message, "unfinished"),
        always(property(lambda message: False)),
    ),
    Mutant(
        "claims last as long as slots",
        ("callers die",),
        (driver, "CLAIM"),
        always(3600.0),
        also=((slot, "state_of", counts_as_queued),),
    ),
    Mutant(
        "what ends before its body keeps its slot",
        ("cut short",),
        (parent, "discard"),
        decides(None),
        also=((ending, "discard", decides(None)),),
    ),
    Mutant(
        "late claims are granted",
        ("far nodes", "far nodes, one silent"),
        (decisions, "SUPERSEDED"),
        always(0.0),
        also=((driver, "SUPERSEDED", always(0.0)),),
    ),
    Mutant("no turn for callers", ("replace waiting", "replace crowd"), (driver, "turn"), always(no_turn)),
    Mutant(
        "an id for each caller",
        ("rerun burst",),
        (call, "_take_over"),
        with_record(lambda call, record: record._replace(task_id=call.ticket.task_id)),
    ),
    Mutant(
        "no numbers",
        ("rerun freed", "node away"),
        (call, "_take_over"),
        with_record(lambda call, record: record._replace(number=0)),
    ),
    Mutant("the record stays", ("rerun burst",), (arrival, "begin"), forgets_the_record),
    Mutant("no note of what began", ("rerun crowd", "debounce"), (arrival, "begin"), forgets_the_note),
    Mutant("the record is not looked at", ("replace waiting",), (call, "_look"), sees_nothing),
    Mutant(
        "older messages run",
        ("rerun crowd", "replace waiting"),
        (pending.PendingMessage, "is_superseded"),
        returns(False),
    ),
    Mutant("every message is older", ("rerun",), (pending.PendingMessage, "is_superseded"), returns(True)),
    Mutant("a copy runs beside the run", ("redelivered",), (Nodes, "take"), shared_token),
    Mutant(
        "copies of what began run",
        ("redelivered",),
        (pending.PendingMessage, "has_begun"),
        returns(False),
    ),
    Mutant(
        "single nodes are no evidence", ("nodes come and go",), (pending.PendingMessage, "is_superseded"), quorums_only
    ),
    Mutant("slots stay", ("once",), (task, "end"), decides(None)),
    Mutant("pending calls are skipped", ("rerun",), (arrival, "_wait"), not_waiting),
    Mutant("wrong answers", ("rerun",), (SingletonResult, "about"), accepted),
    Mutant(
        "newer arguments are not taken over",
        ("rerun", "rerun crowd"),
        (call, "_has_these_arguments"),
        any_arguments,
    ),
    Mutant("messages give way to other ids", ("rerun freed",), (pending.PendingMessage, "is_superseded"), any_id),
    Mutant(
        "an older message expires its call",
        ("expiring",),
        (parent, "expire"),
        expires_anyway,
    ),
    Mutant(
        "a run that may be dead is left alone", ("dropped",), (arrival, "_watch"), decides(arrival.Leave("It runs."))
    ),
    Mutant("no note of what gave up", ("waits briefly",), (arrival, "discard"), frees_only),
    Mutant("older messages of revoked ones run", ("replace revoked",), (parent, "discard"), frees_only),
    Mutant("messages of revoked calls run", ("debounce revoked",), (call, "discard_seen"), frees_what_it_sees),
    Mutant("revoked calls are joined", ("revoked",), (call, "_is_over"), decides(False)),
    Mutant(
        "hold_for does not hold",
        ("rerun held",),
        (arrival, "_take_for_pending"),
        decides(None),
    ),
    Mutant(
        "what is replaced runs as well",
        ("replace waiting",),
        (call, "_take_over"),
        runs_as_well,
    ),
    Mutant("a revoked message keeps its place", ("serial, revoked",), (LockManager, "leave_queue"), returns(None)),
    Mutant(
        "a revoked message keeps its place for ever",
        ("serial, revoked",),
        (LockManager, "leave_queue"),
        returns(None),
        also=((arrival, "GRACE", always(FOR_LONG)),),
    ),
    Mutant("the turn of a lost message is never taken back", ("serial, purged",), (arrival, "GRACE"), always(FOR_LONG)),
    Mutant("places are not kept", ("serial burst",), (arrival.Message, "waits_in_line"), NOWHERE),
    Mutant(
        "messages overtake those that come in a moment",
        ("serial burst",),
        (arrival, "_wait_in_process"),
        overtakes_at_once,
    ),
    Mutant("messages forget when they came", ("serial with limit",), (Ticket, "pack"), forgets_its_stamp),
    Mutant(
        "one vote is enough for a permit",
        ("serial with limit", "serial, flapping"),
        (Attempt, "__init__"),
        for_few_votes,
    ),
    Mutant("copies of a retried message run", ("serial, copies",), (call, "note_sending"), decides(None)),
    Mutant("a minimum hold ends with its process", ("serial, held",), (worker.Arrival, "answers"), holds_by_itself),
)
if find_spec("django.tasks"):  # since Django 6.0
    from .task_mutants import TASK_MUTANTS

    MUTANTS += TASK_MUTANTS


def hunt(mutant: Mutant, enough: int = ENOUGH) -> Kill:
    def objection(haunt: str, seed: int) -> str | None:
        # Shorter: a message that nobody ever takes would be put back for as long as the schedule lasts.
        violations = run(replace(PROFILES[haunt], longest=LONGEST), seed).violations
        return violations[0][1] if violations else None

    return mutation.hunt(mutant, objection, enough)
