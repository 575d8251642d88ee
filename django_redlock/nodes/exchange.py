"""
Ask a server over a connection that redis-py has just made (internal).

redis-py's own parsers read a reply of any length to its end. Here the length is bounded where it is read, so a hostile
or broken server cannot fill the memory of its clients.
"""

import socket
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import connection as aioconnection
from redis.connection import AbstractConnection

from .answers import BROKEN, describe
from .base import LinkError
from .resp import PARTIAL, Replies

READ_SIZE = 16_384  # bytes that are read at a time
LONGEST_GREETING = 1_048_576  # bytes; INFO takes about 7,000, and more only with thousands of databases or replicas


def exchange(connection: AbstractConnection, data: bytes, count: int = 1) -> tuple[list[Any], Replies]:
    """
    Send *data* and read *count* replies, within the timeout of the connection.

    Returns:
        The replies (an error reply is an exception, and not raised), and the reader with what came behind them.

    Raises:
        LinkError: The connection broke, or what came is no reply or too long.
    """
    sock, replies = connection._sock, greeted_by(connection)
    if sock is None:
        raise LinkError("closed")
    try:
        return _exchange(sock, data, count, replies, connection.socket_timeout), replies
    except BROKEN as error:
        raise LinkError(describe(error)) from None


def _exchange(sock: socket.socket, data: bytes, count: int, replies: Replies, timeout: float | None) -> list[Any]:
    until = None if timeout is None else time.monotonic() + timeout
    sock.settimeout(timeout)
    sock.sendall(data)
    found: list[Any] = []
    while not collect(replies, found, count):
        if until is not None:  # for all of it: a server that drips must not keep anybody for longer
            sock.settimeout(max(0.001, until - time.monotonic()))
        replies.feed(some(sock.recv(READ_SIZE)))
        if until is not None and time.monotonic() > until:
            raise TimeoutError
    return found


async def aexchange(
    connection: aioconnection.AbstractConnection, data: bytes, count: int = 1
) -> tuple[list[Any], Replies]:
    """Do what :func:`exchange` does without blocking; the caller bounds the time."""
    reader, writer = connection._reader, connection._writer
    if reader is None or writer is None:
        raise LinkError("closed")
    replies = greeted_by(connection)
    try:
        writer.write(data)
        await writer.drain()
        found: list[Any] = []
        while not collect(replies, found, count):
            replies.feed(some(await reader.read(READ_SIZE)))
    except BROKEN as error:
        raise LinkError(describe(error)) from None
    return found, replies


def greeted_by(connection: Any) -> Replies:
    """Return a reader for the first replies on a connection."""
    error: Callable[[str], Exception] = connection._parser.parse_error
    return Replies(error, LONGEST_GREETING)


def collect(replies: Replies, found: list[Any], count: int) -> bool:
    """Take the replies that are complete; returns whether there are *count* of them."""
    while len(found) < count and (reply := replies.next()) is not PARTIAL:
        found.append(reply)
    return len(found) == count


def some(data: bytes) -> bytes:
    """
    Return *data*.

    Raises:
        LinkError: There is none, because the other side has ended the connection.
    """
    if not data:
        raise LinkError("closed")
    return data
