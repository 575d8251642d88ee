"""Keep one thing per event loop (internal)."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class PerLoop(Generic[T]):
    """
    One thing per event loop, for as long as the loop is open.

    The things hold timers and connections, and these hold their loop, so neither would ever be freed. Therefore the
    things of closed loops are dropped when another loop first asks for its own.

    Args:
        make: Makes the thing in the running loop.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._things: dict[asyncio.AbstractEventLoop, T] = {}

    def __len__(self) -> int:
        return len(self._things)

    def get(self) -> T:
        """Return the thing of the running event loop; make it on first use."""
        loop = asyncio.get_running_loop()
        thing = self._things.get(loop)
        if thing is None:
            for other in list(self._things):
                if other.is_closed():
                    self._things.pop(other, None)
            thing = self._things[loop] = self._make()
        return thing

    def pop(self) -> T | None:
        """Remove and return the thing of the running event loop, if there is one."""
        return self._things.pop(asyncio.get_running_loop(), None)
