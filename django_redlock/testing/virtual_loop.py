"""Run an event loop in virtual time (internal)."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol
from unittest.mock import patch

# Seconds that one turn of the loop takes. With zero, a timer that is early by a rounding error would be set and fire
# again for ever.
TURN = 1e-6


class Time(Protocol):
    """The part of a :class:`~django_redlock.testing.Simulation` that is needed here."""

    def clock(self) -> float:
        """Return the time, in seconds since an arbitrary moment."""

    def idle(self, seconds: float | None) -> bool:
        """Advance to the next event, by at most the given seconds; return False if there is none and no limit."""


@contextmanager
def virtual_time(loop: asyncio.AbstractEventLoop, simulated: Time) -> Iterator[None]:
    """
    In the ``with`` block, let the timers of *loop* follow a simulated clock.

    Whenever the loop has nothing to do, it jumps to its next timer. While a thread that the loop started is at work,
    time passes at its real speed, because nobody knows how long that thread needs. A loop that is not written in Python
    keeps the real time.
    """
    selector = getattr(loop, "_selector", None)
    if selector is None:
        yield
        return
    with ExitStack() as stack:
        virtual = VirtualLoop(loop, selector.select, simulated)
        stack.enter_context(patch.object(selector, "select", virtual.select))
        stack.enter_context(patch.object(loop, "time", virtual.time))
        for method in ("run_in_executor", "shutdown_default_executor"):
            stack.enter_context(patch.object(loop, method, virtual.at_work(getattr(loop, method))))
        yield


class VirtualLoop:
    """
    Replace the clock of an event loop, and the selector with which the loop waits.

    Args:
        loop: The loop. Its clock continues from its present time, so the existing timers stay as they are.
        select: The method of the loop's selector.
        simulated: The simulated time.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, select: Callable[[float | None], Any], simulated: Time) -> None:
        self._loop = loop
        self._select = select
        self._simulated = simulated
        self._ahead = loop.time() - simulated.clock()
        self._threads = 0  # threads at work for the loop

    def time(self) -> float:
        """Return the time of the loop."""
        return self._simulated.clock() + self._ahead

    def select(self, timeout: float | None = None) -> Any:
        """Return the sockets that are ready; if there are none, let time pass instead of waiting."""
        ready = self._select(0)
        if ready or (timeout is not None and timeout <= 0):
            self._simulated.idle(TURN)
            return ready
        if not self._threads:
            passed = self._simulated.idle(None if timeout is None else timeout + TURN)
            return [] if passed else self._select(None)
        began = time.monotonic()
        ready = self._select(timeout)
        self._simulated.idle(time.monotonic() - began if ready or timeout is None else timeout)
        return ready

    def at_work(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap *start*, a method of the loop that starts a thread, so that time is real until the thread is done."""

        def started(*args: Any, **options: Any) -> asyncio.Future[Any]:
            future: asyncio.Future[Any] = asyncio.ensure_future(start(*args, **options), loop=self._loop)
            self._threads += 1
            future.add_done_callback(self._done)
            return future

        return started

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._threads -= 1
