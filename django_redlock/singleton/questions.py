"""
The questions of a decision about a slot, and the answers (internal).

The decisions in :mod:`.call`, :mod:`.arrival`, :mod:`.pending` and :mod:`.ending` are generators. Each yields questions
and gets the answers, and returns what it has decided. None of them has a clock, a network or a thread. So one table of
tests can say what happens to each message, and Celery, Django's tasks and a simulation carry out the same decisions.

:class:`~.driver.Nodes` answers what concerns the lock nodes. ``celery/`` and ``tasks/`` answer the rest. A question
that has no answer raises in the decision: ``QuorumUnavailableError`` if too few nodes answered, ``LockTakenError`` if
another holder has the lock.
"""

from collections.abc import Generator
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from ..core.protocol import without_secrets
from .slot import Holder, SlotState
from .ticket import Permit, Ticket

Answer = TypeVar("Answer")
Steps = Generator["Question", Any, Answer]
"""A decision: yields questions, and returns an answer."""


class Slot(Protocol):
    """The slot of a run, while the run has it."""

    @property
    def name(self) -> str:
        """The name of the lock."""

    @property
    def secret(self) -> str:
        """The secret of the hold."""

    def valid(self) -> bool:
        """Return whether the slot is still there, by the clock of this process."""

    def ensure(self) -> None:
        """Raise LockLostError if it is not."""


class Question:
    """Something that a decision cannot know."""

    __slots__ = ()


# About time and chance


@dataclass(slots=True)
class Now(Question):
    """The time on the clock of the locks, in seconds."""


@dataclass(slots=True)
class Wall(Question):
    """The date and time of this host, in seconds since the epoch; other hosts may differ."""


@dataclass(slots=True)
class Sleep(Question):
    """Wait for about this long, between half of it and one and a half."""

    seconds: float


# To the lock nodes


@dataclass(slots=True)
class Look(Question):
    """Who has these locks, as the nodes say in one round trip? The answer is a tuple of :class:`~.slot.Seen`."""

    names: tuple[str | Permit, ...]


@without_secrets
@dataclass(slots=True)
class Claim(Question):
    """
    Claim the lock that the message holds while it waits. The answer is the claim, or the holder if it is taken.

    Args:
        ticket: The ticket of the message.
        ttl: For how long the message's slot will last, in seconds; the claim itself ends after ten.
        adopt: Secret of a holder from which the lock may be taken over.
        call: What describes a pending call.
        barge: Whether to take the lock before those that wait for it.
    """

    ticket: Ticket
    ttl: float
    adopt: str = ""
    call: str = ""
    barge: bool = False


@without_secrets
@dataclass(slots=True)
class Put(Question):
    """
    Take a lock that is not renewed; it ends with its ttl.

    The answer is its secret.

    Args:
        name: The lock's name, or the permit of it to take.
        ttl: For how long it lasts, in seconds.
        state: The purpose of the lock.
        secret: Its secret; empty draws a fresh one.
        ref: What identifies the holder.
        adopt: The secret of a holder from which it may be taken over.
        strict: Whether it must be taken over, from *adopt* or from *secret* itself; a free lock is then refused.
        call: What describes a pending call.
        label: The holder's work; empty is the task's name.
        limit: How many may hold the lock at once.
    """

    name: str | Permit
    ttl: float
    state: SlotState | str
    secret: str = ""
    ref: str = ""
    adopt: str = ""
    strict: bool = False
    call: str = ""
    label: str = ""
    limit: int = 1


@without_secrets
@dataclass(slots=True)
class Take(Question):
    """
    Take the slot for a run: from the waiting message, or anew if it is free. The answer is the :class:`Slot`.

    Args:
        ticket: The ticket of the message; its secret is that of the waiting message.
        secret: The secret of the hold; empty draws a fresh one.
        inline: Whether the task runs in the process of its caller, so that nobody can read its result by its id.
        wait: Seconds to wait for it, in the line of the lock.
        away: Seconds for which the message keeps its place in that line, if the slot is taken; 0.0 for none.
        barge: Whether to take a free slot although others in that line come first.
    """

    ticket: Ticket
    secret: str = ""
    inline: bool = False
    wait: float = 0.0
    away: float = 0.0
    barge: bool = False


@without_secrets
@dataclass(slots=True)
class Free(Question):
    """
    Free a lock that is held with *secret*; the answer says what became of it, and it never raises.

    With *revoke*, the holder learns that an operator took the lock away.
    """

    name: str | Permit
    secret: str
    revoke: bool = False


@dataclass(slots=True)
class WriteBack(Question):
    """Write a value that too few nodes are known to have to a quorum; the answer is whether a quorum has it now."""

    name: str
    seen: Any


