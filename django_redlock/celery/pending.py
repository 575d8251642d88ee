"""
The pending call of a key: the one that runs next, and that later calls take over (internal).

``on_duplicate="rerun"`` and ``"replace"`` promise that all calls made during a run share one later run, under one id
and with the arguments of the last of them. Arguments travel in messages only, so each such call sends a message. All
messages of a pending call have one task id, and each has a secret and a number of its own. A record on the lock nodes
says which message counts::

    next:<name>      task id of the pending call; secret and number of the message that counts

This record changes in three ways. Each change is made in the *turn* of the key: while holding the lock
``turn:<name>``, for which all others queue. So a change is a compare-and-set without contention, whose votes cannot be
split, and a record that is still on its way to the nodes is not mistaken for the remains of one. Only a caller that
finds the record of a revoked call discards that call without waiting for a turn.

create
    The record is free. The caller takes the record for an id and a secret of its own, and sends the message.
take over
    The record is there. The caller sends a message with the record's id, the next number and a fresh secret, and then
    replaces the record's secret by its own. Workers read the record in the turn, so none can intervene.
begin
    A worker has the message that counts. It takes the slot of the run, frees the record, and notes which number began
    under this id (``began:<id>``). A worker whose message ends without a run, because it was revoked, expired, waited
    for too long or failed before, does the same, so that no older message runs in its place.

While a node is away, the others may agree neither on one value nor on none: the record is *split*. A worker does not
need to know the record then. It drops a message if any node has a higher number, because a message is sent before its
number is written. (The first record of a call is written before its message, but replaces no other message.) A caller
that needs to know the record settles it in its turn: it writes the newest value back to a quorum, as the readers of a
replicated register do, or frees the record if its message has begun.

A worker drops a message only on evidence that another one is at least as new: the record has its id and no lower
number, or the note shows this for a message that has begun. Without such evidence a message runs, whatever happened to
the record: it expired, an operator freed it, or a node lost it. So every call ends, wherever a process dies:

* A caller that dies before it has replaced the secret leaves a message with the highest number, which runs.
* A worker that dies before it has freed the record leaves it to its own message, which is delivered again, or to the
  next call, which sends a new message under the same id.
* A process that dies in its turn delays the others until the turn's lease ends, after :data:`TURN` seconds.

A process that is paused for longer than that loses its turn and changes nothing, because its compare-and-set names the
secret that it read. One case remains: a call whose message was sent but may not count. It is sent once more, without
a slot.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from django.utils.crypto import salted_hmac

from ..core.rules import Rules
from ..engine.lease import Lease
from ..engine.manager import fresh_secret
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from ..handler import locks
from ..keys import canonical
from .dispatch import Call, SingletonResult
from .slots import (
    CLAIMED,
    FREE,
    NEXT,
    NOTE,
    QUEUED,
    Holder,
    Record,
    Seen,
    SlotState,
    Ticket,
    free,
    look,
    peek,
    take_note,
    write_back,
)

REPAIRS = 3  # how often a caller settles a record before it gives up
TURN = 5.0  # seconds for which a process that was killed in its turn delays the others
LONGEST_LINE = 15.0  # seconds for which a process waits for its turn
SHORT_LINE = 2.0  # the same in a worker's main process, which serves other tasks as well
DIGEST = 10  # hexadecimal digits that distinguish the arguments of pending calls
UNKNOWN = "0" * DIGEST  # for a message whose arguments are no longer compared
NAME = 80  # characters of a task's name that a record shows

log = logging.getLogger("django_redlock")


@contextmanager
def turn(ticket: Ticket, longest: float | None = None) -> Iterator[Lease]:
    """
    Run a block during which no other process changes the pending call of a key.

    Args:
        ticket: The ticket of a call with that key.
        longest: Seconds to wait for the turn; None is :data:`LONGEST_LINE`.

    Raises:
        QuorumUnavailableError: Too few nodes answered, the turn did not come in time, or the record has changed.
    """
    manager = locks[ticket.using]
    ttl = _length(manager.rules)
    wait = LONGEST_LINE if longest is None else longest
    lock = manager.claim(f"turn:{ticket.name}", ttl=ttl, wait=wait, renew=False, kind="task", label="turn")
    try:
        lease = lock.acquire()
        try:
            yield lease
        finally:
            lease.release(wait=False)  # no caller depends on when it arrives
    except LockTakenError as error:  # the same to the caller: it is unknown whether its change was made
        raise QuorumUnavailableError(
            error.name, error.waited, error.attempts, error.nodes, manager.rules.needed
        ) from error


def _length(rules: Rules) -> float:
    with suppress(ValueError):
        return rules.check_ttl(TURN)
    return rules.ttl


def label_of(task: str, digest: str, number: int) -> str:
    """Return the label of the record of a pending call without its state; *digest* stands for its arguments."""
    return f"{task[:NAME]} #{digest}.{number}{NEXT}"


def digest_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a digest of the arguments of a call, which reveals nothing about them."""
    try:
        text = canonical(task.singleton_parameters, args, kwargs)
    except (TypeError, ValueError):  # the arguments cannot be compared, so they may be new
        text = fresh_secret()
    return salted_hmac("django_redlock.celery.next", text, algorithm="sha256").hexdigest()[:DIGEST]


