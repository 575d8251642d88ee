"""
A Redis or Valkey master as a node.

RESP, TLS and authentication are redis-py's business, but for the replies that an event loop hands over (see
:mod:`.resp`); the connections are ours: explicit short timeouts, no retries, no pool. A silent node costs a client
built with redis-py 8.1's defaults 59 seconds.
"""

import asyncio
import inspect
import re
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from redis import exceptions
from redis.asyncio import connection as aioconnection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection, parse_url
from redis.retry import Retry

from ...core.admission import Greeting
from ...core.failure import Failure
from ...core.replies import Kind, Reply, failed
from ...core.requests import Request
from ..base import INCOMPLETE, LinkError, NodeSpec, until_cancelled
from .decode import (
    BROKEN,
    Assembly,
    aged,
    check_subscription,
    link_error,
    parse_age,
    parse_answer,
    parse_info,
)
from .encode import Encoder, Introductions
from .handshake import READ_SIZE, Parse, aexchange, exchange, some
from .resp import PARTIAL, Replies

ALIASES = {"valkey": "redis", "valkeys": "rediss"}

ENCODED = (
    "because characters such as @, #, / and ? must be percent-encoded in a user name or password (%40, %23, %2F, %3F); "
    "urllib.parse.quote(password, safe='') does it"
)

# Ours to decide, whatever the URL and redis-py's defaults say.
FIXED: dict[str, Any] = {"protocol": 2, "decode_responses": False, "health_check_interval": 0}
# redis-py would tell the server its name and version, which takes a right of its own. The argument changed in 7.
if "driver_info" in inspect.signature(AbstractConnection.__init__).parameters:
    FIXED |= {"driver_info": None}
else:
    FIXED |= {"lib_name": None, "lib_version": None}

# That there is something to read, and that the connection has ended; where poll() does not tell, it is read.
SAID, ENDED = select.POLLIN, select.POLLHUP | select.POLLERR | select.POLLNVAL | getattr(select, "POLLRDHUP", 0)
# What a socket that does not block raises when it would.
BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
NOTHING = object()  # stands for a reply that has not come
CROWD = 4  # requests on their way, from which on a link writes once per turn of the loop

# What redis-py's own lock raises, for django_redlock.compat.
RedisLockError = exceptions.LockError
RedisLockNotOwnedError = exceptions.LockNotOwnedError


def verification(
    ssl_cert_reqs: ssl.VerifyMode | str | None = "required", ssl_check_hostname: bool | None = None, **others: Any
) -> dict[str, Any]:
    """Return how certificates are verified, with the host name unless told otherwise, for every version of redis-py."""
    # Before version 6, redis-py took a good certificate of any host; some versions know the words only.
    how = "none" if ssl_cert_reqs is None else ssl_cert_reqs
    how = how.name.removeprefix("CERT_").lower() if isinstance(how, ssl.VerifyMode) else how
    check = ssl_check_hostname is not False and how != "none"
    return {"ssl_cert_reqs": how, "ssl_check_hostname": check}


def check_url(url: str) -> None:
    """
    Refuse a URL that redis-py would read in another way than it is meant.

    An unescaped ``/``, ``#`` or ``?`` in a password ends the address early, so that a part of the password becomes the
    host, the port or the database. No message shows any of it.

    Raises:
        ValueError: A character in the user name or password is not percent-encoded, or the database is no number.
    """
    try:
        scheme, address, path, query, _ = urlsplit(url)
    except ValueError:
        return  # redis-py cannot read it either, which is reported with it
    socket_path = scheme == "unix" and not address  # which may have an @ in its name
    host = scheme == "unix" and not address.endswith("@") and address  # a path has none
    if "#" in url or address.count("@") > 1 or "@" in query or ("@" in path and not socket_path) or host:
        raise ValueError(f"its user name or password cannot be read, {ENCODED}")
    if scheme != "unix" and not re.fullmatch(r"(/[0-9]*)?", path):
        raise ValueError("its database number is not a number; write, for example, redis://lock-1:6379/2")


