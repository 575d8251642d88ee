"""
Background threads, and the means to wake them, in programs that are interrupted (internal).

A signal handler, or another thread, may raise an exception between any two bytecodes: KeyboardInterrupt, Celery's soft
time limit, another library's watchdog. ``threading.Condition``, ``Event`` and ``Thread.start()`` are written in
Python. An exception inside one of them leaves its lock held for ever, or a thread that never gets past its start.

Therefore no code here, and no code that uses it, enters a lock through Python code. The interpreter runs signal
handlers at the start of a function, after a call and when a loop begins again. It runs none inside a call into C, nor
between ``lock.__enter__`` and the body of its ``with`` block if the lock is a C lock. Three rules follow:

- A lock is a C lock, and is entered by ``with``.
- Shared state is changed by one call into C: ``append`` to a deque, ``pop`` of a key. If a change takes several calls,
  a background thread makes it, where no signal is handled, and the other threads send it messages.
- A thread that finds a change left half done by another thread finishes it or throws it away.
"""

import logging
import sys
import threading
import time
from _thread import start_new_thread
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from .clock import steady
from .gevent import real_ident, real_lock, thread, uses_gevent

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


class Event(threading.Event):
    """A :class:`threading.Event` that keeps working for other threads after an exception in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._on = False
        self._sleepers: deque[Any] = deque()  # one lock for each sleeping thread, which waits for it

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._on

    def set(self) -> None:
        """Set the event, and wake all waiting threads."""
        self._on = True
        for sleeper in self._sleepers.copy():  # each stays until it has woken, so this loop may run again
            with suppress(RuntimeError):
                sleeper.release()

    def clear(self) -> None:
        """Clear the event."""
        self._on = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, for at most *timeout* seconds; return whether it is set."""
        if self._on:
            return True
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        try:
            woken = self._on or sleeper.acquire(
                True, -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
            )
        finally:
            with suppress(ValueError):
                self._sleepers.remove(sleeper)
        return woken or self._on


def new_event() -> threading.Event:
    """Return an event for threads, or for greenlets where gevent has replaced the threads."""
    return threading.Event() if uses_gevent() else Event()


exiting = sys.is_finalizing
"""Returns whether the interpreter is shutting down: threads no longer run, and nothing may wait for one."""


def start(target: Callable[[], object], name: str) -> None:
    """
    Start a daemon thread. If an exception arrives meanwhile, the thread has either started or not, nothing in between.

    Raises:
        RuntimeError: There are too many threads, or the interpreter is about to end.
    """
    _start(threading.Thread(target=target, name=name, daemon=True))


def _start(new: Any) -> None:
    if exiting():
        raise RuntimeError("the interpreter is about to end")
    if uses_gevent():
        new.start()
    else:
        # Thread.start() waits for the thread, by a condition that an exception would leave locked. So it is called in a
        # thread where no signal is handled.
        begun = threading.Lock()
        begun.acquire()
        start_new_thread(_start_or_run, (new, begun))
        if sys.version_info < (3, 12):  # see celery/execution.py
            begun.acquire(True, 1)


def _start_or_run(new: threading.Thread, begun: Any) -> None:
    begun.release()
    try:
        new.start()
    except RuntimeError:  # the system allows no more threads than this one
        new.run()


def call_soon(loop: AbstractEventLoop, function: Callable[..., object], *args: Any) -> None:
    """Have an event loop call a function, from any thread; if the loop is closed, nobody wants the call any more."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


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
        self._running = real_lock() if real else threading.Lock()  # held by the thread
        self._ident = 0
        self._present = real_lock()  # held by this run of the thread, and never by another run

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        return bool(self._running.locked())

    @property
    def here(self) -> bool:
        """Whether the calling thread is this background thread."""
        return self.running and self._ident == real_ident()

    def start(self) -> str:
        """
        Start the thread if it is not running; call this after adding work.

        If an exception interrupts the caller, the next caller starts the thread. Return why there is no thread, or "".
        """
        if self._running.locked() or exiting():
            return ""
        try:
            new = thread if self._real else partial(threading.Thread, daemon=True)
            _start(new(target=self._run, name=self._name))
        except RuntimeError as error:  # there are too many threads, or the interpreter is about to end
            return str(error)
        return ""

    def join(self, seconds: float) -> None:
        """Wait for at most *seconds* until the thread, which has been asked to end, has ended."""
        present, until = self._present, steady() + seconds
        if not self.running or self.here or exiting():
            return
        if not uses_gevent():
            present.acquire(True, seconds)  # nothing else wants this lock, so it need not be released
        while uses_gevent() and self.running and steady() < until:
            time.sleep(0.01)  # the other greenlets go on

    def _run(self) -> None:
        while self._busy() and self._running.acquire(False):  # otherwise another thread was quicker
            try:
                self._present, self._ident = real_lock(), real_ident()
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
