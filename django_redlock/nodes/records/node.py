"""
A node whose records one thread of each process reads and writes (internal).
"""

import asyncio
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import ClassVar
from weakref import WeakKeyDictionary, WeakSet

from ...core.protocol import Failure, Request
from ...runtime.threads import call_soon, threads
from ..base import AsyncNotificationLink, LinkError, NotificationLink
from .table import RecordTable
from .worker import AsyncWorkerLink, Worker, WorkerLink


class RecordNode:
    """
    A store of records as a node.

    A kind of store overrides :meth:`table` and, if it has notifications, their methods.

    Args:
        name: The node's name.
        address: The node's address.
    """

    instant = False
    calls = False
    fails_over = False
    kind: ClassVar[str]
    """The name of this kind of store, for the names of threads and the log."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._mutex = threading.RLock()  # an RLock knows its owner, even after a fork that was interrupted
        self._workers: WeakKeyDictionary[object, Worker] = WeakKeyDictionary()
        _nodes.add(self)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def table(self, patience: float) -> RecordTable:
        """Return the records, not yet connected; a request may take *patience* seconds."""
        raise NotImplementedError

    def refused(self, request: Request) -> Failure | None:
        """Return why the calling thread must not make a request now; None if it may."""
        return None

    def connect(self, timeout: float) -> WorkerLink:
        """Open a link; see :class:`~django_redlock.nodes.base.Node`."""
        worker = self._hire(timeout)
        worker.wait_until_open(timeout)
        return WorkerLink(worker)

    async def aconnect(self, timeout: float) -> AsyncWorkerLink:
        """Open a link for the running event loop; see :class:`~django_redlock.nodes.base.Node`."""
        worker, loop, opened = self._hire(timeout), asyncio.get_running_loop(), asyncio.Event()
        worker.when_open(partial(call_soon, loop, opened.set))
        with suppress(TimeoutError):
            await asyncio.wait_for(opened.wait(), timeout)
        worker.wait_until_open(0.0)
        return AsyncWorkerLink(worker)

    @property
    def _user(self) -> object:
        """
        The key of the worker that the calling thread uses: one for all threads.

        Under gevent there is one for each thread of the operating system, because a greenlet waits in the event loop of
        its thread.
        """
        return threads().home() or self

    def _hire(self, timeout: float) -> Worker:
        with self._mutex:
            worker = self._workers.get(self._user)
            if worker is None or not worker.usable:
                if worker and worker.inherited:
                    _left_alone.append(worker)
                worker = self._workers[self._user] = Worker(self.table(timeout), self.kind, self.refused)
        worker.start()
        return worker

    def listen(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> NotificationLink:
        """Refuse: this kind of node does not notify waiters."""
        raise LinkError(Failure.DOES_NOT_NOTIFY)

    async def alisten(
        self, process: str, timeout: float, on_notification: Callable[[str], object]
    ) -> AsyncNotificationLink:
        """Refuse: this kind of node does not notify waiters."""
        raise LinkError(Failure.DOES_NOT_NOTIFY)

    # Forks

    def before_fork(self) -> None:
        """Put the connection aside."""
        self._mutex.acquire()
        if (worker := self._workers.get(self._user)) and worker.usable:
            worker.pause()

    def after_fork(self) -> None:
        """Continue in the parent; start over in the child."""
        if worker := self._workers.get(self._user):
            worker.resume()
        with suppress(RuntimeError):  # this thread does not hold it
            self._mutex.release()


_nodes: WeakSet[RecordNode] = WeakSet()

_paused: list[RecordNode] = []

# Workers of a parent whose fork Python did not report. They are kept, because a driver would end their connections.
_left_alone: list[Worker] = []


def _before_fork() -> None:
    _paused[:] = list(_nodes)
    for node in _paused:
        node.before_fork()


def _after_fork() -> None:
    while _paused:
        _paused[-1].after_fork()
        _paused.pop()  # last, because an interruption may come at any point


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
