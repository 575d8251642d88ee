"""The results of the unattended demo."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """
    One check.

    Args:
        name: The condition, in words.
        ok: Whether it held.
        seen: The numbers behind it.
    """

    name: str
    ok: bool
    seen: str

    def __str__(self) -> str:
        return f"  {'ok    ' if self.ok else 'FAILED'}  {self.name}: {self.seen}"


Say = Callable[[str], object]


def diary(write: Say) -> Say:
    """Return a function that prints a line with the seconds since now in front."""
    start = time.monotonic()
    return lambda text: write(f"{time.monotonic() - start:6.1f} s  {text}")
