"""
The handshake with a server: open a connection, log in, and exchange the first commands (internal).

redis-py opens the socket, with TLS, and packs the commands. The login is sent here, together with the first commands,
and the replies are read here, because redis-py's own parsers read a reply of any length to its end.
"""

import asyncio
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, Generic, TypeVar

from redis.asyncio import connection as aioconnection
from redis.connection import AbstractConnection
from redis.exceptions import RedisError

from ...core.protocol import Failure
from ...runtime.clock import SLICES, Patience, steady
from ...runtime.threads import call_soon, start
from ..base import LinkError
from .connector import Endpoint, ResolvedConnection
from .errors import BROKEN, link_error
from .link import (
    AT_ONCE,
    BLOCKED,
    READ_SIZE,
    AsyncRedisLink,
    AsyncRedisNotificationLink,
    RedisLink,
    RedisNotificationLink,
    hang_up,
    some,
)
from .wire import MOST_PARTS, PARTIAL, Replies

LONGEST_GREETING = 1_048_576  # bytes; INFO takes about 7,000, and more only with thousands of databases or replicas

# A server that sends its first replies byte by byte would cost a processor for as long as making a connection may take.
PIECE = 64  # bytes; after fewer, reading waits for more to gather
GATHER = 0.001  # seconds

Parse = Callable[[Any], Any]
"""Reads one reply to the first commands of a connection; raises LinkError if the server cannot be used."""

SomeConnection = TypeVar("SomeConnection", AbstractConnection, aioconnection.AbstractConnection)
SomeLink = TypeVar("SomeLink", RedisLink, AsyncRedisLink)
SomeNotificationLink = TypeVar("SomeNotificationLink", RedisNotificationLink, AsyncRedisNotificationLink)


class Dialer(ABC, Generic[SomeConnection, SomeLink, SomeNotificationLink]):
    """
    How to wait while a connection is opened, which is the same work for threads and for event loops.

    redis-py's own parsers read a reply of any length to its end. Here the length is bounded where it is read, so a
    hostile or broken server cannot fill the memory of its clients. That holds for the login, too, which is sent here
    together with the first commands.

    Args:
        timeout: Seconds to open a connection.

    Attributes:
        link: The class of links over a connection.
        notification_link: The class of links for notifications.
    """

    link: type[SomeLink]
    notification_link: type[SomeNotificationLink]

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    async def open(
        self, connector: Endpoint, data: bytes, *parsers: Parse, most: int = MOST_PARTS, **where: Any
    ) -> tuple[SomeConnection, list[Any], Replies]:
        """
        Open a connection and send the first commands.

        Args:
            connector: Makes the connection.
            data: The commands.
            parsers: One for each reply, called as soon as the reply is there: a server of another kind may never send
                the next one.
            most: How many parts a reply may have.
            where: Another server than the connector's, by ``host`` and ``port``.

        Returns:
            The connection, what the parsers returned, and the reader with the data that came after the replies.

        Raises:
            LinkError: The server cannot be reached, the data is no reply or too long, or a parser raised it.
        """
        connection: SomeConnection = self.new(connector, where)
        try:
            login: list[bytes] = login_of(connection, await self.credentials(connection))
            replies = Exchange(connection, (*[check_login] * len(login), *parsers), most)
            await self.begin(connection, b"".join(login) + data, replies)
            return connection, replies.found[len(login) :], replies
        except BaseException as error:
            known = connector.explain(error, connection) if isinstance(error, (LinkError, *BROKEN)) else None
            self.close(connection)
            if known:
                raise known from None
            raise

    @abstractmethod
    def new(self, connector: Endpoint, where: Mapping[str, Any]) -> SomeConnection:
        """Return a connection that is not open yet."""

    async def credentials(self, connection: SomeConnection) -> tuple[str, ...]:
        """Return what the connection's credential provider gives; nothing if it has none."""
        provider = connection.credential_provider
        return provider.get_credentials() if provider else ()

    @abstractmethod
    async def begin(self, connection: SomeConnection, data: bytes, replies: "Exchange") -> None:
        """Connect, send the first commands, and read the replies."""

    @staticmethod
    @abstractmethod
    def close(connection: SomeConnection) -> None:
        """Close a connection."""


class BlockingDialer(Dialer[AbstractConnection, RedisLink, RedisNotificationLink]):
    """Open connections for threads; its coroutines never wait for an event loop."""

    link = RedisLink
    notification_link = RedisNotificationLink

    def new(self, connector: Endpoint, where: Mapping[str, Any]) -> AbstractConnection:
        """Return a connection that is not open yet."""
        return connector.new(self.timeout, **where)

    async def begin(self, connection: AbstractConnection, data: bytes, replies: "Exchange") -> None:
        """Connect, send the first commands, and read the replies."""
        connection.connect()
        exchange(connection, data, replies)

    @staticmethod
    def close(connection: AbstractConnection) -> None:
        """Close a connection."""
        connection.disconnect()


