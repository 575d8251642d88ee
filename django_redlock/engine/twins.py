"""
Two ways to wait, for methods that are written once as coroutines (internal).

A coroutine of the blocking flavour calls blocking functions and is never suspended, so
:func:`~django_redlock.nodes.base.run` completes it in one step.
"""

from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from .watchdog import Dog, Runtime

P = ParamSpec("P")
T = TypeVar("T")


class Blocking:
    """Wait by blocking."""

    @staticmethod
    async def call(method: Callable[P, T], amethod: object, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call *method*, the blocking one of two twins."""
        return method(*args, **kwargs)

    @staticmethod
    def watchdog(runtime: Runtime) -> Dog:
        """Return the watchdog of this flavour."""
        return runtime.watchdog


class Awaiting:
    """Wait in the event loop."""

    @staticmethod
    async def call(method: object, amethod: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call *amethod*, the asyncio one of two twins."""
        return await amethod(*args, **kwargs)

    @staticmethod
    def watchdog(runtime: Runtime) -> Dog:
        """Return the watchdog of this flavour."""
        return runtime.loop_watchdog()


Flavour = type[Blocking] | type[Awaiting]
