"""Checks of the arguments of redis-py's locks (internal)."""

from ..core.names import check_name
from ..core.rules import MIN_TTL, seconds

Name = str | bytes | memoryview


def as_text(name: Name) -> str:
    """
    Return a name as text.

    Raises:
        TypeError: The name is neither a string nor bytes.
        ValueError: The name cannot be used for a lock.
    """
    return check_name(bytes(name).decode() if isinstance(name, (bytes, memoryview)) else name)


def check_timeout(timeout: float | None) -> float | None:
    """
    Return *timeout* if it is None or a number of seconds that a lease can last.

    Raises:
        ValueError: It is neither. In redis-py, 0 meant for ever, and less than a millisecond was a server error.
    """
    if timeout is not None and seconds("timeout", timeout) < MIN_TTL:
        raise ValueError(
            f"timeout must be at least {MIN_TTL} seconds, not {timeout!r}; None holds the lock until it is released."
        )
    return timeout
