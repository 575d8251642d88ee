"""Threads that work in the background while there is something to do, and what wakes them (internal)."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from .threads import exiting, start_made, threads

log = logging.getLogger("django_redlock")

ERRAND_THREADS = 16  # at most; a function that blocks for ever keeps one of them


class Bell:
    """
    Wake one sleeping thread. If the bell rings while the thread is awake, the thread does not sleep the next time.

    Args:
        lock: A new C lock, which decides whether a thread of the operating system or a greenlet sleeps.
    """

    def __init__(self, lock: Any) -> None:
        self._silence = lock  # held until the bell rings
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread; any thread may call this, and it never blocks."""
        with suppress(RuntimeError):  # the bell has rung already
            self._silence.release()

    def wait(self, seconds: float) -> bool:
        """Sleep for at most *seconds*; return whether the bell rang."""
        return bool(self._silence.acquire(True, min(max(0.0, seconds), threading.TIMEOUT_MAX)))


class Background:
    """
    A daemon thread that exists while it has something to do.

    Args:
        work: Does the work; return when there has been nothing to do for long enough.
        busy: Returns whether there is something to do.
        name: The name of the thread.
        real: Whether it must be a thread of the operating system even under gevent.
    """

    def __init__(self, work: Callable[[], object], busy: Callable[[], object], name: str, *, real: bool = False):
        self._work = work
        self._busy = busy
        self._name = name
        self._real = real
        self._running = threads().system_lock() if real else threading.Lock()  # held by the thread
        self._ident = 0
        self._present = threads().system_lock()  # held by this run of the thread, and never by another run

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        return bool(self._running.locked())

    @property
    def here(self) -> bool:
        """Whether the calling thread is this background thread."""
        return self.running and self._ident == threads().system_ident()

    def start(self) -> str:
        """
        Start the thread if it is not running; call this after adding work.

        If an exception interrupts the caller, the next caller starts the thread. Return why there is no thread, or "".
        """
        if self._running.locked() or exiting():
            return ""
        try:
            new = threads().system_thread if self._real else partial(threading.Thread, daemon=True)
            start_made(new(target=self._run, name=self._name))
        except RuntimeError as error:  # there are too many threads, or the interpreter is about to end
            return str(error)
        return ""

    def join(self, seconds: float) -> None:
        """Wait for at most *seconds* until the thread, which has been asked to end, has ended."""
        present = self._present
        if self.running and not self.here and not exiting():
            threads().join(present, lambda: self.running, seconds)

    def _run(self) -> None:
        while self._busy() and self._running.acquire(False):  # otherwise another thread was quicker
            try:
                self._present, self._ident = threads().system_lock(), threads().system_ident()
                with self._present:
                    self._work()
            except BaseException:  # another thread may raise anything here; the next work must be done nevertheless
                log.exception("%s failed", self._name)
            finally:
                self._running.release()
            # Another thread may have added work before the lock was free, and relied on this thread to do it.


class Errands:
    """
    Run callbacks, which may block, in separate threads, one after another in each.

    Args:
        name: The name of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.start_over()

    def start_over(self) -> None:
        """Forget all callbacks and threads, in a forked child."""
        self._waiting: deque[Callable[[], object]] = deque()
        # They form a ring, because a thread that was just started may not be running yet.
        self._threads = deque(
            Background(self._work, self._waiting.__len__, self._name, real=True) for _ in range(ERRAND_THREADS)
        )

    def run(self, function: Callable[[], object]) -> None:
        """Call *function* soon in another thread, or in this thread if no other can be started."""
        self._waiting.append(function)
        if self._recruit():
            self._work()

    def _recruit(self) -> str:
        """Start one more thread unless there are enough; return why none can be started, or ""."""
        self._threads.rotate(-1)
        free = next((one for one in self._threads.copy() if not one.running), None)
        return free.start() if free else ""

    def _work(self) -> None:
        with suppress(IndexError):
            for function in iter(self._waiting.popleft, None):
                if self._waiting:  # this function may block
                    self._recruit()
                try:
                    function()
                except BaseException:
                    log.exception("%s failed", self._name)
