"""The clock that measures leases (internal)."""

import time
from collections.abc import Callable
from functools import partial

Clock = Callable[[], float]

# Seconds on a clock that never steps and that, where the system has such a clock, counts suspension. It is read a dozen
# times for a lock, so no Python function wraps it.
steady: Clock = partial(time.clock_gettime, time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic
