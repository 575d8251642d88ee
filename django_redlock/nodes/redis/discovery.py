"""
A node whose master can move: each new connection asks other servers where the master is now (internal).

Sentinels know the master of a service, and every member of a cluster knows the master of each hash slot. A replica
that takes the master's place may lack the last locks, so it votes like a server that has just restarted.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ...core.protocol import Failure
from ..base import LinkError, NodeSpec
from .connector import Connector
from .errors import BROKEN, link_error
from .link import AsyncRedisLink, RedisLink, aexchange, exchange, unchanged
from .node import RedisNode
from .wire import resp

SomeLink = TypeVar("SomeLink", RedisLink, AsyncRedisLink)


@dataclass(frozen=True, slots=True)
class Place:
    """The address of the master, and the least time for which it has been the master, in seconds; None if unknown."""

    host: str
    port: int
    age: float | None = None


class DiscoveredNode(RedisNode):
    """
    A master whose address other servers know.

    Args:
        spec: The URL and the options for the master.
        prefix: The beginning of every key.
        guides: The servers to ask, one after the other.
        question: The command that asks them.

    Raises:
        ValueError: redis-py cannot make connections from the URL and options.
    """

    fails_over = True
    unserved: ClassVar[Mapping[Failure, Failure]]
    """The errors of a server that is no longer the master, and what to report for each."""

    def __init__(self, spec: NodeSpec, prefix: str, guides: list[Connector], question: list[str]) -> None:
        super().__init__(spec, prefix)
        self.guides = guides
        self._question = resp(question)

    def connect(self, timeout: float) -> RedisLink:
        """Open a link to the present master; see :class:`~django_redlock.nodes.base.Node`."""
        failure = LinkError(Failure.UNREACHABLE)
        for guide in self.guides:
            try:
                place = self.ask(guide, timeout)
                link = self.greet(self.connector.new(timeout, host=place.host, port=place.port))
                return self._follow(link, place)
            except LinkError as error:
                failure = error
        raise without_blame(failure)

    async def aconnect(self, timeout: float) -> AsyncRedisLink:
        """Do what :meth:`connect` does without blocking."""
        failure = LinkError(Failure.UNREACHABLE)
        for guide in self.guides:
            try:
                place = self.parse_place(await self._aask(guide, timeout), guide)
                connection = self.connector.new_async(timeout, host=place.host, port=place.port)
                return self._follow(await self.agreet(connection, timeout), place)
            except LinkError as error:
                failure = error
        raise without_blame(failure)

    def _follow(self, link: SomeLink, place: Place) -> SomeLink:
        """Return *link*, adapted to its server; from now on, notifications come from that server as well."""
        self.connector.follow(place.host, place.port)
        link.unserved = self.unserved
        return link

    def parse_place(self, raw: Any, guide: Connector) -> Place:
        """
        Return where the master is, from the reply of one of ``guides``.

        Raises:
            LinkError: The guide does not know, or replied something else.
        """
        raise NotImplementedError

    def of_guide(self, error: LinkError) -> LinkError:
        """Return what to report if one of ``guides`` could not be asked."""
        return error

    def ask(self, guide: Connector, timeout: float) -> Place:
        """
        Ask one of ``guides`` where the master is.

        Args:
            guide: The server to ask.
            timeout: Seconds for each step: to connect, to send, to read.

        Raises:
            LinkError: The guide cannot be reached, or does not know.
        """
        return self.parse_place(self._ask(guide, timeout), guide)

    def _ask(self, guide: Connector, timeout: float) -> Any:
        connection = guide.new(timeout)
        try:
            connection.connect()
            (reply,), _ = exchange(connection, self._question, unchanged)
            return reply
        except (LinkError, *BROKEN) as error:
            raise self.of_guide(link_error(error)) from None
        finally:
            connection.disconnect()

    async def _aask(self, guide: Connector, timeout: float) -> Any:
        connection = guide.new_async(timeout, socket_timeout=timeout)
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()
                (reply,), _ = await aexchange(connection, self._question, unchanged)
                return reply
        except (LinkError, *BROKEN) as error:
            raise self.of_guide(link_error(error)) from None
        finally:
            await connection.disconnect(nowait=True)


def without_blame(failure: LinkError) -> LinkError:
    """Return *failure*, but report a replica as a failover, which passes; elsewhere, the settings would be wrong."""
    return LinkError(Failure.FAILING_OVER) if failure.failure is Failure.REPLICA else failure
