"""Notice the leases that are dropped without a release (internal)."""

import logging
import warnings
from collections import deque
from contextlib import suppress
from typing import Any
from weakref import ref

from ..core.hold import Hold
from ..core.names import named
from ..nodes.clock import Clock
from ..nodes.threads import exiting
from .process import process

log = logging.getLogger("django_redlock")


class Drop(ref[Any]):
    """
    Knows when a lease is dropped without a release.

    The callback is in C, not in a ``__del__``, where an exception from a signal handler would be swallowed.
    """

    __slots__ = ("clock", "ends", "hold")
    hold: Hold
    clock: Clock
    ends: deque[float]


unreleased: set[Drop] = set()  # keeps those of leases that have not been released
drops: deque[Drop] = deque()  # whose leases are gone; see note_drops()


def watch_drop(lease: object, hold: Hold, clock: Clock, ends: deque[float]) -> Drop:
    """Have the drop of a lease noted; :func:`note_drops` then adds to *ends* when its lock ends, by *clock*."""
    drop = Drop(lease, drops.append)
    drop.hold, drop.clock, drop.ends = hold, clock, ends
    unreleased.add(drop)
    return drop


def note_drops() -> None:
    """Warn of the leases that were dropped without a release; called in a thread where no signal is handled."""
    with suppress(IndexError):
        for drop in iter(drops.popleft, None):
            unreleased.discard(drop)
            left = drop.hold.remaining(drop.clock())
            if left and not drop.hold.ended and not exiting():
                drop.ends.append(drop.hold.deadline)
                warn_of_drop(named(drop.hold.names), left)


def warn_of_drop(name: str, left: float) -> None:
    """Warn of one dropped lease; if a filter makes an error of the warning, log it instead."""
    said = (
        f"Lock {name!r} was dropped without a release. Nobody renews it, and it stays taken for another {left:.1f} s. "
        "Keep the lease until release(), or use a with block."
    )
    try:
        warnings.warn(said, ResourceWarning, stacklevel=2)
    except ResourceWarning:
        log.error("%s", said)


# Leases of the parent are no leases of a forked child.
process.starts += [unreleased.clear, drops.clear]
