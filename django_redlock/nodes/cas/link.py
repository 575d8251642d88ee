"""
Links to a store of records, for threads and for event loops (internal).

All links of a process share one worker. As with a Redis node, a socket shows that a reply has arrived.
"""

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial

from ...core.admission import Greeting
from ...core.protocol import Failure, Kind, Reply, Request
from ..base import INCOMPLETE, LinkError, until_cancelled
from ..records.worker import Job, Worker
from ..threads import start


class WorkerLink:
    """A link to a store, used by one thread at a time."""

    def __init__(self, worker: Worker, greeting: Greeting) -> None:
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
        """Return the descriptor to poll, or -1 if there is none."""
        return self._reader.fileno()

    def send(self, request: Request, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.Link`."""
        self._worker.submit(Job(request, self._deliver))

    def _deliver(self, reply: Reply | LinkError) -> None:
        self._replies.append(reply)
        with self._mutex:  # another socket may have the descriptor of a closed one
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
        if not self.readable():
            return INCOMPLETE
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


class AsyncWorkerLink:
    """A link to a store, used by all tasks of an event loop."""

    def __init__(self, worker: Worker, greeting: Greeting) -> None:
        self.greeting = greeting
        self.broken = False
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[Callable[[Reply | None], bool] | None, None] = {}
        self._delivered = self._taken = 0  # how many replies the worker delivered, and how many the event loop took
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
        # Each request carries its callback. If replies were matched by counting, an interruption would mix them up.
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
        with suppress(RuntimeError):  # the loop is closed, and its tasks have ended
            self._keeper.cancel()
        if self._worker.detach(self._on_end):
            with suppress(RuntimeError):  # there are too many threads; it ends by itself
                start(self._worker.finish, "django_redlock close")
        for on_reply in [on_reply for on_reply in self._waiting if on_reply]:
            self._waiting.pop(on_reply)
            on_reply(error.reply(Kind.UNKNOWN))
