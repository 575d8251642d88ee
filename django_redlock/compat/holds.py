"""
The token and the lease that a thread or task has of a lock, and how the lease is extended to the timeout (internal).
"""

import asyncio
import math
import threading
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..core.protocol import without_secrets
from ..core.rules import Rules
from ..engine.lease import Lease
from ..engine.twins import Awaiting, Blocking, Flavour
from ..engine.watchdog import Chore, Dog
from ..nodes.base import run

SLACK = 0.001  # seconds; a smaller difference is a rounding error, and nodes count in milliseconds


@without_secrets
class Ownership(NamedTuple):
    """
    The hold of one thread or task.

    Args:
        token: The token that redis-py would have written to the node.
        lease: The lease; None for a token that was handed over, until the lock is used.
        timed: What extends the lease to the end of the timeout; None if there is no timeout.
    """

    token: bytes
    lease: Lease | None = None
    timed: "TimedLease | None" = None


class OwnerSlot:
    """Keep a hold. Its ``token`` can be read, and set to a token that another process handed over."""

    hold: Ownership | None = None

    @property
    def token(self) -> bytes | None:
        """The token of the held lock, or None."""
        return self.hold.token if self.hold else None

    @token.setter
    def token(self, token: str | bytes | None) -> None:
        self.hold = None if token is None else Ownership(as_bytes(token))

    def mine(self) -> "OwnerSlot":
        """Return the slot of the calling thread or task."""
        return self


class ThreadSlot(threading.local, OwnerSlot):
    """A slot for each thread."""


class TaskSlot(OwnerSlot):
    """A slot for each asyncio task. When a task ends, its slot goes with it, as a thread's does."""

    def __init__(self) -> None:
        self._slots: WeakKeyDictionary[asyncio.Task[Any], OwnerSlot] = WeakKeyDictionary()
        self._outside = OwnerSlot()

    def mine(self) -> OwnerSlot:
        """Return the slot of the running task."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs here
            task = None
        return self._outside if task is None else self._slots.setdefault(task, OwnerSlot())

    @property
    def hold(self) -> Ownership | None:
        """The hold of the running task."""
        return self.mine().hold

    @hold.setter
    def hold(self, hold: Ownership | None) -> None:
        self.mine().hold = hold


class TimedLease(Chore):
    """
    A lease that is extended until the lock's ``timeout``, and no further.

    No lease is longer than ``max_ttl``, the time for which a restarted node gives no vote. A longer timeout is covered
    by leases of ``OPTIONS["ttl"]``, one after another; the last lease ends with the timeout.

    Args:
        lease: The lease to extend; nobody else extends it.
        length: The timeout, in seconds from the start of the lease.
        rules: The rules of the lock's alias.
        flavour: How to wait.
    """

    def __init__(self, lease: Lease, length: float, rules: Rules, flavour: Flavour) -> None:
        ttl = piece(length, rules)
        self.lease, self._rules, self._flavour = lease, rules, flavour
        self._covered = lease.hold.clock() + lease.remaining() + rules.drift(ttl)
        self._next = self._covered - ttl * 2 / 3
        self.slack = ttl / 30  # so that it is extended with the leases, not after them as a chore
        self.since = self._covered - ttl
        self.until = self.since + length
        self._watchdog.watch(self)

    async def end_at(self, until: float) -> bool:
        """Change when the timeout ends; return whether a quorum agreed."""
        if self._flavour is Blocking:
            self.lease.hold.keeper.surroundings.blocking()
        # A shorter timeout applies before the nodes know of it, because their answer may never come.
        before, self.until = self.until, min(self.until, until)
        try:
            agreed = await self._extend(until, self._flavour)
        except ValueError:  # no lease can be that short, so nothing was asked for
            self.until = before
            raise
        if agreed:
            self.until = until
        for changed in (self.lease, self):  # the watchdog may have to look at them earlier now
            self._watchdog.watch(changed)
        return agreed

    async def _extend(self, until: float, flavour: Flavour) -> bool:
        now, keeper = self.lease.hold.clock(), self.lease.hold.keeper
        ttl = piece(until - now, self._rules)
        # Not by the lease: in a simulation, its watchdog blocks in the thread of an event loop as well.
        agreed = await flavour.call(keeper.extend, keeper.aextend, [self.lease], ttl) == 1
        self._next = now + ttl / (3 if agreed else 12)
        if agreed:
            self._covered = now + ttl
        return agreed

    async def _go_on(self, flavour: Flavour) -> None:
        """Extend the lease towards the end of the timeout."""
        self._next = math.inf
        with suppress(ValueError):  # too little is left for another lease: the present lease is the last
            await self._extend(self.until, flavour)

    @property
    def _watchdog(self) -> Dog:
        return self._flavour.watchdog(self.lease.hold.keeper.runtime)

    def due(self) -> float:
        """Return when to extend the lease next; infinity if it has ended or reaches the end of the timeout."""
        return math.inf if self.lease.reason or self._covered >= self.until - SLACK else self._next

    def valid(self) -> bool:
        """Return whether the lock is still held."""
        return self.lease.valid()

    def do(self) -> None:
        """Extend the lease towards the end of the timeout."""
        run(self._go_on(Blocking))

    async def ado(self) -> None:
        """Do what :meth:`do` does without blocking."""
        await self._go_on(Awaiting)


def piece(length: float, rules: Rules) -> float:
    """Return the length of the next lease for a lock that is to be held for *length* more seconds."""
    return length if length <= rules.max_ttl else rules.ttl


def as_bytes(token: str | bytes) -> bytes:
    """Return a token as redis-py keeps it."""
    return token.encode() if isinstance(token, str) else bytes(token)


def reference(token: bytes) -> str:
    """
    Return the ``ref`` that stands for a token that the holder chose or was given.

    The token is not used as the secret. Otherwise two callers that chose the same token would both hold the lock.
    """
    return f"token {blake2b(token, digest_size=8, person=b'redlock compat').hexdigest()}"