def take_over(ticket: Ticket, ttl: float, label: str, seen: Seen) -> None:
    """
    Make the message with this ticket count instead of the one seen; only in the caller's turn.

    Raises:
        LockTakenError: The record has changed since it was read, or its message was discarded.
        QuorumUnavailableError: Too few nodes answered.
    """
    # A delayed message may arrive after the one that counts, so the record lasts as long as the longest-lived message.
    about = (max(ttl, seen.left), ticket.secret, ticket.task_id, label + QUEUED)
    take_note(ticket.using, ticket.following, *about, adopt=seen.secret, strict=True)


def settle(ticket: Ticket, seen: Seen) -> Seen:
    """
    Return the record that a quorum of nodes has; settle it first if it is split. Only in the caller's turn.

    The reader writes the newest value back to a quorum. It frees older values, and a value whose message has begun or
    that a node refuses because it knows of a later value or of a release.

    Raises:
        QuorumUnavailableError: Too few nodes answered, or the nodes keep changing.
    """
    for _ in range(REPAIRS):
        if not seen.split:
            return seen
        newest, *older = seen.split
        for value in older:
            free(ticket.using, ticket.following, value.secret)
        if _has_run(ticket.using, newest) or not write_back(ticket.using, ticket.following, newest):
            free(ticket.using, ticket.following, newest.secret)
        seen = peek(ticket.using, ticket.following)
    raise QuorumUnavailableError(ticket.following, needed=locks[ticket.using].rules.needed)


def _has_run(using: str, seen: Seen) -> bool:
    """Return whether the call of a record has begun, so that the record remains only on nodes that were away."""
    record = seen.record
    if record is None:
        return False
    notes = [note.record for note in peek(using, began_name(record.task_id)).sightings]
    return any(note is not None and note.number >= record.number for note in notes)


def is_superseded(ticket: Ticket, seen: Seen, began: Seen) -> bool:
    """
    Return whether the record or the note shows a message of the same call that is at least as new.

    A value on a single node is enough evidence: a message is sent before its number is written anywhere. So a
    number that was written to a quorum is never missed, whichever nodes are away.
    """
    known = bool(seen.value) or any(sighting.secret == ticket.secret for sighting in seen.split)
    for sighting in seen.sightings:
        if sighting.secret == ticket.secret:
            break  # the note counts as well: a node that was away keeps the record of a message that has begun
        record = sighting.record
        # Of two messages with the same number, a split record shows which is older only if it has both.
        if record and record.task_id == ticket.task_id and record.number + known > ticket.number:
            return True
    own = began_secret(ticket.secret)
    return any(note.record and note.record.number >= ticket.number and note.secret != own for note in began.sightings)


def has_begun(ticket: Ticket, began: Seen) -> bool:
    """Return whether this message or a copy of it has already begun a run."""
    return bool(began.value) and began.secret == began_secret(ticket.secret)


def keep(ticket: Ticket, ttl: float, seen: Seen) -> None:
    """Keep the record of a message that counts until it is delivered again; only in the worker's turn."""
    # A record that is gone is not created again, because an older message would give it a lower number.
    if seen.secret != ticket.secret or seen.owner is None or seen.left > ttl / 2:
        return
    with suppress(LockTakenError):
        label = seen.owner.label.removesuffix(CLAIMED).removesuffix(QUEUED) + QUEUED
        take_note(ticket.using, ticket.following, ttl, ticket.secret, ticket.task_id, label, strict=True)


