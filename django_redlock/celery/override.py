"""Switch singletons off for tests of the tasks themselves (internal)."""

import threading
from contextlib import ContextDecorator
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, Self

_mutex = threading.Lock()
_off: list[object] = []


def switched_off() -> bool:
    """Return whether tasks are now sent and run without slots."""
    return bool(_off)


class override_singleton(ContextDecorator):
    """
    Treat singleton tasks as ordinary ones during a ``with`` block, a decorated function or a coroutine.

    This applies to the whole process, and to workers that receive a message sent meanwhile. To test the singletons
    themselves, use nodes in memory, ``REDLOCK = {"default": {"NODES": "memory://a"}}``.

    Args:
        enabled: Whether singletons are on. Inside a block that has switched them off, True has no effect.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def __call__(self, function: Any) -> Any:
        """
        Return *function*, which may be a coroutine function, so that it runs inside this block.

        Raises:
            TypeError: It is a class or a generator function, whose body would run after the call.
        """
        if isinstance(function, type) or isgeneratorfunction(function) or isasyncgenfunction(function):
            raise TypeError(
                f"override_singleton decorates functions and methods, not {function!r}; in a fixture or setUp write "
                "it as a with block, or self.enterContext(override_singleton(enabled=False))."
            )
        if not iscoroutinefunction(function):
            return super().__call__(function)

        @wraps(function)
        async def switched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return switched

    def __enter__(self) -> Self:
        if not self._enabled:
            with _mutex:
                _off.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._enabled:
            with _mutex:
                _off.remove(self)
