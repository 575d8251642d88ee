"""
The connections of one alias that no round uses at present (internal).

Threads take connection sets from a stack, last in, first out, so that a process with one busy thread has one warm set.
"""

from contextlib import suppress
from threading import get_ident
from weakref import WeakKeyDictionary

from ..nodes.gevent import Here, here, uses_gevent
from .connections import ConnectionSet

MAX_IDLE = 60.0  # seconds after which a link is no longer used: firewalls drop idle connections silently


class IdleConnections:
    """
    The idle connection sets of one alias.

    Attributes:
        sets: The connection sets that any thread may take; the last one was used most recently.
    """

    def __init__(self) -> None:
        self.sets: list[ConnectionSet] = []
        # For each thread, the set on which it sent an unattended round. The thread's next round uses the same
        # connections, so that every node sees both in order.
        self._kept: dict[int, ConnectionSet] = {}
        self._by_thread: WeakKeyDictionary[Here, list[ConnectionSet]] | None = (
            WeakKeyDictionary() if uses_gevent() else None
        )

    def take(self, now: float) -> ConnectionSet:
        """Return the connection set that was used last, or a new one; close any that has been idle for too long."""
        stack = self.sets if self._by_thread is None else self._stack()
        try:
            connections = (self._kept.pop(get_ident(), None) if self._kept else None) or stack.pop()
            while connections.closed:  # the thread that gave it back was interrupted just then
                connections = stack.pop()
        except IndexError:
            return ConnectionSet()
        if connections.used > now - MAX_IDLE:
            if stack:
                self._trim(stack, now)
            return connections
        connections.retire()
        with suppress(IndexError):
            while True:  # all others have been idle for longer
                stack.pop().retire()
        return ConnectionSet()

    def borrow(self, connections: ConnectionSet) -> bool:
        """Take these connections; return whether they were idle."""
        kept = self._kept.pop(connections.thread, None)
        if kept is not None and kept is not connections:
            self.give_back(kept)  # its thread has sent another round meanwhile
        if kept is not connections:
            try:
                self._stack().remove(connections)
            except ValueError:
                return False
        return True

    def give_back(self, connections: ConnectionSet) -> None:
        """Let any thread take these connections, or only their own thread while an unattended round is open on them."""
        thread = connections.thread
        if thread and connections.unattended and self._kept.setdefault(thread, connections) is connections:
            return
        connections.thread = 0
        (self.sets if self._by_thread is None else self._stack()).append(connections)

    @staticmethod
    def _trim(stack: list[ConnectionSet], now: float) -> None:
        """Close the connection set that has been idle longest, left from when more threads used locks."""
        if (oldest := stack[:1]) and oldest[0].used < now - MAX_IDLE:  # another thread may have taken even this one
            with suppress(IndexError):  # others take connection sets at the same time
                stack.pop(0).retire()

    def close(self) -> None:
        """Drop all idle links."""
        while self._kept:
            with suppress(KeyError):  # its thread was quicker
                self._kept.popitem()[1].close()
        for stack in (self.sets, *list((self._by_thread or {}).values())):
            while stack:
                stack.pop().close()

    def _stack(self) -> list[ConnectionSet]:
        """Return the idle connection sets that may be used here: under gevent, those of this system thread."""
        if self._by_thread is None:
            return self.sets
        thread = here()
        stack = self._by_thread.get(thread)
        if stack is None:
            stack = self._by_thread[thread] = []
            thread.links.append(stack)
        return stack
