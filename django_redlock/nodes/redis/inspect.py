"""
Inspect one Redis or Valkey server closely, for the doctor and for the panel of nodes (internal).

A separate connection asks for INFO, measures round trips and the server's clock, and tries each command that the locks
need. It connects as the user of the locks, and the keys that it writes are gone a second later.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from redis import exceptions
from redis.connection import AbstractConnection

from ...core.protocol import Failure
from ...runtime.clock import steady
from ..base import shown
from ..inspection import Inspection
from .errors import link_error, parse_error
from .handshake import Exchange, exchange
from .wire import Encoder, resp, unchanged

SAMPLES = 5  # round trips; the shortest one counts
LINES = 1000  # of INFO that are read; it has about 200, and the others are about databases and replicas


def examine(
    connection: AbstractConnection, encoder: Encoder, database: int, rights: bool, blank: Inspection
) -> tuple[Inspection, Any]:
    """
    Ask a server over a connection.

    Args:
        connection: The connection, as the user of the locks.
        encoder: The encoder of the node's requests.
        database: The number of the database.
        rights: Whether to try each command that locks need.
        blank: What is known of the node already.

    Returns:
        What the server reports, and its reply about the time for which it has served these locks.

    Raises:
        LinkError: The connection broke, or the server reports an error.
    """
    raw, served = _replies(connection, encoder.greeting, 2)
    info: dict[str, str] = {}
    if isinstance(raw, bytes):
        lines = raw.decode("utf-8", "replace").splitlines()
        info = dict(shown(line).split(":", 1) for line in lines[:LINES] if ":" in line)
    elif parse_error(raw).failure is not Failure.NOPERM:
        raise link_error(raw)
    round_trip, ahead = _clock(connection)
    refused = tuple(_refused(connection, blank.user, encoder.prefix, database)) if rights else ()
    return replace(blank, round_trip=round_trip, ahead=ahead, info=info, refused=refused), served


def _clock(connection: AbstractConnection) -> tuple[float, float]:
    """Return the shortest round trip, and how far the server's clock was ahead during it, in seconds."""
    samples = []
    for _ in range(SAMPLES):
        wall, began = time.time(), steady()
        reply = _command(connection, "TIME")
        took = steady() - began
        there = int(reply[0]) + int(reply[1]) / 1e6 if isinstance(reply, list) else wall + took / 2
        samples.append((took, there - (wall + took / 2)))
    return min(samples)


def commands(prefix: str, db: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """
    Yield each right that locks need, with a command that tries it; keys that these write are gone a second later.

    A server checks the right to ``EVALSHA`` before it looks up the script, so the script need not exist.
    """
    key = f"{prefix}x:doctor:{os.urandom(8).hex()}"
    line, number = f"{key}:line", f"{key}:number"
    yield "+info", ("INFO", "server")
    if db:
        yield "+select", ("SELECT", db)
    yield "+time", ("TIME",)
    yield "+set", ("SET", key, "1", "PX", 1000)
    yield "+get", ("GET", key)
    yield "+mget", ("MGET", key)
    yield "+exists", ("EXISTS", key)
    yield "+pexpire", ("PEXPIRE", key, 1000)
    yield "+pttl", ("PTTL", key)
    yield "+zadd", ("ZADD", line, "1", "a")
    yield "", ("PEXPIRE", line, 1000)
    yield "+zrange", ("ZRANGE", line, 0, -1)
    yield "+zrangebyscore", ("ZRANGEBYSCORE", line, "-inf", "+inf")
    yield "+zcard", ("ZCARD", line)
    yield "+zrank", ("ZRANK", line, "a")
    yield "+zscore", ("ZSCORE", line, "a")
    yield "+zremrangebyscore", ("ZREMRANGEBYSCORE", line, "5", "6")
    yield "+zrem", ("ZREM", line, "a")
    yield "+del", ("DEL", key, line)
    yield "+eval", ("EVAL", "return 1", 1, number)
    yield "+evalsha", ("EVALSHA", "0" * 40, 1, number)
    yield "+publish", ("PUBLISH", f"{prefix}w:doctor", "doctor|0")
    yield "+subscribe", ("SUBSCRIBE", f"{prefix}w:doctor")


def _refused(connection: AbstractConnection, user: str, prefix: str, db: int) -> Iterator[str]:
    """
    Yield the rights that the user lacks.

    The errors distinguish commands from keys and channels. Some servers name the user, whose name may be any text.
    """
    seen = {""}
    for right, command in commands(prefix, db):
        reply = _command(connection, *command)
        if not isinstance(reply, exceptions.RedisError) or parse_error(reply).failure is not Failure.NOPERM:
            continue
        text = str(reply).replace(f"User {user} ", "")
        missing = f"&{prefix}w:*" if "channel" in text else f"~{prefix}*" if " key" in text else right
        if missing not in seen:
            seen.add(missing)
            yield missing


def _command(connection: AbstractConnection, *command: Any) -> Any:
    (reply,) = _replies(connection, resp([str(word) for word in command]), 1)
    return reply


def _replies(connection: AbstractConnection, data: bytes, number: int) -> list[Any]:
    """Send commands, and return as many replies; an error reply is returned as an exception."""
    replies = Exchange(connection, [unchanged] * number)
    exchange(connection, data, replies)
    return replies.found
