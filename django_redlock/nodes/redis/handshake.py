"""
Query a server over a connection that redis-py has just made (internal).

redis-py's own parsers read a reply of any length to its end. Here the length is bounded where it is read, so a hostile
or broken server cannot fill the memory of its clients.
"""

import socket
import ssl
from collections.abc import Callable
from typing import Any

from redis.asyncio import connection as aioconnection
from redis.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from ...core.protocol import Failure
from ..base import LinkError
from ..clock import SLICES, Patience, steady
from .errors import BROKEN, link_error
from .wire import PARTIAL, Replies

READ_SIZE = 16_384  # bytes that are read at a time
BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
LONGEST_GREETING = 1_048_576  # bytes; INFO takes about 7,000, and more only with thousands of databases or replicas

Parse = Callable[[Any], Any]


def unchanged(raw: Any) -> Any:
    """
    Return a reply as it is; an error reply is returned as an exception, not raised.

    Raises:
        LinkError: The reply is an error after which the server hangs up, or does nothing else for now.
    """
    if isinstance(raw, RedisError) and not isinstance(raw, ResponseError):
        raise link_error(raw)
    return raw


class Exchange:
    """
    The replies to the first commands on a connection.

    Args:
        connection: The connection, with no reply in flight.
        parsers: One for each reply, called as soon as the reply is there: a server of another kind may never send the
            next one.
    """

    def __init__(self, connection: Any, parsers: tuple[Parse, ...]) -> None:
        self.replies = Replies(connection._parser.parse_error, LONGEST_GREETING)
        self.found: list[Any] = []
        self._parsers = parsers

    def complete(self) -> bool:
        """Take the replies that have arrived; return whether these are all."""
        while len(self.found) < len(self._parsers) and (reply := self.replies.next()) is not PARTIAL:
            self.found.append(self._parsers[len(self.found)](reply))
        return len(self.found) == len(self._parsers)


def exchange(connection: AbstractConnection, data: bytes, *parsers: Parse) -> tuple[list[Any], Replies]:
    """
    Send some commands, and read their replies within the timeout of the connection.

    Args:
        connection: The connection, with no reply in flight.
        data: The commands.
        parsers: One for each reply.

    Returns:
        What the parsers returned, and the reader with the data that came after the replies.

    Raises:
        LinkError: The connection broke, or the data is no reply or too long.
    """
    under_way, sock = Exchange(connection, parsers), connection._sock
    if sock is None:
        raise LinkError(Failure.CLOSED)
    try:
        _carry_out(under_way, sock, data, connection.socket_timeout)
    except BROKEN as error:
        raise link_error(error) from None
    return under_way.found, under_way.replies


def _carry_out(under_way: Exchange, sock: socket.socket, data: bytes, timeout: float | None) -> None:
    sock.settimeout(timeout)
    sock.sendall(data)
    patience = timeout and Patience(timeout)
    asked = timeout and timeout / SLICES
    while not under_way.complete():
        began = steady()
        sock.settimeout(asked)  # 0.0 at the end of the time, which reads what has arrived
        try:
            under_way.replies.feed(some(sock.recv(READ_SIZE)))
        except (TimeoutError, *BLOCKED):
            if not asked:
                raise LinkError(Failure.LATE if patience and patience.late else Failure.TIMEOUT) from None
        if patience and asked:  # for the whole exchange, even if a server sends byte by byte
            asked = patience.count(asked, steady() - began)


async def aexchange(
    connection: aioconnection.AbstractConnection, data: bytes, *parsers: Parse
) -> tuple[list[Any], Replies]:
    """Do what :func:`exchange` does without blocking; the caller bounds the time."""
    under_way, reader, writer = Exchange(connection, parsers), connection._reader, connection._writer
    if reader is None or writer is None:
        raise LinkError(Failure.CLOSED)
    try:
        writer.write(data)
        await writer.drain()
        while not under_way.complete():
            under_way.replies.feed(some(await reader.read(READ_SIZE)))
    except BROKEN as error:
        raise link_error(error) from None
    return under_way.found, under_way.replies


def some(data: bytes) -> bytes:
    """
    Return *data* if it is not empty.

    Raises:
        LinkError: There is no data, because the other side has ended the connection.
    """
    if not data:
        raise LinkError(Failure.CLOSED)
    return data
