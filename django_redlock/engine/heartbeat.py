"""
Show on the nodes that this process lives, for as long as it holds locks (internal).

A process that holds locks for longer than a moment keeps one key on every node, which the watchdog renews and which
ends after the process does. So an operator who looks at held locks sees which of them nobody will release, and does not
have to guess from a host and a process id. Nothing else depends on it: a lock is held by its own keys alone.

The time that the key has left shows when the process was last heard. The key outlasts the longest lease: while
it is there, the process may be paused and hold a valid lease. When it is gone, every lease of the process has ended.

The key is written by the request that takes a lock, under a name that no lock can have, so every kind of node can
keep it.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Any, Protocol

from ..core.names import heartbeat
from ..core.owner import NONCE_SIZE, Owner, encode
from ..core.replies import POSITIVE
from ..core.requests import Acquire
from ..core.round import Round, count
from .drops import note_drops

FIRST = 2.0  # seconds that a process holds a lock before the first heartbeat, so that short holds cost nothing
EVERY = 3.0  # seconds
LIFE = 10.0  # seconds for which it counts as alive after a heartbeat
SILENCE = 6.0  # seconds after which the process of a lock should have sent a heartbeat
NEVER = float("inf")

_KEY = os.urandom(16)  # so that no other process can write it


class Manager(Protocol):
    """The part of a :class:`~django_redlock.engine.manager.LockManager` that a heartbeat uses."""

    nodes: tuple[Any, ...]
    rules: Any

    def ask(self, round: Round) -> None:
        """Carry out one round."""

    async def aask(self, round: Round) -> None:
        """Carry out one round in the running event loop."""


class Dog(Protocol):
    """The part of a watchdog that a heartbeat uses."""

    def watch(self, lease: Any) -> None:
        """Look after it."""

    def forget(self, lease: Any) -> None:
        """Look after it no longer."""

    def tends(self, keeper: Any) -> bool:
        """Return whether it looks after leases of *keeper*."""


class ProcessHeartbeat:
    """
    The heartbeat of one process on the nodes of one alias; to the watchdog it is one more lease.

    Args:
        manager: The manager whose nodes store the heartbeat.
        owner: The process.
        dog: The watchdog that looks after the leases.
        clock: Returns seconds on a steady clock.
        dropped: When each lease ends that was dropped without a release. The nodes keep its lock until then, so the
            heartbeat goes on.
    """

    renewed = True
    slack = 0.0

    def __init__(
        self,
        manager: Manager,
        owner: Owner,
        dog: Dog,
        clock: Callable[[], float],
        dropped: Iterable[float] = (),
    ):
        self._manager = manager
        self._owner = owner
        self._dropped = dropped
        self._dog = dog
        self._clock = clock
        self._mutex = threading.Lock()
        # The same for all event loops and threads of a process: they write the same key, and each of them keeps it
        # alive.
        self._nonce = blake2b(owner.process.encode(), key=_KEY, digest_size=NONCE_SIZE // 2).hexdigest()
        self._slugs = (heartbeat(owner.process),)
        self._due = NEVER

    @property
    def hold(self) -> "ProcessHeartbeat":
        """When the watchdog looks at it: it knows that itself."""
        return self

    @property
    def keeper(self) -> "ProcessHeartbeat":
        """Who renews it: itself."""
        return self

    def join(self) -> None:
        """Send heartbeats from now on; called when the process has taken a lock."""
        if self._due is NEVER:
            with self._mutex:
                if self._due is NEVER:
                    try:
                        self._due = self._clock() + FIRST
                        self._dog.watch(self)
                    except BaseException:  # the next lock tries again
                        self._due = NEVER
                        raise

    def leave(self) -> None:
        """Stop, because the connections are closed, unless locks are held; the next lock begins anew."""
        if not self.valid():
            self._dog.forget(self)

    def due(self) -> float:
        """Return when the next heartbeat is due."""
        return self._due

    def valid(self) -> bool:
        """Return whether locks are held; if not, it ends."""
        note_drops()
        with self._mutex:
            if not self._dog.tends(self._manager) and max(self._dropped, default=0.0) <= self._clock():
                due, self._due = self._due, NEVER
                if self._dog.tends(self._manager):
                    self._due = due  # meanwhile a lock was taken by a thread that saw this going on
        return self._due is not NEVER

    def extend(self, leases: Any) -> int:
        """Send a heartbeat, blocking for at most one node timeout."""
        round = self._beat()
        self._manager.ask(round)
        return round.count(*POSITIVE)

    async def aextend(self, leases: Any) -> int:
        """Send a heartbeat without blocking."""
        round = self._beat()
        await self._manager.aask(round)
        return round.count(*POSITIVE)

    def _beat(self) -> Round:
        with self._mutex:
            if self._due is not NEVER:
                self._due = self._clock() + EVERY
        rules = self._manager.rules
        # Token 0 is never accepted, so no fence is kept; the key itself is what counts.
        life = rules.guard + LIFE
        value = encode(self._nonce, self._owner._replace(ttl=life))
        request = Acquire(self._slugs, self._nonce, value, life, 0, life, 0.0)
        everywhere = dict.fromkeys(range(len(self._manager.nodes)), request)
        timeout = rules.timeout(rules.ttl)
        return Round(everywhere, lambda replies: count(replies, *POSITIVE) >= rules.needed, timeout, rules.needed)


def this_process(host: str, process: str, since: float) -> Owner:
    """Return the description of this process: the program's name, without its arguments, which may be secret."""
    program = os.path.basename(sys.argv[0]) if sys.argv else ""
    return Owner(host, os.getpid(), "process", program, since=since, ttl=LIFE, process=process)
