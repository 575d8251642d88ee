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
    A weak reference that notices when a lease is dropped without a release.

    The callback is a C function rather than a ``__del__``, in which an exception from a signal handler would be
    swallowed.
    """

    __slots__ = ("clock", "ends", "hold")
    hold: Hold
    clock: Clock
    ends: deque[float]


unreleased: set[Drop] = set()  # keeps alive the drops of leases that have not been released
drops: deque[Drop] = deque()  # the drops whose leases are gone; see note_drops()


def watch_drop(lease: object, hold: Hold, clock: Clock, ends: deque[float]) -> Drop:
    """Notice the drop of a lease; :func:`note_drops` then adds the end of its lock, by *clock*, to *ends*."""
    drop = Drop(lease, drops.append)
    drop.hold, drop.clock, drop.ends = hold, clock, ends
    unreleased.add(drop)
    return drop


def note_drops() -> None:
    """Warn about the leases that were dropped without a release; the watchdogs and heartbeats call this."""
    with suppress(IndexError):
        for drop in iter(drops.popleft, None):
            unreleased.discard(drop)
            left = drop.hold.remaining(drop.clock())
            if left and not drop.hold.ended and not exiting():
                drop.ends.append(drop.hold.deadline)
                warn_of_drop(named(drop.hold.names), left)


def warn_of_drop(name: str, left: float) -> None:
    """Warn about one dropped lease; if a filter turns the warning into an error, log it instead."""
    message = (
        f"Lock {name!r} was dropped without a release. Nobody renews it, and it stays taken for another {left:.1f} s. "
        "Keep the lease until release(), or use a with block."
    )
    try:
        warnings.warn(message, ResourceWarning, stacklevel=2)
    except ResourceWarning:
        log.error("%s", message)


# A forked child does not have the leases of its parent.
process.starts += [unreleased.clear, drops.clear]
