"""What the unattended demo found out."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """
    One thing that was checked.

    Args:
        name: What should hold, in words.
        ok: Whether it did.
        seen: The numbers behind it.
    """

    name: str
    ok: bool
    seen: str

    def __str__(self) -> str:
        return f"  {'ok    ' if self.ok else 'FAILED'}  {self.name}: {self.seen}"


Say = Callable[[str], object]


def diary(write: Say) -> Say:
    """Return a function that writes a line with the seconds since now before it."""
    start = time.monotonic()
    return lambda text: write(f"{time.monotonic() - start:6.1f} s  {text}")
