"""
A database of ``DATABASES`` as a node: SQLite, PostgreSQL, MySQL or MariaDB (internal).

:mod:`.worker` talks to the database, :mod:`.link` hands requests to it, and :mod:`.table` decides what to write.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...core.failure import Failure
from ..base import AsyncNotificationLink, LinkError, NodeSpec, NotificationLink
from .link import AsyncDatabaseLink, DatabaseLink
from .table import LockTable
from .vendors import CLOCKS
from .worker import DatabaseWorker

log = logging.getLogger("django_redlock")


class DatabaseNode:
    """
    A database of ``DATABASES``.

    Args:
        spec: Its URL, ``database://alias``.
        prefix: What every key begins with.

    Attributes:
        file: The path of a file of SQLite, which has one writer at a time; empty for a server.

    Raises:
        ValueError: There is no such database, or none that can be a node.
    """

    instant = False
    calls = False
    fails_over = False

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        if "@" in spec.url:
            raise ValueError("its URL names an alias of DATABASES, such as database://default, and no address")
        self.alias = urlsplit(spec.url).netloc
        connection = self._known()
        self.name = spec.name or f"database:{self.alias}"
        self.address = address(connection, self.alias)
        self.file = os.path.realpath(connection.settings_dict["NAME"]) if connection.vendor == "sqlite" else ""
        if spec.options:
            raise ValueError("a database takes no OPTIONS: they are those of its entry in DATABASES")
        self._prefix = prefix
        self._mutex = threading.RLock()  # knows whose it is, after a fork that was interrupted
        self._worker: DatabaseWorker | None = None
        _nodes.add(self)

    def __repr__(self) -> str:
        return f"<DatabaseNode {self.name}>"

    def _known(self) -> Any:
        if self.alias not in connections:
            known = ", ".join(map(repr, connections))
            raise ValueError(f"DATABASES has no alias {self.alias!r}, it has {known}; write database://default")
        try:
            connection = connections.create_connection(self.alias)
        except ImproperlyConfigured as error:
            raise ValueError(f"Django cannot use the database {self.alias!r} ({type(error).__name__})") from None
        if connection.vendor not in CLOCKS:
            raise ValueError(f"the database {self.alias!r} is not SQLite, PostgreSQL, MySQL or MariaDB")
        return connection

    def connect(self, timeout: float) -> DatabaseLink:
        """Open a link; see :class:`~django_redlock.nodes.base.Node`."""
        worker = self._hire(timeout)
        return DatabaseLink(worker, worker.greeting(timeout))

    async def aconnect(self, timeout: float) -> AsyncDatabaseLink:
        """Open a link for the running event loop; see :class:`~django_redlock.nodes.base.Node`."""
        worker, loop, opened = self._hire(timeout), asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(opened.set)

        worker.when_open(tell)
        with suppress(TimeoutError):
            await asyncio.wait_for(opened.wait(), timeout)
        return AsyncDatabaseLink(worker, worker.greeting(0.0))

    def table(self, timeout: float) -> LockTable:
        """Return its table, not yet connected, whose requests may take *timeout* seconds."""
        return LockTable(self.alias, self._prefix, timeout)

    def _hire(self, timeout: float) -> DatabaseWorker:
        with self._mutex:
            if self._worker is None or not self._worker.usable:
                if self._worker and self._worker.inherited:
                    _left_alone.append(self._worker)
                self._worker = DatabaseWorker(self.table(timeout), self.file)
            worker = self._worker
        worker.start()
        return worker

    def listen(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> NotificationLink:
        """Refuse: a database calls nobody."""
        raise LinkError(Failure.DOES_NOT_NOTIFY)

    async def alisten(
        self, process: str, timeout: float, on_notification: Callable[[str], object]
    ) -> AsyncNotificationLink:
        """Refuse: a database calls nobody."""
        raise LinkError(Failure.DOES_NOT_NOTIFY)

    # Forks

    def before_fork(self) -> None:
        """Take the connection out of the way."""
        self._mutex.acquire()
        if self._worker and self._worker.usable:
            self._worker.pause()

    def after_fork(self) -> None:
        """Go on, in the parent; the child begins anew."""
        if self._worker:
            self._worker.resume()
        with suppress(RuntimeError):  # it is not this thread's
            self._mutex.release()


def address(connection: Any, alias: str) -> str:
    """Return where a database is: one server, or one file, has one vote."""
    entry = connection.settings_dict
    if connection.vendor != "sqlite":
        return f"{connection.vendor}:{entry.get('HOST') or alias}:{entry.get('PORT', '')}"
    return f"sqlite:{entry['NAME'] if connection.is_in_memory_db() else os.path.realpath(entry['NAME'])}"


_nodes: WeakSet[DatabaseNode] = WeakSet()
_paused: list[DatabaseNode] = []
# Workers of a parent whose fork Python was not told of: a driver would end their connections with them.
_left_alone: list[DatabaseWorker] = []


def _before_fork() -> None:
    _paused[:] = list(_nodes)
    for node in _paused:
        node.before_fork()


def _after_fork() -> None:
    while _paused:
        _paused[-1].after_fork()
        _paused.pop()  # last, in case of an interruption


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def open_node(spec: NodeSpec, prefix: str) -> DatabaseNode:
    """Return the node of a ``database`` URL."""
    return DatabaseNode(spec, prefix)
