"""
The hold behind a lease: which manager extends it, how often it was entered, and its release (internal).

Fences, reentrant locks and the watchdog use a :class:`LeaseHold`. The members for users are in :class:`~.lease.Lease`.
"""

import os
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Protocol
from weakref import ref

from ..core.attempt import Granted, HighestToken
from ..core.hold import Hold
from ..core.protocol import EndReason
from ..core.round import Round
from ..core.rules import Rules, Wanted
from ..nodes.base import Node
from ..nodes.threads import exiting
from .driver import Driver
from .manager import Runtime, Surroundings
from .process import process
from .watchdog import Drop, Ended, unreleased, watch_drop

NEVER = float("inf")
LASTING = 86_400.0  # seconds for which the release of a hold that may last long is redelivered


class Manager(Protocol):
    """The part of a :class:`~.manager.LockManager` that extends and releases a lease."""

    nodes: tuple[Node, ...]
    rules: Rules
    runtime: Runtime
    notify: Callable[..., None]
    surroundings: Surroundings
    driver: Driver

    def ask(self, round: Round) -> None:
        """Carry out one round, blocking."""

    async def aask(self, round: Round) -> None:
        """Carry out one round in the running event loop."""

    def extend(self, leases: Sequence[Any], ttl: float | None = None) -> int:
        """Extend leases, blocking; return how many are longer now."""

    async def aextend(self, leases: Sequence[Any], ttl: float | None = None) -> int:
        """Extend leases in the running event loop; return how many are longer now."""


class Report(Protocol):
    """The part of the report of a loss that the watchdog uses."""

    @property
    def pending(self) -> bool:
        """Whether somebody is still to be notified, and no thread is doing that."""


class LeaseHold(Hold):
    """
    A hold of this process, with its release and what the watchdog needs to know.

    Args:
        keeper: The manager that extends and releases the hold.
        wanted: The lock that was requested.
        granted: The won acquisition.
        highest: The highest tokens seen in this process.
        renewed: Whether the watchdog extends the hold.
    """

    def __init__(self, keeper: Manager, wanted: Wanted, granted: Granted, highest: HighestToken, renewed: bool) -> None:
        super().__init__(wanted, granted, keeper.rules, highest)
        self.keeper = keeper
        self.clock = keeper.runtime.clock
        self.renewed = renewed
        self._sends = wanted.sends
        self.takeover = granted.rounds[0] if wanted.adopt else None  # the round that took the lock over
        self._pid = process.pid
        self._abandoned = False  # whether the release was left to the background
        self._depth = 1
        self._cleanup: Round | None = None  # the round that releases the lock
        self._drop: Drop | None = None
        self._loss: Callable[[], Report | None] = _no_report

    def belongs_to(self, lease: object, loss: Report) -> None:
        """Note the report of the *loss* of *lease*, and notice a drop of the lease without a release."""
        self._loss = ref(loss)
        if self.renewed:
            self._drop = watch_drop(lease, self, self.clock, self.keeper.driver.dropped)

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the holder; only the holder has the lock."""
        process.notice_fork()
        return self._pid != process.pid

    # Used by the watchdog

    @property
    def slack(self) -> float:
        """Seconds by which the hold may be extended early, together with others."""
        return self.ttl / 30 if self.renewed else 0.0

    def due(self) -> float:
        """Return when the watchdog looks at the hold next; at once if its loss is still to be reported."""
        ended = self.ended
        if ended is EndReason.RELEASED:
            return NEVER
        if ended and (loss := self._loss()) and loss.pending:
            return 0.0
        return self.next_event(self.renewed)

    # Used by reentrant locks

    @property
    def entered(self) -> bool:
        """Whether the holder is still inside: it has not yet left the lock as often as it has entered it."""
        return self._depth > 0

    def enter_again(self) -> None:
        """Note that the holder has entered the lock once more."""
        self._depth += 1

    def leave(self) -> bool:
        """Note that the holder has left the lock once; return whether it has entered the lock more often."""
        self._depth -= 1
        return self._depth > 0

    # Used by fences

    def slots(self) -> list[tuple[str, str]]:
        """Return each name with the number of its permit, which is empty unless the lock has a ``limit``."""
        return [(name, self.permit()) for name in self.names]

    def owner(self) -> str:
        """
        Return the identifier of this acquisition in a fence: 32 hexadecimal digits, not secret.

        No other acquisition has the same one, not even one with the same secret, or one in a fork of this process.
        """
        # One call into C, so that all threads get the same identifier.
        identifier = self.__dict__.setdefault("_identifier", os.urandom(16))
        return blake2b(identifier, digest_size=16, key=str(os.getpid()).encode()).hexdigest()

    # The release

    @property
    def waits_at_end(self) -> bool:
        """
        Whether the end of the block waits for the replies to the release.

        Even a block that only sends the release waits if the lease may end, by the local clock, before the release
        arrives: the replies then tell whether the block has to raise.
        """
        return not self._sends or self.remaining(self.clock()) <= self.timeout

    def begin_release(self, wait: bool) -> Round | None:
        """
        End the hold before the first byte of its release is sent, and return the round that releases it.

        Return None in a fork, or if the lock was released, unless that was left to the background: then this release
        is sent as well, so that the caller can wait for it.

        Args:
            wait: Whether to wait for the replies.
        """
        if self.forked or (self.ended is EndReason.RELEASED and not self._abandoned):
            return None
        if self.check(self.clock()):
            self.end(EndReason.RELEASED, self.clock())
        round = self._cleanup = self.release(self.timeout if wait else 0.0)
        round.unattended = not wait
        return round

    def carry_out(self, round: Round, ended: Ended) -> bool:
        """Carry out the release; return True if its outcome is known already, otherwise *ended* is called later."""
        if round.unattended:
            return self.keeper.driver.leave(round, self.timeout, ended)
        self.keeper.ask(round)
        return True

    async def acarry_out(self, round: Round, ended: Ended) -> bool:
        """Do what :meth:`carry_out` does without blocking; a cancellation cannot interrupt an *unattended* release."""
        if round.unattended:
            return self.keeper.driver.aleave(round, self.timeout, ended)
        await self.keeper.aask(round)
        return True

    def end(self, reason: EndReason, now: float) -> bool:
        """End the hold for good, so that its lease may be dropped; return whether this call ended it."""
        first = super().end(reason, now)
        if self._drop is not None:
            unreleased.discard(self._drop)
            self._drop = None
        return first

    def release_later(self) -> None:
        """Have the release redelivered to the nodes that have not answered it, if the lease has ended."""
        if self.ended:
            round = self._cleanup = self._cleanup or self.release(0.0)
            self.keeper.driver.bring(round)

    def abandon(self) -> None:
        """
        Leave the lock once, and have it released in the background if that was the last time, without waiting.

        This is for a holder that was interrupted before it could release the lock itself.
        """
        if self.forked or self.ended or exiting() or self.leave():
            return
        self._abandoned = True  # first: a thread that sees the end must see this as well
        self.end(EndReason.RELEASED, self.clock())
        self.release_later()


def end_of_earlier_hold(takeover: Round) -> Round | None:
    """Return the round that ends the earlier hold on nodes that may still receive the request to take it over."""
    if not takeover.remedy or not (nodes := takeover.unanswered()):
        return None
    requests = {node: takeover.remedy[node] for node in nodes}
    return Round(requests, lambda replies: False, 0.0, cleanup=True, lasting=LASTING)


def _no_report() -> None:
    """Return no report, for a hold that has no lease."""
