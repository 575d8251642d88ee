"""
A Redis or Valkey master as a node (internal).

A node makes links: in the handshake it sends the first commands, and reads what the server reports about itself.
"""

import os
import re
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from redis import exceptions
from redis.connection import AbstractConnection

from ...core.admission import Greeting
from ...core.protocol import Failure
from ..base import LinkError, NodeSpec, run, split_url
from ..inspection import Inspection
from .connector import Endpoint
from .errors import link_error, parse_error
from .handshake import AsyncDialer, BlockingDialer, Dialer, SomeLink, SomeNotificationLink
from .inspect import examine
from .link import (
    AsyncRedisLink,
    AsyncRedisNotificationLink,
    Introduction,
    RedisLink,
    RedisNotificationLink,
    check_subscription,
)
from .wire import Encoder, resp, whole

LONGEST_MARK = 200  # bytes; each request that takes or extends a lock carries it, and that of ``served.lua`` has 98


class RedisNode:
    """
    One Redis or Valkey master.

    Args:
        spec: The server's URL and options.
        prefix: The beginning of every key.

    Raises:
        ValueError: redis-py cannot make a connection from the URL and options.
    """

    instant = False
    calls = True
    fails_over = False
    mode = "standalone"
    """The mode in which the server must run."""
    guide = ""
    """The kind of server that names the master, such as "sentinel"; empty if the URL does."""

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        self.connector = Endpoint(spec)
        self.encoder = Encoder(prefix)
        self._alias = re.sub("[^!-~]", "?", spec.alias)  # the name of a connection has no other characters
        self.address = self.connector.address
        self.name = spec.name or self.address
        # For the checks of the settings.
        self.encrypted, self.verified = self.connector.encrypted, self.connector.verified
        self.authenticated, self.remote = self.connector.authenticated, self.connector.remote

    def __repr__(self) -> str:
        return f"<RedisNode {self.name}>"

    @property
    def _naming(self) -> bytes:
        """
        The command that names a connection in ``CLIENT LIST``, whatever the server replies.

        Unlike ``CLIENT SETNAME``, it needs no right. A ``client_name`` in the URL or the options wins.
        """
        name = ":".join(filter(None, ("django_redlock", self._alias, str(os.getpid()))))
        return resp(["HELLO", "2", *([] if "client_name" in self.connector.options else ["SETNAME", name])])

    def holder_key(self, slug: str) -> str:
        """Return the key under which the server has the holder of a lock."""
        return f"{self.encoder.prefix}{slug}:h"

    def connect(self, timeout: float) -> RedisLink:
        """Open a link; see :class:`~django_redlock.nodes.base.Node`."""
        return run(self.open_link(BlockingDialer(timeout)))

    async def aconnect(self, timeout: float) -> AsyncRedisLink:
        """Open a link for the running event loop; see :class:`~django_redlock.nodes.base.Node`."""
        return await self.open_link(AsyncDialer(timeout))

    def listen(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> RedisNotificationLink:
        """Open a link for notifications; see :class:`~django_redlock.nodes.base.Node`."""
        return run(self._subscribe(BlockingDialer(timeout), process))

    async def alisten(
        self, process: str, timeout: float, on_notification: Callable[[str], object]
    ) -> AsyncRedisNotificationLink:
        """Open a link for notifications; see :class:`~django_redlock.nodes.base.Node`."""
        return await self._subscribe(AsyncDialer(timeout), process)

    async def _subscribe(self, dialer: Dialer[Any, Any, SomeNotificationLink], process: str) -> SomeNotificationLink:
        data = self._naming + self.encoder.subscription(process)
        connection, _, messages = await dialer.open(self.connector, data, ignored, check_subscription)
        return dialer.notification_link(connection, messages)

    async def open_link(self, dialer: Dialer[Any, SomeLink, Any]) -> SomeLink:
        """Open a link to the master."""
        return await self.greet(dialer)

    async def greet(self, dialer: Dialer[Any, SomeLink, Any], **where: Any) -> SomeLink:
        """
        Open a connection, ask the server to identify itself, and return the link over the connection.

        Raises:
            LinkError: The server cannot be reached, or is not one that can keep locks.
        """
        connection, (greeting, age, _), _ = await dialer.open(
            self.connector, self.encoder.greeting + self._naming, self.read_info, self.read_age, ignored, **where
        )
        try:
            first = combined(greeting, age)
            return dialer.link(connection, self.encoder, Introduction(self.encoder, self.describe, first))
        except LinkError:
            dialer.close(connection)
            raise

    def inspect(self, timeout: float, *, rights: bool = True) -> Inspection:
        """Inspect the server closely; see :mod:`~django_redlock.nodes.inspection`."""
        connector = self.connector
        known = Inspection(
            self.name,
            encrypted=connector.encrypted,
            local=not connector.remote,
            ignored=tuple(sorted(connector.ignored)),
            user=connector.user,
            guide=self.guide,
            mode=self.mode,
        )
        connection = None
        try:
            connection, deaf = self._reach(timeout)
            known = replace(known, deaf=deaf)
            found, served = examine(connection, self.encoder, connector.database, rights, known)
            with suppress(LinkError):
                found = replace(found, age=self.read_age(served).seconds)
            return found
        except Exception as error:  # whatever it was, as that of a credential provider, the other nodes are inspected
            failed = link_error(error)
            # Of the commands that redis-py sends to make a connection, only SELECT needs a right.
            refused = ("+select",) if failed.failure is Failure.NOPERM and connection is None else ()
            return replace(known, detail=failed.detail, failure=failed.failure, refused=refused)
        finally:
            if connection:
                connection.disconnect()

    def _reach(self, timeout: float, **where: Any) -> tuple[AbstractConnection, tuple[str, ...]]:
        """Return a connection of redis-py to the master, and the servers that were asked for it in vain."""
        connection, _, _ = run(BlockingDialer(timeout).open(self.connector, b"", **where))
        return connection, ()

    def describe(self, info: Any, served: Any) -> Greeting:
        """Return how the server describes itself by its replies to the greeting; raise LinkError if it is useless."""
        return combined(self.read_info(info), self.read_age(served))

    def read_info(self, raw: Any) -> Greeting:
        """
        Return the part of a server's INFO that matters to a vote.

        Raises:
            LinkError: The server cannot be used, now or at all.
        """
        if isinstance(raw, exceptions.NoPermissionError):
            return Greeting(refused="NOPERM")
        if isinstance(raw, exceptions.RedisError):
            raise link_error(raw)
        if not isinstance(raw, bytes) or b"run_id:" not in raw:
            raise LinkError(Failure.MALFORMED)
        mode = line_of(raw, "redis_mode", line_of(raw, "server_mode", "standalone"))
        if mode != self.mode:
            raise LinkError(Failure.WRONG_MODE, f"runs in {mode} mode")
        if line_of(raw, "role", "") == "slave":
            raise LinkError(Failure.REPLICA)
        evicts = (
            line_of(raw, "maxmemory", "0") != "0" and line_of(raw, "maxmemory_policy", "noeviction") != "noeviction"
        )
        return Greeting(
            run_id=line_of(raw, "run_id", ""),
            evicts=evicts,
            promoted=line_of(raw, "master_replid", "?") if line_of(raw, "second_repl_offset", "-1") != "-1" else "",
        )

    def read_age(self, raw: Any) -> "Age":
        """
        Return how long a server has served these locks.

        Raises:
            LinkError: The server is loading its data, or has become a replica.
        """
        if isinstance(raw, exceptions.RedisError):
            failure = parse_error(raw).failure
            if failure is Failure.LOADING:
                raise LinkError(failure)  # it will know soon, but this connection is not asked again
            if failure in (Failure.READONLY, Failure.MASTERDOWN):
                raise LinkError(Failure.REPLICA)
            return Age()
        try:
            word, run_id, micros, mark = raw.decode().split(" ", 3)
            return Age(run_id, whole(micros) / 1e6, mark) if word == "SERVED" and len(mark) <= LONGEST_MARK else Age()
        except (ValueError, AttributeError):
            return Age()


def open_node(spec: NodeSpec, prefix: str) -> RedisNode:
    """
    Return the node of a ``redis``, ``rediss``, ``unix``, ``valkey`` or ``valkeys`` URL.

    Raises:
        ValueError: The URL or the options cannot be used.
    """
    parts = split_url(spec.url)
    if parts.scheme == "unix" and not parts.path:
        raise ValueError("a unix:// URL needs the path of a socket, such as unix:///run/valkey.sock")
    if parts.scheme == "unix" and not hasattr(socket, "AF_UNIX"):
        raise ValueError("this system has no Unix sockets: write a redis:// URL, such as redis://localhost:6379")
    if "," in parts.netloc.rpartition("@")[2]:
        raise ValueError(
            "its URL names several servers: write one URL for each, with its scheme, or redis+cluster://host-1,host-2 "
            "if they are members of one cluster"
        )
    return RedisNode(spec, prefix)


def ignored(raw: Any) -> None:
    """Take any reply: nothing depends on it."""


def line_of(info: bytes, name: str, default: str) -> str:
    """Return the value of the line *name* of INFO: six searches take less time than reading all 200 lines."""
    begins = f"{name}:".encode()
    start = 0 if info.startswith(begins) else info.find(b"\n" + begins) + 1
    if not start and not info.startswith(begins):
        return default
    end = info.find(b"\n", start)
    return info[start + len(begins) : end if end >= 0 else None].rstrip(b"\r").decode("utf-8", "replace")


class Age(NamedTuple):
    """How many seconds the server with a run id has served the locks, and the mark; None if it does not report that."""

    run_id: str = ""
    seconds: float | None = None
    mark: str = ""


def combined(greeting: Greeting, age: Age) -> Greeting:
    """Return a greeting with the age and the mark; raise LinkError if they are another server's."""
    if greeting.run_id and age.run_id not in ("", greeting.run_id):
        raise LinkError(Failure.TWO_SERVERS)
    return replace(greeting, age=age.seconds, mark=age.mark)


# The errors of redis-py's own lock, for django_redlock.compat.
RedisLockError = exceptions.LockError

RedisLockNotOwnedError = exceptions.LockNotOwnedError
