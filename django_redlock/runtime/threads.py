"""
How this process makes threads, events and locks, in programs that are interrupted (internal).

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

import sys
import threading
import time
from _thread import start_new_thread
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from . import gevent
from .clock import steady

exiting = sys.is_finalizing
"""Returns whether the interpreter is shutting down: threads no longer run, and nothing may wait for one."""


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


class Threads:
    """
    Python's own threads, and what serves between them.

    A *thread* is what Python's ``threading`` makes; a *system thread* is one of the operating system. They differ only
    where gevent has replaced Python's threads with greenlets.
    """

    greenlets = False
    """Whether threads are greenlets: they take turns, and a connection belongs to the system thread that opened it."""

    def event(self) -> threading.Event:
        """Return an event for threads."""
        return Event()

    def start(self, new: threading.Thread) -> None:
        """Start a thread; if an exception arrives meanwhile, it has either started or not, nothing in between."""
        # Thread.start() waits for the thread, by a condition that an exception would leave locked. So it is called in a
        # thread where no signal is handled.
        begun = threading.Lock()
        begun.acquire()
        start_new_thread(_start_or_run, (new, begun))
        if sys.version_info < (3, 12):  # see celery/execution.py
            begun.acquire(True, 1)

    def join(self, present: Any, running: Callable[[], bool], seconds: float) -> None:
        """Wait for at most *seconds* until a background thread has ended, which holds the lock *present* meanwhile."""
        present.acquire(True, seconds)  # nothing else wants this lock, so it need not be released

    def home(self) -> gevent.Home | None:
        """Return the system thread to which connections belong that are opened here; None if all threads share them."""
        return None

    def system_ident(self) -> int:
        """Return the identifier of the running system thread."""
        return threading.get_ident()

    def system_lock(self) -> Any:
        """Return a lock for system threads."""
        return threading.Lock()

    def system_thread(self, target: Callable[[], None], name: str) -> Any:
        """Return a daemon system thread, to be started by :meth:`start`."""
        return threading.Thread(target=target, name=name, daemon=True)


class Greenlets(Threads):
    """gevent's greenlets in place of Python's threads; see :mod:`.gevent`."""

    greenlets = True

    def event(self) -> threading.Event:
        """Return an event for greenlets; gevent has replaced the locks in it, too."""
        return threading.Event()

    def start(self, new: threading.Thread) -> None:
        """Start a greenlet or a system thread."""
        new.start()

    def join(self, present: Any, running: Callable[[], bool], seconds: float) -> None:
        """Wait for at most *seconds* while the other greenlets go on."""
        until = steady() + seconds
        while running() and steady() < until:
            time.sleep(0.01)

    def home(self) -> gevent.Home | None:
        """Return the running system thread, in whose event loop its connections wait."""
        return gevent.home()

    def system_ident(self) -> int:
        """Return the identifier of the running system thread."""
        ident: int = gevent.original("_thread", "get_ident")()
        return ident

    def system_lock(self) -> Any:
        """Return a lock for system threads."""
        return gevent.original("_thread", "allocate_lock")()

    def system_thread(self, target: Callable[[], None], name: str) -> Any:
        """Return a system thread, to be started by :meth:`start`."""
        return gevent.SystemThread(target, name)


THREADS, GREENLETS = Threads(), Greenlets()


def threads() -> Threads:
    """Return how this process makes threads now: a server may import a project before gevent replaces its threads."""
    monkey: Any = sys.modules.get("gevent.monkey")
    return GREENLETS if monkey is not None and monkey.is_module_patched("threading") else THREADS


def new_event() -> threading.Event:
    """Return an event for threads, or for greenlets where gevent has replaced the threads."""
    return threads().event()


def start(target: Callable[[], object], name: str) -> None:
    """
    Start a daemon thread. If an exception arrives meanwhile, the thread has either started or not, nothing in between.

    Raises:
        RuntimeError: There are too many threads, or the interpreter is about to end.
    """
    start_made(threading.Thread(target=target, name=name, daemon=True))


def start_made(new: Any) -> None:
    """
    Start a thread that has been made; see :func:`start`.

    Raises:
        RuntimeError: There are too many threads, or the interpreter is about to end.
    """
    if exiting():
        raise RuntimeError("the interpreter is about to end")
    threads().start(new)


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
