"""
A master that Redis Sentinel monitors, as a node (internal).

The sentinel knows how long a server has been the master; the restart guard uses this time.
"""

from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from ...core.protocol import Failure
from ..base import LinkError, NodeSpec
from .connector import Connector
from .discovered import DiscoveredNode, Place, SomeLink
from .errors import DEMOTED, link_error


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
        options = [tls if urlsplit(url).scheme in ("rediss", "valkeys") else {} for url in spec.sentinels]
        sentinels = [Connector(NodeSpec(url, options=own)) for url, own in zip(spec.sentinels, options, strict=True)]
        service = urlsplit(spec.url).netloc
        super().__init__(spec, prefix, sentinels, ["SENTINEL", "MASTER", service])
        self.address = f"{service} of {', '.join(sorted(sentinel.address for sentinel in sentinels))}"
        self.name = spec.name or service

    def _follow(self, link: SomeLink, place: Place) -> SomeLink:
        link = super()._follow(link, place)
        if link.greeting.promoted and place.age is not None:
            age = link.greeting.age
            link.greeting = replace(link.greeting, age=place.age if age is None else min(age, place.age))
        return link

    def parse_place(self, raw: Any, guide: Connector) -> Place:
        """Return what a sentinel reports about the master, as alternating names and values."""
        if isinstance(raw, RedisError):
            if "No such master" in str(raw):
                raise LinkError(Failure.UNKNOWN_TO_SENTINEL)
            raise self.of_guide(link_error(raw))
        try:
            words = [word.decode() for word in raw]
            fields = dict(zip(words[::2], words[1::2], strict=True))
            return Place(fields["ip"], int(fields["port"]), int(fields["role-reported-time"]) / 1000)
        except (TypeError, ValueError, KeyError, AttributeError):
            raise self.of_guide(LinkError(Failure.MALFORMED)) from None

    def of_guide(self, error: LinkError) -> LinkError:
        """Return what to report about a sentinel that could not be asked; other sentinels know the master, too."""
        return LinkError(Failure.SENTINEL, f"{Failure.SENTINEL.value}: {error.detail}")


def open_node(spec: NodeSpec, prefix: str) -> SentinelNode:
    """Return the node of a service that sentinels monitor."""
    return SentinelNode(spec, prefix)
