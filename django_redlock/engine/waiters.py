"""
The waiters of this process, or of one event loop, and how a notification finds its waiter (internal).
"""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable
from socket import gethostname
from typing import Generic, TypeVar

from ..core.acquisition import Waiter

HOST = gethostname().replace("|", "-").replace(" ", "-")

Event = TypeVar("Event", threading.Event, asyncio.Event)


class Waiters(Generic[Event]):
    """
    The waiters of this process, or of one event loop, by the names that the nodes know.

    Args:
        needed: How many nodes must be listened to so that a waiter can rely on notifications.
        event: Makes the event that a waiter waits for.
    """

    def __init__(self, needed: int, event: Callable[[], Event]) -> None:
        # Nodes publish to this name. Random bits distinguish two processes with the same host name and process id, as
        # in containers; the host is for people who look at the queue.
        self.process = f"{HOST}:{os.getpid()}.{os.urandom(6).hex()}"
        self.listening: set[int] = set()
        self._needed = needed
        self._event: Callable[[], Event] = event
        self._numbers = itertools.count(1)
        self._expected: dict[str, Waiter] = {}
        self._waiting: dict[str, tuple[Waiter, Event]] = {}

    def new_name(self) -> str:
        """Return a name for one more waiter."""
        return f"{self.process}|{next(self._numbers)}"

    @property
    def notified(self) -> bool:
        """Whether enough nodes can notify a waiter of its turn."""
        return len(self.listening) >= self._needed

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, waiter: Waiter) -> None:
        """
        Take notifications for a waiter that asks for the first time and may have to wait.

        A node queues the waiter when it refuses the lock, and may notify the waiter before that reply has been read.
        """
        if self.listening and waiter.name:
            self._expected[waiter.name] = waiter

    def join(self, waiter: Waiter) -> Event:
        """Let *waiter* wait; return the event that is set when it is notified."""
        if waiter.name not in self._waiting:
            self._waiting[waiter.name] = (waiter, self._event())
        event = self._waiting[waiter.name][1]
        event.clear()
        if waiter.called:
            event.set()
        return event

    def leave(self, waiter: Waiter) -> None:
        """Forget *waiter*."""
        self._expected.pop(waiter.name, None)
        self._waiting.pop(waiter.name, None)

    def notification(self, node: int, name: str) -> None:
        """Pass on a node's notification that a waiter is first in the queue."""
        waiter, event = self._waiting.get(name, (self._expected.get(name), None))
        if waiter and waiter.hear(node) and event:
            event.set()

    def reached(self, node: int) -> None:
        """
        Note that a node is listened to from now on.

        Once enough nodes are, all waiters ask again, in case they missed a notification.
        """
        before = self.notified
        self.listening.add(node)
        if self.notified and not before:
            for waiter, event in list(self._waiting.values()):
                waiter.recall()
                event.set()
