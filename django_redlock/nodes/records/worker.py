"""
Links to a store of records, for threads and for event loops (internal).

All links of a process share one worker. As with a Redis node, a socket shows that a reply has arrived.
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
from typing import Generic, NamedTuple, TypeVar

from ...core.admission import Greeting
from ...core.protocol import Failure, Kind, Reply, Request, Survey, failed
from ...runtime.clock import SLICES, Patience, steady
from ...runtime.threads import call_soon, exiting, new_event, start
from ..base import INCOMPLETE, LinkError, Packed, until_cancelled
from .table import RecordTable, UntouchedError

AT_ONCE = 50  # requests that are decided and written together, at most

UNUSED = 1.0  # seconds for which a connection waits for its first link

LAST_REQUEST = 1.0  # seconds for which closing a connection waits for the current request

log = logging.getLogger("django_redlock")

Item = TypeVar("Item")


Answer = Reply | Greeting | LinkError


class Mailbox(Generic[Item]):
    """
    What other threads deliver to a thread, which polls a socket to learn of it.

    Attributes:
        arrived: What has been delivered and not been taken yet.
    """

    def __init__(self) -> None:
        self.arrived: deque[Item] = deque()
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._closed = False

    def fileno(self) -> int:
        """Return the descriptor to poll, or -1 if there is none."""
        return self._reader.fileno()

    def deliver(self, item: Item) -> None:
        """Add an item, in any thread."""
        self.arrived.append(item)
        with self._mutex:  # another socket may have the descriptor of a closed one
            if not self._closed:
                with suppress(BlockingIOError):
                    self._writer.send(b"!")

    def look(self) -> bool:
        """Return whether something has arrived, and let the descriptor announce only what comes from now on."""
        with suppress(OSError):
            self._reader.recv(4096)
        return bool(self.arrived)

    def close(self) -> bool:
        """Close the socket; return whether it was open."""
        with nullcontext() if self._pid != os.getpid() else self._mutex:  # in a child, a thread of the parent holds it
            if self._closed:
                return False
            self._closed = True
            self._reader.close()
            self._writer.close()
            return True


class WorkerLink:
    """A link to a store, used by one thread at a time."""

    def __init__(self, worker: "Worker") -> None:
        self._worker = worker
        self._replies = Mailbox[Answer]()
        self.fileno = self._replies.fileno
        self._deliver = self._replies.deliver
        try:
            worker.attach(self._deliver)
        except LinkError:
            self._replies.close()
            raise

    @property
    def greeting(self) -> Greeting:
        """How the store described itself last."""
        return self._worker.greeting

    def greet(self) -> None:
        """Ask the store to describe itself again; see :class:`~django_redlock.nodes.base.Link`."""
        self._worker.submit(Job(None, self._deliver))

    def receive_greeting(self) -> Greeting | None:
        """Return how the store describes itself; see :class:`~django_redlock.nodes.base.Link`."""
        said = self._receive()
        return said if isinstance(said, Greeting) else None

    def send(self, request: Request, packed: Packed, *, in_full: bool = False) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.Link`."""
        self._worker.submit(Job(request, self._deliver))

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        return self._replies.look() or not self._worker.usable

    def receive(self, request: Request) -> Reply | None:
        """Return the reply to the oldest request; see :class:`~django_redlock.nodes.base.Link`."""
        reply = self._receive()
        return reply if isinstance(reply, Reply) else INCOMPLETE

    def _receive(self) -> Answer | None:
        if not self.readable():
            return None
        reply = self._replies.arrived.popleft() if self._replies.arrived else LinkError(Failure.CLOSED)
        if isinstance(reply, LinkError):
            raise reply
        return reply

    def close(self) -> None:
        """Close the connection."""
        if self._replies.close() and self._worker.detach(self._deliver):
            self._worker.finish()


