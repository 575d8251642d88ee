"""
The slot of one call: a lock in one of four states (internal).

CLAIMED: a caller is about to send a message. QUEUED: the message was sent. The lock's secret travels with the message,
and nobody renews the lock. RUNNING: a worker runs the task and renews a short lease under a secret of its own. HELD:
the run has ended, and ``hold_for`` has not. Each step takes the lock over from the previous one, if that one still has
it, in one atomic round. So a slot is never free in between. If a queued slot expires, the worst result is one more
message in the queue.

A claim lapses after :data:`CLAIM` seconds, because its caller may die before it has sent the message. The caller
confirms the claim after it has sent the message, without waiting for replies. No call is a duplicate of one whose
message may never have been sent: callers wait a moment for the confirmation and then send a message of their own, and
workers put their message back.

A task with ``on_duplicate="rerun"`` or ``"replace"`` has a pending call as well; see :mod:`.pending`.

There are also notes, which are separate locks that are never waited for. They record which copy of a message watches
another (``watch:``), which message is done (``done:``), and which has begun (``begun:``, ``began:``).
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from math import inf
from typing import Any, NamedTuple, Self, TypeVar

from ..core.acquisition import GaveUp
from ..core.attempt import Granted
from ..core.names import Owner, decode, secret_of, slug
from ..core.protocol import SUPERSEDED, Outcome
from ..core.rules import MIN_TTL
from ..engine.lease import Lease, passed_on, stop_renewal
from ..engine.manager import LockManager, fresh_secret
from ..engine.options import LockOptions
from ..exceptions import LockTakenError, QuorumUnavailableError, RedlockError, printable
from ..handler import locks
from ..inventory.survey import Poll, ask_nodes
from ..signals import lock_acquired, lock_taken

HEADER = "django_redlock"
RUN_HEADER = "django_redlock_run"
RECEIVED_HEADER = "django_redlock_received"  # when the worker got the message, on the steady clock
OURS = (HEADER, RUN_HEADER, RECEIVED_HEADER)
FORMAT = 3
LIFETIME, RUNNING, WAITING, BOTH = "until_executed", "while_executing", "until_executing", "until_and_while_executing"
SCOPES = (LIFETIME, RUNNING, WAITING, BOTH)
CLAIM = 10.0  # seconds after which a claim lapses unless its message was sent
UNCONFIRMED = 1.0  # seconds for which a call waits until another caller has sent its message
FIRST_LOOK, LONGEST_LOOK = 0.01, 0.1  # seconds of the pauses meanwhile

T = TypeVar("T")
log = logging.getLogger("django_redlock")
_compact = json.JSONEncoder(separators=(",", ":"))


class SlotState(StrEnum):
    """
    What is known about a slot.

    The members are strings, so that users' code, logs and events can compare and show them.
    """

    FREE = "free"
    CLAIMED = "claimed"  # a message is about to be sent, or may have been
    QUEUED = "queued"  # a message is on its way
    RUNNING = "running"
    HELD = "held"  # the run has ended and the slot is kept, or the holder is not a task
    UNKNOWN = "unknown"  # too few nodes answered and agreed


@dataclass(slots=True)  # not frozen: each message has one, and creating a frozen one takes five times as long
class Ticket:
    """
    The information about its slot that a message carries in one header; treat it as immutable, use ``replace()``.

    A flat string passes through every broker. It holds the message's own id, because people start tasks with
    ``headers=self.request.headers``, and such a task must not inherit the slot.

    Args:
        name: Name of the lock; empty for a message that is to run without one. A worker uses this name even if a deploy
            has changed how the key is made.
        using: Alias in ``REDLOCK``.
        task_id: Id of the message's task.
        secret: Secret of the queued slot; empty if the message was sent without one.
        tries: How often a worker has put the message back into the queue.
        scope: The option of this name: which slots there are while the message waits and while it runs.
        number: How many messages of a pending call there have been, including this one; 0 for any other call.
        waited: Seconds for which it has been put back to wait for its slot.
        watch: Secret of the note of the only copy that watches another; empty for all other messages.
        joined: Id of the task whose result it waits for; empty if it waits for none.
        redelivered: Whether the broker had delivered the message again when a worker put it back. A message that is put
            back is a new one for the broker, so it loses the broker's own mark.
    """

    name: str
    using: str
    task_id: str
    secret: str = ""
    tries: int = 0
    scope: str = LIFETIME
    number: int = 0
    waited: float = 0.0
    watch: str = ""
    joined: str = ""
    redelivered: bool = False

    @property
    def trailing(self) -> bool:
        """Whether it is the message of a pending call, which a later call may take over."""
        return self.number > 0

    @property
    def waiting(self) -> str:
        """Name of the lock that the message holds while it waits; empty if it holds none."""
        return self.following if self.number else self.queue

    @property
    def following(self) -> str:
        """Name of the lock that a pending call holds."""
        return f"next:{self.name}"

    @property
    def begun(self) -> "Ticket":
        """The ticket once the run has begun: no later call can take it over."""
        return replace(self, number=0) if self.trailing else self

    @property
    def queue(self) -> str:
        """Name of the lock that calls with this key hold while they wait; empty if they hold none."""
        if self.scope == RUNNING:
            return ""
        return f"queued:{self.name}" if self.scope == BOTH else self.name

    @property
    def running(self) -> str:
        """Name of the lock that its run holds; empty if it holds none."""
        return "" if self.scope == WAITING else self.name

    def places(self, trails: bool) -> list[str]:
        """
        Return the names of all locks that calls with this key may hold, for a run and for waiting messages.

        Args:
            trails: Whether a duplicate may run after the holder.
        """
        after = self.following if trails else ""
        return list(dict.fromkeys(filter(None, (self.running, self.queue, after))))

    def pack(self) -> str:
        """Return the header's value."""
        # Not dataclasses.astuple(), which copies deeply: this runs for every message.
        mine = (self.name, self.using, self.task_id, self.secret, self.tries, self.scope)
        return _compact.encode([FORMAT, *mine, self.number, self.waited, self.watch, self.joined, self.redelivered])

    @classmethod
    def of(cls, request: Any) -> "Ticket | None":
        """Return the ticket in the request of a task that is about to run, or None as :meth:`unpack` does."""
        # In eager mode, Celery keeps headers apart from the other attributes of a request.
        return cls.unpack(request.get(HEADER) or (request.headers or {}).get(HEADER), request.id)

    @classmethod
    def unpack(cls, header: object, task_id: str | None) -> "Ticket | None":
        """Return the ticket in a header, or None if there is none or it belongs to another task."""
        with suppress(TypeError, ValueError, OverflowError, RecursionError):
            version, name, using, owner, secret, tries, scope, number, waited, watch, joined, again = json.loads(
                header  # type: ignore[arg-type]
            )
            secrets = is_secret(secret) and is_secret(watch)
            if version == FORMAT and owner == task_id and secrets and scope in SCOPES:
                done = (int(tries), scope, int(number), float(waited), watch, str(joined), bool(again))
                return cls(str(name), str(using), owner, secret, *done)
        return None

    def claim(self, ttl: float, label: str, adopt: str = "", call: str = "") -> "Claim | Holder":
        """
        Claim the lock that the message holds while it waits, in one round trip; return the holder if it is taken.

        Args:
            ttl: For how long the message's slot will last, in seconds.
            label: The task's name.
            adopt: Secret of a holder from which the lock may be taken over.
            call: What describes a pending call.

        Raises:
            QuorumUnavailableError: Too few nodes answered, or they do not agree on one holder.
        """
        manager = locks[self.using]
        wanted = manager.acquirer.left_alone(
            self.waiting,
            ttl=max(MIN_TTL, min(CLAIM, ttl)),
            kind="task",
            label=label,
            ref=self.task_id,
            state=SlotState.CLAIMED,
            call=call,
            secret=self.secret,
            adopt=adopt,
        )
        outcome = manager.acquirer.run(wanted)
        # Signals are sent only to those who receive them: their arguments take time.
        if isinstance(outcome, Granted):
            if lock_acquired.receivers:
                manager.acquirer.held(wanted, outcome, renew=False)
            return Claim(manager, wanted.owner, outcome)
        if outcome.agreed and not lock_taken.receivers:
            return Holder.described(decode(outcome.holder), outcome.retry_after)
        try:
            manager.acquirer.held(wanted, outcome, renew=False)  # raises
        except LockTakenError as taken:
            return Holder.of(taken)
        raise AssertionError("an attempt that gave up has an error")

    def take(
        self, name: str, ttl: float, label: str, state: str, secret: str = "", *, ref: str | None = None, **options: Any
    ) -> None:
        """
        Take a lock that is not renewed; it ends with its ttl.

        Args:
            name: The lock's name.
            ttl: For how long it lasts, in seconds.
            label: The task's name.
            state: The purpose of the lock.
            secret: Its secret; empty draws a fresh one.
            ref: What identifies the holder; None is the task's id.
            **options: ``adopt``: the secret of a holder from which it may be taken over. ``strict``: whether it must
                be taken over, from *adopt* or from *secret* itself; a free lock is then refused. ``call``: what
                describes a pending call.

        Raises:
            LockTakenError: Another task has it.
            QuorumUnavailableError: Too few nodes answered.
        """
        manager, ttl = locks[self.using], max(MIN_TTL, ttl)
        about: dict[str, Any] = {"kind": "task", "label": label, "ref": self.task_id if ref is None else ref}
        about |= {"state": state, "call": "", "secret": secret or fresh_secret(), **options}
        wanted = manager.acquirer.left_alone(name, ttl=ttl, **about)
        outcome = manager.acquirer.run(wanted)
        # A lock that is not renewed needs a lease only as the signal's argument.
        if isinstance(outcome, GaveUp) or lock_acquired.receivers:
            manager.acquirer.held(wanted, outcome, renew=False)

    def take_running(
        self, times: LockOptions, label: str, secret: str, inline: bool = False, wait: float = 0.0
    ) -> Lease:
        """
        Take the slot for a run: from the waiting message, or anew if it is free.

        Args:
            times: How long it lasts without renewal, and with it.
            label: The task's name.
            secret: The secret of the hold; empty draws a fresh one.
            inline: Whether the task runs in the process of its caller, so that nobody can read its result by its id.
            wait: Seconds to wait for it, in the queue of the lock.

        Raises:
            LockTakenError: Another task has it, or another run of this one.
            QuorumUnavailableError: Too few nodes answered.
        """
        adopt = self.secret if self.waiting == self.running else ""
        about: dict[str, Any] = {"kind": "task", "label": label, "ref": "" if inline else self.task_id}
        about |= {"secret": secret, "adopt": adopt, "wait": wait, "renew": True}
        return locks[self.using].on_behalf(self.running, **times, **about).acquire()

    def keep_held(self, lease: Lease, seconds: float, label: str, ref: str) -> bool:
        """
        Replace the slot of a run that is over by one that is not renewed; return whether that worked.

        Args:
            lease: The slot of the run.
            seconds: For how long the slot stays taken.
            label: The task's name.
            ref: Id of the task; empty if nobody can read its result by its id.
        """
        stop_renewal(lease)
        try:
            self.take(self.running, seconds, label, SlotState.HELD, adopt=lease.secret, ref=ref)
        except (LockTakenError, QuorumUnavailableError):
            return False
        passed_on(lease)
        return True

    def live_run(self) -> "Holder | None":
        """
        Return the run of this same message that has the slot; None if another message has it, or none.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        holder = peek(self.using, self.running).holder if self.running else None
        runs = holder and holder.task_id == self.task_id and holder.state is SlotState.RUNNING
        return holder if runs else None

    def free(self) -> Outcome:
        """Free the lock that the message holds while it waits."""
        return free(self.using, self.waiting, self.secret)


class DuplicateTask(RedlockError):
    """
    Another call has the slot, and the options ask for an error in that case.

    Args:
        holder_id: Id of the task that has the slot; None when it is not a task.
        state: What that task does: ``queued``, ``running``, or ``held`` when the holder is not a task.
        retry_after: Seconds until the slot frees itself unless its holder keeps it; None when unknown.
        name: The lock's name.
    """

    def __init__(
        self, holder_id: str | None = None, state: str = "held", retry_after: float | None = None, name: str = ""
    ) -> None:
        super().__init__(holder_id, state, retry_after, name)
        self.holder_id = holder_id
        self.state = state
        self.retry_after = retry_after
        self.name = name

    @classmethod
    def found(cls, holder_id: str | None, state: str, retry_after: float | None, name: str) -> Self:
        """Return the error about a holder; a subclass with another constructor overrides this."""
        return cls(holder_id, state, retry_after, name)

    def __str__(self) -> str:
        if self.holder_id is None and self.state == "claimed":
            return f"{self.name!r} is about to be taken by another one that waits for it."
        if self.holder_id is None:
            return f"{self.name!r} is held, and not by a task."
        return f"{self.name!r} is {self.state} as task {printable(self.holder_id)}."


class Claim(NamedTuple):
    """
    The slot of a message that is about to be sent.

    Args:
        manager: The manager of the slot's alias.
        owner: The description of the claim.
        granted: The won lock.
    """

    manager: LockManager
    owner: Owner
    granted: Granted

    def confirm(self, ttl: float) -> None:
        """
        Keep the slot for *ttl* seconds, because the message was sent; this happens in the background.

        A node on which the claim has lapsed, or that did not get it, gets the slot as well, unless it knows of a later
        holder or of a release.
        """
        self.manager.confirmations.add(self.granted, self.owner, SlotState.QUEUED, ttl)


@dataclass(frozen=True, slots=True)
class Holder:
    """
    The holder of a slot, as described by the error about the taken lock.

    Args:
        task_id: Id of the task that has it; None when the holder is not a task, or runs where it was called.
        state: CLAIMED, QUEUED, RUNNING, or HELD when the task is over or the holder is not a task. An explanation also
            has FREE (nobody has the slot) and UNKNOWN (too few nodes answered and agreed).
        retry_after: Seconds until the hold ends unless it is renewed; None when unknown.
        since: When the holder entered that state, in seconds since the epoch on its own clock; 0.0 when unknown.
    """

    task_id: str | None
    state: SlotState
    retry_after: float | None
    since: float = 0.0

    @classmethod
    def of(cls, taken: LockTakenError) -> "Holder":
        """
        Return the holder that the error names.

        Raises:
            QuorumUnavailableError: The nodes do not agree on one holder.
        """
        if taken.queued:
            return cls(None, SlotState.CLAIMED, taken.retry_after)
        if not taken.agreed:
            raise QuorumUnavailableError(taken.name, taken.waited, taken.attempts, taken.nodes) from taken
        return cls.described(Owner(**taken.holder) if taken.holder else None, taken.retry_after)

    @classmethod
    def described(cls, owner: Owner | None, left: float | None) -> "Holder":
        """Return whom the description of a holder tells of, and for how long the hold lasts."""
        if owner is None or owner.kind != "task":
            return cls(None, SlotState.HELD, left)
        return cls(owner.ref or None, state_of(owner), left, owner.since)

    @property
    def waits(self) -> bool:
        """Whether the slot is that of a message which waits, or is about to be sent."""
        return self.state in (SlotState.CLAIMED, SlotState.QUEUED)

    def waits_as(self, task_id: str | None) -> bool:
        """Return whether the slot waits for the message of the task with this id."""
        return self.waits and self.task_id == task_id

    def error(self, kind: Any, name: str) -> Exception:
        """Return an error of the class *kind*, a DuplicateTask, about the lock *name* that this holder has."""
        # Plain text, because programs without this package may unpickle the error.
        error: Exception = kind.found(self.task_id, str(self.state), self.retry_after, name)
        return error

    def __str__(self) -> str:
        if self.task_id:
            return f"{self.state} as task {printable(self.task_id)}"
        if self.state is SlotState.RUNNING:
            return "running where it was called"
        if self.state is SlotState.CLAIMED:
            return "about to be taken by another one that waits for it"
        return "held by something that is not a task"


def once_confirmed(ticket: Ticket, look: Callable[[], tuple[T, Holder | None]]) -> T:
    """
    Return what *look* finds, once the holder that it reports as well has sent its message, or is gone.

    A holder whose message may not have been sent is no holder yet: its caller may have died. So this waits for a second
    at most.

    Raises:
        QuorumUnavailableError: That does not become known in time.
    """
    until, pause = inf, FIRST_LOOK
    while True:
        found, holder = look()
        if holder is None or holder.state is not SlotState.CLAIMED:
            return found
        runtime = locks[ticket.using].runtime
        until = min(until, runtime.clock() + UNCONFIRMED)
        if runtime.clock() + pause > until:
            raise QuorumUnavailableError(ticket.waiting, nodes={str(holder): "may not have been sent"})
        runtime.sleep(pause * (0.5 + runtime.random()))
        pause = min(2 * pause, LONGEST_LOOK)


def state_of(owner: Owner) -> SlotState:
    """Return the state of the slot that a task has."""
    if not owner.state:
        return SlotState.RUNNING
    return SlotState(owner.state) if owner.state in (SlotState.CLAIMED, SlotState.QUEUED) else SlotState.HELD


def free(using: str, name: str, secret: str, *, revoke: bool = False) -> Outcome:
    """
    Free a lock that is held with *secret*; return what :meth:`LockManager.release` returns.

    It never raises, because it is called while another error is handled. Without a name or secret it returns
    ``unknown``. With *revoke*, the holder learns that an operator took the lock away.
    """
    if not secret or not name:
        return Outcome.UNKNOWN
    try:
        # The claim of the lock, or its confirmation, may still be on its way to a node.
        return Outcome(locks[using].release(name, secret, SUPERSEDED, revoke=revoke))
    except Exception:
        log.exception("the slot %s could not be freed; it ends with its time", printable(name))
        return Outcome.UNKNOWN


def is_secret(value: Any) -> bool:
    """Return whether *value* can be a lock's secret, or is empty, which stands for none."""
    return isinstance(value, str) and bool(re.fullmatch("([0-9a-f]{32})?", value))


