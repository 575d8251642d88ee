"""The clock that leases are measured by (internal)."""

import time
from collections.abc import Callable
from functools import partial

Clock = Callable[[], float]

# Seconds on a clock that never steps and, where the system has one, counts suspension. It is read a dozen times for a
# lock, so there is no function of ours around it.
steady: Clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
