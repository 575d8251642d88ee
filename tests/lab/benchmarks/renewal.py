"""
Ten thousand leases renewed by one process.
"""

import threading
import time
from collections import Counter
from collections.abc import Iterator

from .bench import TTL, Bench, in_child, manager_of
from .report import Figure, Section, Target

LEASES = 10_000


def run(bench: Bench) -> Iterator[Section]:
    """Take the leases, then observe them for the given time."""
    section = Section(
        "renewal", f"{LEASES:,} leases of {TTL:.0f} s renewed by one process, N = 5, {bench.seconds:.0f} s"
    )
    found = in_child(hold, bench.urls(5), LEASES, bench.seconds)
    section.figures = [
        Figure("CPU, share of a core", found["cpu"], "%"),
        Figure("threads", found["threads"], ""),
        Figure("leases lost", found["lost"], ""),
        Figure("renewals per lease", found["extensions"], ""),
        Figure("shortest validity left at any time", found["least"], "s"),
        Figure("taking them", found["taking"], "s"),
    ]
    section.targets = [
        Target("CPU, share of a core", found["cpu"], 10, "%"),
        Target("leases lost", found["lost"], 0, ""),
        Target("threads", found["threads"], 5, ""),
        Target("shortest validity left at any time", found["least"], TTL / 3, "s", least=True),
    ]
    yield section


def hold(urls: list[str], count: int, seconds: float) -> dict[str, float]:
    """Hold the given number of leases for the given time; return the cost."""
    manager = manager_of(urls)
    start = time.monotonic()
    leases = [manager.lock(f"renewed:{number}", wait=5).acquire() for number in range(count)]
    taking = time.monotonic() - start
    began, cpu, least, threads = time.monotonic(), time.process_time(), TTL, 0
    while time.monotonic() < began + seconds:
        time.sleep(1)
        least = min(least, *(lease.remaining() for lease in leases[:: max(1, count // 100)]))
        threads = max(threads, threading.active_count())
    share = (time.process_time() - cpu) / (time.monotonic() - began)
    reasons = Counter(lease.reason for lease in leases)
    extensions = sum(lease.extensions for lease in leases) / count
    return {
        "cpu": share * 100,
        "lost": count - reasons[None],
        "threads": threads,
        "extensions": extensions,
        "least": least,
        "taking": taking,
    }
