"""
Threads of the operating system under gevent, which replaces Python's threads with greenlets (internal).

:class:`~django_redlock.runtime.threads.Greenlets` asks for what is here.

Greenlets take turns: while one computes, no other runs. Heartbeats must continue all the same, so the watchdog uses a
thread of the operating system. Whatever waits in a thread (sockets, ``poll``) belongs to the event loop of that thread,
so threads do not share links.
"""

import sys
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from .clock import steady


def original(module: str, name: str) -> Any:
    """Return what gevent has replaced."""
    monkey: Any = sys.modules["gevent.monkey"]
    return monkey.get_original(module, name)


class Home:
    """Identify a thread of the operating system while it lives; a later thread may get the same number."""

    def __init__(self) -> None:
        self.links: list[list[Any]] = []
        """The stacks of connections that were opened in this thread and belong to its event loop."""


_local: Any = None


def home() -> Home:
    """Return the object that identifies the running thread of the operating system."""
    global _local
    if _local is None:
        _local = original("_thread", "_local")()
    try:
        found: Home = _local.home
    except AttributeError:
        found = _local.home = Home()
    return found


def leave() -> None:
    """Close this thread's connections and its event loop, because the thread is about to end."""
    for links in home().links:
        while links:
            links.pop().close()
    gevent_hub: Any = sys.modules["gevent.hub"]
    gevent_hub.get_hub().destroy(destroy_loop=True)


class SystemThread:
    """A thread of the operating system, with the methods of :class:`threading.Thread` that the watchdog needs."""

    def __init__(self, target: Callable[[], None], name: str) -> None:
        self._target = target
        self._name = name
        self._alive = False

    def start(self) -> None:
        """Start the thread."""
        self._alive = True
        _threads.add(self)
        original("_thread", "start_new_thread")(self._run, ())

    def join(self, timeout: float) -> None:
        """Wait until the thread ends, for at most *timeout* seconds."""
        until = steady() + timeout
        while self._alive and steady() < until:
            time.sleep(0.01)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            try:
                leave()
            finally:
                self._alive = False


_threads: WeakSet[SystemThread] = WeakSet()


forget_threads = _threads.clear
"""Forget the threads of the parent, in a forked child."""


def join_threads(seconds: float) -> None:
    """
    Wait for at most *seconds* until the threads of the operating system have ended, because the interpreter ends.

    Python 3.13 and earlier unwind the stack of each thread that still runs then. If the thread is in its event loop,
    greenlet has frames on that stack, and those would crash the process.
    """
    until = steady() + seconds
    for each in list(_threads):
        each.join(until - steady())
