"""Switch singletons off, for tests of the tasks themselves."""

import threading
from contextlib import ContextDecorator
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, Self

_mutex = threading.Lock()
_off: list[object] = []


def switched_off() -> bool:
    """Return whether tasks are sent and run without slots at the moment."""
    return bool(_off)


class override_singleton(ContextDecorator):
    """
    Send and run singleton tasks as ordinary ones while a ``with`` block, a decorated function or a coroutine runs.

    It applies to the whole process, and to the workers that get a message that was sent inside. For tests of
    singletons as such, use nodes in memory, ``REDLOCK = {"default": {"NODES": "memory://a"}}``.

    Args:
        enabled: Whether singletons are on; inside a block that has switched them off, True does not switch them on.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def __call__(self, function: Any) -> Any:
        """
        Return *function*, a coroutine function or not, with singletons switched while it runs.

        Raises:
            TypeError: It is a class or a generator, which does its work after the call.
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
