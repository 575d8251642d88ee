"""Redis distributed locks for Django and Celery."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .conf import InvalidRedlockError
    from .engine.lease import Lease
    from .engine.lock import Lock
    from .engine.manager import LockManager
    from .engine.reentrancy import assert_locked, current_lease
    from .exceptions import LockLostError, LockTakenError, QuorumUnavailableError, RedlockError, StaleTokenError
    from .fencing import fenced
    from .handler import lock, locks
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
    "assert_locked",
    "current_lease",
    "fenced",
    "lock",
    "lock_for_update",
    "locked_command",
    "locked_view",
    "locks",
]

# Nothing is imported before it is used. The pytest plugin is part of this package, and pytest loads it wherever the
# package is installed. It must not load the rest of the package before coverage measures, or in unrelated tests.
_HOMES = {
    "InvalidRedlockError": ".conf",
    "Lease": ".engine.lease",
    "Lock": ".engine.lock",
    "LockLostError": ".exceptions",
    "LockManager": ".engine.manager",
    "LockTakenError": ".exceptions",
    "LockableQuerySet": ".querysets",
    "QuorumUnavailableError": ".exceptions",
    "RedlockError": ".exceptions",
    "StaleTokenError": ".exceptions",
    "assert_locked": ".engine.reentrancy",
    "current_lease": ".engine.reentrancy",
    "fenced": ".fencing",
    "lock": ".handler",
    "lock_for_update": ".querysets",
    "locked_command": ".management.locked",
    "locked_view": ".views",
    "locks": ".handler",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOMES[name], __name__), name)
    return value
