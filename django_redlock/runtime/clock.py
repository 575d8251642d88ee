"""The clock that measures leases, and how long to wait for a node (internal)."""

import os
import time
from collections.abc import Callable
from functools import partial

Clock = Callable[[], float]

# Seconds on a clock that never steps and that, where the system has such a clock, counts suspension. It is read a dozen
# times for a lock, so no Python function wraps it. Libraries that freeze or move time in tests replace time.monotonic()
# in every module, or change what the system's functions say about the time of day; they leave this clock alone.
steady: Clock = (
    partial(time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
    if hasattr(time, "clock_gettime")
    else partial(time.monotonic)
)

SLICES = 8  # waits that a timeout is divided into, so that it shows when this process was late
LATE = 0.02  # seconds by which the end of a wait may be late in any case
OWED = 5.0  # least seconds to wait on for a node while this process or its machine is late
LOAD = "/proc/loadavg"  # Linux: the fourth column is how many threads run or wait for a processor, of how many
CROWD = 1.5 * (os.cpu_count() or 1)  # threads; from here on some wait for long


def is_late(asked: float, took: float) -> bool:
    """Return whether a wait ended late, because this process had no processor, or no turn of its interpreter."""
    return took > asked + max(asked, LATE)


def crowded(clock: Clock = steady) -> bool:
    """
    Return whether far more threads of this machine want to run than it has processors, as far as is known.

    Where *clock* shows a time of its own, as in a simulation, the machine does not matter.
    """
    if clock is not steady:
        return False
    try:
        with open(LOAD, "rb", buffering=0) as file:
            return int(file.read(100).split()[3].split(b"/")[0]) > CROWD
    except (OSError, ValueError, IndexError):
        return False


class Patience:
    """
    How much longer to wait for a node.

    A timeout measures the node. So it is not charged for a wait that ended late, nor for one at whose end threads of
    this machine wait for a processor, because one of them may be the node's. Such waits have a bound of their own. If a
    wait ends a little late, the part that was not asked for is not charged: a thread may need ten turns of a busy
    interpreter to open a connection, and each turn would cost a little. Making connections has an allowance of its own.

    Args:
        seconds: The timeout.
        lifetime: Seconds after which no answer is of use.
        clock: The clock that measures the waits.
        connecting: The allowance for making connections, in seconds; None is as much as the timeout.
    """

    __slots__ = ("_clock", "_connecting", "_left", "_lifetime", "_owed", "_part")

    def __init__(
        self, seconds: float, lifetime: float = float("inf"), clock: Clock = steady, connecting: float | None = None
    ) -> None:
        self._clock = clock
        self._left = seconds
        self._connecting = seconds if connecting is None else connecting
        self._owed = max(seconds, OWED)
        self._part = seconds / SLICES
        self._lifetime = lifetime

    @property
    def late(self) -> bool:
        """Whether the waiting ended before the node had its whole timeout."""
        return self._left > 0 and self._connecting > 0

    def count(self, asked: float, took: float, *, connecting: bool = False) -> float:
        """
        Note how long a wait was to last, and how long it lasted.

        Args:
            asked: The seconds to wait.
            took: The seconds that passed.
            connecting: Whether no node has been asked yet, because the connections are being made. Then a late wait
                costs nothing.

        Returns:
            The seconds to wait next; 0.0 when there is nothing to wait for any more.
        """
        self._lifetime -= took
        if is_late(asked, took) or crowded(self._clock):
            self._owed -= 0.0 if connecting else asked
        elif connecting:
            self._connecting -= min(asked, took)
        else:
            self._left -= min(asked, took)
        left = self._connecting if connecting else self._left
        return max(0.0, min(self._part, left)) if self._owed > 0 and self._lifetime > 0 else 0.0
