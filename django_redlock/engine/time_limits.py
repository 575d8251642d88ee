"""Time limits in an event loop, with two timers for all of them (internal)."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

AGAIN = 0.1  # seconds after which the second timer follows the first
EARLY = 0.001  # seconds by which a timer may come early, because event loops round times
NEVER = float("inf")


class TimeLimits(Generic[T]):
    """
    Call a function for each thing whose time limit has passed.

    Nearly everything is discarded long before its limit, which sets and cancels no timer. The second timer is needed
    because an exception from a signal handler may end a callback of an event loop at any line; asyncio logs the
    exception and goes on.

    Args:
        passed: The function to call with a thing; it is called again if an exception ended the call.
    """

    def __init__(self, passed: Callable[[T], object]) -> None:
        self._passed = passed
        self._limits: dict[T, float] = {}
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self._wake_at = NEVER

    def add(self, thing: T, seconds: float) -> None:
        """Call the function with *thing* after *seconds* seconds, unless the thing is discarded before."""
        loop = asyncio.get_running_loop()
        when = self._limits[thing] = loop.time() + seconds
        if when < self._wake_at:
            self._set_timers(loop, when)

    def discard(self, thing: T) -> None:
        """Forget *thing*."""
        self._limits.pop(thing, None)

    def rest(self) -> None:
        """Drop the timers if they are not needed."""
        if not self._limits:
            self._wake_at = NEVER
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
        self._set_timers(loop, now + AGAIN)  # in case an exception ends this call
        for thing, when in list(self._limits.items()):
            if when <= now + EARLY:
                self._passed(thing)
                self.discard(thing)
        if self._limits:
            self._set_timers(loop, min(self._limits.values()))
        else:
            self.rest()
