"""Redis distributed locks for Django and Celery."""

from .conf import InvalidRedlockError
from .exceptions import LockLostError, LockTakenError, QuorumUnavailableError, RedlockError, StaleTokenError
from .handler import lock, locks
from .locks import Lease, Lock, LockManager

__version__ = "0.1.0"

__all__ = [
    "InvalidRedlockError",
    "Lease",
    "Lock",
    "LockLostError",
    "LockManager",
    "LockTakenError",
    "QuorumUnavailableError",
    "RedlockError",
    "StaleTokenError",
    "lock",
    "locks",
]