class AsyncWorkerLink:
    """A link to a store, used by all tasks of an event loop."""

    def __init__(self, worker: "Worker") -> None:
        self.broken = False
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Callable[..., object], None] = {}
        self._delivered = self._taken = 0  # how many replies the worker delivered, and how many the event loop took
        worker.attach(self._on_end)
        self._keeper = self._loop.create_task(until_cancelled(), name="django_redlock link")
        self._keeper.add_done_callback(lambda keeper: self.close())

    @property
    def greeting(self) -> Greeting:
        """How the store described itself last."""
        return self._worker.greeting

    def send(
        self,
        request: Request,
        packed: Packed,
        on_reply: Callable[[Reply | None], bool],
        *,
        in_full: bool = False,
    ) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.AsyncLink`."""
        if self.broken:
            raise LinkError(Failure.CLOSED)
        # Each request carries its callback. If replies were matched by counting, an interruption would mix them up.
        self._waiting[on_reply] = None
        try:
            self._worker.submit(Job(request, partial(self._deliver, on_reply)))
        except LinkError as error:
            # Noted now: a caller that asks again at once may keep the event loop from hearing of the worker's end.
            del self._waiting[on_reply]
            self._end(error)
            raise

    def greet(self, on_greeting: Callable[[Greeting], object]) -> None:
        """Ask the store to describe itself again; see :class:`~django_redlock.nodes.base.AsyncLink`."""
        if self.broken:
            raise LinkError(Failure.CLOSED)
        self._worker.submit(Job(None, partial(self._deliver, on_greeting)))

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        return self._delivered > self._taken

    def _deliver(self, on_reply: Callable[..., object] | None, reply: Answer) -> None:
        self._delivered += 1
        call_soon(self._loop, self._take, on_reply, reply)

    def _on_end(self, error: LinkError) -> None:
        self._deliver(None, error)

    def _take(self, on_reply: Callable[..., object] | None, reply: Answer) -> None:
        self._taken += 1
        if isinstance(reply, LinkError):
            self._end(reply)
        elif isinstance(reply, Greeting):
            if on_reply and not self.broken:
                on_reply(reply)
        elif on_reply and on_reply in self._waiting:
            self._waiting.pop(on_reply)
            on_reply(reply)

    def close(self) -> None:
        """Close the connection."""
        self._end(LinkError(Failure.CLOSED))

    def _end(self, error: LinkError) -> None:
        if self.broken:
            return
        self.broken = True
        with suppress(RuntimeError):  # the loop is closed, and its tasks have ended
            self._keeper.cancel()
        if self._worker.detach(self._on_end):
            with suppress(RuntimeError):  # there are too many threads; it ends by itself
                start(self._worker.finish, "django_redlock close")
        for on_reply in list(self._waiting):
            self._waiting.pop(on_reply)
            on_reply(error.reply(Kind.UNKNOWN))


class Job(NamedTuple):
    """A request, None for a greeting, and the function that gets the reply, or the error if there will be none."""

    request: Request | None
    deliver: Callable[[Answer], None]


class Worker:
    """
    Carries out the requests of a process at one store, in the order in which they come, in a thread of its own.

    It ends when its last link is closed, or when its connection breaks during a request.

    Args:
        table: The store's records.
        kind: The kind of store, for the name of the thread.
        refused: Returns why the calling thread must not make a request now; None if it may.
    """

    def __init__(self, table: RecordTable, kind: str, refused: Callable[[Request], Failure | None]) -> None:
        self.ended = False
        self._kind = kind
        self._refused = refused
        self._begun = threading.Lock()  # held from the start of its thread on
        self._opened = new_event()
        self._said: Greeting | LinkError = LinkError(Failure.TIMEOUT)
        self._on_open: deque[Callable[[], object]] = deque()
        self._gone = new_event()
        self._ident = 0
        self._pid = os.getpid()
        self._table = table
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._mutex = threading.Lock()
        self._at_work = threading.RLock()  # knows its owner, after a pause that was interrupted
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
        Start its thread; called by every user of it, because the first may have been interrupted.

        Raises:
            LinkError: No thread can be started.
        """
        if not self._begun.locked():
            try:
                start(self._begin, f"django_redlock {self._kind}")
            except RuntimeError:
                raise LinkError(Failure.NO_THREAD) from None

    @property
    def greeting(self) -> Greeting:
        """How the store described itself last, once it is open."""
        assert isinstance(self._said, Greeting)
        return self._said

    def wait_until_open(self, timeout: float) -> None:
        """
        Wait until the store has described itself, for at most *timeout* seconds.

        Raises:
            LinkError: It cannot be used, or has not answered yet.
        """
        patience, asked = Patience(timeout), timeout / SLICES
        while asked > 0 and not self._opened.is_set():
            began = steady()
            self._opened.wait(asked)
            asked = patience.count(asked, steady() - began)
        if isinstance(self._said, LinkError):
            if timeout and patience.late and not self._opened.is_set():
                raise LinkError(Failure.LATE)
            raise LinkError(self._said.failure, self._said.detail)

    def when_open(self, callback: Callable[[], object]) -> None:
        """Call *callback*, in any thread, when the store has answered or failed for the first time."""
        self._on_open.append(callback)
        if self._opened.is_set():
            self._report_open()

    def _report_open(self) -> None:
        with suppress(IndexError):
            while True:
                self._on_open.popleft()()

    def attach(self, on_end: Callable[[LinkError], None]) -> None:
        """Add a link; *on_end* is called when there will be no more replies."""
        self._refuse_child()
        with self._mutex:
            if self.ended:
                raise LinkError(Failure.CLOSED)
            self._links.add(on_end)

    def detach(self, on_end: Callable[[LinkError], None]) -> bool:
        """Remove a link, and end with the last one; return whether it was the last."""
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
        """Wait until the requests sent have been carried out; does not wait for a silent server."""
        if threading.get_ident() != self._ident and not exiting() and not self._gone.wait(LAST_REQUEST):
            self._table.abort()
            self._gone.wait(LAST_REQUEST)

    def submit(self, job: Job) -> None:
        """
        Have a request carried out, or answer at once if the calling thread must not make it.

        Raises:
            LinkError: The worker has ended.
        """
        self._refuse_child()
        if job.request is not None and (refused := self._refused(job.request)):
            job.deliver(failed(refused))
            return
        with self._mutex:
            if self.ended:
                raise LinkError(Failure.CLOSED)
            self._inbox.put(job)

    def _refuse_child(self) -> None:
        """Raise before any lock is touched, because a thread that exists only in the parent may hold it."""
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
        try:
            with self._at_work:
                self._said = self._table.open()
        except LinkError as error:
            self._said = error
        except Exception as error:  # a driver's own error, such as for an option that it does not know
            self._said = unusable(error)
        self.ended = isinstance(self._said, LinkError)
        self._opened.set()
        self._report_open()
        reason = LinkError(Failure.CLOSED)
        try:
            while not isinstance(self._said, LinkError) and (jobs := self._take()):
                for kind, some in groupby(jobs, lambda job: job.request and isinstance(job.request, Survey)):
                    self._do(list(some), greets=kind is None)
        except LinkError as broken:
            reason = broken
        except Exception as error:  # whatever it was, the waiting callers must learn of it
            reason = unusable(error)
            log.error("%s as a lock node cannot be used (%s)", self._kind, type(error).__name__)
        finally:
            self._end(reason)

    def _take(self) -> list[Job]:
        """Wait for requests; return none when it is time to end."""
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
            self._inbox.put(None)  # behind the requests that came before it
        return [job for job in jobs if job]

    def _do(self, jobs: Sequence[Job], *, greets: bool) -> None:
        replies: Iterable[Answer] = []
        try:
            with self._at_work:
                self._busy_since = steady()
                if greets:
                    self._said = self._table.describe() or self._said
                    replies = [self._said] * len(jobs)
                else:
                    replies = self._table.execute([job.request for job in jobs if job.request])
        except LinkError as error:
            # Ended before anybody learns of the error: whoever connects then gets another worker.
            with self._mutex:
                self.ended = True
            replies = [error.reply() if isinstance(error, UntouchedError) else error] * len(jobs)
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
        for on_end in links:  # which also fails the requests that have not been taken from the inbox
            on_end(error)

    # A connection must not be carried over a fork: SQLite's locks belong to a process, and what the child sends when it
    # ends would go out over the parent's connection. So it is closed before the fork, and replaced when it is needed.

    def pause(self) -> None:
        """Close the connection and stop until :meth:`resume`; does not wait for a silent server."""
        if not self._at_work.acquire(timeout=LAST_REQUEST):
            self._table.abort()
            if not self._at_work.acquire(timeout=LAST_REQUEST):
                return
        self._table.close()

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        with suppress(RuntimeError):  # this thread does not hold it
            self._at_work.release()


def unusable(error: Exception) -> LinkError:
    """Return what to report of an error of a driver; its text may hold a password."""
    return LinkError(Failure.UNUSABLE, f"{Failure.UNUSABLE.value} ({type(error).__name__})")
