"""
A database of ``DATABASES`` as a node: SQLite, PostgreSQL, MySQL or MariaDB.

Each process has one connection to such a node, which is not Django's and so outside every transaction of the
project, and one thread that uses it; who asks is told of the reply over a socket, as by a Redis node. What several
threads ask at once is decided and written together. What is written, and how, :mod:`.table` says.
"""

import asyncio
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from weakref import WeakSet

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...core.admission import Greeting
from ...core.failure import Failure
from ...core.replies import Kind, Reply, failed
from ...core.requests import Acquire, Request, Survey
from ..base import AsyncNotificationLink, LinkError, NodeSpec, NotificationLink, until_cancelled
from ..clock import steady
from ..threads import exiting, new_event, start
from .table import LockTable, UntouchedError
from .vendors import CLOCKS, in_own_transaction

AT_ONCE = 50  # requests that are decided and written together, at most
UNUSED = 1.0  # seconds for which a connection waits for its first link
LAST_REQUEST = 1.0  # seconds for which closing a connection waits for the request under way

log = logging.getLogger("django_redlock")


class Job(NamedTuple):
    """A request, and who gets the reply or hears that there will be none."""

    request: Request
    deliver: Callable[[Reply | LinkError], None]


class DatabaseWorker:
    """
    Carries out the requests of a process at one database, in the order in which they come, in a thread of its own.

    It ends when its last link is closed, or when it cannot know what the database did.
    """

    def __init__(self, table: LockTable, file: str) -> None:
        self.ended = False
        self._file = file
        self._begun = threading.Lock()  # held from its beginning on, for good
        self._opened = new_event()
        self._greeting: Greeting | LinkError = LinkError(Failure.TIMEOUT)
        self._on_open: deque[Callable[[], object]] = deque()
        self._gone = new_event()
        self._ident = 0
        self._pid = os.getpid()
        self._table = table
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._at_work = threading.RLock()  # knows whose it is, after a pause that was interrupted
        self._busy_since = float("inf")
        self._links: set[Callable[[LinkError], None]] = set()

    @property
    def usable(self) -> bool:
        """Whether it takes requests, or may soon."""
        return not self.ended and not self.inherited

    @property
    def inherited(self) -> bool:
        """Whether it belongs to the process that this one was forked from."""
        return self._pid != os.getpid()

    def start(self) -> None:
        """
        Have its thread begin; called by all who use it, because the first may have been interrupted.

        Raises:
            LinkError: There can be no thread.
        """
        if not self._begun.locked():
            try:
                start(self._begin, "django_redlock database")
            except RuntimeError:
                raise LinkError(Failure.NO_THREAD) from None

    def greeting(self, timeout: float) -> Greeting:
        """
        Return what the database said of itself, waiting for so many seconds at most.

        Raises:
            LinkError: It cannot be used, or has said nothing yet.
        """
        self._opened.wait(timeout)
        if isinstance(self._greeting, LinkError):
            raise LinkError(self._greeting.failure, self._greeting.detail)
        return self._greeting

    def when_open(self, tell: Callable[[], object]) -> None:
        """Call *tell*, in any thread, when the database has said something of itself."""
        self._on_open.append(tell)
        if self._opened.is_set():
            self._tell_open()

    def _tell_open(self) -> None:
        with suppress(IndexError):
            while True:
                self._on_open.popleft()()

    def attach(self, on_end: Callable[[LinkError], None]) -> None:
        """Take one more link; *on_end* tells it that there will be no more replies."""
        self._refuse_child()
        with self._mutex:
            if self.ended:
                raise LinkError(Failure.CLOSED)
            self._links.add(on_end)

    def detach(self, on_end: Callable[[LinkError], None]) -> bool:
        """Forget a link, and end with the last one; returns whether it was that."""
        if self.inherited:
            return False
        with self._mutex:
            self._links.discard(on_end)
            last = not self._links and not self.ended
            self.ended = self.ended or last
        if last:
            self._inbox.put(None)
        if steady() - self._busy_since > self._table.patience:
            self._table.abort()  # the server is silent
        return last

    def finish(self) -> None:
        """Wait until what was sent has been carried out; does not wait for a silent server."""
        if threading.get_ident() != self._ident and not exiting() and not self._gone.wait(LAST_REQUEST):
            self._table.abort()
            self._gone.wait(LAST_REQUEST)

    def submit(self, job: Job) -> None:
        """
        Have a request carried out.

        An acquisition is answered at once in a thread whose own transaction keeps the file from being written. Other
        requests are not: a release is delivered again later.

        Raises:
            LinkError: There is nobody any more to do that.
        """
        self._refuse_child()
        if self._file and isinstance(job.request, Acquire) and in_own_transaction(self._file):
            job.deliver(failed(Failure.OWN_TRANSACTION))
            return
        with self._mutex:
            if self.ended:
                raise LinkError(Failure.CLOSED)
            self._inbox.put(job)

    def _refuse_child(self) -> None:
        """Refuse before any lock is touched: a thread that exists in the parent alone may have been holding it."""
        if self.inherited:
            raise LinkError(Failure.CLOSED)

    def _begin(self) -> None:
        if self._begun.acquire(False):  # else it has begun
            self._ident = threading.get_ident()
            try:
                self._run()
            finally:
                self._gone.set()

    def _run(self) -> None:
        outcome: Greeting | LinkError
        try:
            with self._at_work:
                outcome = self._table.open()
        except LinkError as error:
            outcome = error
        except Exception as error:  # a driver's own, such as of an option that it does not know
            outcome = unusable(error)
        self.ended = isinstance(outcome, LinkError)
        self._greeting = outcome
        self._opened.set()
        self._tell_open()
        reason = LinkError(Failure.CLOSED)
        try:
            while not isinstance(outcome, LinkError) and (jobs := self._take()):
                for _, some in groupby(jobs, lambda job: isinstance(job.request, Survey)):
                    self._do(list(some))
        except LinkError as broken:
            reason = broken
        except Exception as error:  # whatever it was, those who wait must hear of it
            reason = unusable(error)
            log.error("a database as a node cannot be used (%s)", type(error).__name__)
        finally:
            self._end(reason)

    def _take(self) -> list[Job]:
        """Wait for something to do; returns nothing when it is time to end."""
        try:
            jobs = [self._inbox.get(timeout=None if self._links else UNUSED)]
        except Empty:
            with self._mutex:
                self.ended = not self._links
            return [] if self.ended else self._take()
        with suppress(Empty):
            while jobs[-1] is not None and len(jobs) < AT_ONCE:
                jobs.append(self._inbox.get_nowait())
        if jobs[-1] is None:
            self._inbox.put(None)  # what came before it comes first
        return [job for job in jobs if job]

    def _do(self, jobs: Sequence[Job]) -> None:
        replies: Iterable[Reply | LinkError] = []
        try:
            with self._at_work:
                self._busy_since = steady()
                replies = self._table.execute([job.request for job in jobs])
        except UntouchedError as error:
            replies = [error.reply()] * len(jobs)
            raise
        except LinkError as error:
            replies = [error] * len(jobs)
            raise
        finally:
            self._busy_since = float("inf")
            for job, reply in zip(jobs, replies, strict=False):
                job.deliver(reply)
        with self._at_work:
            self._table.clean()

    def _end(self, error: LinkError) -> None:
        with self._mutex:
            self.ended = True
            links = list(self._links)
        with self._at_work:
            self._table.close()
        with suppress(Empty):
            while True:
                job = self._inbox.get_nowait()
                if job:
                    job.deliver(error)
        for on_end in links:
            on_end(error)

    # A connection must not be carried over a fork: SQLite's locks belong to a process, and what the child says at its
    # end is said in the parent's name. So it is closed before, and made anew when it is needed.

    def pause(self) -> None:
        """Close the connection and do nothing until :meth:`resume`; a silent server is not waited for."""
        if not self._at_work.acquire(timeout=LAST_REQUEST):
            self._table.abort()
            if not self._at_work.acquire(timeout=LAST_REQUEST):
                return
        self._table.close()

    def resume(self) -> None:
        """Go on."""
        with suppress(RuntimeError):  # it is not this thread's
            self._at_work.release()


