"""
A Redis or Valkey Cluster as one node (internal).

All keys of an alias are in one hash slot, so that the scripts may use them together: ``KEY_PREFIX`` is written in
braces, and a cluster hashes only the text between the first pair of braces of a key. The shard that serves the slot
decides, and the other shards have no say. A cluster is therefore one node, however many servers it has.
"""

import re
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from redis.crc import key_slot
from redis.exceptions import RedisError

from ...core.protocol import Failure
from ..base import LinkError, NodeSpec
from .connector import Connector, check_url, refuse_service
from .discovered import DiscoveredNode, Place
from .errors import DEMOTED, link_error, parse_error
from .node import Age, parse_age
from .wire import Encoder

EXAMPLE = "redis+cluster://redis-1:6379,redis-2:6379,redis-3:6379"

# A server that replies with one of these does not serve the slot, at least not alone.
ELSEWHERE = (Failure.MOVED, Failure.ASK, Failure.TRYAGAIN)


def parse_shard_age(raw: Any) -> Age:
    """
    Return how long a shard has served these locks.

    Raises:
        LinkError: The shard does not serve them, or not at present.
    """
    failure = parse_error(raw).failure if isinstance(raw, RedisError) else None
    if failure in ClusterNode.unserved:
        raise LinkError(ClusterNode.unserved[failure])
    return parse_age(raw)


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
    parse_age = staticmethod(parse_shard_age)

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        check_url(spec.url)
        members = [NodeSpec(url, spec.name, spec.options) for url in member_urls(spec.url)]
        connectors = [Connector(member) for member in members]
        for connector in connectors:
            refuse_service(connector.host, clustered=True)
        if connectors[0].database:
            raise ValueError("a cluster has the database 0 only: leave the number out")
        tagged = f"{{{prefix.removesuffix(':')}}}:"
        super().__init__(members[0], tagged, connectors, ["CLUSTER", "SLOTS"])
        self.encoder = Encoder(tagged, shares=False)
        self.members = tuple(sorted(connector.address for connector in connectors))
        self.address = ", ".join(self.members)
        self._slot = key_slot(tagged.encode())

    def parse_place(self, raw: Any, guide: Connector) -> Place:
        """Return the master of the slot; each range of slots lists its master first, then the replicas."""
        if isinstance(raw, RedisError):
            raise link_error(raw)
        try:
            masters = [master for first, last, master, *_ in raw if first <= self._slot <= last]
            if not masters:
                raise LinkError(Failure.FAILING_OVER)
            host, port = masters[0][:2]
            # A member that does not know its own address leaves it out. The master is then the member that was asked.
            return Place(host.decode() if host else guide.host, int(port))
        except (TypeError, ValueError, AttributeError):
            raise LinkError(Failure.MALFORMED) from None


def member_urls(url: str) -> list[str]:
    """
    Return a URL for each member that the URL of a cluster names, with the same user, password and options.

    Raises:
        ValueError: A member has no host; redis-py would take this machine for it.
    """
    parts = urlsplit(url)
    user, at, hosts = parts.netloc.rpartition("@")
    if any(not re.match(r"\s*[^\s:]", host) for host in hosts.split(",")):
        raise ValueError(f"it names a member without a host: write, for example, {EXAMPLE}")
    scheme = parts.scheme.removesuffix("+cluster")
    return [urlunsplit(parts._replace(scheme=scheme, netloc=f"{user}{at}{host.strip()}")) for host in hosts.split(",")]


def open_node(spec: NodeSpec, prefix: str) -> ClusterNode:
    """Return the node of a cluster."""
    return ClusterNode(spec, prefix)
