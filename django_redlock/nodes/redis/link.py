"""
The connections to one server, for threads and for event loops: for requests and for notifications (internal).

:mod:`.handshake` opens a connection and logs in. Everything after that is sent and read here.
"""

import asyncio
import socket
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from redis.asyncio import connection as aioconnection
from redis.connection import AbstractConnection
from redis.exceptions import RedisError

from ...core.admission import Greeting
from ...core.protocol import Failure, Kind, Reply, Request, failed
from ...runtime.poll import ENDED, READABLE, poller
from ..base import INCOMPLETE, LinkError, Packed, RateLimit, until_cancelled
from .errors import BROKEN, DEMOTED, link_error
from .wire import (
    COMMON,
    PARTIAL,
    Assembly,
    Encoder,
    Replies,
    common_reply,
    unchanged,
    word,
)

READ_SIZE = 16_384  # bytes that are read at a time

BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

AT_ONCE = 64  # reads in a row; a server that never stops must not keep a thread beyond the time it waits

UNASKED = 10_000  # notifications within a second; no process takes as many locks

CROWD = 4  # requests in flight; from this number on, a link writes once per turn of the loop

NOTHING = object()  # stands for a reply that has not arrived

Describe = Callable[[Any, Any], Greeting]
"""Returns how a server describes itself by its replies to :attr:`.wire.Encoder.greeting`, or raises LinkError."""


class Introduction:
    """
    What the server at the other end of a link says about itself: first when the link is made, later when it is asked.

    A link knows one memory of one server, by its mark. If a later greeting has another mark, the link ends, because
    requests with the old mark may be on their way; a new link learns what the server is now.

    Args:
        encoder: Has the commands of the greeting.
        describe: Reads the replies.
        greeting: The first greeting.
    """

    def __init__(self, encoder: Encoder, describe: Describe, greeting: Greeting) -> None:
        self.greeting = greeting
        self.mark = word(greeting.mark).encode()
        self.question = encoder.greeting
        self._describe = describe
        self._said: list[Any] = []

    def hear(self, raw: Any) -> bool:
        """
        Note one of the two replies to the question; return whether it was the second.

        Raises:
            LinkError: The server cannot be used any more, or its memory is another one.
        """
        self._said.append(raw)
        if len(self._said) < 2:
            return False
        greeting = self._describe(*self._said)
        self._said.clear()
        if greeting.mark != self.greeting.mark:
            raise LinkError(Failure.FORGOT)
        self.greeting = greeting
        return True


