"""Waiting for what a thread, a process or a server does in its own time: never for a duration."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def wait_until(
    condition: Callable[[], Any], pause: float = 0.02, seconds: float = 90.0, despite: type[Exception] | None = None
) -> Any:
    """Wait until a condition holds, and return what it returned; it may raise *despite* until then."""
    until = time.monotonic() + seconds
    while True:
        with suppress(despite or ()):
            if found := condition():
                return found
        if time.monotonic() > until:
            raise TimeoutError(f"it did not happen within {seconds:g} seconds")
        time.sleep(pause)


async def eventually(condition: Callable[[], bool]) -> None:
    """Do the same in a coroutine, whose event loop goes on."""
    until, pause = time.monotonic() + 60, 0.002
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError("it did not happen within 60 seconds")
        await asyncio.sleep(pause)
        pause = min(0.05, pause * 1.5)