class DatabaseLink:
    """A process's way to its worker, for one thread at a time."""

    def __init__(self, worker: DatabaseWorker, greeting: Greeting) -> None:
        self.greeting = greeting
        self._worker = worker
        self._replies: deque[Reply | LinkError] = deque()
        self._mutex = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._closed = False
        try:
            worker.attach(self._deliver)
        except LinkError:
            self._reader.close()
            self._writer.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 if there is none."""
        return self._reader.fileno()

    def send(self, request: Request, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.Link`."""
        self._worker.submit(Job(request, self._deliver))

    def _deliver(self, reply: Reply | LinkError) -> None:
        self._replies.append(reply)
        with self._mutex:  # the number of a closed socket may be another's by now
            if not self._closed:
                with suppress(BlockingIOError):
                    self._writer.send(b"!")

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        with suppress(OSError):
            self._reader.recv(4096)
        return bool(self._replies) or not self._worker.usable

    def receive(self, request: Request) -> Reply | None:
        """Return the reply to the oldest request; see :class:`~django_redlock.nodes.base.Link`."""
        reply = self._replies.popleft() if self._replies else LinkError(Failure.CLOSED)
        if isinstance(reply, LinkError):
            raise reply
        return reply

    def close(self) -> None:
        """Close the connection."""
        with nullcontext() if self._worker.inherited else self._mutex:
            if self._closed:
                return
            self._closed = True
            self._reader.close()
            self._writer.close()
        if self._worker.detach(self._deliver):
            self._worker.finish()


