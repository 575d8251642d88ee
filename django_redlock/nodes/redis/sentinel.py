"""
A master that Redis Sentinel looks after, as a node.

Each new connection asks the sentinels where the master is now. A replica that takes its place may not have the last
locks, and votes like a server that has just restarted: the sentinel knows for how long it has been the master.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from ...core.failure import Failure
from ..base import LinkError, NodeSpec
from .connector import Connector
from .decode import BROKEN, link_error
from .encode import resp
from .handshake import aexchange, exchange, unchanged
from .link import RedisLink
from .link_async import AsyncRedisLink
from .node import RedisNode

SomeLink = TypeVar("SomeLink", RedisLink, AsyncRedisLink)


@dataclass(frozen=True, slots=True)
class Master:
    """Where a sentinel says the master is, and for how many seconds at least it has been one."""

    host: str
    port: int
    age: float


def parse_master(raw: Any) -> Master:
    """
    Return what a sentinel says of a master: names and values in turn.

    Raises:
        LinkError: It knows no such service, or said something else.
    """
    if isinstance(raw, RedisError):
        if "No such master" in str(raw):
            raise LinkError(Failure.UNKNOWN_TO_SENTINEL)
        raise of_sentinel(link_error(raw))
    try:
        words = [word.decode() for word in raw]
        fields = dict(zip(words[::2], words[1::2], strict=True))
        return Master(fields["ip"], int(fields["port"]), int(fields["role-reported-time"]) / 1000)
    except (TypeError, ValueError, KeyError, AttributeError):
        raise of_sentinel(LinkError(Failure.MALFORMED)) from None


class SentinelNode(RedisNode):
    """
    The master of one service of Redis Sentinel.

    Args:
        spec: The service's name as the host of its URL, the options for the master, and the sentinels' URLs.
        prefix: What every key begins with.

    Raises:
        ValueError: redis-py cannot make connections of the URLs and options.
    """

    fails_over = True

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        tls = {key: value for key, value in spec.options.items() if key.startswith("ssl_")}
        options = [tls if urlsplit(url).scheme in ("rediss", "valkeys") else {} for url in spec.sentinels]
        self.sentinels = [
            Connector(NodeSpec(url, options=own)) for url, own in zip(spec.sentinels, options, strict=True)
        ]
        super().__init__(spec, prefix)
        service = urlsplit(spec.url).netloc
        self.address = f"{service} of {', '.join(sorted(sentinel.address for sentinel in self.sentinels))}"
        self.name = spec.name or service
        self._question = resp(["SENTINEL", "MASTER", service])

    def connect(self, timeout: float) -> RedisLink:
        """Open a link to the present master; see :class:`~django_redlock.nodes.base.Node`."""
        failure = LinkError(Failure.UNREACHABLE)
        for sentinel in self.sentinels:
            try:
                master = self.ask(sentinel, timeout)
                link = self.greet(self.connector.new(timeout, host=master.host, port=master.port))
                return self._follow(link, master)
            except LinkError as error:
                failure = error
        raise without_blame(failure)

    async def aconnect(self, timeout: float) -> AsyncRedisLink:
        """Do what :meth:`connect` does without blocking."""
        failure = LinkError(Failure.UNREACHABLE)
        for sentinel in self.sentinels:
            try:
                master = parse_master(await self._aask(sentinel, timeout))
                connection = self.connector.new_async(timeout, host=master.host, port=master.port)
                return self._follow(await self.agreet(connection, timeout), master)
            except LinkError as error:
                failure = error
        raise without_blame(failure)

    def _follow(self, link: SomeLink, master: Master) -> SomeLink:
        """Return *link* with what the sentinel knows of its server; notifications come from there from now on."""
        self.connector.follow(master.host, master.port)
        link.demoted = Failure.FAILING_OVER
        if link.greeting.promoted:
            age = link.greeting.age
            link.greeting = replace(link.greeting, age=master.age if age is None else min(age, master.age))
        return link

    def ask(self, sentinel: Connector, timeout: float) -> Master:
        """
        Ask one sentinel where the master is.

        Args:
            sentinel: The sentinel, one of ``sentinels``.
            timeout: Seconds for each step: to connect, to send, to read.

        Raises:
            LinkError: It cannot be reached, or does not know the service.
        """
        return parse_master(self._ask(sentinel, timeout))

    def _ask(self, sentinel: Connector, timeout: float) -> Any:
        connection = sentinel.new(timeout)
        try:
            connection.connect()
            (said,), _ = exchange(connection, self._question, unchanged)
            return said
        except (LinkError, *BROKEN) as error:
            raise of_sentinel(link_error(error)) from None
        finally:
            connection.disconnect()

    async def _aask(self, sentinel: Connector, timeout: float) -> Any:
        connection = sentinel.new_async(timeout, socket_timeout=timeout)
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()
                (said,), _ = await aexchange(connection, self._question, unchanged)
                return said
        except (LinkError, *BROKEN) as error:
            raise of_sentinel(link_error(error)) from None
        finally:
            await connection.disconnect(nowait=True)


def of_sentinel(error: LinkError) -> LinkError:
    """Return what to report of a sentinel that could not be asked: that passes, as others know the master, too."""
    return LinkError(Failure.SENTINEL, f"{Failure.SENTINEL.value}: {error.detail}")


def without_blame(failure: LinkError) -> LinkError:
    """Return *failure*; that the master is a replica is a mistake in the settings elsewhere, but will pass here."""
    return LinkError(Failure.FAILING_OVER) if failure.failure is Failure.REPLICA else failure


def open_node(spec: NodeSpec, prefix: str) -> SentinelNode:
    """Return the node of a service that sentinels look after."""
    return SentinelNode(spec, prefix)
