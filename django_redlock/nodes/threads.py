"""
Threads in the background and what wakes them, in programs that are interrupted.

A signal handler, or another thread, may raise an exception between any two bytecodes: KeyboardInterrupt, Celery's soft
time limit, a watchdog of somebody else's. ``threading.Condition``, ``Event`` and ``Thread.start()`` are written in
Python. An exception inside one of them leaves its lock held for ever, or a thread that never gets past its start.

So nothing here, and nothing that uses it, enters a lock through Python code. The interpreter runs signal handlers at
the start of a function, after a call and when a loop begins again, but not inside a call into C, nor between
``lock.__enter__`` and the body of its ``with`` block if the lock is C's. Three rules follow:

- A lock is C's, and is entered by ``with``.
- What changes shared state is one call into C: ``append`` to a deque, ``pop`` of a key. If it takes several, a thread
  in the background does it, where no signal is handled, and the others send it messages.
- Whoever finds what another has left half done finishes it or throws it away.
"""

import logging
import sys
import threading
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .gevent import real_ident, real_lock, thread, uses_gevent

log = logging.getLogger("django_redlock")


class Bell:
    """
    Wakes one thread that sleeps. If it is rung while the thread is awake, the thread does not sleep the next time.

    Args:
        lock: A new C lock, which decides whether a thread of the system's or a greenlet sleeps.
    """

    def __init__(self, lock: Any) -> None:
        self._silence = lock  # held until it is rung
        self._silence.acquire()

    def ring(self) -> None:
        """Wake the thread; from any thread, and never blocks."""
        with suppress(RuntimeError):  # it was rung already
            self._silence.release()

    def wait(self, seconds: float) -> bool:
        """Sleep for at most *seconds*; returns whether it was rung."""
        return bool(self._silence.acquire(True, min(max(0.0, seconds), threading.TIMEOUT_MAX)))


class Event(threading.Event):
    """A :class:`threading.Event` that an exception in one thread does not spoil for the others."""

    def __init__(self) -> None:
        super().__init__()
        self._on = False
        self._sleepers: deque[Any] = deque()  # a lock for each, which the sleeper waits for

    def is_set(self) -> bool:
        """Return whether it is set."""
        return self._on

    def set(self) -> None:
        """Set it, and wake all waiting threads."""
        self._on = True
        for sleeper in self._sleepers.copy():  # each stays until it has woken, so that this may be done again
            with suppress(RuntimeError):
                sleeper.release()

    def clear(self) -> None:
        """Clear it."""
        self._on = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, for at most *timeout* seconds; returns whether it is."""
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
    """Return an event for threads, or for greenlets where gevent has replaced those."""
    return threading.Event() if uses_gevent() else Event()


def exiting() -> bool:
    """Return whether the interpreter is shutting down: threads no longer run, and nothing may wait for one."""
    return sys.is_finalizing()


def start(target: Callable[[], object], name: str) -> None:
    """
    Start a daemon thread. An exception that arrives meanwhile finds it started or not, and nothing in between.

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
        # Thread.start() waits for the thread, by a condition that an exception would leave locked. So does this one,
        # but in a thread where no signal is handled.
        begun = threading.Lock()
        begun.acquire()
        start_new_thread(_start_or_run, (new, begun))
        if sys.version_info < (3, 12):  # see celery/interrupt.py
            begun.acquire(True, 1)


def _start_or_run(new: threading.Thread, begun: Any) -> None:
    begun.release()
    try:
        new.start()
    except RuntimeError:  # the system allows no thread more than this one
        new.run()


STARTS = frozenset({_start.__code__, threading.Thread.start.__code__})
"""The functions that start threads."""


class Background:
    """
    A daemon thread that is there while it has something to do.

    Args:
        work: Does it; returns when there has been nothing to do for long enough.
        busy: Returns whether there is something to do.
        name: What to call the thread.
        real: Whether it must be a thread of the system's also under gevent.
    """

    daemon = True
    """Always true: the process may end while the thread is at work."""

    def __init__(self, work: Callable[[], object], busy: Callable[[], object], name: str, *, real: bool = False):
        self._work = work
        self._busy = busy
        self._name = name
        self._real = real
        self._running = real_lock() if real else threading.Lock()  # held by the thread
        self._ident = 0
        self._present = real_lock()  # held by this run of the thread, and never by another one

    @property
    def running(self) -> bool:
        """Whether the thread is at work."""
        return bool(self._running.locked())

    @property
    def here(self) -> bool:
        """Whether the calling thread is this one."""
        return self.running and self._ident == real_ident()

    def start(self) -> str:
        """
        Start the thread if there is work and it is not running; called after work was added.

        If an exception interrupts the caller, the next caller does it. Returns why there is no thread, or "".
        """
        if self._running.locked() or exiting():
            return ""
        try:
            _start(thread(self._run, self._name) if self._real else self._new_thread())
        except RuntimeError as error:  # there are too many, or the interpreter is about to end
            return str(error)
        return ""

    def join(self, seconds: float) -> None:
        """Wait until the thread, which has been asked to end, has ended, for at most *seconds*."""
        present, until = self._present, time.monotonic() + seconds
        if not self.running or self.here or exiting():
            return
        if not uses_gevent():
            present.acquire(True, seconds)  # nothing else wants it, so it need not be released
        while uses_gevent() and self.running and time.monotonic() < until:
            time.sleep(0.01)  # the other greenlets go on

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name=self._name, daemon=True)

    def _run(self) -> None:
        while self._busy() and self._running.acquire(False):  # otherwise another thread was quicker
            try:
                self._present, self._ident = real_lock(), real_ident()
                with self._present:
                    self._work()
            except BaseException:  # another thread may raise anything here; the next work must be done all the same
                log.exception("%s failed", self._name)
            finally:
                self._running.release()
            # Another thread may have added work before the lock was free, and have relied on this one.


class Errands:
    """
    Runs callbacks, which may block, in threads of its own, one after another in each.

    Args:
        name: What to call the threads.
        most: How many threads there are at most; a function that blocks for ever keeps one of them.
    """

    def __init__(self, name: str, most: int = 16) -> None:
        self._name = name
        self._most = most
        self.start_over()

    def start_over(self) -> None:
        """Forget all; in a forked child."""
        self._waiting: deque[Callable[[], object]] = deque()
        # In a ring, because one that was just started may not be running yet.
        self._threads = deque(
            Background(self._work, self._waiting.__len__, self._name, real=True) for _ in range(self._most)
        )

    def run(self, function: Callable[[], object]) -> None:
        """Have *function* called soon by another thread, or by this one if no thread can be started."""
        self._waiting.append(function)
        if self._recruit():
            self._work()

    def _recruit(self) -> str:
        """Start one more thread unless there are enough; returns why there is none at all, or ""."""
        self._threads.rotate(-1)
        free = next((one for one in self._threads.copy() if not one.running), None)
        return free.start() if free else ""

    def _work(self) -> None:
        with suppress(IndexError):
            for function in iter(self._waiting.popleft, None):
                if self._waiting:  # this one may block
                    self._recruit()
                try:
                    function()
                except BaseException:
                    log.exception("%s failed", self._name)
