"""
The pending call of a key: the one that runs next, and that later calls take over (internal).

``on_duplicate="rerun"`` and ``"replace"`` promise that all calls made during a run share one later run, under one id
and with the arguments of the last of them. Arguments travel in messages only, so each such call sends a message. All
messages of a pending call have one task id, and each has a secret and a number of its own. A record on the lock nodes
says which message counts::

    next:<name>  or  queued:<name>      task id of the pending call; secret and number of the message that counts

There are three changes of this record. Each is made in the *turn* of the key: the lock ``turn:<name>``, for which all
others queue. So a change is a compare-and-set that cannot be split between contenders, because nobody contends, and
nobody takes a record that is only on its way to the nodes for the remains of one.

create
    The record is free. The caller takes the record for an id and a secret of its own, and sends the message.
take over
    The record is there. The caller sends a message with the record's id, the next number and a fresh secret, and then
    replaces the record's secret by its own. Workers look at the record in the turn, so none can come in between.
begin
    A worker has the message that counts. It takes the slot of the run, frees the record, and notes which number began
    under this id (``began:<id>``).

While a node is away, the others may have neither one value nor none: the record is *split*. Nobody guesses then. A
worker needs no more than evidence. It drops a message if any node has a higher number, because a message is sent before
its number is written. The first record of a call is written before its message, and it replaces no other
message. A caller that has to know the record settles it in its turn: it writes the newest value back to a
quorum, as the readers of a replicated register do, or frees it if its message has begun.

A worker drops a message only on evidence that another one is at least as new: the record has its id and no lower
number, or the note says so of a message that has begun. A message without such evidence runs, whatever has become of
the record: it expired, an operator freed it, a node lost it. So every call ends, wherever a process dies:

* A caller that dies before it has replaced the secret leaves a message with the highest number, which runs.
* A worker that dies before it has freed the record leaves it to its own message, which comes again, or to the next
  call, which sends a new one under the same id.
* A process that dies in its turn delays the others until the turn's lease ends, after :data:`TURN` seconds.

A process that stands still for longer than that loses its turn and changes nothing: the compare-and-set names the
secret that it has seen. One case remains: a call whose message was sent and may not count. It is sent once more,
without a slot.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hashlib import blake2b
from typing import Any

from django.utils.crypto import salted_hmac

from ..core.rules import Rules
from ..engine.acquirer import fresh_secret
from ..engine.lease import Lease
from ..exceptions import LockTakenError, QuorumUnavailableError
from ..handler import locks
from .keys import canonical
from .sightings import Seen, peek, write_back
from .slots import NEXT, NOTE, Ticket, free, take_note

REPAIRS = 3  # how often a caller settles a record before it gives up
TURN = 5.0  # seconds for which a process that was killed in its turn keeps the others waiting
LONGEST_LINE = 15.0  # seconds for which a process waits for its turn
DIGEST = 10  # hexadecimal digits that tell the arguments of pending calls apart
UNKNOWN = "0" * DIGEST  # of a message whose arguments nobody compares any more
NAME = 80  # characters of a task's name that a record shows


@contextmanager
def turn(ticket: Ticket) -> Iterator[Lease]:
    """
    Run a block in which nobody else changes the pending call of a key.

    Raises:
        QuorumUnavailableError: Too few nodes answered, the turn did not come in time, or the record is not what it was.
    """
    manager = locks[ticket.using]
    ttl = _length(manager.rules)
    lock = manager.claim(f"turn:{ticket.name}", ttl=ttl, wait=LONGEST_LINE, renew=False, kind="task", label="turn")
    try:
        lease = lock.acquire()
        try:
            yield lease
        finally:
            lease.release(wait=False)  # nobody has to know when it arrives
    except LockTakenError as error:  # for the caller the same: what it wanted to change is not known to have changed
        raise QuorumUnavailableError(
            error.name, error.waited, error.attempts, error.nodes, manager.rules.needed
        ) from error


def _length(rules: Rules) -> float:
    with suppress(ValueError):
        return rules.check_ttl(TURN)
    return rules.ttl


def label_of(task: str, digest: str, number: int) -> str:
    """Return the label of the record of a pending call; *digest* tells its arguments from others."""
    return f"{task[:NAME]} #{digest}.{number}{NEXT}"


def digest_of(task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return a text that tells the arguments of a call from others, and that shows people nothing of them."""
    try:
        text = canonical(task.singleton_parameters, args, kwargs)
    except (TypeError, ValueError):  # it has no key, so it may be new
        text = fresh_secret()
    return salted_hmac("django_redlock.celery.next", text, algorithm="sha256").hexdigest()[:DIGEST]


