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

The record is created and taken over in :mod:`.call`, and begun in :mod:`.arrival`; what both need is here.

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
* A process that dies in its turn delays the others until the turn's lease ends, after five seconds.

A process that is paused for longer than that loses its turn and changes nothing, because its compare-and-set names the
secret that it read. One case remains: a call whose message was sent but may not count. It is sent once more, without
a slot.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..core.names import NOTE
from ..core.protocol import Outcome
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from .options import SingletonOptions
from .questions import Free, InTurn, LeaveLine, Look, Put, Steps, WriteBack
from .slot import Seen, SlotState
from .ticket import Ticket, began_name, began_secret

REPAIRS = 3  # how often a caller settles a record before it gives up
LONGEST_LINE = 15.0  # seconds for which a process waits for its turn
SHORT_LINE = 2.0  # the same in a worker's main process, which serves other tasks as well
LONGEST_PAUSE = 60.0  # seconds until a message whose slot could not be looked up is tried again

log = logging.getLogger("django_redlock")


@dataclass
class PendingMessage:
    """
    The message of a pending call, and what the nodes say about that call.

    Args:
        ticket: The ticket of the message.
        record: The record of the pending call.
        began: The note of the message that has begun.
    """

    ticket: Ticket
    record: Seen
    began: Seen

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

    @property
    def secrets(self) -> list[str]:
        """The secrets of all records of the message's call that any node has."""
        return [one.secret for one in self.record.sightings if one.record and one.record.task_id == self.ticket.task_id]


def look_up(ticket: Ticket) -> Steps[PendingMessage]:
    """Return the message of a ticket with what the nodes say now."""
    return PendingMessage(ticket, *(yield Look((ticket.following, began_name(ticket.task_id)))))


def keep(message: PendingMessage, ttl: float) -> Steps[None]:
    """Keep the record of a message that counts until it is delivered again; only in the worker's turn."""
    # A record that is gone is not created again, because an older message would give it a lower number.
    ticket, seen = message.ticket, message.record
    if seen.secret == ticket.secret and seen.owner and seen.left <= ttl / 2:
        with suppress(LockTakenError):
            yield write(ticket, ttl, seen.owner.call, label=seen.owner.label)


def write(ticket: Ticket, ttl: float, call: str, adopt: str = "", label: str = "") -> Put:
    """Return the request to write the record of a pending call in place of the present one."""
    about: Any = {"ref": ticket.task_id, "adopt": adopt, "strict": True, "call": call, "label": label}
    return Put(ticket.following, ttl, SlotState.QUEUED, ticket.secret, **about)


def begin(message: PendingMessage, rules: SingletonOptions) -> Steps[None]:
    """
    Free the record, and note that the message begins its run; only in the worker's turn.

    In this order, a record whose message has begun can remain only on nodes that were away.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    ticket = message.ticket
    # Nodes that are away may hide the record. Then the record with this message's secret is freed unread.
    unknown = False
    for secret in message.secrets or [ticket.secret]:
        unknown |= (yield Free(ticket.following, secret)) is Outcome.UNKNOWN
    if unknown:
        (seen,) = yield Look((ticket.following,))
        if replace(message, record=seen).secrets:
            raise seen.undecided(ticket.following)
    yield from note_number(message, rules)


def note_number(message: PendingMessage, rules: SingletonOptions) -> Steps[None]:
    """Note that no older message of the call may run any more."""
    # Older messages may arrive as long as the record would have lasted.
    ttl = max(LONGEST_PAUSE, rules.queue_ttl, *(one.left for one in message.record.sightings))
    ticket, older = message.ticket, message.began.sightings
    about: Any = {"ref": ticket.task_id, "call": str(ticket.number), "adopt": older[0].secret if older else ""}
    yield Put(began_name(ticket.task_id), ttl, NOTE, began_secret(ticket.secret), **about)


def discard(ticket: Ticket, rules: SingletonOptions, *, counts: bool = False) -> Steps[None]:
    """
    Free what a message has that ends without a run; it never raises, because it may handle another error.

    For a pending call, a note of the message's number keeps older messages from running in its place: a worker that
    starts later may not know that the call has ended. If too few nodes answer, there is no note, and they may run.

    Args:
        ticket: The ticket of the message.
        rules: The options of its task.
        counts: Whether the message is known to count. Otherwise its caller may be about to write the record, so the
            worker waits for its turn.
    """
    if ticket.stamp:
        yield LeaveLine(ticket)
    try:
        if ticket.trailing and counts:
            yield from _end(ticket, rules)
            return
        if ticket.trailing:
            yield InTurn(ticket, _end(ticket, rules), SHORT_LINE)
            return
    except (LockTakenError, QuorumUnavailableError):
        pass
    except Exception:
        log.exception("older messages of task %s may run: it could not be noted as over", printable(ticket.task_id))
    yield Free(ticket.waiting, ticket.secret)


def _end(ticket: Ticket, rules: SingletonOptions) -> Steps[None]:
    """Note that the call is over, unless another message of it counts, and free its slot."""
    message = yield from look_up(ticket)
    if not message.is_superseded():
        yield from note_number(message, rules)
    yield Free(ticket.waiting, ticket.secret)


def discard_seen(name: str, seen: Seen, ticket: Ticket, rules: SingletonOptions) -> Steps[None]:
    """
    Free a waiting call that was revoked; if it is a pending call, no message of it runs any more.

    Args:
        name: The name of the lock that the waiting call holds.
        seen: The waiting call.
        ticket: The ticket of any call with the same key.
        rules: The options of the task.
    """
    if record := seen.record:
        over = replace(ticket, task_id=record.task_id, secret=seen.secret, number=record.number)
        yield from discard(over, rules, counts=True)
    else:
        yield Free(name, seen.secret)


def settled(ticket: Ticket, seen: Seen) -> Steps[Seen]:
    """
    Return the record that a quorum of nodes has; settle it first if it is split. Only in the caller's turn.

    The reader writes the newest value back to a quorum. It frees older values, and a value whose message has begun
    or that a node refuses because it knows of a later value or of a release.

    Raises:
        QuorumUnavailableError: Too few nodes answered, or the nodes keep changing.
    """
    name, repairs = ticket.following, 0
    while seen.split:
        if repairs == REPAIRS:
            raise seen.undecided(name)
        repairs += 1
        newest, *older = seen.split
        for secret in {value.secret for value in older} - {newest.secret}:  # which it may have in two states
            yield Free(name, secret)
        # Without a secret it would overwrite the record of another call, or a free key, with nothing.
        kept = not (yield from _has_run(newest)) and newest.secret and (yield WriteBack(name, newest))
        if not kept:
            yield Free(name, newest.secret)
        (seen,) = yield Look((name,))
    return seen


def _has_run(seen: Seen) -> Steps[bool]:
    """Return whether the call of a record has begun, so that the record remains only on nodes that were away."""
    record = seen.record
    if record is None:
        return False
    (began,) = yield Look((began_name(record.task_id),))
    notes = [note.record for note in began.sightings]
    return any(note is not None and note.number >= record.number for note in notes)
