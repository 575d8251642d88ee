"""
The nodes, which have one vote each: what a node is, and how all nodes are queried (internal).

A node is anything that can compare and set a named record that expires. The scheme of its URL is its kind, which
the majority logic never knows.
"""

import sys
import threading
from _thread import start_new_thread
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

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

forking = False
"""Whether this process is about to fork, so that no thread may be started."""

__all__ = ["KINDS", "LinkError", "Node", "NodeSpec", "open_node"]


def open_node(spec: NodeSpec, prefix: str) -> Node:
    """
    Return the node that *spec* describes, without connecting to it.

    Raises:
        ValueError: The URL or the options cannot work.
    """
    module = ".redis.discovered" if spec.sentinels else KINDS[split_url(spec.url).scheme]
    try:
        opener: Any = loaded(f"{__package__}{module}")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "kazoo":
            raise
        raise ValueError('it needs kazoo: pip install "django-redlock[zookeeper]"') from None
    node: Node = opener.open_node(spec, prefix)
    return node


def loaded(name: str) -> ModuleType:
    """
    Import a module; the main thread leaves that to another thread, and waits.

    A signal handler interrupts the main thread, and may need the module too. It then waits for the other thread. If the
    main thread were importing the module itself, the handler would find half of it.
    """
    main = threading.current_thread() is threading.main_thread()
    if main and name not in sys.modules and not forking and not importing():
        done = threading.Lock()
        done.acquire()

        def load() -> None:
            with suppress(Exception):  # it is raised below
                import_module(name)
            done.release()

        with suppress(RuntimeError):  # no more threads can be started
            start_new_thread(load, ())
            done.acquire()
    return import_module(name)


def importing() -> bool:
    """Return whether any module is being imported: another thread might wait for it, and this one for that thread."""
    return any(getattr(getattr(it, "__spec__", None), "_initializing", False) for it in list(sys.modules.values()))
