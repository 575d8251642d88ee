"""The errors of redis-py's locks over these nodes (internal; :mod:`django_redlock.compat` has their public names)."""

from ..exceptions import RedlockError
from ..nodes.redis.node import RedisLockError, RedisLockNotOwnedError


class LockError(RedlockError, RedisLockError):
    """
    The lock was not acquired, or is not held; also a ``redis.exceptions.LockError``.

    Args:
        message: What happened.
        lock_name: Name of the lock.
    """

    def __init__(self, message: str | None = None, lock_name: str | None = None) -> None:
        super().__init__(message, lock_name)
        self.args = (message, lock_name)
        self.message = message
        self.lock_name = lock_name

    def __str__(self) -> str:
        return f"Lock {self.lock_name!r}: {self.message}." if self.lock_name else str(self.message)


class LockNotOwnedError(LockError, RedisLockNotOwnedError):
    """The lock was held, but is not any more; also a ``redis.exceptions.LockNotOwnedError``."""