def exchange(connection: AbstractConnection, data: bytes, replies: "Exchange") -> None:
    """Send commands over a blocking connection, and read their replies within its timeout; see :meth:`Dialer.open`."""
    timeout, sock = connection.socket_timeout or 0.0, connection._sock  # the connector has set one
    if sock is None:
        raise LinkError(Failure.CLOSED)
    try:
        sock.settimeout(timeout)
        sock.sendall(data)
        patience, asked = Patience(timeout), timeout / SLICES
        last_reads = AT_ONCE
        while not replies.complete():
            began = steady()
            sock.settimeout(asked)  # 0.0 at the end of the time, which reads what has arrived
            try:
                data = some(sock.recv(READ_SIZE))
                replies.feed(data)
                if len(data) < PIECE:
                    time.sleep(GATHER)
            except (TimeoutError, *BLOCKED):
                if not asked:
                    raise LinkError(Failure.LATE if patience.late else Failure.TIMEOUT) from None
            if asked:  # for the whole exchange, even if a server sends byte by byte
                asked = patience.count(asked, steady() - began)
            elif not (last_reads := last_reads - 1):  # of what has arrived, which a hostile server adds to
                raise LinkError(Failure.TIMEOUT)
    except BROKEN as error:
        raise link_error(error) from None


class AsyncDialer(Dialer[aioconnection.AbstractConnection, AsyncRedisLink, AsyncRedisNotificationLink]):
    """Open connections for the running event loop."""

    link = AsyncRedisLink
    notification_link = AsyncRedisNotificationLink

    def new(self, connector: Endpoint, where: Mapping[str, Any]) -> aioconnection.AbstractConnection:
        """Return a connection that is not open yet."""
        return connector.new_async(self.timeout, **where)

    async def credentials(self, connection: aioconnection.AbstractConnection) -> tuple[str, ...]:
        """Return what the connection's credential provider gives; nothing if it has none."""
        provider = connection.credential_provider
        if provider and hasattr(provider, "get_credentials_async"):  # not in redis-py 5.2
            return await provider.get_credentials_async()
        return await super().credentials(connection)

    async def begin(self, connection: aioconnection.AbstractConnection, data: bytes, replies: "Exchange") -> None:
        """Connect, send the first commands, and read the replies."""
        async with asyncio.timeout(self.timeout):
            if isinstance(connection, ResolvedConnection):
                await connect(connection)
            else:
                await connection.connect()
            reader, writer = connection._reader, connection._writer
            if reader is None or writer is None:
                raise LinkError(Failure.CLOSED)
            writer.write(data)
            await writer.drain()
            while not replies.complete():
                data = some(await reader.read(READ_SIZE))
                replies.feed(data)
                if len(data) < PIECE:
                    writer.transport.pause_reading()  # type: ignore[attr-defined]
                    await asyncio.sleep(GATHER)
                    writer.transport.resume_reading()  # type: ignore[attr-defined]

    close = staticmethod(hang_up)


async def connect(connection: ResolvedConnection) -> None:
    """Connect to the first address of its host that can be reached."""
    *others, last = await addresses(connection.host, connection.port)
    for connection.address in others:
        with suppress(*BROKEN):
            await connection.connect()
            return
    connection.address = last
    await connection.connect()


async def addresses(host: str, port: int) -> list[str]:
    """Return the addresses of a host, looked up in a thread of its own; an address stands for itself."""
    with suppress(ValueError):
        ip_address(host)
        return [host]
    loop = asyncio.get_running_loop()
    found: asyncio.Future[list[str]] = loop.create_future()

    def deliver(addresses: list[str], error: Exception | None) -> None:
        if not found.done():
            found.set_exception(error) if error else found.set_result(addresses)

    def look_up() -> None:
        known: list[str] = []
        failure: Exception | None = None
        try:
            known = [str(at[0]) for *_, at in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        except Exception as error:  # whatever it was, the coroutine must learn of it; a bad name is a ValueError
            failure = error
        call_soon(loop, deliver, known, failure)

    start(look_up, "django_redlock look-up")
    return await found


class Exchange(Replies):
    """
    The replies to the first commands on a connection, whoever reads the bytes.

    Args:
        connection: The connection, with no reply in flight.
        parsers: One for each reply.
        most: How many parts a reply may have.
    """

    def __init__(self, connection: Any, parsers: Sequence[Parse], most: int = MOST_PARTS) -> None:
        super().__init__(connection._parser.parse_error, LONGEST_GREETING, most)
        self.found: list[Any] = []
        self._parsers = parsers

    def complete(self) -> bool:
        """Take the replies that have arrived; return whether these are all."""
        while len(self.found) < len(self._parsers) and (reply := self.next()) is not PARTIAL:
            self.found.append(self._parsers[len(self.found)](reply))
        return len(self.found) == len(self._parsers)


def login_of(connection: Any, credentials: tuple[str, ...]) -> list[bytes]:
    """Return the commands that redis-py would send first, with the options of the connection."""
    if not credentials and (connection.username or connection.password):
        password = connection.password or ""
        credentials = (connection.username, password) if connection.username else (password,)
    commands = [
        ("AUTH", *credentials) if credentials else (),
        ("CLIENT", "SETNAME", connection.client_name) if connection.client_name else (),
        ("SELECT", connection.db) if connection.db else (),
    ]
    return [b"".join(connection.pack_command(*command)) for command in commands if command]


def check_login(raw: Any) -> None:
    """Raise LinkError if the reply does not confirm the login, the name of the connection or the database."""
    if raw != b"OK":
        raise link_error(raw) if isinstance(raw, RedisError) else LinkError(Failure.MALFORMED)
