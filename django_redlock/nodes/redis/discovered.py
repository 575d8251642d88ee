"""
A node whose master can move: each new connection asks other servers where the master is now (internal).

Sentinels know the master of a service, and every member of a cluster knows the master of each hash slot. A replica
that takes the master's place may lack the last locks, so it votes like a server that has just restarted.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from urllib.parse import urlsplit, urlunsplit

from redis.connection import AbstractConnection
from redis.crc import key_slot
from redis.exceptions import RedisError

from ...core.protocol import Failure
from ..base import LinkError, NodeSpec, run, split_url
from .connector import Endpoint, check_url
from .errors import DEMOTED, link_error, parse_error
from .handshake import BlockingDialer, Dialer, SomeLink
from .node import Age, RedisNode
from .wire import MOST_PARTS_OF_GUIDE, Encoder, resp, unchanged


@dataclass(frozen=True, slots=True)
class Master:
    """The address of the master, and the least time for which it has been the master, in seconds; None if unknown."""

    host: str
    port: int
    age: float | None = None

    def explain(self, error: LinkError, guide: str) -> LinkError:
        """Return *error* with the address that a server of the kind *guide* gave, if nothing answers there."""
        if error.failure not in SAID_NOTHING:
            return error
        return LinkError(error.failure, f"{error.detail}: {self.host[:255]}:{self.port}, says a {guide}")


SAID_NOTHING = frozenset(
    {Failure.UNKNOWN_HOST, Failure.REFUSED, Failure.TIMEOUT, Failure.UNREACHABLE, Failure.SENTINEL}
)
"""The failures of a server that said nothing, or, for a sentinel, nothing of use."""


def most_telling(tried: Sequence[tuple[Master | None, LinkError]], guide: str) -> LinkError:
    """
    Return what to report if no guide led to the master: what one server says, not that another one is silent.

    Args:
        tried: For each guide the master that it named, if it named one, and the error.
        guide: The kind of the guides.
    """
    told = [
        master.explain(error, guide) if master else error
        for master, error in tried
        if master or error.failure not in SAID_NOTHING
    ]
    return told[-1] if told else tried[0][1]


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

    def __init__(self, spec: NodeSpec, prefix: str, guides: list[Endpoint], question: list[str]) -> None:
        super().__init__(spec, prefix)
        self.guides = guides
        self.verified = self.verified and all(guide.verified for guide in guides if guide.encrypted)
        self.masters = spec.masters
        self._question = resp(question)

    async def open_link(self, dialer: Dialer[Any, SomeLink, Any]) -> SomeLink:
        """Open a link to the present master, as the first guide knows it that answers."""
        tried: list[tuple[Master | None, LinkError]] = []
        for guide in self.guides:
            master = None
            try:
                master = await self.ask(dialer, guide)
                return self._follow(await self.greet(dialer, host=master.host, port=master.port), master)
            except LinkError as error:
                tried.append((master, error))
        failure = most_telling(tried, self.guide)
        if failure.failure is Failure.REPLICA:  # a failover, which passes; elsewhere, the settings would be wrong
            raise LinkError(Failure.FAILING_OVER)
        raise failure

    def _reach(self, timeout: float, **where: Any) -> tuple[AbstractConnection, tuple[str, ...]]:
        """Connect to the master that the first guide to answer names; also return the guides that did not answer."""
        deaf: list[str] = []
        tried: list[tuple[Master | None, LinkError]] = []
        for guide in self.guides:
            master = None
            try:
                master = run(self.ask(BlockingDialer(timeout), guide))
                return super()._reach(timeout, host=master.host, port=master.port)[0], tuple(deaf)
            except LinkError as error:
                tried.append((master, error))
                if master is None:
                    deaf.append(f"{guide.address} ({error.detail.removeprefix('sentinel: ')})")
        raise most_telling(tried, self.guide)

    async def ask(self, dialer: Dialer[Any, Any, Any], guide: Endpoint) -> Master:
        """
        Ask one of ``guides`` where the master is.

        Raises:
            LinkError: The guide cannot be reached, does not know, or names a host that cannot be the master.
        """
        try:
            connection, (raw,), _ = await dialer.open(guide, self._question, unchanged, most=MOST_PARTS_OF_GUIDE)
        except LinkError as error:
            raise self.of_guide(error) from None
        dialer.close(connection)
        master = self.parse_master(raw, guide)
        if self.masters and master.host not in self.masters:  # it would get the password
            raise self.of_guide(LinkError(Failure.FOREIGN_MASTER))
        return master

    def _follow(self, link: SomeLink, master: Master) -> SomeLink:
        """Return *link*, adapted to its server; from now on, notifications come from that server as well."""
        self.connector.follow(master.host, master.port)
        link.unserved = self.unserved
        return link

    def parse_master(self, raw: Any, guide: Endpoint) -> Master:
        """
        Return where the master is, from the reply of one of ``guides``.

        Raises:
            LinkError: The guide does not know, or replied something else.
        """
        raise NotImplementedError

    def of_guide(self, error: LinkError) -> LinkError:
        """Return what to report if one of ``guides`` could not be asked."""
        return error


class SentinelNode(DiscoveredNode):
    """
    The master of one service of Redis Sentinel.

    Args:
        spec: The service's name as the host of its URL, the options for the master, and the sentinels' URLs.
        prefix: The beginning of every key.

    Raises:
        ValueError: redis-py cannot make connections from the URLs and options.
    """

    guide = "sentinel"
    unserved = dict.fromkeys(DEMOTED, Failure.FAILING_OVER)

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        tls = {key: value for key, value in spec.options.items() if key.startswith("ssl_")}
        options = [tls if url.partition(":")[0] in ("rediss", "valkeys") else {} for url in spec.sentinels]
        sentinels = [Endpoint(NodeSpec(url, options=own)) for url, own in zip(spec.sentinels, options, strict=True)]
        service = urlsplit(spec.url).netloc
        super().__init__(spec, prefix, sentinels, ["SENTINEL", "MASTER", service])
        self.address = f"{service} of {', '.join(sorted(sentinel.address for sentinel in sentinels))}"
        self.name = spec.name or service

    def _follow(self, link: SomeLink, master: Master) -> SomeLink:
        link = super()._follow(link, master)
        known = link.introduction.greeting
        if known.promoted and master.age is not None:
            age = master.age if known.age is None else min(known.age, master.age)
            link.introduction.greeting = replace(known, age=age)
        return link

    def parse_master(self, raw: Any, guide: Endpoint) -> Master:
        """Return what a sentinel reports about the master, as alternating names and values."""
        if isinstance(raw, RedisError):
            if "No such master" in str(raw):
                raise LinkError(Failure.UNKNOWN_TO_SENTINEL)
            raise self.of_guide(link_error(raw))
        try:
            words = [word.decode() for word in raw]
            fields = dict(zip(words[::2], words[1::2], strict=True))
            return Master(fields["ip"], int(fields["port"]), int(fields["role-reported-time"]) / 1000)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise self.of_guide(LinkError(Failure.MALFORMED)) from None

    def of_guide(self, error: LinkError) -> LinkError:
        """Return what to report about a sentinel that could not be asked; other sentinels know the master, too."""
        return LinkError(Failure.SENTINEL, f"{Failure.SENTINEL.value}: {error.detail}")


MEMBERS_EXAMPLE = "redis+cluster://redis-1:6379,redis-2:6379,redis-3:6379"

# A server that replies with one of these does not serve the slot, at least not alone.
ELSEWHERE = (Failure.MOVED, Failure.ASK, Failure.TRYAGAIN)


class ClusterNode(DiscoveredNode):
    """
    The shard of a cluster that serves the hash slot of an alias.

    Args:
        spec: A ``redis+cluster`` or ``rediss+cluster`` URL with some members, and the options for all of them.
        prefix: The beginning of every key, without braces.

    Raises:
        ValueError: The URL names a database other than 0, or redis-py cannot use the URL and the options.
    """

    guide = "member"
    unserved = {
        **dict.fromkeys((*DEMOTED, Failure.CLUSTERDOWN), Failure.FAILING_OVER),
        **dict.fromkeys(ELSEWHERE, Failure.MIGRATING),
    }
    mode = "cluster"

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        check_url(spec.url)
        members = [replace(spec, url=url) for url in member_urls(spec.url)]
        connectors = [Endpoint(member) for member in members]
        if connectors[0].database:
            raise ValueError("a cluster has the database 0 only: leave the number out")
        tagged = f"{{{prefix.removesuffix(':')}}}:"
        super().__init__(members[0], tagged, connectors, ["CLUSTER", "SLOTS"])
        self.encoder = Encoder(tagged, shares=False)
        self.members = tuple(sorted(connector.address for connector in connectors))
        self.address = ", ".join(self.members)
        self._slot = key_slot(tagged.encode())

    def read_age(self, raw: Any) -> Age:
        """Return how long the shard has served these locks; raise LinkError if it does not serve them, or not now."""
        failure = parse_error(raw).failure if isinstance(raw, RedisError) else None
        if failure in self.unserved:
            raise LinkError(self.unserved[failure])
        return super().read_age(raw)

    def parse_master(self, raw: Any, guide: Endpoint) -> Master:
        """Return the master of the slot; each range of slots lists its master first, then the replicas."""
        if isinstance(raw, RedisError):
            raise link_error(raw)
        try:
            masters = [master for first, last, master, *_ in raw if first <= self._slot <= last]
            if not masters:
                raise LinkError(Failure.FAILING_OVER)
            host, port = masters[0][:2]
            # A member that does not know its own address leaves it out. The master is then the member that was asked.
            return Master(host.decode() if host else guide.host, int(port))
        except (TypeError, ValueError, AttributeError):
            raise LinkError(Failure.MALFORMED) from None


def member_urls(url: str) -> list[str]:
    """
    Return a URL for each member that the URL of a cluster names, with the same user, password and options.

    Raises:
        ValueError: A member has no host; redis-py would take this machine for it.
    """
    parts = split_url(url)
    user, at, hosts = parts.netloc.rpartition("@")
    if any(not re.match(r"\s*[^\s:]", host) for host in hosts.split(",")):
        raise ValueError(f"it names a member without a host: write, for example, {MEMBERS_EXAMPLE}")
    scheme = parts.scheme.removesuffix("+cluster")
    return [urlunsplit(parts._replace(scheme=scheme, netloc=f"{user}{at}{host.strip()}")) for host in hosts.split(",")]
