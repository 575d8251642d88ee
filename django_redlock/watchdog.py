"""
Keep held leases alive, and tell their holders when they ended.

One thread per process and one task per event loop look after all leases, whatever their number. Lateness is
normal (a busy interpreter delays any thread), so nothing here decides whether a lease is valid: that, a lease asks
its clock. A lease that its holder dropped without a release is no longer looked after and ends by itself.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from .nodes.gather import steady

LINGER = 5.0  # seconds for which the thread waits for a next lease before it ends
TICK = 1.0  # seconds between two looks at most, so that a new lease seldom has to wake the thread

log = logging.getLogger("django_redlock")


class Tended(Protocol):
    """What the watchdog looks after."""

    def due(self) -> float:
        """Return when to look at it next, on the steady clock; infinity when it ended."""

    def tend(self) -> None:
        """Extend it, or notice its end; may block for one node timeout."""

    async def atend(self) -> None:
        """The same without blocking."""


class Watchdog:
    """
    One thread that looks after all leases of blocking code in this process.

    Args:
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._clock = clock
        self._start_over()

    def _start_over(self) -> None:
        self._leases: WeakSet[Tended] = WeakSet()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._wake_at = 0.0

    def watch(self, lease: Tended) -> None:
        """Look after *lease* until it ends; starts the thread if there is none."""
        with self._changed:
            self._leases.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="django_redlock watchdog", daemon=True)
                self._thread.start()
            elif lease.due() < self._wake_at:
                self._changed.notify()

    def forget(self, lease: Tended) -> None:
        """Stop looking after *lease*."""
        with self._changed:
            self._leases.discard(lease)

    def _run(self) -> None:
        while (leases := self._sleep()) is not None:
            for lease in leases:
                if lease.due() <= self._clock():
                    tend(lease)

    def _sleep(self) -> list[Tended] | None:
        """Sleep until a lease is due; returns all leases, or None when there has been none for a while."""
        with self._changed:
            if not self._leases:
                self._wake_at = float("inf")
                self._changed.wait(LINGER)
                if not self._leases:
                    self._thread = None
                    return None
            now = self._clock()
            self._wake_at = min([now + TICK, *(lease.due() for lease in self._leases)])
            self._changed.wait(max(0.0, self._wake_at - now))
            return list(self._leases)


def tend(lease: Tended) -> None:
    """Tend one lease; whatever goes wrong with it must not end the watch over the others."""
    try:
        lease.tend()
    except Exception:
        log.exception("tending %r failed", lease)


class AsyncWatchdog:
    """One task that looks after all leases of an event loop; it ends when there are none."""

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._clock = clock
        self._leases: WeakSet[Tended] = WeakSet()
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._wake_at = 0.0

    def watch(self, lease: Tended) -> None:
        """Look after *lease* until it ends."""
        self._leases.add(lease)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="django_redlock watchdog")
        elif lease.due() < self._wake_at:
            self._changed.set()

    def forget(self, lease: Tended) -> None:
        """Stop looking after *lease*; the task ends with the last."""
        self._leases.discard(lease)
        if not self._leases and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while self._leases:
            await self._sleep()
            due = [lease for lease in self._leases if lease.due() <= self._clock()]
            for result in await asyncio.gather(*(lease.atend() for lease in due), return_exceptions=True):
                if isinstance(result, Exception):
                    log.error("tending a lease failed", exc_info=result)

    async def _sleep(self) -> None:
        self._changed.clear()
        now = self._clock()
        self._wake_at = min([now + TICK, *(lease.due() for lease in self._leases)])
        try:
            async with asyncio.timeout(max(0.0, self._wake_at - now)):
                await self._changed.wait()
        except TimeoutError:
            pass


watchdog = Watchdog()
"""The one of this process."""

_per_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncWatchdog] = WeakKeyDictionary()


def loop_watchdog() -> AsyncWatchdog:
    """Return the one of the running event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _per_loop:
        _per_loop[loop] = AsyncWatchdog()
    return _per_loop[loop]


if hasattr(os, "register_at_fork"):
    # The thread did not survive, and neither leases nor locks of the parent are ours.
    os.register_at_fork(after_in_child=watchdog._start_over)