class AsyncDatabaseLink:
    """The same for all tasks of an event loop."""

    def __init__(self, worker: DatabaseWorker, greeting: Greeting) -> None:
        self.greeting = greeting
        self.broken = False
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Callable[[Reply | None], bool] | None, None] = {}
        self._delivered = self._taken = 0  # by the worker, and by the event loop
        worker.attach(self._on_end)
        self._keeper = self._loop.create_task(until_cancelled(), name="django_redlock link")
        self._keeper.add_done_callback(lambda keeper: self.close())

    def send(
        self,
        request: Request,
        packed: dict[int, bytes],
        on_reply: Callable[[Reply | None], bool],
        *,
        in_full: bool = False,
    ) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.AsyncLink`."""
        if self.broken:
            raise LinkError(Failure.CLOSED)
        # Each request knows who waits for it: counted off, they would all get each other's after an interruption.
        self._waiting[on_reply] = None
        self._worker.submit(Job(request, partial(self._deliver, on_reply)))

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        return self._delivered > self._taken

    def _deliver(self, on_reply: Callable[[Reply | None], bool] | None, reply: Reply | LinkError) -> None:
        self._delivered += 1
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._take, on_reply, reply)

    def _on_end(self, error: LinkError) -> None:
        self._deliver(None, error)

    def _take(self, on_reply: Callable[[Reply | None], bool] | None, reply: Reply | LinkError) -> None:
        self._taken += 1
        if isinstance(reply, LinkError):
            self._end(reply)
        elif on_reply is not None and on_reply in self._waiting:
            del self._waiting[on_reply]
            on_reply(reply)

    def close(self) -> None:
        """Close the connection."""
        self._end(LinkError(Failure.CLOSED))

    def _end(self, error: LinkError) -> None:
        if self.broken:
            return
        self.broken = True
        with suppress(RuntimeError):  # the loop is closed already, and its tasks with it
            self._keeper.cancel()
        if self._worker.detach(self._on_end):
            with suppress(RuntimeError):  # there are too many threads; it ends by itself
                start(self._worker.finish, "django_redlock close")
        for on_reply in [on_reply for on_reply in self._waiting if on_reply]:
            self._waiting.pop(on_reply)
            on_reply(error.reply(Kind.UNKNOWN))


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

    def _hire(self, timeout: float) -> DatabaseWorker:
        with self._mutex:
            if self._worker is None or not self._worker.usable:
                if self._worker and self._worker.inherited:
                    _left_alone.append(self._worker)
                self._worker = DatabaseWorker(LockTable(self.alias, self._prefix, timeout), self.file)
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


def unusable(error: Exception) -> LinkError:
    """Return what to report of an error of a driver; its text may hold a password."""
    return LinkError(Failure.UNUSABLE, f"{Failure.UNUSABLE.value} ({type(error).__name__})")


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
