"""What a process pays: the import, its first lock, system calls per lock, and ten thousand leases that it renews."""

import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from . import contenders
from .bench import TTL, Bench, in_child, manager_of, set_up
from .contenders import FLOOR
from .report import OURS, THEIRS, Section

LEASES = 10_000
FEW, MANY = 50, 550  # calls: the difference between two runs excludes everything that happens once
BASE = "import django.conf, django.core.exceptions, django.core.signals, redis, asyncio"
IMPORT = """
import sys, time
{before}
start = time.perf_counter()
from django_redlock import lock
print(time.perf_counter() - start)
assert not {{"celery", "kombu"}} & set(sys.modules), "the package imports Celery"
"""
FIRST = """
import sys, time
from tests.lab.benchmarks.bench import ours, set_up
set_up()
manager = ours("first", sys.argv[1:])
import redis
start = time.perf_counter()
lease = manager.lock("first", wait=0).acquire()
print(time.perf_counter() - start)
lease.release()
"""


def run(bench: Bench) -> Iterator[Section]:
    """Measure each in fresh processes."""
    section = Section("startup", "importing the package, and the first lock of a process, N = 5")
    times = bench.rounds(30, 8)
    section.add("import, after Django and redis-py", _median(IMPORT.format(before=BASE), times), "ms", 30)
    section.add("import, with all that it imports", _median(IMPORT.format(before=""), times), "ms")
    section.add("first lock, with its connections", _median(FIRST, times, *bench.urls(5)), "ms", 3.5)
    yield section
    for nodes, limit in ((1, 8), (5, 25)):
        section = Section(f"syscalls-n{nodes}", f"system calls per acquire + release, N = {nodes}")
        if not shutil.which("strace"):
            section.left_out.append("all of it: needs strace (on Debian: apt-get install strace)")
        else:
            for name in (OURS, FLOOR, *([THEIRS] if nodes == 1 else [])):
                few, many = (_count(name, times, bench.urls(nodes)) for times in (FEW, MANY))
                section.add(name, (many - few) / (MANY - FEW), "calls", limit if name == OURS else None)
        yield section
    yield in_child(_hold, bench.urls(5), LEASES, 30.0 if bench.quick else 120.0)


def _median(code: str, times: int, *args: str) -> float:
    """Return the median of what a child process prints, in milliseconds; the first child warms the disk's cache."""
    program = [sys.executable, "-c", code, *args]
    took = [float(subprocess.run(program, check=True, capture_output=True, text=True).stdout) for _ in range(times + 1)]
    return statistics.median(took[1:]) * 1e3


def _count(name: str, times: int, urls: list[str]) -> int:
    """Return the sum of strace's table for a process that takes a lock *times* times."""
    with tempfile.NamedTemporaryFile("r") as summary:
        program = [sys.executable, "-m", "tests.lab.benchmarks.processes", name, str(times), *urls]
        traced = ["strace", "-f", "-c", "-U", "calls,name", "-o", summary.name, *program]
        subprocess.run(traced, check=True, capture_output=True, text=True)
        table = Path(summary.name).read_text().splitlines()
    return int(next(line for line in reversed(table) if line.split()[-1:] == ["total"]).split()[0])


def _repeat(name: str, times: int, urls: list[str]) -> None:
    """Acquire and release so often; strace observes this."""
    if name == FLOOR:
        with contenders.raw_sockets(name, urls, contenders.recorded_pair(urls)) as floor:
            for _ in range(times):
                floor.once()
        return
    once = {OURS: contenders.with_lock, THEIRS: contenders.with_client_lock}[name](urls)
    for _ in range(times):
        once("traced")


def _hold(urls: list[str], count: int, seconds: float) -> Section:
    """Hold so many leases for the given time."""
    section = Section("renewal", f"{count:,} leases of {TTL:.0f} s renewed by one process, N = 5, {seconds:.0f} s")
    manager, start = manager_of(urls), time.monotonic()
    leases = [manager.lock(f"renewed:{number}", wait=5).acquire() for number in range(count)]
    began, cpu, least, threads = time.monotonic(), time.process_time(), TTL, 0
    while time.monotonic() < began + seconds:
        time.sleep(1)
        least = min(least, *(lease.remaining() for lease in leases[:: max(1, count // 100)]))
        threads = max(threads, threading.active_count())
    share = (time.process_time() - cpu) / (time.monotonic() - began)
    section.add("CPU, share of a core", share * 100, "%", 10)
    section.add("threads", threads, limit=5)
    section.add("leases lost", sum(not lease.valid() for lease in leases), limit=0)
    section.add("renewals per lease", sum(lease.extensions for lease in leases) / count)
    section.add("shortest validity left at any time", least, "s", TTL / 3, least=True)
    section.add("taking them", began - start, "s")
    return section


if __name__ == "__main__":
    set_up()
    _repeat(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
