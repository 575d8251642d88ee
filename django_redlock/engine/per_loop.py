"""Things of which each event loop has its own."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """
    One thing per event loop, for as long as the loop is open.

    The things hold timers and connections, and these hold their loop, so that nothing of it would ever be freed; what
    belongs to loops that have been closed is dropped when another loop asks for its own.

    Args:
        make: Makes the thing in the running loop.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._things: dict[asyncio.AbstractEventLoop, T] = {}

    def __len__(self) -> int:
        return len(self._things)

    def get(self) -> T:
        """Return the thing of the running event loop, made when it is first asked for."""
        loop = asyncio.get_running_loop()
        thing = self._things.get(loop)
        if thing is None:
            for other in list(self._things):
                if other.is_closed():
                    self._things.pop(other, None)
            thing = self._things[loop] = self._make()
        return thing

    def pop(self) -> T | None:
        """Return the thing of the running event loop, which is no longer its own, if there is one."""
        return self._things.pop(asyncio.get_running_loop(), None)
