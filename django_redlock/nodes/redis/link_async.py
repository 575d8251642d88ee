"""
The connections of an event loop to one server: one for requests, one for notifications (internal).

redis-py makes a connection, with TLS and authentication. These classes send and read everything after that.
"""

import asyncio
import select
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from redis import exceptions
from redis.asyncio import connection as aioconnection

from ...core.admission import Greeting
from ...core.protocol import Failure, Kind, Reply, Request, failed
from ..base import INCOMPLETE, LinkError, until_cancelled
from .errors import BROKEN, DEMOTED, link_error
from .link import READ_SIZE, parse_notification, some
from .wire import COMMON, PARTIAL, Assembly, Encoder, Replies, common_reply, parse_answer

# Events: there is data to read; the connection has ended. Where poll() does not report the end, a read finds it.
READABLE, ENDED = select.POLLIN, select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
CROWD = 4  # requests in flight; from this number on, a link writes once per turn of the loop


class AsyncRedisLink(asyncio.BufferedProtocol):
    """
    One connection for all tasks of an event loop.

    redis-py makes the connection. Then the link takes over the transport, because redis-py's streams cost more than the
    rest of a round (see :mod:`.resp`). It also writes by itself: redis-py's ``send_packed_command`` waits, and a
    request must be either sent or not. The link has a task that does nothing. Cancelling all tasks of a loop, as
    :func:`asyncio.run` does at its end, therefore closes the link, too.

    Raises:
        LinkError: The connection has ended meanwhile.
    """

    unserved: Mapping[Failure, Failure] = DEMOTED

    def __init__(self, connection: aioconnection.AbstractConnection, encoder: Encoder, greeting: Greeting) -> None:
        loop = asyncio.get_running_loop()
        self.greeting = greeting
        self.broken = False
        self._connection = connection
        self.encoder = encoder
        # Requests whose scripts the server knows. A script is sent in full the first time, because loading it would
        # take a command, and a right, of its own.
        self._taught: set[type[Request]] = set()
        self._waiting: deque[tuple[Request, Callable[[Reply | None], bool]]] = deque()
        self._assembly = Assembly()
        self._replies = Replies(connection._parser.parse_error)
        self._room = memoryview(bytearray(READ_SIZE))
        self._unsent: list[bytes] = []
        # Whether requests and the functions that wait for replies may not match. This stays true after an exception
        # from a signal handler, and the link is given up: otherwise one request would get the reply of another.
        self._torn = False
        self._loop = loop
        self._writer = take_over(connection, self)  # kept: a stream writer closes when it is garbage-collected
        self._transport = self._writer.transport
        self._keeper = loop.create_task(until_cancelled(), name="django_redlock link")
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
        if self._torn:
            self._end(LinkError(Failure.INTERRUPTED))
        if self.broken or self._transport.is_closing():
            raise LinkError(Failure.CLOSED)
        self._torn = True
        self._put(request, packed, on_reply, in_full)
        self._torn = False

    def _put(
        self, request: Request, packed: dict[int, bytes], on_reply: Callable[[Reply | None], bool], in_full: bool
    ) -> None:
        if type(request) not in self._taught:
            self._taught.add(type(request))
            in_full = True
        data = self.encoder.pack(request, packed, in_full)
        if self._unsent:
            self._unsent.append(data)
        else:
            self._write(data)
        self._waiting.append((request, on_reply))

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        sock = self._transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), READABLE | ENDED)
        return any(events & READABLE and not events & ENDED for _, events in poll.poll(0))

    def _write(self, data: bytes) -> None:
        """Write at once, or, if many tasks send in one turn of the loop, write all their requests together."""
        if len(self._waiting) < CROWD:
            self._transport.write(data)
        else:
            self._unsent.append(data)
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        torn, self._torn = self._torn, True
        data, self._unsent = b"".join(self._unsent), []
        if data and not self._transport.is_closing():
            self._transport.write(data)
        self._torn = torn

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer into which the event loop reads."""
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        """Process what the event loop has read."""
        replies = self._replies
        if self._torn:
            self._end(LinkError(Failure.INTERRUPTED))
            return
        self._torn = True
        data = bytes(self._room[:nbytes])
        try:
            replies.feed(data[self._take_common(data) :] if replies.empty else data)
            while not self.broken and (raw := replies.next()) is not PARTIAL:
                self._take(raw)
            self._torn = False
        except LinkError as error:
            self._end(error)
        except (ValueError, IndexError):  # malformed, or not the reply to any request
            self._end(LinkError(Failure.MALFORMED))

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        self._end(link_error(exc) if exc else LinkError(Failure.CLOSED))

    def _take_common(self, data: bytes) -> int:
        """Process the common replies with which *data* begins; return where they end."""
        end = 0
        while self._waiting and not self.broken and (found := COMMON.match(data, end)):
            request, on_reply = self._waiting[0]
            reply = common_reply(request, found)
            if reply is None:
                break
            end = found.end()
            self._waiting.popleft()
            on_reply(reply)
        return end

    def _take(self, raw: Any) -> None:
        request, on_reply = self._waiting[0]
        if isinstance(raw, exceptions.RedisError) and not isinstance(raw, exceptions.ResponseError):
            raise link_error(raw)  # redis-py closes the connection after these
        whole = self._assembly.add(request, parse_answer(raw, self.unserved))
        if whole is INCOMPLETE:
            return
        self._waiting.popleft()
        if whole is None:
            self._taught.discard(type(request))
            self._again(request, on_reply)
        else:
            on_reply(whole)

    def _again(self, request: Request, on_reply: Callable[[Reply | None], bool]) -> None:
        """Send a request whose script the server does not know again, in full, if the caller still wants it."""
        if on_reply(None) and not self.broken and not self._transport.is_closing():
            self._put(request, {}, on_reply, in_full=True)
        else:
            on_reply(failed(Failure.NOSCRIPT))

    def close(self) -> None:
        """Close the connection."""
        self._end(LinkError(Failure.CLOSED))

    def _end(self, error: LinkError) -> None:
        """Drop the connection, and answer every pending request with the error, because no reply will come."""
        if self.broken:
            return
        self._flush()  # so that what was written before, such as a release, is still sent
        self.broken = True
        with suppress(RuntimeError):  # the loop is closed already, and its transports and tasks with it
            self._transport.abort()
            self._keeper.cancel()
        while self._waiting:
            self._waiting.popleft()[1](error.reply(Kind.UNKNOWN))


class AsyncRedisNotificationLink:
    """A :class:`~django_redlock.nodes.redis.link.RedisNotificationLink` for an event loop."""

    def __init__(self, connection: aioconnection.AbstractConnection, messages: Replies) -> None:
        self._connection = connection
        self._messages = messages

    async def read(self) -> list[str]:
        """Wait for notifications; return the waiters that they name."""
        try:
            while (message := self._messages.next()) is PARTIAL:
                if self._connection._reader is None:
                    raise LinkError(Failure.CLOSED)
                self._messages.feed(some(await self._connection._reader.read(READ_SIZE)))
        except BROKEN as error:
            raise link_error(error) from None
        return [parse_notification(message)]

    def close(self) -> None:
        """Close the connection."""
        drop(self._connection)


def take_over(connection: aioconnection.AbstractConnection, protocol: asyncio.BaseProtocol) -> asyncio.StreamWriter:
    """
    Make *protocol*, instead of redis-py, read what arrives on a connection from now on.

    Raises:
        LinkError: The connection has ended, and *protocol* would never learn of it.
    """
    reader, writer = connection._reader, connection._writer
    if reader is None or writer is None or reader.at_eof() or writer.is_closing():
        raise LinkError(Failure.CLOSED)
    writer.transport.set_protocol(protocol)
    connection._reader = connection._writer = None  # redis-py would close what it still has, and warn about it
    return writer


def drop(connection: aioconnection.AbstractConnection) -> None:
    """Close a connection of an event loop as its ``disconnect()`` does, but without an await."""
    writer = connection._writer
    connection._reader = connection._writer = None  # redis-py warns about a connection that still has them
    if writer is not None:
        with suppress(RuntimeError):  # the loop is closed already, and its transports with it
            writer.transport.abort()
