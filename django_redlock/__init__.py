"""Redis distributed locks for Django and Celery."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .conf import InvalidRedlockError
from .engine.lease import Lease
from .engine.lock import Lock
from .engine.manager import LockManager
from .exceptions import LockLostError, LockTakenError, QuorumUnavailableError, RedlockError, StaleTokenError
from .handler import lock, locks

if TYPE_CHECKING:
    from .fencing import fenced
    from .management.locked import locked_command
    from .querysets import LockableQuerySet, lock_for_update
    from .views import locked_view

__version__ = "0.1.0"

__all__ = [
    "InvalidRedlockError",
    "Lease",
    "Lock",
    "LockLostError",
    "LockManager",
    "LockTakenError",
    "LockableQuerySet",
    "QuorumUnavailableError",
    "RedlockError",
    "StaleTokenError",
    "fenced",
    "lock",
    "lock_for_update",
    "locked_command",
    "locked_view",
    "locks",
]

_LATER = {
    "LockableQuerySet": ".querysets",
    "fenced": ".fencing",
    "lock_for_update": ".querysets",
    "locked_command": ".management.locked",
    "locked_view": ".views",
}
"""What needs Django's models, which take longer to import than all the rest: imported when it is asked for."""


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(import_module(_LATER[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
