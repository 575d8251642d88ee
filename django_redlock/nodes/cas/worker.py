"""
The thread of a process that talks to one store of records (internal).

It has a connection of its own. For a database, this is not Django's, so it is outside every transaction of the project.
Requests that several threads make at once are decided and written together.
"""

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import NamedTuple

from ...core.admission import Greeting
from ...core.protocol import Failure, Reply, Request, Survey, failed
from ..base import LinkError
from ..clock import SLICES, Patience, steady
from ..records.table import RecordTable, UntouchedError
from ..threads import exiting, new_event, start

AT_ONCE = 50  # requests that are decided and written together, at most
UNUSED = 1.0  # seconds for which a connection waits for its first link
LAST_REQUEST = 1.0  # seconds for which closing a connection waits for the current request

log = logging.getLogger("django_redlock")


class Job(NamedTuple):
    """A request, and the function that gets the reply, or the error if there will be none."""

    request: Request
    deliver: Callable[[Reply | LinkError], None]


class Worker:
    """
    Carries out the requests of a process at one store, in the order in which they come, in a thread of its own.

    It ends when its last link is closed, or when its connection breaks during a request.

    Args:
        table: The store's records.
        kind: The kind of store, for the name of the thread.
        refused: Returns why the calling thread must not make a request now; None if it may.
    """

    def __init__(
        self, table: RecordTable, kind: str, refused: Callable[[Request], Failure | None] = lambda request: None
    ) -> None:
        self.ended = False
        self._kind = kind
        self._refused = refused
        self._begun = threading.Lock()  # held from the start of its thread on
        self._opened = new_event()
        self._greeting: Greeting | LinkError = LinkError(Failure.TIMEOUT)
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

    def greeting(self, timeout: float) -> Greeting:
        """
        Return how the store describes itself, waiting for at most *timeout* seconds.

        Raises:
            LinkError: It cannot be used, or has not answered yet.
        """
        patience, asked = Patience(timeout), timeout / SLICES
        while asked > 0 and not self._opened.is_set():
            began = steady()
            self._opened.wait(asked)
            asked = patience.count(asked, steady() - began)
        if not isinstance(self._greeting, LinkError):
            return self._greeting
        if timeout and patience.late and not self._opened.is_set():
            raise LinkError(Failure.LATE)
        raise LinkError(self._greeting.failure, self._greeting.detail)

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
        if refused := self._refused(job.request):
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
        outcome: Greeting | LinkError
        try:
            with self._at_work:
                outcome = self._table.open()
        except LinkError as error:
            outcome = error
        except Exception as error:  # a driver's own error, such as for an option that it does not know
            outcome = unusable(error)
        self.ended = isinstance(outcome, LinkError)
        self._greeting = outcome
        self._opened.set()
        self._report_open()
        reason = LinkError(Failure.CLOSED)
        try:
            while not isinstance(outcome, LinkError) and (jobs := self._take()):
                for _, some in groupby(jobs, lambda job: isinstance(job.request, Survey)):
                    self._do(list(some))
        except LinkError as broken:
            reason = broken
        except Exception as error:  # whatever it was, the waiting callers must learn of it
            reason = unusable(error)
            log.error("%s as a node cannot be used (%s)", self._kind, type(error).__name__)
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
