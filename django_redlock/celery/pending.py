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
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

from django.utils.crypto import salted_hmac

from ..core.names import MAX_LABEL, NOTE, slug
from ..core.protocol import Extend, Kind, Term
from ..core.rules import MIN_TTL
from ..engine.lease import Lease
from ..engine.manager import fresh_secret
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from ..handler import locks
from ..inventory.survey import tell_nodes
from ..singleton.slots import FREE, Holder, Record, Seen, SlotState, Ticket, free, look, once_confirmed, peek
from .dispatch import Call, SingletonResult

REPAIRS = 3  # how often a caller settles a record before it gives up
TURN = 5.0  # seconds for which a process that was killed in its turn delays the others
LONGEST_LINE = 15.0  # seconds for which a process waits for its turn
SHORT_LINE = 2.0  # the same in a worker's main process, which serves other tasks as well
DIGEST = 10  # hexadecimal digits that distinguish the arguments of pending calls
FOLLOWS = "is sent, and runs afterwards"
LONGEST_PAUSE = 60.0  # seconds until a message whose slot could not be looked up is tried again

log = logging.getLogger("django_redlock")


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
        if self.task.singleton_options.pends and not self.linked:
            self.ticket = replace(self.ticket, number=1)
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
                return self._take_part(run, self._settled(record))
        return self.answer(taken_by) if taken_by else self.publish(self.ticket)

    def _take_part(self, run: Seen, record: Seen) -> SingletonResult[Any]:
        """Create the pending call, or take it over; only in this call's turn."""
        if pending := self._pending(record):
            if self._has_these_arguments(record):
                return self._joined(run, record)
            return self._take_over_pending(run, record, pending)
        if record.value:  # the holder cannot be taken over, or is not a call of this task, so this call comes after it
            sent = self.noted(record.holder, FOLLOWS).publish(replace(self.ticket, secret=""))
            return sent.about(record.holder, accepted=True)
        # The attempt to take the slot decides whether there is a run; a value on single nodes does not.
        holder = run.holder if run.value else self.claim()
        if holder is None:
            return self.publish(self.ticket)
        if run.value or not self.ticket.number:
            self.ticket = replace(self.ticket, number=1)
            if self.claim():
                raise LockTakenError(self.ticket.waiting)
            return self.noted(holder, FOLLOWS).publish(self.ticket).about(holder, accepted=True)
        raise LockTakenError(self.ticket.waiting)

    def _take_over_pending(self, run: Seen, seen: Seen, record: Record) -> SingletonResult[Any]:
        """
        Send the message that counts from now on, under the id of the pending call; only in this call's turn.

        Raises:
            LockTakenError: The record has changed since it was read, or its message was discarded.
            QuorumUnavailableError: Too few nodes answered.
        """
        holder = run.holder if run.value else seen.holder
        self.ticket = replace(self.ticket, number=record.number + 1)
        ticket = replace(self.ticket, task_id=record.task_id)
        # First, so that there is always a message that counts: until the next line, the previous one does.
        sent = self.noted(holder, f"gives its arguments to the waiting task {record.task_id}").publish(ticket)
        # A delayed message may arrive after the one that counts, so the record lasts as long as the longest-lived one.
        about: dict[str, Any] = {"adopt": seen.secret, "strict": True, "call": self.call}
        ttl = max(self.ttl, seen.left)
        ticket.take(ticket.following, ttl, self.task.name, SlotState.QUEUED, ticket.secret, **about)
        return sent.about(holder, accepted=True)

    def _joined(self, run: Seen, record: Seen) -> SingletonResult[Any]:
        """Answer a call whose arguments are those of the pending call, so that no message is needed."""
        holder = run.holder if run.value else record.holder
        waiting = str(record.holder.task_id)
        self.noted(holder, f"sends nothing, and has the result of the waiting task {waiting}")
        return self.task.AsyncResult(waiting).about(holder, accepted=False)

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

        return once_confirmed(self.ticket, found)

    def _unless_over(self, name: str, seen: Seen) -> Seen:
        """Return what was seen under a name; if that was revoked before its time, free it."""
        if not self.is_over(seen.holder):
            return seen
        discard_seen(self.ticket, name, seen, self.task)
        return FREE

    def _pending(self, record: Seen) -> Record | None:
        """Return the pending call if it is one of this task, so that this call can take it over."""
        found = record.record
        return found if found and found.task == self.task.name[:MAX_LABEL] else None

    def _has_these_arguments(self, record: Seen) -> bool:
        """
        Return whether a message with these arguments was sent for the pending call.

        It counts as none with ``replace``, which also moves the time.
        """
        found = self._pending(record)
        moved = self.rules.on_duplicate == "replace"
        sent = record.holder.state is SlotState.QUEUED
        return found is not None and sent and not moved and found.digest == self._digest

    @property
    def call(self) -> str:
        """For a pending call, the number of the message that counts and a digest of its arguments."""
        return f"{self.ticket.number}.{self._digest}" if self.ticket.trailing else ""

    @cached_property
    def _digest(self) -> str:
        """A digest of the arguments, which reveals nothing about them."""
        try:
            text = self.task.singleton_key.canonical(self.args, self.kwargs)
        except (TypeError, ValueError):  # the arguments cannot be compared, so they may be new
            text = fresh_secret()
        return salted_hmac("django_redlock.celery.next", text, algorithm="sha256").hexdigest()[:DIGEST]

    def _settled(self, seen: Seen) -> Seen:
        """
        Return the record that a quorum of nodes has; settle it first if it is split. Only in the caller's turn.

        The reader writes the newest value back to a quorum. It frees older values, and a value whose message has begun
        or that a node refuses because it knows of a later value or of a release.

        Raises:
            QuorumUnavailableError: Too few nodes answered, or the nodes keep changing.
        """
        using, name, repairs = self.ticket.using, self.ticket.following, 0
        while seen.split:
            if repairs == REPAIRS:
                raise seen.undecided(using, name)
            repairs += 1
            newest, *older = seen.split
            for value in older:
                free(using, name, value.secret)
            if self._has_run(newest) or not self._write_back(newest):
                free(using, name, newest.secret)
            seen = peek(using, name)
        return seen

    def _has_run(self, seen: Seen) -> bool:
        """Return whether the call of a record has begun, so that the record remains only on nodes that were away."""
        record = seen.record
        if record is None:
            return False
        notes = [note.record for note in peek(self.ticket.using, began_name(record.task_id)).sightings]
        return any(note is not None and note.number >= record.number for note in notes)

    def _write_back(self, seen: Seen) -> bool:
        """
        Write a record that too few nodes are known to have to a quorum; return whether a quorum has it now.

        A node refuses if it knows of a later holder or of a release. The record keeps its secret.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        if not seen.secret:  # it would overwrite the record of another call, or a free key, with nothing
            return False
        manager, name = locks[self.ticket.using], self.ticket.following
        term = Term((slug(name),), seen.secret, seen.value, max(MIN_TTL, seen.left), seen.fence)
        replies = tell_nodes(manager, Extend((term,), manager.rules.fence_keep)).replies
        kinds = [reply.terms[0].kind for reply in replies.values() if reply.terms]
        if kinds.count(Kind.HELD) >= manager.rules.needed:
            return True
        if len(kinds) < manager.rules.needed:
            nodes = {manager.nodes[node].name: str(reply) for node, reply in replies.items()}
            raise QuorumUnavailableError(name, nodes=nodes, needed=manager.rules.needed)
        return False


@contextmanager
def turn(ticket: Ticket, longest: float = LONGEST_LINE) -> Iterator[Lease]:
    """
    Run a block during which no other process changes the pending call of a key.

    Args:
        ticket: The ticket of a call with that key.
        longest: Seconds to wait for the turn.

    Raises:
        QuorumUnavailableError: Too few nodes answered, the turn did not come in time, or the record has changed.
    """
    manager = locks[ticket.using]
    try:
        ttl = manager.rules.check_ttl(TURN)
    except ValueError:
        ttl = manager.rules.ttl
    # Detached, so that no watchdog looks after the lease: a turn ends long before it.
    about: dict[str, Any] = {"kind": "task", "label": "turn", "detached": True}
    lock = manager.on_behalf(f"turn:{ticket.name}", ttl=ttl, wait=longest, renew=False, **about)
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


@dataclass
class PendingMessage:
    """
    The message of a pending call in a worker, and what the nodes say about that call.

    Args:
        ticket: The ticket of the message.
        task: The task.
        record: The record of the pending call.
        began: The note of the message that has begun.
    """

    ticket: Ticket
    task: Any
    record: Seen
    began: Seen

    @classmethod
    def look_up(cls, ticket: Ticket, task: Any) -> "PendingMessage":
        """
        Return the message with what the nodes say now.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        return cls(ticket, task, *look(ticket.using, ticket.following, began_name(ticket.task_id)))

    def is_superseded(self) -> bool:
        """
        Return whether the record or the note shows a message of the same call that is at least as new.

        A value on a single node is enough evidence: a message is sent before its number is written anywhere. So a
        number that was written to a quorum is never missed, whichever nodes are away.
        """
        ticket, seen = self.ticket, self.record
        known = bool(seen.value) or any(sighting.secret == ticket.secret for sighting in seen.split)
        for sighting in seen.sightings:
            if sighting.secret == ticket.secret:
                break  # the note counts as well: a node that was away keeps the record of a message that has begun
            record = sighting.record
            # Of two messages with the same number, a split record shows which is older only if it has both.
            if record and record.task_id == ticket.task_id and record.number + known > ticket.number:
                return True
        notes = [(note.record, note.secret) for note in self.began.sightings]
        own = began_secret(ticket.secret)
        return any(note and note.number >= ticket.number and secret != own for note, secret in notes)

    def has_begun(self) -> bool:
        """Return whether this message or a copy of it has already begun a run."""
        return bool(self.began.value) and self.began.secret == began_secret(self.ticket.secret)

    def keep(self, ttl: float) -> None:
        """Keep the record of a message that counts until it is delivered again; only in the worker's turn."""
        # A record that is gone is not created again, because an older message would give it a lower number.
        ticket, owner = self.ticket, self.record.owner
        if self.record.secret == ticket.secret and owner and self.record.left <= ttl / 2:
            with suppress(LockTakenError):
                options: dict[str, Any] = {"strict": True, "call": owner.call}
                ticket.take(ticket.following, ttl, owner.label, SlotState.QUEUED, ticket.secret, **options)

    def begin(self) -> None:
        """
        Free the record, and note that the message begins its run; only in the worker's turn.

        In this order, a record whose message has begun can remain only on nodes that were away.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        ticket = self.ticket
        # Nodes that are away may hide the record. Then the record with this message's secret is freed unread.
        secrets = self._secrets(self.record) or [ticket.secret]
        outcomes = [free(ticket.using, ticket.following, secret) for secret in secrets]
        if "unknown" in outcomes and self._secrets(seen := peek(ticket.using, ticket.following)):
            raise seen.undecided(ticket.using, ticket.following)
        self.note_number()

    def note_number(self) -> None:
        """Note that no older message of the call may run any more."""
        # Older messages may arrive as long as the record would have lasted.
        left = (one.left for one in self.record.sightings)
        ttl = max(LONGEST_PAUSE, self.task.singleton_options.queue_ttl, *left)
        ticket, older = self.ticket, self.began.sightings
        options: dict[str, Any] = {"call": str(ticket.number), "adopt": older[0].secret if older else ""}
        name, secret = began_name(ticket.task_id), began_secret(ticket.secret)
        ticket.take(name, ttl, self.task.name, NOTE, secret, **options)

    def _secrets(self, seen: Seen) -> list[str]:
        """Return the secrets of all records of the message's call that any node has."""
        return [one.secret for one in seen.sightings if one.record and one.record.task_id == self.ticket.task_id]


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
                message = PendingMessage.look_up(ticket, task)
                if not message.is_superseded():
                    message.note_number()
                ticket.free()
                return
    except (LockTakenError, QuorumUnavailableError):
        pass
    except Exception:
        log.exception("older messages of task %s may run: it could not be noted as over", printable(ticket.task_id))
    ticket.free()


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


def began_name(task_id: str) -> str:
    """Return the name of the note about the message of a pending call that has begun."""
    return f"began:{task_id}"


def began_secret(secret: str) -> str:
    """Return the secret of the note; a node that cancelled an attempt with the message's own would refuse that."""
    return blake2b(secret.encode(), digest_size=16, person=b"redlock began").hexdigest()
