"""The lease of an event loop (internal)."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from ..core.hold import Hold
from ..core.round import Round
from .lease import Lease, Manager
from .renewal import loop_watchdog


class AsyncLease(Lease):
    """A lease whose events belong to the event loop that acquired it."""

    def __init__(self, manager: Manager, hold: Hold, renew: bool, takeover: Round | None = None) -> None:
        super().__init__(manager, hold, renew, takeover)
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        raise TypeError(
            f"The lease of {self.name!r} belongs to an event loop; write 'async with lease:' instead of 'with lease:'."
        )

    def _new_event(self) -> asyncio.Event:
        return asyncio.Event()

    def _apart(self, function: Callable[[], object]) -> bool:
        return False

    def _call_back(self, teller: object) -> None:
        super()._call_back(teller)  # an exit would end the event loop, whoever runs in it

    def _tell_later(self) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(lambda: loop_watchdog().watch(self))

    def _set_lost(self) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody waits for the event any more
            if asyncio._get_running_loop() is self._loop or not self._loop.is_running():
                super()._set_lost()
            else:  # noticed in another thread, which may not wake those that wait
                self._loop.call_soon_threadsafe(super()._set_lost)
