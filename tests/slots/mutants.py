"""Wrong protocols of the slots of singleton tasks: the simulation has to catch each of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from celery.exceptions import Ignore

from django_redlock.celery import pending, request, worker
from django_redlock.celery.execution import Execution
from django_redlock.core.acquisition import Acquisition, GaveUp
from django_redlock.core.node_state import decisions
from django_redlock.core.protocol import Kind
from django_redlock.engine.manager import fresh_secret
from django_redlock.singleton import slots
from django_redlock.singleton.slots import SlotState
from tests.simulation import mutation
from tests.simulation.mutation import Kill, Mutant, Wrong, always, returns

from .profiles import PROFILES
from .schedule import run

ENOUGH = 150  # schedules of each profile after which a mutant counts as alive
LONGEST = 1_000.0  # seconds of virtual time; longer than any countdown


@contextmanager
def no_turn(ticket: Any) -> Iterator[None]:
    yield


def with_record(changed: Callable[[Any, Any], Any]) -> Wrong:
    """Take a pending call over with another record."""
    return lambda right: lambda call, run, seen, record: right(call, run, seen, changed(call, record))


def forgets_the_record(right: Any) -> Any:
    def begin(message: Any) -> None:
        message.ticket, message.record = replace(message.ticket, secret=fresh_secret()), slots.FREE
        right(message)

    return begin


def forgets_the_note(right: Any) -> Any:
    def begin(message: Any) -> None:
        slots.free(message.ticket.using, message.ticket.following, message.record.secret)

    return begin


def sees_nothing(right: Any) -> Any:
    def look(call: Any) -> Any:
        run, _ = right(call)
        return run, slots.Seen("", 0.0, 0)

    return look


def shared_token(right: Any) -> Any:
    def take(ticket: Any, times: Any, label: str, secret: str, inline: bool = False) -> Any:
        return right(ticket, times, label, ticket.secret, inline)

    return take


def not_waiting(right: Any) -> Any:
    def wait(arrival: Any, holder: Any, follow: bool) -> Any:
        arrival._skip("Skipped.")

    return wait


def accepted(right: Any) -> Any:
    return lambda *about: right(*about).about(slots.Holder(None, SlotState.RUNNING, None), accepted=True)


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
    return lambda ticket, task: ticket.free()


def frees_what_it_sees(right: Any) -> Any:
    """Free a waiting call that was revoked, and do not note that its messages must not run."""
    return lambda ticket, name, seen, task: slots.free(ticket.using, name, seen.secret)


def raises_ignore(again: Any, holder: Any) -> Any:
    raise Ignore


def runs_as_well(right: Any) -> Any:
    def take_over(call: Any, run: Any, seen: Any, record: Any) -> Any:
        sent = call.noted(seen.holder, "is sent").publish(replace(call.ticket, secret="", number=0))
        return sent.about(seen.holder, accepted=True)

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
    def without_nodes(arrived: Any, error: Exception, execution: Any = None) -> Any:
        if execution:
            execution.end(hold=False)
            raise error
        return right(arrived, error)

    return without_nodes


def asks_plainly(right: Any) -> Any:
    return lambda arrival, task_id: arrival.task.backend.get_task_meta(task_id)


def counts_as_queued(right: Any) -> Any:
    """Take a message that may not have been sent for one that was."""
    return lambda owner: SlotState.QUEUED if owner.state == SlotState.CLAIMED else right(owner)


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
    Mutant("the backend decides", ("backend away",), (worker.Arrival, "stored"), asks_plainly),
    Mutant("silence after the take fails", ("quorum away",), (worker.Arrival, "_without_nodes"), lets_it_fail),
    Mutant(
        "what has begun is dropped",
        ("workers die", "workers stop"),
        (worker.Arrival, "unfinished"),
        always(property(lambda message: False)),
    ),
    Mutant(
        "claims last as long as slots",
        ("callers die",),
        (slots, "CLAIM"),
        always(3600.0),
        also=((slots, "state_of", counts_as_queued),),
    ),
    Mutant(
        "what ends before its body keeps its slot",
        ("cut short",),
        (request, "discard"),
        returns(None),
    ),
    Mutant(
        "late claims are granted",
        ("far nodes", "far nodes, one silent"),
        (decisions, "SUPERSEDED"),
        always(0.0),
        also=((slots, "SUPERSEDED", always(0.0)),),
    ),
    Mutant("no turn for callers", ("rerun burst", "replace burst"), (pending, "turn"), always(no_turn)),
    Mutant(
        "an id for each caller",
        ("rerun burst",),
        (pending.TrailingCall, "_take_over_pending"),
        with_record(lambda call, record: record._replace(task_id=call.ticket.task_id)),
    ),
    Mutant(
        "no numbers",
        ("rerun freed", "node away"),
        (pending.TrailingCall, "_take_over_pending"),
        with_record(lambda call, record: record._replace(number=0)),
    ),
    Mutant("the record stays", ("rerun burst",), (pending.PendingMessage, "begin"), forgets_the_record),
    Mutant("no note of what began", ("rerun crowd", "debounce"), (pending.PendingMessage, "begin"), forgets_the_note),
    Mutant("the record is not looked at", ("replace waiting",), (pending.TrailingCall, "_look"), sees_nothing),
    Mutant(
        "older messages run",
        ("rerun crowd", "replace waiting"),
        (pending.PendingMessage, "is_superseded"),
        returns(False),
    ),
    Mutant("every message is older", ("rerun",), (pending.PendingMessage, "is_superseded"), returns(True)),
    Mutant("a copy runs beside the run", ("redelivered",), (slots.Ticket, "take_running"), shared_token),
    Mutant(
        "copies of what began run",
        ("redelivered",),
        (pending.PendingMessage, "has_begun"),
        returns(False),
    ),
    Mutant(
        "single nodes are no evidence", ("nodes come and go",), (pending.PendingMessage, "is_superseded"), quorums_only
    ),
    Mutant("slots stay", ("once",), (Execution, "end"), returns(None)),
    Mutant("pending calls are skipped", ("rerun",), (worker.Arrival, "_wait"), not_waiting),
    Mutant("wrong answers", ("rerun",), (pending.TrailingCall, "_joined"), accepted),
    Mutant(
        "newer arguments are not taken over",
        ("rerun burst",),
        (pending.TrailingCall, "_has_these_arguments"),
        lambda right: lambda call, record: bool(record.record),
    ),
    Mutant("messages give way to other ids", ("rerun freed",), (pending.PendingMessage, "is_superseded"), any_id),
    Mutant(
        "an older message expires its call",
        ("expiring",),
        (request.SingletonRequest, "_is_superseded"),
        returns(False),
    ),
    Mutant("a run that may be dead is left alone", ("dropped",), (worker.Arrival, "_watch"), always(raises_ignore)),
    Mutant("no note of what gave up", ("waits briefly",), (worker, "discard"), frees_only),
    Mutant("older messages of revoked ones run", ("replace revoked",), (request, "discard"), frees_only),
    Mutant("messages of revoked calls run", ("debounce revoked",), (pending, "discard_seen"), frees_what_it_sees),
    Mutant("revoked calls are joined", ("revoked",), (pending.TrailingCall, "is_over"), returns(False)),
    Mutant(
        "hold_for does not hold",
        ("rerun held",),
        (worker.Arrival, "_take_begun"),
        returns((None, None)),
    ),
    Mutant(
        "what is replaced runs as well",
        ("replace waiting",),
        (pending.TrailingCall, "_take_over_pending"),
        runs_as_well,
    ),
)
if find_spec("django.tasks"):  # since Django 6.0
    from .task_mutants import TASK_MUTANTS

    MUTANTS += TASK_MUTANTS


def hunt(mutant: Mutant, enough: int = ENOUGH) -> Kill:
    def objection(haunt: str, seed: int) -> str | None:
        # Shorter: a message that nobody ever takes would be put back for as long as the schedule lasts.
        violations = run(replace(PROFILES[haunt], longest=LONGEST), seed).violations
        return violations[0] if violations else None

    return mutation.hunt(mutant, objection, enough)
