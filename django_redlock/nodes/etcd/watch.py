"""
Notifications from an etcd cluster (internal).

A release puts the names of waiters under a key of their process, and the process watches that key in a thread of its
own. A watch begins with the next change. What was put before it began is not missed for long, because each waiter asks
again by itself.
"""

import asyncio
import json
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException, HTTPResponse

from ...core.failure import Failure
from ..base import LinkError
from ..threads import new_event, start
from .client import Client, EtcdError, decoded, encoded, link_error, parsed
from .place import Place

LONGEST = 2**20  # bytes of one notification

Deliver = Callable[[list[str] | LinkError], object]


class Watch:
    """
    A thread that reads the notifications to a process.

    Args:
        place: The cluster.
        key: The key under which they are put.
        timeout: Seconds in which the watch must begin.
        deliver: Called in that thread with the waiters notified, once with none as soon as the watch has begun, and
            at the end with the reason.
    """

    def __init__(self, place: Place, key: str, timeout: float, deliver: Deliver) -> None:
        self._place = place
        self._key = key
        self._timeout = timeout / (len(place.members) + 1)
        self._deliver = deliver
        self._client: Client | None = None
        self._closed = False
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread; raises LinkError if there are too many."""
        try:
            start(self._run, "django_redlock etcd notifications")
        except RuntimeError:
            raise LinkError(Failure.NO_THREAD) from None

    def close(self) -> None:
        """End the watch; in a forked child, without a word to the member, whose connection the parent uses."""
        self._closed = True
        if self._client and self._pid == os.getpid():
            self._client.abort()

    def _run(self) -> None:
        reason = LinkError(Failure.CLOSED)
        try:
            self._read(self._begin())
        except (LinkError, EtcdError, OSError, HTTPException, ValueError) as error:
            reason = link_error(error)
        finally:
            if self._client:
                self._client.close()
            self._deliver(reason)

    def _begin(self) -> HTTPResponse:
        """Begin to watch at the first member that answers."""
        failure = LinkError(Failure.UNREACHABLE)
        for place in range(len(self._place.members)):
            if self._closed:
                break
            try:
                self._client = Client(self._place, place, self._timeout)
                self._client.open()
                response = self._client.stream("/v3/watch", {"create_request": {"key": encoded(self._key)}})
                self._names(response.readline(LONGEST))  # says that the watch has begun
                self._client.wait(None)
                return response
            except (EtcdError, OSError, HTTPException, ValueError) as error:
                failure = link_error(error)
                if self._client:
                    self._client.close()
        raise failure

    def _read(self, response: HTTPResponse) -> None:
        self._deliver([])
        while not self._closed:
            line = response.readline(LONGEST)
            if not line:
                return
            if names := self._names(line):
                self._deliver(names)

    def _names(self, line: bytes) -> list[str]:
        """Return the waiters that a line names; raises EtcdError if it says that the watch has ended."""
        result = parsed(line, 200).get("result", {})
        if result.get("canceled"):
            raise EtcdError(Failure.CLOSED)
        names: list[str] = []
        for event in result.get("events", []):
            text = decoded(event.get("kv", {}).get("value", ""))
            names += [str(name) for name in (json.loads(text).get("to", []) if text else [])]
        return names


class EtcdNotificationLink:
    """The notifications of a cluster to the waiters of a process; see :class:`~django_redlock.nodes.base.Node`."""

    def __init__(self, place: Place, key: str, timeout: float) -> None:
        self._arrived: deque[list[str] | LinkError] = deque()
        self._mutex = threading.Lock()
        self._closed = False
        self._begun = new_event()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._watch = Watch(place, key, timeout, self._deliver)
        try:
            self._watch.start()
            if not self._begun.wait(timeout):
                raise LinkError(Failure.TIMEOUT)
            self.read()
        except BaseException:
            self.close()
            raise

    def _deliver(self, names: list[str] | LinkError) -> None:
        self._arrived.append(names)
        self._begun.set()
        with self._mutex:  # the descriptor of a closed socket may have been given to another one
            if not self._closed:
                with suppress(BlockingIOError):
                    self._writer.send(b"!")

    def fileno(self) -> int:
        """Return the descriptor to poll, -1 if there is none."""
        return self._reader.fileno()

    def read(self) -> list[str]:
        """Return the waiters that were notified, without blocking; raises LinkError at the end of the watch."""
        with suppress(OSError):
            self._reader.recv(4096)
        names: list[str] = []
        while self._arrived:
            arrived = self._arrived.popleft()
            if isinstance(arrived, LinkError):
                raise arrived
            names += arrived
        return names

    def close(self) -> None:
        """End the watch."""
        self._watch.close()
        with suppress(RuntimeError):  # in a forked child, a thread of the parent may hold it
            if self._mutex.acquire(timeout=1.0):
                self._closed = True
                self._reader.close()
                self._writer.close()
                self._mutex.release()


class AsyncEtcdNotificationLink:
    """The same for an event loop."""

    def __init__(self, place: Place, key: str, timeout: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[list[str] | LinkError] = asyncio.Queue()
        self._watch = Watch(place, key, timeout, self._deliver)

    async def begin(self, timeout: float) -> None:
        """Begin to watch, within *timeout* seconds; raises LinkError if that is not possible."""
        self._watch.start()
        try:
            async with asyncio.timeout(timeout):
                await self.read()
        except TimeoutError:
            self.close()
            raise LinkError(Failure.TIMEOUT) from None
        except BaseException:
            self.close()
            raise

    def _deliver(self, names: list[str] | LinkError) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, names)

    async def read(self) -> list[str]:
        """Wait for notifications and return the waiters that they name; raises LinkError at the end of the watch."""
        arrived = await self._arrived.get()
        if isinstance(arrived, LinkError):
            raise arrived
        return arrived

    def close(self) -> None:
        """End the watch."""
        self._watch.close()
