"""
How an entry of ``NODES`` becomes a node (internal).

A dotted path names the class of a node: the ``BACKEND`` of the entry, or what is registered here for the scheme of its
URL.
"""

import sys
import threading
from _thread import start_new_thread
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from traceback import extract_tb
from types import ModuleType
from typing import Any

from ..core.rules import nearest
from .base import Node, NodeSpec, split_url

REDIS = "django_redlock.nodes.redis.node.open_node"
SENTINEL = "django_redlock.nodes.redis.discovered.SentinelNode"
CLUSTER = "django_redlock.nodes.redis.discovered.ClusterNode"
ETCD = "django_redlock.contrib.consensus.etcd.node.EtcdNode"
ZOOKEEPER = "django_redlock.contrib.consensus.zookeeper.node.ZookeeperNode"

SCHEMES = {
    **dict.fromkeys(("redis", "rediss", "unix", "valkey", "valkeys"), REDIS),
    **dict.fromkeys(("redis+cluster", "rediss+cluster"), CLUSTER),
    "memory": "django_redlock.nodes.memory.open_node",
    "database": "django_redlock.nodes.database.node.DatabaseNode",
    **dict.fromkeys(("etcd", "etcds"), ETCD),
    **dict.fromkeys(("zookeeper", "zookeepers"), ZOOKEEPER),
}
"""The ``BACKEND`` of each scheme, imported on first use: redis-py and Django are slow to import."""

METHODS = ("connect", "aconnect", "listen", "alisten")
ATTRIBUTES = ("name", "address", "instant", "calls", "fails_over")

forking = False
"""Whether this process is about to fork, so that no thread may be started."""


def open_node(spec: NodeSpec, prefix: str) -> Node:
    """
    Return the node that *spec* describes, without connecting to it.

    Raises:
        ValueError: Its ``BACKEND`` cannot be used, or the URL or the options cannot work.
    """
    if spec.backend:
        return _of_backend(spec, prefix)
    try:
        make = named(SENTINEL if spec.sentinels else SCHEMES[split_url(spec.url).scheme])
    except ImportError as error:  # a kind of node may need a package that is not installed
        raise ValueError(str(error)) from None
    node: Node = make(spec, prefix)
    return node


def named(path: str) -> Callable[[NodeSpec, str], Any]:
    """Return what a dotted path names: a class of nodes, or a function that makes one."""
    module, _, name = path.rpartition(".")
    found: Callable[[NodeSpec, str], Any] = getattr(loaded(module), name)
    return found


def _of_backend(spec: NodeSpec, prefix: str) -> Node:
    """Return the node of a class that the settings name; no error shows what the class does with the settings."""
    path, _, name = spec.backend.rpartition(".")
    try:
        module = loaded(path)
    except Exception as error:  # whatever the module raises
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"its BACKEND names the module {path!r}, which cannot be imported ({why})") from None
    if not hasattr(module, name):
        near = nearest(name, vars(module)).removesuffix(".")
        raise ValueError(f"its BACKEND names {name!r}, which the module {path!r} does not have{near}")
    make = named(spec.backend)
    if isinstance(make, type):
        _check(make, name, METHODS)
    try:
        node: Node = make(spec, prefix)
    except ValueError:
        raise
    except Exception as error:  # its text may show a password
        frame = extract_tb(error.__traceback__)[-1]
        where = f"{type(error).__name__} in {frame.filename}, line {frame.lineno}"
        raise ValueError(f"its BACKEND {name} raised {where}; it takes a NodeSpec and a prefix") from None
    _check(node, name, METHODS + ATTRIBUTES)
    if not (isinstance(node.name, str) and isinstance(node.address, str)):
        raise ValueError(f"its BACKEND {name} has no str as its name and address: it must take a NodeSpec and a prefix")
    if any("//" in str(text) for text in (node.name, node.address)):  # it may have a password
        raise ValueError(f"its BACKEND {name} has a URL as its name or address, which pages show: use the host")
    return node


def _check(node: Any, name: str, wanted: tuple[str, ...]) -> None:
    if lacking := [each for each in wanted if not hasattr(node, each)]:
        raise ValueError(
            f"its BACKEND names {name}, which is no node: it has no {', '.join(lacking)}. Write the path of a class "
            "that is one (the documentation says how to write it), or leave BACKEND out if the scheme of a URL says it"
        )


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