class RedisNode:
    """
    One Redis or Valkey master.

    Args:
        spec: Its URL and options.
        prefix: What every key begins with.

    Raises:
        ValueError: redis-py cannot make a connection of the URL and options.
    """

    instant = False
    calls = True
    fails_over = False

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        scheme, rest = spec.url.split(":", 1)
        check_url(spec.url)
        try:
            arguments: dict[str, Any] = dict(parse_url(f"{ALIASES.get(scheme, scheme)}:{rest}"))
        except ValueError:
            # The message of urllib or redis-py may quote the URL, and with it the password.
            raise ValueError(f"its address, port or database number cannot be read, {ENCODED}") from None
        self._class: type[AbstractConnection] = arguments.pop("connection_class", Connection)
        self._arguments = arguments | dict(spec.options)
        if issubclass(self._class, SSLConnection):
            self._arguments |= verification(**self._arguments)
        self.encoder = Encoder(prefix)
        self.address = self._address()
        self.name = spec.name or self.address
        self._new_connection(1.0)

    def __repr__(self) -> str:
        return f"<RedisNode {self.name}>"

    @property
    def encrypted(self) -> bool:
        """Whether its connections are encrypted."""
        return issubclass(self._class, SSLConnection)

    @property
    def authenticated(self) -> bool:
        """Whether a password is sent."""
        return bool(self._arguments.get("password") or self._arguments.get("credential_provider"))

    @property
    def remote(self) -> bool:
        """Whether its connections leave this machine."""
        host = str(self._arguments.get("host", "localhost"))
        local = host in ("localhost", "::1") or host.startswith("127.")
        return self._class is not UnixDomainSocketConnection and not local

    def _address(self) -> str:
        if self._class is UnixDomainSocketConnection:
            return str(self._arguments.get("path", ""))
        host = self._arguments.get("host", "localhost")
        return f"{f'[{host}]' if ':' in host else host}:{self._arguments.get('port', 6379)}"

    def _new_connection(self, timeout: float, **where: Any) -> AbstractConnection:
        timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        fixed: dict[str, Any] = FIXED | timeouts | {"retry": Retry(NoBackoff(), 0)}
        if self._class is not UnixDomainSocketConnection:
            fixed["socket_keepalive"] = True
        try:
            return self._class(**(self._arguments | fixed | where))
        except TypeError as error:
            unknown = str(error).rpartition("argument ")[2]
            raise ValueError(f"redis-py's connection has no option {unknown}") from None
        except exceptions.RedisError as error:
            raise ValueError(f"redis-py refuses its options ({type(error).__name__})") from None

    def connect(self, timeout: float) -> "RedisLink":
        """Open a link; see :class:`~django_redlock.nodes.base.Node`."""
        return self._connect(self._new_connection(timeout))

    def listen(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> "RedisNotificationLink":
        """Open a link for notifications; see :class:`~django_redlock.nodes.base.Node`."""
        connection = self._new_connection(timeout)
        _, messages = self._open(connection, self.encoder.subscription(process), check_subscription)
        return RedisNotificationLink(connection, messages)

    def _connect(self, connection: AbstractConnection) -> "RedisLink":
        (greeting, age), _ = self._open(connection, self.encoder.greeting, parse_info, parse_age)
        return RedisLink(connection, self.encoder, aged(greeting, age))

    def _open(self, connection: AbstractConnection, data: bytes, *parsers: Parse) -> tuple[list[Any], Replies]:
        """Connect and send the first commands; see :func:`~django_redlock.nodes.redis.handshake.exchange`."""
        try:
            connection.connect()
            return exchange(connection, data, *parsers)
        except (LinkError, *BROKEN) as error:
            connection.disconnect()
            raise link_error(error) from None

    async def aconnect(self, timeout: float) -> "AsyncRedisLink":
        """Open a link for the running event loop; see :class:`~django_redlock.nodes.base.Node`."""
        return await self._aconnect(self._new_async_connection(timeout), timeout)

    async def alisten(
        self, process: str, timeout: float, on_notification: Callable[[str], object]
    ) -> "AsyncRedisNotificationLink":
        """Open a link for notifications; see :class:`~django_redlock.nodes.base.Node`."""
        connection = self._new_async_connection(timeout)
        data = self.encoder.subscription(process)
        _, messages = await self._aopen(connection, timeout, data, check_subscription)
        return AsyncRedisNotificationLink(connection, messages)

    def _new_async_connection(self, timeout: float, **where: Any) -> aioconnection.AbstractConnection:
        classes = {
            Connection: aioconnection.Connection,
            SSLConnection: aioconnection.SSLConnection,
            UnixDomainSocketConnection: aioconnection.UnixDomainSocketConnection,
        }
        # No read timeout: one task reads for as long as the link lives, and rounds have timeouts of their own.
        timeouts = {"socket_timeout": None, "socket_connect_timeout": timeout}
        fixed: dict[str, Any] = FIXED | timeouts | {"retry": AsyncRetry(NoBackoff(), 0)}
        connection: aioconnection.AbstractConnection = classes[self._class](**(self._arguments | fixed | where))
        return connection

    async def _aconnect(self, connection: aioconnection.AbstractConnection, timeout: float) -> "AsyncRedisLink":
        (greeting, age), _ = await self._aopen(connection, timeout, self.encoder.greeting, parse_info, parse_age)
        try:
            return AsyncRedisLink(connection, self.encoder, aged(greeting, age))
        except LinkError:
            drop(connection)
            raise

    async def _aopen(
        self, connection: aioconnection.AbstractConnection, timeout: float, data: bytes, *parsers: Parse
    ) -> tuple[list[Any], Replies]:
        """Do what :meth:`_open` does without blocking."""
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()
                return await aexchange(connection, data, *parsers)
        except BaseException as error:
            await connection.disconnect(nowait=True)
            if isinstance(error, (LinkError, *BROKEN)):
                raise link_error(error) from None
            raise  # cancelled


class RedisLink:
    """
    One connection that redis-py made, used without its client: what is sent is sent once.

    Its socket does not block. With a timeout, Python would poll before it sends and before it receives, although the
    round that asks has polled already. Replies are read by :mod:`.resp`, as those of an event loop are.
    """

    demoted: Failure | None = None
    """What to say when the server is no master any more; empty is what it says itself."""

    def __init__(self, connection: AbstractConnection, encoder: Encoder, greeting: Greeting) -> None:
        self.greeting = greeting
        self._connection = connection
        self.encoder = encoder
        self._scripts = Introductions()
        self._assembly = Assembly()
        self._replies = Replies(connection._parser.parse_error)
        self._ahead: Any = NOTHING
        self._sock: socket.socket | None = connection._sock
        if self._sock is not None:
            self._sock.setblocking(False)

    def fileno(self) -> int:
        return fileno(self._connection)

    def send(self, request: Request, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        in_full = self._scripts.is_new(request) or in_full
        data = self.encoder.pack(request, packed, in_full)
        if self._sock is None:
            raise LinkError(Failure.CLOSED)
        try:
            sent = self._sock.send(data)
        except BLOCKED:
            sent = 0
        except OSError as error:
            raise link_error(error) from None
        if sent < len(data):
            self._send_rest(self._sock, memoryview(data)[sent:])

    def _send_rest(self, sock: socket.socket, rest: memoryview) -> None:
        """Send what was too much for the socket's buffer; blocks for at most the time allowed for connecting."""
        try:
            sock.settimeout(self._connection.socket_timeout)
            sock.sendall(rest)
            sock.setblocking(False)
        except OSError as error:
            raise link_error(error) from None

    def receive(self, request: Request) -> Reply | None:
        raw, self._ahead = self._ahead, NOTHING
        if isinstance(raw, LinkError):
            raise raw
        return self._assembly.add(request, parse_answer(raw, self.demoted))

    def readable(self) -> bool:
        """Read one reply ahead, if all of it is there: bytes that TLS holds back, no poll shows."""
        if self._ahead is NOTHING:
            self._ahead = self._read()
        return self._ahead is not NOTHING

    def _read(self) -> Any:
        """Return a reply, the error that ended the connection, or ``NOTHING``."""
        if self._sock is None:
            return LinkError(Failure.RESET)
        try:
            while (raw := self._replies.next()) is PARTIAL:
                data = self._sock.recv(READ_SIZE)
                if not data:
                    return LinkError(Failure.CLOSED)
                self._replies.feed(data)
        except BLOCKED:
            return NOTHING
        except OSError as error:
            return link_error(error)
        except ValueError:
            return LinkError(Failure.MALFORMED)
        if isinstance(raw, exceptions.RedisError) and not isinstance(raw, exceptions.ResponseError):
            return link_error(raw)  # redis-py hangs up after these
        return raw

    def close(self) -> None:
        self._sock = None
        self._connection.disconnect()


class RedisNotificationLink:
    """
    A connection that has subscribed to the channel of a process.

    Args:
        connection: The connection.
        messages: Reads what comes on it, and has what came right behind the reply to the subscription.
    """

    def __init__(self, connection: AbstractConnection, messages: Replies) -> None:
        self._connection = connection
        self._messages = messages
        self._sock: socket.socket | None = connection._sock
        if self._sock is not None:
            self._sock.setblocking(False)

    def fileno(self) -> int:
        return fileno(self._connection)

    def read(self) -> list[str]:
        told = []
        try:
            self._feed()
            while (message := self._messages.next()) is not PARTIAL:
                told.append(notified_waiter(message))
        except BROKEN as error:
            raise link_error(error) from None
        return told

    def _feed(self) -> None:
        """Take what has come; several times, because of what TLS holds back no poll tells."""
        while self._sock is not None:
            try:
                data = self._sock.recv(READ_SIZE)
            except BLOCKED:
                return
            self._messages.feed(some(data))
        raise LinkError(Failure.CLOSED)

    def close(self) -> None:
        self._sock = None
        self._connection.disconnect()


class AsyncRedisNotificationLink:
    """The same for an event loop."""

    def __init__(self, connection: aioconnection.AbstractConnection, messages: Replies) -> None:
        self._connection = connection
        self._messages = messages

    async def read(self) -> list[str]:
        try:
            while (message := self._messages.next()) is PARTIAL:
                if self._connection._reader is None:
                    raise LinkError(Failure.CLOSED)
                self._messages.feed(some(await self._connection._reader.read(READ_SIZE)))
        except BROKEN as error:
            raise link_error(error) from None
        return [notified_waiter(message)]

    def close(self) -> None:
        drop(self._connection)


def notified_waiter(message: Any) -> str:
    """Return the waiter that a message of a channel names."""
    if not isinstance(message, list) or len(message) < 3 or message[0] != b"message":
        return ""
    return str(message[2], "utf-8", "replace")


def fileno(connection: AbstractConnection) -> int:
    """Return the file descriptor of a connection."""
    sock = connection._sock
    if sock is None:
        raise LinkError(Failure.CLOSED)
    return int(sock.fileno())


def drop(connection: aioconnection.AbstractConnection) -> None:
    """Close a connection of an event loop as its ``disconnect()`` does, which has to be awaited."""
    writer = connection._writer
    connection._reader = connection._writer = None  # redis-py warns of a connection that still has them
    if writer is not None:
        with suppress(RuntimeError):  # the loop is closed already, and its transports with it
            writer.transport.abort()


class AsyncRedisLink(asyncio.BufferedProtocol):
    """
    One connection for all tasks of an event loop.

    redis-py makes it; then the transport is taken over, because its streams cost more than the rest of a round
    (see :mod:`.resp`). Writing is ours as well: redis-py's ``send_packed_command`` waits, and a request must be
    either sent or not. The link has a task that does nothing, so that whoever cancels all tasks of a loop, as
    :func:`asyncio.run` does at its end, closes it too.

    Raises:
        LinkError: The connection has ended meanwhile.
    """

    demoted: Failure | None = None

    def __init__(self, connection: aioconnection.AbstractConnection, encoder: Encoder, greeting: Greeting) -> None:
        loop = asyncio.get_running_loop()
        self.greeting = greeting
        self.broken = False
        self._connection = connection
        self.encoder = encoder
        self._scripts = Introductions()
        self._waiting: deque[tuple[Request, Callable[[Reply | None], bool]]] = deque()
        self._assembly = Assembly()
        self._replies = Replies(connection._parser.parse_error)
        self._room = memoryview(bytearray(READ_SIZE))
        self._unsent: list[bytes] = []
        # Whether requests and the functions that wait for replies may not match. It stays so after an exception from a
        # signal handler, and the link is given up: otherwise one request would get the reply of another.
        self._torn = False
        self._loop = loop
        self._writer = take_over(connection, self)  # kept, because a stream writer closes when it is collected
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
        in_full = self._scripts.is_new(request) or in_full
        self._write(self.encoder.pack(request, packed, in_full))
        self._waiting.append((request, on_reply))

    def readable(self) -> bool:
        sock = self._transport.get_extra_info("socket")
        if sock is None or sock.fileno() < 0:
            return False
        poll = select.poll()
        poll.register(sock.fileno(), SAID | ENDED)
        return any(events & SAID and not events & ENDED for _, events in poll.poll(0))

    def _write(self, data: bytes) -> None:
        """Send at once; of a crowd of tasks, send together what they have to say in one turn of the loop."""
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
        return self._room

    def buffer_updated(self, nbytes: int) -> None:
        replies = self._replies
        if self._torn:
            self._end(LinkError(Failure.INTERRUPTED))
            return
        self._torn = True
        replies.feed(bytes(self._room[:nbytes]))
        try:
            while not self.broken and (raw := replies.next()) is not PARTIAL:
                self._take(raw)
            self._torn = False
        except LinkError as error:
            self._end(error)
        except (ValueError, IndexError):  # no reply, or one that nobody asked for
            self._end(LinkError(Failure.MALFORMED))

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(link_error(exc) if exc else LinkError(Failure.CLOSED))

    def _take(self, raw: Any) -> None:
        request, on_reply = self._waiting[0]
        if isinstance(raw, exceptions.RedisError) and not isinstance(raw, exceptions.ResponseError):
            raise link_error(raw)  # redis-py hangs up after these
        whole = self._assembly.add(request, parse_answer(raw, self.demoted))
        if whole is INCOMPLETE:
            return
        self._waiting.popleft()
        if whole is None:
            self._again(request, on_reply)
        else:
            on_reply(whole)

    def _again(self, request: Request, on_reply: Callable[[Reply | None], bool]) -> None:
        """Send a request whose script the server does not know once more, in full, if it is still wanted."""
        if on_reply(None) and not self.broken and not self._transport.is_closing():
            self._put(request, {}, on_reply, in_full=True)
        else:
            on_reply(failed(Failure.NOSCRIPT))

    def close(self) -> None:
        self._end(LinkError(Failure.CLOSED))

    def _end(self, error: LinkError) -> None:
        """Drop the connection, and tell all who wait for a reply that there will be none."""
        if self.broken:
            return
        self._flush()  # what is written before a link is dropped, such as a release, is sent
        self.broken = True
        with suppress(RuntimeError):  # the loop is closed already, and its transports and tasks with it
            self._transport.abort()
            self._keeper.cancel()
        while self._waiting:
            self._waiting.popleft()[1](error.reply(Kind.UNKNOWN))


def take_over(connection: aioconnection.AbstractConnection, protocol: asyncio.BaseProtocol) -> asyncio.StreamWriter:
    """
    Have *protocol* read what comes on a connection from now on, instead of redis-py.

    Raises:
        LinkError: The connection has ended, and *protocol* would never hear of it.
    """
    reader, writer = connection._reader, connection._writer
    if reader is None or writer is None or reader.at_eof() or writer.is_closing():
        raise LinkError(Failure.CLOSED)
    writer.transport.set_protocol(protocol)
    connection._reader = connection._writer = None  # redis-py closes, and warns of, what it still has
    return writer


def open_node(spec: NodeSpec, prefix: str) -> RedisNode:
    """Return the node of a ``redis``, ``rediss``, ``unix``, ``valkey`` or ``valkeys`` URL."""
    if urlsplit(spec.url).scheme == "unix" and not urlsplit(spec.url).path:
        raise ValueError("a unix:// URL needs the path of a socket, such as unix:///run/valkey.sock")
    return RedisNode(spec, prefix)