class RedisLink:
    """
    One connection that redis-py made, used without its client, so that nothing is sent twice.

    Its socket does not block. With a timeout, Python would poll before each send and each receive, although the round
    has polled already. :mod:`.wire` reads the replies, as it does for an event loop.
    """

    unserved: Mapping[Failure, Failure] = DEMOTED
    """The errors of a server that no longer serves these locks, and what to report for each."""

    def __init__(self, connection: AbstractConnection, encoder: Encoder, introduction: Introduction) -> None:
        self.introduction, self._mark = introduction, introduction.mark
        self._connection = connection
        self.encoder = encoder
        # Requests whose scripts the server knows. A script is sent in full the first time, because loading it would
        # take a command, and a right, of its own.
        self._taught: set[type[Request]] = set()
        self._assembly = Assembly()
        self._replies = Replies(connection._parser.parse_error)
        self._ahead: Any = NOTHING
        self._sock: socket.socket | None = connection._sock
        if self._sock is not None:
            self._sock.setblocking(False)

    @property
    def greeting(self) -> Greeting:
        """What the server said about itself last."""
        return self.introduction.greeting

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return descriptor(self._sock)

    def greet(self) -> None:
        """Ask the server to describe itself again; see :class:`~django_redlock.nodes.base.Link`."""
        self._send(self.introduction.question)

    def receive_greeting(self) -> Greeting | None:
        """Return what the server says about itself; see :class:`~django_redlock.nodes.base.Link`."""
        while (raw := self._read()) is not NOTHING:
            if self.introduction.hear(raw):
                return self.introduction.greeting
        return None

    def send(self, request: Request, packed: Packed, *, in_full: bool = False) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.Link`."""
        if type(request) not in self._taught:
            self._taught.add(type(request))
            in_full = True
        self._send(self.encoder.pack(request, packed, in_full, self._mark))

    def _send(self, data: bytes) -> None:
        sock = self._sock
        if sock is None:
            raise LinkError(Failure.CLOSED)
        try:
            sent = sock.send(data)
        except BLOCKED:
            sent = 0
        except OSError as error:
            raise link_error(error) from None
        if sent < len(data):
            self._send_rest(sock, memoryview(data)[sent:])

    def _send_rest(self, sock: socket.socket, rest: memoryview) -> None:
        """Send the rest of a request that did not fit the socket's buffer; block for at most the socket timeout."""
        try:
            sock.settimeout(self._connection.socket_timeout)
            sock.sendall(rest)
            sock.setblocking(False)
        except OSError as error:
            raise link_error(error) from None

    def receive(self, request: Request) -> Reply | None:
        """Return the reply to the oldest request; see :class:`~django_redlock.nodes.base.Link`."""
        whole: Reply | None = INCOMPLETE
        while whole is INCOMPLETE:
            raw = self._read(request)
            if type(raw) is Reply:
                return raw
            if raw is NOTHING:
                return INCOMPLETE
            whole = self._assembly.add(request, raw, self.unserved)
        if whole is None:
            self._taught.discard(type(request))
        return whole

    def readable(self) -> bool:
        """Read one reply ahead if all of it has arrived; a poll does not show the bytes that TLS holds back."""
        if self._ahead is NOTHING:
            try:
                self._ahead = self._read()
            except LinkError as error:
                self._ahead = error
        return self._ahead is not NOTHING

    def _read(self, request: Request | None = None) -> Any:
        """
        Return the next reply, read ahead or not, or ``NOTHING``; raise the error that ended the connection.

        A common reply to *request* is returned as a :class:`Reply`.
        """
        if self._ahead is not NOTHING:
            ahead, self._ahead = self._ahead, NOTHING
            if isinstance(ahead, LinkError):
                raise ahead
            return ahead
        if self._sock is None:
            raise LinkError(Failure.RESET)
        replies = self._replies
        try:
            for _ in range(AT_ONCE):
                if not (empty := replies.empty) and (raw := replies.next()) is not PARTIAL:
                    return raw
                data = self._sock.recv(READ_SIZE)
                if not data:
                    raise LinkError(Failure.CLOSED)
                found = COMMON.fullmatch(data) if empty else None
                if found and request and (reply := common_reply(request, found)):
                    return reply
                replies.feed(data)
            raw = replies.next()
        except BLOCKED:
            return NOTHING
        except OSError as error:
            raise link_error(error) from None
        except ValueError:
            raise LinkError(Failure.MALFORMED) from None
        return NOTHING if raw is PARTIAL else raw  # the caller polls, and so notices when its time has passed

    def close(self) -> None:
        """Close the connection."""
        self._sock = None
        self._connection.disconnect()


class AsyncRedisLink(asyncio.BufferedProtocol):
    """
    One connection for all tasks of an event loop.

    redis-py makes the connection. Then the link takes over the transport, because redis-py's streams cost more than the
    rest of a round (see :mod:`.wire`). It also writes by itself: redis-py's ``send_packed_command`` waits, and a
    request must be either sent or not. The link has a task that does nothing. Cancelling all tasks of a loop, as
    :func:`asyncio.run` does at its end, therefore closes the link, too.

    Raises:
        LinkError: The connection has ended meanwhile.
    """

    unserved: Mapping[Failure, Failure] = DEMOTED

    def __init__(
        self, connection: aioconnection.AbstractConnection, encoder: Encoder, introduction: Introduction
    ) -> None:
        loop = asyncio.get_running_loop()
        self.introduction, self._mark = introduction, introduction.mark
        self.broken = False
        self._connection = connection
        self.encoder = encoder
        # Requests whose scripts the server knows. A script is sent in full the first time, because loading it would
        # take a command, and a right, of its own.
        self._taught: set[type[Request]] = set()
        self._waiting: deque[tuple[Request | None, Callable[..., Any]]] = deque()  # without a request: a greeting
        self._assembly = Assembly()
        self._replies = Replies(connection._parser.parse_error)
        self._room = memoryview(bytearray(READ_SIZE))
        self._unsent: list[bytes] = []
        # Whether requests and the functions that wait for replies may not match. This stays true after an exception
        # from a signal handler, and the link is given up: otherwise one request would get the reply of another.
        self._torn = False
        self._loop = loop
        reader, writer = connection._reader, connection._writer
        if reader is None or writer is None or reader.at_eof() or writer.is_closing():
            raise LinkError(Failure.CLOSED)
        writer.transport.set_protocol(self)
        connection._reader = connection._writer = None  # redis-py would close what it still has, and warn about it
        self._writer = writer  # kept: a stream writer closes when it is garbage-collected
        self._transport = writer.transport
        self._keeper = loop.create_task(until_cancelled(), name="django_redlock link")
        self._keeper.add_done_callback(lambda keeper: self.close())

    @property
    def greeting(self) -> Greeting:
        """What the server said about itself last."""
        return self.introduction.greeting

    def send(
        self,
        request: Request,
        packed: Packed,
        on_reply: Callable[[Reply | None], bool],
        *,
        in_full: bool = False,
    ) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.AsyncLink`."""
        self._check()
        self._torn = True
        self._put(request, packed, on_reply, in_full)
        self._torn = False

    def greet(self, on_greeting: Callable[[Greeting], object]) -> None:
        """Ask the server to describe itself again; see :class:`~django_redlock.nodes.base.AsyncLink`."""
        self._check()
        self._torn = True
        self._write(self.introduction.question)
        self._waiting.append((None, on_greeting))
        self._torn = False

    def _check(self) -> None:
        """Raise LinkError if the link is broken."""
        if self._torn:
            self._end(LinkError(Failure.INTERRUPTED))
        if self.broken or self._transport.is_closing():
            raise LinkError(Failure.CLOSED)

    def _put(self, request: Request, packed: Packed, on_reply: Callable[[Reply | None], bool], in_full: bool) -> None:
        if type(request) not in self._taught:
            self._taught.add(type(request))
            in_full = True
        self._write(self.encoder.pack(request, packed, in_full, self._mark))
        self._waiting.append((request, on_reply))

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        sock = self._transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return False
        poll = poller()
        poll.register(sock.fileno(), READABLE | ENDED)
        return any(events & READABLE and not events & ENDED for _, events in poll.poll(0))

    def _write(self, data: bytes) -> None:
        """Write at once, or, if many tasks send in one turn of the loop, write all their requests together."""
        if self._unsent:
            self._unsent.append(data)
        elif len(self._waiting) < CROWD:
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
            if rest := data[self._answer_common(data) :] if replies.empty else data:
                replies.feed(rest)
                while not self.broken and (raw := replies.next()) is not PARTIAL:
                    self._answer(raw)
            self._torn = False
        except LinkError as error:
            self._end(error)
        except (ValueError, IndexError):  # malformed, or not the reply to any request
            self._end(LinkError(Failure.MALFORMED))

    def connection_lost(self, exc: Exception | None) -> None:
        """Note that the connection is gone."""
        self._end(link_error(exc) if exc else LinkError(Failure.CLOSED))

    def _answer_common(self, data: bytes) -> int:
        """Process the common replies with which *data* begins; return where they end."""
        end = 0
        while self._waiting and not self.broken and (found := COMMON.match(data, end)):
            request, on_reply = self._waiting[0]
            reply = common_reply(request, found) if request else None
            if reply is None:
                break
            end = found.end()
            self._waiting.popleft()
            on_reply(reply)
        return end

    def _answer(self, raw: Any) -> None:
        request, on_reply = self._waiting[0]
        if request is None:
            if self.introduction.hear(raw):
                self._waiting.popleft()
                on_reply(self.introduction.greeting)
            return
        whole = self._assembly.add(request, raw, self.unserved)
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
            request, on_reply = self._waiting.popleft()
            if request is not None:
                on_reply(error.reply(Kind.UNKNOWN))


class RedisNotificationLink:
    """
    A connection that has subscribed to the channel of a process.

    Args:
        connection: The connection.
        messages: The reader of the connection, which already has what came right after the reply to the subscription.
    """

    def __init__(self, connection: AbstractConnection, messages: Replies) -> None:
        self._connection = connection
        self._messages = messages
        self._limit = RateLimit(UNASKED)
        self._sock: socket.socket | None = connection._sock
        if self._sock is not None:
            self._sock.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return descriptor(self._sock)

    def read(self) -> list[str]:
        """Return the waiters that were notified; a poll does not show the bytes that TLS holds back, so read on."""
        notified: list[str] = []
        try:
            for _ in range(AT_ONCE):
                data = self._receive()
                self._messages.feed(data)
                while (message := self._messages.next()) is not PARTIAL:
                    self._limit.count()
                    notified.append(parse_notification(message))
                if not data:
                    break
        except BROKEN as error:
            raise link_error(error) from None
        return notified

    def _receive(self) -> bytes:
        """Return what has arrived; nothing if it would have to wait."""
        if self._sock is None:
            raise LinkError(Failure.CLOSED)
        try:
            return some(self._sock.recv(READ_SIZE))
        except BLOCKED:
            return b""

    def close(self) -> None:
        """Close the connection."""
        self._sock = None
        self._connection.disconnect()


class AsyncRedisNotificationLink:
    """A :class:`RedisNotificationLink` for an event loop."""

    def __init__(self, connection: aioconnection.AbstractConnection, messages: Replies) -> None:
        self._connection = connection
        self._messages = messages
        self._limit = RateLimit(UNASKED)

    async def read(self) -> list[str]:
        """Wait for notifications; return the waiters that they name."""
        try:
            while (message := self._messages.next()) is PARTIAL:
                if self._connection._reader is None:
                    raise LinkError(Failure.CLOSED)
                self._messages.feed(some(await self._connection._reader.read(READ_SIZE)))
        except BROKEN as error:
            raise link_error(error) from None
        self._limit.count()
        return [parse_notification(message)]

    def close(self) -> None:
        """Close the connection."""
        hang_up(self._connection)


def check_subscription(raw: Any) -> None:
    """Raise LinkError if the reply does not confirm the subscription to a channel; an ACL may forbid it."""
    if not isinstance(unchanged(raw), list):
        raise link_error(raw) if isinstance(raw, RedisError) else LinkError(Failure.MALFORMED)


def parse_notification(message: Any) -> str:
    """Return the waiter that a message on a channel names; raise LinkError for anything else."""
    match message:
        case [b"message", _, bytes(name)]:
            return name.decode("utf-8", "replace")
    raise LinkError(Failure.MALFORMED)


def descriptor(sock: socket.socket | None) -> int:
    """Return the file descriptor of a connection; raise LinkError if it is closed."""
    if sock is None:
        raise LinkError(Failure.CLOSED)
    return sock.fileno()


def some(data: bytes) -> bytes:
    """Return *data*; raise LinkError if there is none, because the other side has ended the connection."""
    if not data:
        raise LinkError(Failure.CLOSED)
    return data


def hang_up(connection: aioconnection.AbstractConnection) -> None:
    """Close a connection as its ``disconnect()`` does, but without an await."""
    writer = connection._writer
    connection._reader = connection._writer = None  # redis-py warns about a connection that still has them
    if writer is not None:
        with suppress(RuntimeError):  # the loop is closed already, and its transports with it
            writer.transport.abort()
