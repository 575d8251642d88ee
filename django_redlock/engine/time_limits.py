"""Time limits in an event loop, with two timers for all of them (internal)."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from ..nodes.clock import LATE, OWED, SLICES, Clock, crowded, is_late

T = TypeVar("T")

AGAIN = 0.1  # seconds after which the second timer follows the first
EARLY = 0.001  # seconds by which a timer may come early, because event loops round times
NEVER = float("inf")


class TimeLimits(Generic[T]):
    """
    Call a function for each thing whose time limit has passed.

    A limit counts only the time for which the event loop was served, as :class:`~django_redlock.nodes.clock.Patience`
    does for threads. So a timer goes off several times within a limit. Where it is late, or the machine has too few
    processors, the time since the last time is counted apart.

    Nearly everything is discarded long before its limit, which sets and cancels no timer. The second timer is needed
    because an exception from a signal handler may end a callback of an event loop at any line; asyncio logs the
    exception and goes on.

    Args:
        passed: The function to call with a thing, and with whether this event loop was late; returns whether the thing
            is over. Otherwise, or if an exception ended the call, it is called again.
        clock: The clock that measures the leases.
    """

    def __init__(self, passed: Callable[[T, bool], bool], clock: Clock) -> None:
        self._passed = passed
        self._clock = clock
        self._limits: dict[T, tuple[float, float]] = {}  # what ``_served`` and ``_owed`` are then
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self._looked = 0.0
        self._wake_at = NEVER
        self._part = NEVER  # seconds between two looks
        self._served = 0.0  # seconds for which the event loop was served
        self._owed = 0.0  # seconds for which it was to be served, but was late
        self._late_at = -NEVER

    def add(self, thing: T, seconds: float) -> None:
        """Call the function with *thing* after *seconds* seconds, unless the thing is discarded before."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._wake_at == NEVER:
            self._looked = now
        since = now - self._looked
        self._limits[thing] = self._served + since + seconds, self._owed + max(seconds, OWED)
        part = seconds / SLICES
        if part < self._part:
            self._part = part
        if now + part < self._wake_at:
            self._set_timers(loop, now + part)

    def discard(self, thing: T) -> None:
        """Forget *thing*."""
        self._limits.pop(thing, None)

    def late_within(self, seconds: float) -> bool:
        """Return whether the event loop has been late within the last *seconds* seconds, as far as is known."""
        now = asyncio.get_running_loop().time()
        return now - self._late_at < seconds or now > self._wake_at + LATE

    def rest(self) -> None:
        """Drop the timers if they are not needed."""
        if not self._limits:
            self._wake_at = self._part = NEVER
            for timer in self._timers:
                timer.cancel()

    def _set_timers(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        before = self._timers
        self._timers = (loop.call_at(when, self._look), loop.call_at(when + AGAIN, self._look))
        self._wake_at = when
        for timer in before:
            timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        asked, took = self._wake_at - self._looked, now - self._looked
        self._looked = now
        self._set_timers(loop, now + AGAIN)  # in case an exception ends this call
        late = is_late(asked, took)
        if late:
            self._late_at = now
        if late or crowded(self._clock):
            self._owed += asked
        else:
            self._served += took
        for thing, (served, owed) in list(self._limits.items()):
            silent = served <= self._served + EARLY
            if (silent or owed <= self._owed) and self._passed(thing, not silent):
                self.discard(thing)
        if self._limits:
            first = min(self._limits.values())[0] - self._served
            self._set_timers(loop, now + max(EARLY, min(self._part, first)))
        else:
            self.rest()