def begin(ticket: Ticket, task: Any, seen: Seen, began: Seen) -> None:
    """
    Free the record, and note that a message begins its run; only in the worker's turn.

    In this order, a record whose message has begun can remain only on nodes that were away.

    Args:
        ticket: The ticket of the message.
        task: The task.
        seen: The present record.
        began: The present note.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    # Nodes that are away may hide the record. Then the record with this message's secret is freed without being read.
    secrets = _secrets(ticket, seen) or [ticket.secret]
    outcomes = [free(ticket.using, ticket.following, secret) for secret in secrets]
    if "unknown" in outcomes and _secrets(ticket, peek(ticket.using, ticket.following)):
        raise QuorumUnavailableError(ticket.following, needed=locks[ticket.using].rules.needed)
    _note_number(ticket, task, seen, began)


def discard(ticket: Ticket, task: Any, *, counts: bool = False) -> None:
    """
    Free the slot of a message that ends without a run; it never raises, because it may handle another error.

    For a pending call, a note of the message's number keeps older messages from running in its place: a worker that
    starts later may not know that the call has ended. If too few nodes answer, there is no note, and they may run.

    Args:
        ticket: The ticket of the message.
        task: The task.
        counts: Whether the message is known to count. Otherwise its caller may be about to write the record, so the
            worker waits for its turn.
    """
    try:
        if ticket.trailing:
            with nullcontext() if counts else turn(ticket, SHORT_LINE):
                seen, began = look(ticket.using, ticket.following, began_name(ticket.task_id))
                if not is_superseded(ticket, seen, began):
                    _note_number(ticket, task, seen, began)
                free(ticket.using, ticket.following, ticket.secret)
                return
    except (LockTakenError, QuorumUnavailableError):
        pass
    except Exception:
        log.exception("older messages of %s may run, because it could not be noted as over", printable(ticket.task_id))
    free(ticket.using, ticket.waiting, ticket.secret)


def discard_seen(ticket: Ticket, name: str, seen: Seen, task: Any) -> None:
    """
    Free a waiting call that was revoked; if it is a pending call, no message of it runs any more.

    Args:
        ticket: The ticket of any call with the same key.
        name: The name of the lock that the waiting call holds.
        seen: The waiting call.
        task: The task.
    """
    if record := seen.record:
        discard(replace(ticket, task_id=record.task_id, secret=seen.secret, number=record.number), task, counts=True)
    else:
        free(ticket.using, name, seen.secret)


def _note_number(ticket: Ticket, task: Any, seen: Seen, began: Seen) -> None:
    """Note that no older message of the call may run any more; *seen* is the present record, *began* the note."""
    # Older messages may arrive as long as the record would have lasted.
    ttl = max(LONGEST_PAUSE, task.singleton_options.queue_ttl, *(one.left for one in seen.sightings))
    label, older = f"{task.name[:NAME]} #{UNKNOWN}.{ticket.number}{NOTE}", began.sightings
    about = (ttl, began_secret(ticket.secret), ticket.task_id, label)
    take_note(ticket.using, began_name(ticket.task_id), *about, adopt=older[0].secret if older else "")


def _secrets(ticket: Ticket, seen: Seen) -> list[str]:
    """Return the secrets of all records of a message's call that any node has."""
    return [one.secret for one in seen.sightings if one.record and one.record.task_id == ticket.task_id]


def began_name(task_id: str) -> str:
    """Return the name of the note about the message of a pending call that has begun."""
    return f"began:{task_id}"


def began_secret(secret: str) -> str:
    """Return the secret of the note; a node that cancelled an attempt with the message's own would refuse that."""
    return blake2b(secret.encode(), digest_size=16, person=b"redlock began").hexdigest()


