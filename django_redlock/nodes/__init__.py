"""
Votes: what one node is, and how all of them are asked.

A node is anything that can compare and set a named record that expires. Which kind it is, its URL's scheme
says; the majority logic never knows.
"""

from importlib import import_module
from urllib.parse import urlsplit

from .base import AsyncLink, Link, LinkError, Node, NodeSpec

KINDS = {
    "redis": ".redis.node",
    "rediss": ".redis.node",
    "unix": ".redis.node",
    "valkey": ".redis.node",
    "valkeys": ".redis.node",
    "redis+cluster": ".redis.cluster",
    "rediss+cluster": ".redis.cluster",
    "memory": ".memory",
    "database": ".database.node",
    "etcd": ".etcd.node",
    "etcds": ".etcd.node",
    "zookeeper": ".zookeeper.node",
    "zookeepers": ".zookeeper.node",
}
"""Which module opens the nodes of a scheme; imported at first use, because redis-py and Django are slow to import."""

EXTRAS = {"kazoo": "zookeeper"}
"""Which extra of this package installs a module that a kind of node needs."""

__all__ = ["KINDS", "AsyncLink", "Link", "LinkError", "Node", "NodeSpec", "open_node"]


def open_node(spec: NodeSpec, prefix: str) -> Node:
    """
    Return the node that *spec* describes, without connecting to it.

    Raises:
        ValueError: Its URL or options cannot work.
    """
    module = ".redis.sentinel" if spec.sentinels else KINDS[urlsplit(spec.url).scheme]
    try:
        opener = import_module(module, __package__)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in EXTRAS:
            raise
        raise ValueError(f"it needs {missing}: pip install django-redlock[{EXTRAS[missing]}]") from None
    node: Node = opener.open_node(spec, prefix)
    return node