@dataclass(slots=True)
class InTurn(Question):
    """
    Carry out a decision while no other process changes the pending call of this key; the answer is its answer.

    A lock that is taken by another one meanwhile counts as unknown: it is not known whether the change was made.

    Args:
        ticket: The ticket of a call with that key.
        decision: The decision.
        longest: Seconds to wait for the turn.
    """

    ticket: Ticket
    decision: "Steps[Any]"
    longest: float


@dataclass(slots=True)
class LeaveLine(Question):
    """Give up the place of a message in the line of its slot; this never raises."""

    ticket: Ticket


# About the slot of a run in this process


@dataclass(slots=True)
class HandOver(Question):
    """Give the slot of a run to a waiting message, which continues the work; the answer is the claim."""

    slot: Slot
    ticket: Ticket
    ttl: float


@dataclass(slots=True)
class Length(Question):
    """
    How long do runs under this lock take, as far as this process knows? The answer is :class:`~.line.Expected`.

    Args:
        name: The lock.
        told: What the present run tells about that; 0.0 if it does not know.
        since: When the present run began, in seconds since the epoch on its own clock.
    """

    name: str
    told: float = 0.0
    since: float = 0.0


@dataclass(slots=True)
class NoteLength(Question):
    """A run under this lock took so long, in seconds."""

    name: str
    seconds: float


@dataclass(slots=True)
class FreeSlot(Question):
    """
    Free the slot of a run, and report it if it was lost.

    Args:
        slot: The slot.
        wait: Whether to wait for the nodes; otherwise, the release may still be under way afterwards.
        hold: Seconds for which the slot stays taken, although nobody renews it any more.
    """

    slot: Slot
    wait: bool = True
    hold: float = 0.0


# To whatever carries messages and stores results


class ResultState(Enum):
    """What is known about the result of a task."""

    UNKNOWN = "nobody stores it, or can be asked"
    SILENT = "the store does not answer"
    ABSENT = "nothing is stored"
    GONE = "there is no such task any more"
    WAITS = "the task has not begun"
    UNDERWAY = "the task has begun"
    SUCCESS = "success"
    FAILURE = "failure"
    REVOKED = "revoked"

    @property
    def known(self) -> bool:
        """Whether the store has answered."""
        return self not in (ResultState.UNKNOWN, ResultState.SILENT)

    @property
    def final(self) -> bool:
        """Whether the task has ended."""
        return self in (ResultState.SUCCESS, ResultState.FAILURE, ResultState.REVOKED)

    @property
    def done(self) -> bool:
        """Whether it needs no further run. A failed task is repeated by the rules of its framework."""
        return self in (ResultState.SUCCESS, ResultState.REVOKED)


class Result(NamedTuple):
    """
    The stored result of a task.

    Args:
        state: What is known.
        value: The value or the error; for a store that is silent, its error.
    """

    state: ResultState
    value: Any = None


@dataclass(slots=True)
class ResultOf(Question):
    """What is stored about the task with this id? The answer is a :class:`Result`."""

    task_id: str


@dataclass(slots=True)
class StoreOutcome(Question):
    """
    Store the outcome of a message that ends without a run. The answer is None, or the error if it was not stored.

    Args:
        outcome: The verdict.
    """

    outcome: Any


class NotSent(NamedTuple):
    """
    A message was not accepted.

    Args:
        error: The error.
        for_good: Whether the message itself cannot be sent, now or later.
    """

    error: Exception
    for_good: bool


@dataclass(slots=True)
class Send(Question):
    """
    Send the message, and confirm its claim if it has one; if that fails, its slot is freed.

    For a call, the answer is what the framework returns, and an error is raised. For a message in a worker, which is
    sent back to the broker, the answer is None, or :class:`NotSent`.

    Args:
        ticket: The ticket that the message carries.
        claim: The slot that was claimed for it.
        pause: Seconds until it is delivered.
    """

    ticket: Ticket
    claim: Any = None
    pause: float = 0.0


@dataclass(slots=True)
class Report(Question):
    """
    Report that another holder has the slot of a message.

    Args:
        holder: The holder.
        strategy: The option that says what happens.
        effect: What happens, for people.
    """

    holder: Holder
    strategy: str
    effect: str


@dataclass(slots=True)
class Kept(Question):
    """For how long has this worker had the message, in seconds? None if that is not known."""


@dataclass(slots=True)
class Digest(Question):
    """What are the arguments of the call? The answer is a digest, which reveals nothing about them."""


@without_secrets
@dataclass(slots=True)
class StoredHere(Question):
    """Which task has this thread stored under the slot with this secret? The answer is its id, or empty."""

    secret: str


@dataclass(slots=True)
class ShowLife(Question):
    """Show that a process has the task, though it has no slot."""