def take_over(ticket: Ticket, ttl: float, label: str, seen: Seen) -> None:
    """
    Make the message with this ticket the one that counts, in place of the one seen; in the caller's turn.

    Raises:
        LockTakenError: The record is not what was seen.
        QuorumUnavailableError: Too few nodes answered.
    """
    # A message that is put off may come after the one that counts; the record lasts as long as the longest of them.
    about = (max(ttl, seen.left), ticket.secret, ticket.task_id, label)
    take_note(ticket.using, ticket.following, *about, adopt=seen.secret)


def settle(ticket: Ticket, seen: Seen) -> Seen:
    """
    Return the record as a quorum of nodes has it, after deciding it if it is split; in the caller's turn.

    The reader writes the newest value back to a quorum. It frees older values, and a value whose message has begun or
    that a node refuses, because that node knows of a later one or of its release.

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
    """Return whether the call of a record has begun; then nodes that were away have kept the record."""
    record = seen.record
    if record is None:
        return False
    notes = [note.record for note in peek(using, began_name(record.task_id)).sightings]
    return any(note is not None and note.number >= record.number for note in notes)


def is_superseded(ticket: Ticket, seen: Seen, began: Seen) -> bool:
    """
    Return whether a message is no newer than another one of the same call, as the record or the note says.

    What a single node has is evidence enough: a message is sent before its number is written anywhere. So a
    number that was written to a quorum is never missed, whichever nodes are away.
    """
    known = bool(seen.value) or any(sighting.secret == ticket.secret for sighting in seen.split)
    for sighting in seen.sightings:
        if sighting.secret == ticket.secret:
            break  # the note counts all the same: a node that was away keeps the record of a message that has begun
        record = sighting.record
        # Of two messages with one number, a split record tells the older one only if it has both.
        if record and record.task_id == ticket.task_id and record.number + known > ticket.number:
            return True
    own = began_secret(ticket.secret)
    return any(note.record and note.record.number >= ticket.number and note.secret != own for note in began.sightings)


def has_begun(ticket: Ticket, began: Seen) -> bool:
    """Return whether this very message, or a copy of it, has begun a run before."""
    return bool(began.value) and began.secret == began_secret(ticket.secret)


def keep(ticket: Ticket, ttl: float, seen: Seen) -> None:
    """Keep the record of a message that counts and is put back, until it is delivered again; in the worker's turn."""
    # A record that is gone is not created again: an older message would do so with a lower number.
    if seen.secret != ticket.secret or seen.owner is None or seen.left > ttl / 2:
        return
    with suppress(LockTakenError):
        take_note(ticket.using, ticket.following, ttl, ticket.secret, ticket.task_id, seen.owner.label, strict=True)


def begin(ticket: Ticket, ttl: float, task: str, seen: Seen, began: Seen) -> None:
    """
    Free the record, and note that a message begins its run; in the worker's turn.

    In this order, so that a record whose message has begun is only what nodes that were away have left of it.

    Args:
        ticket: The message's.
        ttl: How long other messages of the call may still come, in seconds.
        task: The task's name.
        seen: The record as it is now.
        began: The note as it is now.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    # Nodes that are away may hide the record. Then the one with this message's secret is freed unseen.
    secrets = _secrets(ticket, seen) or [ticket.secret]
    outcomes = [free(ticket.using, ticket.following, secret) for secret in secrets]
    if "unknown" in outcomes and _secrets(ticket, peek(ticket.using, ticket.following)):
        raise QuorumUnavailableError(ticket.following, needed=locks[ticket.using].rules.needed)
    label = f"{task[:NAME]} #{UNKNOWN}.{ticket.number}{NOTE}"
    left, older = max((one.left for one in seen.sightings), default=0.0), began.sightings
    about = (max(ttl, left), began_secret(ticket.secret), ticket.task_id, label)
    take_note(ticket.using, began_name(ticket.task_id), *about, adopt=older[0].secret if older else "")


def _secrets(ticket: Ticket, seen: Seen) -> list[str]:
    """Return the secrets of all records of a message's call that any node has."""
    return [one.secret for one in seen.sightings if one.record and one.record.task_id == ticket.task_id]


def began_name(task_id: str) -> str:
    """Return the name of the note that says which message of a pending call has begun."""
    return f"began:{task_id}"


def began_secret(secret: str) -> str:
    """Return the secret of the note. A node that has cancelled an attempt with the message's own would refuse that."""
    return blake2b(secret.encode(), digest_size=16, person=b"redlock began").hexdigest()
