"""The clocks, pauses and watchdogs that the locks of an alias use (internal)."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from ..core.protocol import Instant
from ..nodes.clock import Clock, steady
from .watchdog import Tended, loop_watchdog, watchdog


class Dog(Protocol):
    """A watchdog that looks after leases: the thread of a process, the timers of an event loop, or a simulation."""

    def watch(self, lease: Tended, /) -> None:
        """Look after *lease* until it ends."""

    def forget(self, lease: Tended, /) -> None:
        """Stop looking after *lease*."""

    def tends(self, keeper: Any, /) -> bool:
        """Return whether this watchdog looks after leases of *keeper*."""

    def apart(self, function: Callable[[], object], /) -> bool:
        """If the calling thread is the watchdog's own, let another one call *function*; return whether it is."""

    def rest(self) -> None:
        """End what runs in the background, unless there is a lease to look after."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """
    The clocks, pauses and watchdogs that a manager and its leases use; a simulation passes others.

    Attributes:
        clock: Returns seconds on a steady clock, which leases are measured by.
        wall: Returns the time of day, in seconds since the epoch.
        random: Returns a number from 0 to 1, for the pauses between attempts.
        sleep: Blocks the calling thread for a number of seconds.
        asleep: Suspends an asyncio task for a number of seconds.
        watchdog: Looks after the leases of threads.
        loop_watchdog: Returns what looks after the leases of the running event loop.
    """

    clock: Clock = steady
    wall: Callable[[], float] = time.time
    random: Callable[[], float] = random.random
    sleep: Callable[[float], None] = time.sleep
    asleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep
    watchdog: Dog = watchdog
    loop_watchdog: Callable[[], Dog] = loop_watchdog

    def instant(self) -> Instant:
        """Read the clocks."""
        return Instant(self.clock(), int(self.wall() * 1_000_000))
