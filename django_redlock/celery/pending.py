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
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from django.utils.crypto import salted_hmac

from ..core.rules import Rules
from ..engine.acquirer import fresh_secret
from ..engine.lease import Lease
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from ..handler import locks
from ..keys import canonical
from .slots import CLAIMED, NEXT, NOTE, QUEUED, Seen, Ticket, free, look, peek, take_note, write_back

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
