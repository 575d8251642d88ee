"""
The slot of one call: a lock in one of four states, and what the lock nodes say about it (internal).

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

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple, Self

from ..core.names import Owner, decode, secret_of
from ..core.protocol import without_secrets
from ..core.votes import is_quorum
from ..exceptions import LockTakenError, QuorumUnavailableError, RedlockError, printable
from .line import read_length

CLAIM = 10.0  # seconds after which a claim lapses unless its message was sent


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
            return f"{self.name!r} is held by something that is not a task, or by runs with another limit."
        return f"{self.name!r} is {self.state} as task {printable(self.holder_id)}."


@dataclass(frozen=True, slots=True)
class Holder:
    """
    The holder of a slot, as described by the error about the taken lock.

    Args:
        task_id: Id of the task that has it; None when the holder is not a task, or runs where it was called.
        state: CLAIMED, QUEUED, RUNNING, or HELD when the task is over or the holder is not a task. An explanation also
            has FREE (nobody has the slot) and UNKNOWN (too few nodes answered and agreed).
        retry_after: Seconds until the hold ends unless it is renewed; None when unknown.
        since: When the message began to wait or the run began, in seconds since the epoch on the clock of its host; 0.0
            when unknown.
        length: How long runs of this slot take, in seconds, as far as a run knows; 0.0 when unknown.
        over: For how long the run has been over that left it HELD, in seconds on the clocks of the nodes.
    """

    task_id: str | None
    state: SlotState
    retry_after: float | None
    since: float = 0.0
    length: float = 0.0
    over: float = 0.0

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
        state = state_of(owner)
        length = read_length(owner.call) if state is SlotState.RUNNING else 0.0
        over = max(owner.ttl - left, 0.0) if state is SlotState.HELD and left is not None else 0.0
        return cls(owner.ref or None, state, left, owner.since, length, over)

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
        return "held by something that is not a task, or by runs with another limit"


def state_of(owner: Owner) -> SlotState:
    """Return the state of the slot that a task has."""
    if not owner.state:
        return SlotState.RUNNING
    return SlotState(owner.state) if owner.state in (SlotState.CLAIMED, SlotState.QUEUED) else SlotState.HELD


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


@without_secrets
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
        needed: How many nodes a quorum has.
    """

    value: str
    left: float
    nodes: int
    fence: int = 0
    split: tuple["Seen", ...] = ()
    reported: Mapping[str, str] = field(default_factory=dict)
    needed: int = 0

    @property
    def free(self) -> bool:
        """Whether a quorum of nodes has no value under the key."""
        return not self.value and not self.split

    @property
    def sightings(self) -> "tuple[Seen, ...]":
        """The values on single nodes, which prove that they were once written; newest first."""
        return (self,) if self.value else self.split

    @property
    def is_changing(self) -> bool:
        """Whether a quorum of nodes has one hold, but not in one state, because it is being changed."""
        found = Counter[str]()
        for each in self.split:
            found[each.secret] += each.nodes
        return bool(self.needed) and is_quorum(max(found.values(), default=0), self.needed)

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

    def undecided(self, name: str) -> QuorumUnavailableError:
        """Return the error of a caller that has to know who holds this lock, on which the nodes do not agree."""
        return QuorumUnavailableError(name, nodes=self.reported, needed=self.needed)


FREE = Seen("", 0.0, 0)