class Record(NamedTuple):
    """
    A pending call.

    Args:
        task_id: The id of its task.
        digest: A digest of the arguments of the message that counts.
        number: The number of that message.
        task: The task's name; tasks of one group share the records.
    """

    task_id: str
    digest: str
    number: int
    task: str


@dataclass(frozen=True)
class Seen:
    """
    The state of a lock's key on the nodes.

    Args:
        value: The value that a quorum has; empty if the key is free, or if no quorum has one value.
        left: Seconds until it expires, on the node where it expires first.
        nodes: How many nodes agree.
        fence: The fencing token under which it was written.
        split: The values that fewer nodes than a quorum have, newest first, if no quorum agrees on one value or on
            a free key. The nodes that did not answer may decide either way, so the lock is neither held nor free.
        reported: The report of each node unless it is free, by the node's display name.
    """

    value: str
    left: float
    nodes: int
    fence: int = 0
    split: tuple["Seen", ...] = ()
    reported: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, poll: Poll, slug: str) -> "Seen":
        """Return what a survey shows about the key of one lock."""
        tally = poll.tally(slug, by=str)  # a quorum must agree on the state, too
        if tally.is_free or (tally.winner and not tally.winner.value):
            return FREE
        nodes = poll.manager.nodes
        found: list[Seen] = []
        reported = {node.name: poll.silent.get(index, str(SlotState.FREE)) for index, node in enumerate(nodes)}
        for vote in tally.votes:
            if vote.value:  # a key that is empty or not a string names no holder
                left, fence = min(vote.lefts), min(row.fence for row in vote.rows.values())
                seen = cls(vote.value, left if left < inf else 0.0, vote.nodes, fence, reported=reported)
                reported |= {nodes[index].name: str(seen.holder) for index in vote.rows}
                found.append(seen)
        if tally.winner:
            return found[0]
        return cls("", 0.0, 0, split=tuple(sorted(found, key=lambda seen: -seen.fence)), reported=reported)

    @property
    def free(self) -> bool:
        """Whether a quorum of nodes has no value under the key."""
        return not self.value and not self.split

    @property
    def sightings(self) -> "tuple[Seen, ...]":
        """The values on single nodes, which prove that they were once written; newest first."""
        return (self,) if self.value else self.split

    @property
    def secret(self) -> str:
        """The holder's secret; empty if there is none."""
        return secret_of(self.value) if self.value else ""

    @cached_property
    def owner(self) -> Owner | None:
        """The holder; None if there is none, or if another program wrote the value."""
        return decode(self.value) if self.value else None

    @cached_property
    def record(self) -> "Record | None":
        """The pending call that the value describes; None if it describes none."""
        owner = self.owner
        number, _, digest = owner.call.partition(".") if owner else ("", "", "")
        if owner is None or not owner.ref or not re.fullmatch("[0-9]{1,9}", number):
            return None
        return Record(owner.ref, digest, int(number), owner.label)

    @cached_property
    def holder(self) -> Holder:
        """The holder as an error about a taken lock would name it."""
        return Holder.described(self.owner, self.left)

    def undecided(self, using: str, name: str) -> QuorumUnavailableError:
        """Return the error of a caller that has to know who holds this lock, on which the nodes do not agree."""
        return QuorumUnavailableError(name, nodes=self.reported, needed=locks[using].rules.needed)


FREE = Seen("", 0.0, 0)


def peek(using: str, name: str) -> Seen:
    """
    Ask the nodes for the holder of a lock, in one round trip.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    return look(using, name)[0]


def look(using: str, *names: str) -> tuple[Seen, ...]:
    """
    Ask the nodes for the holders of several locks, in one round trip.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    slugs = tuple(map(slug, names))
    poll = ask_nodes(locks[using], slugs)
    poll.require_quorum(names[0])
    return tuple(Seen.of(poll, slug) for slug in slugs)