@dataclass
class TrailingCall(Call):
    """One call of a task with ``on_duplicate="rerun"`` or ``"replace"``."""

    def take_and_send(self) -> SingletonResult[Any]:
        """
        Take the slot if it is free and no call is pending; otherwise join the pending call.

        Raises:
            DuplicateTask: As in :meth:`SingletonTask.apply_async`.
            QuorumUnavailableError: Too few nodes answered.
        """
        # A later call would take it over without its links, so a linked call is never replaced.
        self.ticket = replace(self.ticket, number=int(self.task.singleton_options.pends and not self.linked))
        takes_part = self.rules.trails and not self.linked
        run, record = self._look()
        if takes_part and self._has_these_arguments(record):
            return self._joined(run, record)
        free, holder = not run.value and record.free, run.holder if run.value else record.holder
        if free and not self.ticket.number:  # the slot of a run is not a record, so no turn is needed
            taken_by = self.claim()
            if not taken_by:
                return self.publish(self.ticket)
            free, holder = False, taken_by
        if not free and not takes_part:
            return self.answer(holder)
        with turn(self.ticket):
            taken_by = self.claim() if free else holder
            if taken_by and takes_part:
                run, record = self._look()
                return self._take_part(run, settle(self.ticket, record))
        return self.answer(taken_by) if taken_by else self.publish(self.ticket)

    def _take_part(self, run: Seen, record: Seen) -> SingletonResult[Any]:
        """Create the pending call, or take it over; only in this call's turn."""
        if pending := self._pending(record):
            if self._has_these_arguments(record):
                return self._joined(run, record)
            return self._take_over_pending(run, record, pending)
        if record.value:  # the holder cannot be taken over, or is not a call of this task, so this call comes after it
            return (
                self.noted(record.holder).publish(replace(self.ticket, secret="")).about(record.holder, accepted=True)
            )
        # The attempt to take the slot decides whether there is a run; a value on single nodes does not.
        holder = run.holder if run.value else self.claim()
        if holder is None:
            return self.publish(self.ticket)
        if run.value or not self.ticket.number:
            self.ticket = replace(self.ticket, number=1)
            if self.claim():
                raise LockTakenError(self.ticket.waiting)
            return self.noted(holder).publish(self.ticket).about(holder, accepted=True)
        raise LockTakenError(self.ticket.waiting)

    def _take_over_pending(self, run: Seen, seen: Seen, record: Record) -> SingletonResult[Any]:
        """Send the message that counts from now on, under the id of the pending call; only in this call's turn."""
        holder = run.holder if run.value else seen.holder
        self.ticket = replace(self.ticket, number=record.number + 1)
        ticket = replace(self.ticket, task_id=record.task_id)
        # First, so that there is always a message that counts: until the next line, the previous one does.
        sent = self.noted(holder).publish(ticket)
        take_over(ticket, self.ttl, self.label, seen)
        return sent.about(holder, accepted=True)

    def _joined(self, run: Seen, record: Seen) -> SingletonResult[Any]:
        """Answer a call whose arguments are those of the pending call, so that no message is needed."""
        holder = run.holder if run.value else record.holder
        return self.noted(holder).result(str(record.holder.task_id)).about(holder, accepted=False)

    def _look(self) -> tuple[Seen, Seen]:
        """
        Return the holder of the slot that the pending call comes after, and the pending call.

        A call that was revoked before its time is out of the way: its callers know that, and no longer wait for it.

        Raises:
            QuorumUnavailableError: Too few nodes answered, or the message of the holder may not have been sent.
        """

        def found() -> tuple[tuple[Seen, Seen], Holder]:
            using, names = self.ticket.using, self.ticket.places(trails=True)
            slots = [self._unless_over(name, seen) for name, seen in zip(names, look(using, *names), strict=True)]
            run = next((seen for seen in slots[:-1] if seen.value), FREE)
            return (run, slots[-1]), run.holder

        return self.once_confirmed(found)

    def _unless_over(self, name: str, seen: Seen) -> Seen:
        """Return what was seen under a name; if that was revoked before its time, free it."""
        if not self.is_over(seen.holder):
            return seen
        discard_seen(self.ticket, name, seen, self.task)
        return FREE

    def _pending(self, record: Seen) -> Record | None:
        """Return the pending call if it is one of this task, so that this call can take it over."""
        found = record.record
        return found if found and found.task == self.task.name[:NAME] else None

    def _has_these_arguments(self, record: Seen) -> bool:
        """
        Return whether a message with these arguments was sent for the pending call.

        It counts as none with ``replace``, which also moves the time.
        """
        found = self._pending(record)
        moved = self.rules.on_duplicate == "replace"
        sent = record.holder.state is SlotState.QUEUED
        return found is not None and sent and not moved and found.digest == digest_of(self.task, self.args, self.kwargs)

    @property
    def label(self) -> str:
        """The label of the slot; for a pending call, it identifies the arguments and the message that count."""
        if not self.ticket.trailing:
            return str(self.task.name)
        return label_of(self.task.name, digest_of(self.task, self.args, self.kwargs), self.ticket.number)


LONGEST_PAUSE = 60.0  # seconds until a message whose slot could not be looked up is tried again
# Seconds for which a message that waits for its slot is put back. Celery's delayed delivery over quorum queues counts
# whole seconds, and fails with 0.
FIRST_WAIT, LONGEST_WAIT = 1.0, 10.0


def backoff(first: float, longest: float, tries: int) -> float:
    """Return the next pause, in seconds, of a message that has been put back *tries* times."""
    return min(longest, first * 2.0 ** min(tries, 32))


def pause_after(error: Exception, tries: int) -> float:
    """Return the pause, in seconds, of a message that cannot be run because a part that it needs does not answer."""
    if isinstance(error, QuorumUnavailableError) and error.retry_after is not None:
        # A little longer, so that the nodes vote again when the message arrives.
        return min(LONGEST_PAUSE, error.retry_after + 0.5)
    return backoff(1.0, LONGEST_PAUSE, tries)
