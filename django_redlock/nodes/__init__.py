"""
The nodes, which have one vote each: what a node is, and how all nodes are queried (internal).

A node is anything that can compare and set a named record that expires. The scheme of its URL is its kind, which
the majority logic never knows.
"""

from importlib import import_module

from .base import LinkError, Node, NodeSpec, split_url

KINDS = {
    "redis": ".redis.node",
    "rediss": ".redis.node",
    "unix": ".redis.node",
    "valkey": ".redis.node",
    "valkeys": ".redis.node",
    "redis+cluster": ".redis.discovered",
    "rediss+cluster": ".redis.discovered",
    "memory": ".memory",
    "database": ".database.node",
    "etcd": ".etcd.node",
    "etcds": ".etcd.node",
    "zookeeper": ".zookeeper.node",
    "zookeepers": ".zookeeper.node",
}
"""The module that opens the nodes of a scheme, imported on first use: redis-py and Django are slow to import."""

__all__ = ["KINDS", "LinkError", "Node", "NodeSpec", "open_node"]


def open_node(spec: NodeSpec, prefix: str) -> Node:
    """
    Return the node that *spec* describes, without connecting to it.

    Raises:
        ValueError: The URL or the options cannot work.
    """
    module = ".redis.discovered" if spec.sentinels else KINDS[split_url(spec.url).scheme]
    try:
        opener = import_module(module, __package__)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "kazoo":
            raise
        raise ValueError('it needs kazoo: pip install "django-redlock[zookeeper]"') from None
    node: Node = opener.open_node(spec, prefix)
    return node
