"""
Inspect one Redis or Valkey server closely, for the doctor and for the panel of nodes (internal).

A separate connection asks for INFO, measures round trips and the server's clock, and tries each command that the locks
need. It connects as the user of the locks, and the keys that it writes are gone a second later.
"""

import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from redis import exceptions
from redis.connection import AbstractConnection

from ...core.protocol import Failure
from ...runtime.clock import steady
from ..base import LinkError, Node, run, shown
from .discovered import DiscoveredNode, Master, most_telling
from .errors import link_error, parse_error
from .handshake import BlockingDialer, Exchange, exchange
from .node import RedisNode
from .wire import resp, unchanged

SAMPLES = 5  # round trips; the shortest one counts
LINES = 1000  # of INFO that are read; it has about 200, and the others are about databases and replicas


@dataclass(frozen=True, slots=True)
class Inspection:
    """
    The result of the inspection of one node.

    Args:
        name: The node's display name.
        detail: Why the node could not be inspected, as text for people; empty if it could.
        failure: The same reason, for decisions.
        round_trip: Seconds that the shortest of a few round trips took.
        ahead: How many seconds the node's clock is ahead of ours, give or take half a round trip.
        info: What the node reports about itself; empty if it reports nothing.
        refused: The rights that the user lacks, as in ``ACL SETUSER``.
        encrypted: Whether the connection is encrypted.
        local: Whether the connection stays on this machine.
        ignored: Options of redis-py in the URL that are not used.
        known: Whether this kind of node can be inspected at all.
        user: The user as whom locks connect.
        deaf: The servers that were asked for the master in vain, each with the reason.
        guide: The kind of those servers, such as "sentinel"; empty if the URL names the master.
        mode: The mode in which the node's server must run.
        age: How many seconds the server has served these locks; None if it does not report that.
        facts: What a node of another kind reports about itself, for the checks of that kind.
    """

    name: str
    detail: str = ""
    failure: Failure | None = None
    round_trip: float = 0.0
    ahead: float = 0.0
    info: Mapping[str, str] = field(default_factory=dict)
    refused: tuple[str, ...] = ()
    encrypted: bool = False
    local: bool = False
    ignored: tuple[str, ...] = ()
    known: bool = True
    user: str = "default"
    deaf: tuple[str, ...] = ()
    guide: str = ""
    mode: str = "standalone"
    age: float | None = None
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def store(self) -> str:
        """The kind of a replicated store and its oldest version, such as "etcd 3.4.23"; empty for other nodes."""
        return " ".join(filter(None, (self.facts.get("kind"), self.facts.get("version"))))

    @property
    def server(self) -> str:
        """The kind of the server."""
        return "Valkey" if "valkey_version" in self.info else "Redis"

    @property
    def version(self) -> str:
        """The version of the server, or the oldest one in a replicated store; empty if it is unknown."""
        return self.info.get("valkey_version") or self.info.get("redis_version") or self.facts.get("version", "")

    def number(self, what: str) -> int:
        """Return a number that the server reports; 0 if it does not report it."""
        try:
            return int(float(self.info.get(what, "0")))
        except ValueError:
            return 0


def inspect_all(nodes: tuple[Node, ...], timeout: float, *, rights: bool = True) -> list[Inspection]:
    """Inspect all nodes at once; a node that does not answer costs *timeout* seconds a few times."""
    with ThreadPoolExecutor(len(nodes), thread_name_prefix="django_redlock inspect") as pool:
        return list(pool.map(lambda node: inspect(node, timeout, rights=rights), nodes))


def inspect(node: Node, timeout: float, *, rights: bool = True) -> Inspection:
    """
    Inspect one node.

    Args:
        node: The node; a node of another kind shows only whether it can be reached, and the facts of its kind.
        timeout: Seconds to wait for each answer.
        rights: Whether to try each command that locks need.
    """
    if not isinstance(node, RedisNode):
        return _reach(node, timeout)
    connector = node.connector
    blank = Inspection(
        node.name,
        encrypted=connector.encrypted,
        local=not connector.remote,
        ignored=tuple(sorted(connector.ignored)),
        user=connector.user,
        guide=node.guide,
        mode=node.mode,
    )
    connection = None
    try:
        connection, deaf = _find(node, timeout) if isinstance(node, DiscoveredNode) else (_open(node, timeout), ())
        blank = replace(blank, deaf=deaf)
        return _ask(node, connection, rights, blank)
    except Exception as error:  # whatever it was, as that of a credential provider, the other nodes are inspected
        failed = link_error(error)
        # Of the commands that redis-py sends to make a connection, only SELECT needs a right.
        refused = ("+select",) if failed.failure is Failure.NOPERM and connection is None else ()
        return replace(blank, detail=failed.detail, failure=failed.failure, refused=refused)
    finally:
        if connection:
            connection.disconnect()


def _reach(node: Node, timeout: float) -> Inspection:
    """Return whether a node of another kind can be reached, and what it reports about itself."""
    inspect = getattr(node, "inspect", None)
    try:
        node.connect(timeout).close()
        round_trip, facts = inspect(timeout) if inspect else (0.0, {})
    except LinkError as error:
        return Inspection(node.name, detail=error.detail, failure=error.failure, known=False)
    return Inspection(node.name, known=False, round_trip=round_trip, facts={it: shown(facts[it]) for it in facts})


def _find(node: DiscoveredNode, timeout: float) -> tuple[AbstractConnection, tuple[str, ...]]:
    """Connect to the master that the first guide to answer names; also return the guides that did not answer."""
    deaf: list[str] = []
    tried: list[tuple[Master | None, LinkError]] = []
    for guide in node.guides:
        master = None
        try:
            master = run(node.ask(BlockingDialer(timeout), guide))
            return _open(node, timeout, host=master.host, port=master.port), tuple(deaf)
        except LinkError as error:
            tried.append((master, error))
            if master is None:
                deaf.append(f"{guide.address} ({error.detail.removeprefix('sentinel: ')})")
    raise most_telling(tried, node.guide)


def _open(node: RedisNode, timeout: float, **where: Any) -> AbstractConnection:
    connection, _, _ = run(BlockingDialer(timeout).open(node.connector, b"", **where))
    return connection


def _ask(node: RedisNode, connection: AbstractConnection, rights: bool, blank: Inspection) -> Inspection:
    raw, served = _replies(connection, node.encoder.greeting, 2)
    info: dict[str, str] = {}
    if isinstance(raw, bytes):
        lines = raw.decode("utf-8", "replace").splitlines()
        info = dict(shown(line).split(":", 1) for line in lines[:LINES] if ":" in line)
    elif parse_error(raw).failure is not Failure.NOPERM:
        raise link_error(raw)
    round_trip, ahead = _clock(connection)
    database = node.connector.database
    refused = tuple(_refused(connection, blank.user, node.encoder.prefix, database)) if rights else ()
    age = None
    with suppress(LinkError):
        age = node.read_age(served).seconds
    return replace(blank, round_trip=round_trip, ahead=ahead, info=info, refused=refused, age=age)


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
