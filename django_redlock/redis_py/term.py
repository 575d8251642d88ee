"""Hold a lock with a ``timeout`` for exactly that time (internal)."""

import math
from contextlib import suppress
from typing import Self

from ..compat.holds import Awaiting, Blocking, Flavour, run
from ..core.rules import Rules
from ..engine.lease import Lease
from ..engine.runtime import Dog

SLACK = 0.001  # seconds; a smaller difference is a rounding error, and nodes count in milliseconds


class Term:
    """
    The time for which a lock with a ``timeout`` is held.

    No lease is longer than ``max_ttl``, the time for which a restarted node gives no vote. A longer term is covered by
    leases of ``OPTIONS["ttl"]``, one after another; the last lease ends with the term.

    Args:
        lease: The lease to extend; nobody else extends it.
        length: The length of the term from the start of the lease, in seconds.
        rules: The rules of the lock's alias.
        flavour: How to wait.
    """

    def __init__(self, lease: Lease, length: float, rules: Rules, flavour: Flavour) -> None:
        ttl = piece(length, rules)
        self._lease, self._rules, self._flavour = lease, rules, flavour
        self._covered = lease.hold.clock() + lease.remaining() + rules.drift(ttl)
        self._next = self._covered - ttl * 2 / 3
        self.since = self._covered - ttl
        self.until = self.since + length
        self._watchdog.watch(self)

    async def end_at(self, until: float) -> bool:
        """Change when the term ends; return whether a quorum agreed."""
        # A shorter term applies before the nodes know of it, because their answer may never come.
        self.until = min(self.until, until)
        agreed = await self._extend(until, self._flavour)
        if agreed:
            self.until = until
        for changed in (self._lease, self):  # the watchdog may have to look at them earlier now
            self._watchdog.watch(changed)
        return agreed

    async def _extend(self, until: float, flavour: Flavour) -> bool:
        now = self._lease.hold.clock()
        ttl = piece(until - now, self._rules)
        agreed = await flavour.call(self._lease.extend, self._lease.aextend, ttl)
        self._next = now + ttl / (3 if agreed else 12)
        if agreed:
            self._covered = now + ttl
        return agreed

    async def _go_on(self, flavour: Flavour) -> int:
        """Extend the lease towards the end of the term."""
        self._next = math.inf
        with suppress(ValueError):  # too little is left for another lease: the present lease is the last
            await self._extend(self.until, flavour)
        return 1

    @property
    def _watchdog(self) -> Dog:
        return self._flavour.watchdog(self._lease.hold.keeper.runtime)

    @property
    def lease(self) -> Lease:
        """The lease that this term extends."""
        return self._lease

    # Used by the watchdog

    renewed = True

    @property
    def hold(self) -> Self:
        """The object that knows when the watchdog must look at the term: itself."""
        return self

    @property
    def keeper(self) -> Self:
        """The object that extends the lease: itself."""
        return self

    slack = 0.0

    def due(self) -> float:
        """Return when to extend the lease next; infinity if it has ended or reaches the end of the term."""
        return math.inf if self._lease.reason or self._covered >= self.until - SLACK else self._next

    def valid(self) -> bool:
        """Return whether the lock is still held."""
        return self._lease.valid()

    def extend(self, terms: object) -> int:
        """Extend the lease towards the end of the term."""
        return run(self._go_on(Blocking))

    async def aextend(self, terms: object) -> int:
        """Do what :meth:`extend` does without blocking."""
        return await self._go_on(Awaiting)


def piece(length: float, rules: Rules) -> float:
    """Return the length of the next lease for a lock that is to be held for *length* more seconds."""
    return length if length <= rules.max_ttl else rules.ttl
