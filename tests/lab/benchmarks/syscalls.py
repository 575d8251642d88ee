"""
System calls per acquire + release, counted by strace.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import floors, peers
from .bench import Bench, set_up
from .report import OURS, Figure, Section, Target

FEW, MANY = 50, 550  # calls: the difference between two runs excludes everything that happens once
CONTENDERS = (floors.SAME, OURS, "redis-py Lock", "redlock-py")
LIMITS = {1: 8.0, 5: 25.0}


def run(bench: Bench) -> Iterator[Section]:
    """Count on one node and on five."""
    for nodes in LIMITS:
        section = Section(f"syscalls-n{nodes}", f"system calls per acquire + release, N = {nodes}")
        if shutil.which("strace"):
            _measure(section, bench, nodes)
        else:
            section.left_out.append("all of it: needs strace (on Debian: apt-get install strace)")
        yield section


def _measure(section: Section, bench: Bench, nodes: int) -> None:
    for name in CONTENDERS:
        if name in peers.ON_ONE_NODE and nodes > 1:
            continue
        try:
            section.figures.append(Figure(name, per_call(name, bench.urls(nodes)), "calls"))
        except subprocess.CalledProcessError as error:
            section.left_out.append(f"{name}: {error.stderr.strip().splitlines()[-1]}")
    if mine := section.value(OURS):
        section.targets.append(Target("system calls", mine, LIMITS[nodes], ""))


def per_call(name: str, urls: list[str]) -> float:
    """Return the system calls of one acquire + release."""
    few, many = _count(name, urls, FEW), _count(name, urls, MANY)
    return (many - few) / (MANY - FEW)


def _count(name: str, urls: list[str], times: int) -> int:
    with tempfile.NamedTemporaryFile("r") as summary:
        program = [sys.executable, "-m", "tests.lab.benchmarks.syscalls", name, str(times), *urls]
        traced = ["strace", "-f", "-c", "-U", "calls,name", "-o", summary.name, *program]
        subprocess.run(traced, check=True, capture_output=True, text=True)
        return _total(Path(summary.name).read_text())


def _total(summary: str) -> int:
    """Return the sum of strace's table."""
    last = next(line for line in reversed(summary.splitlines()) if line.split()[-1:] == ["total"])
    return int(last.split()[0])


def repeat(name: str, times: int, urls: list[str]) -> None:
    """Acquire and release the given number of times; strace observes this."""
    if name == floors.SAME:
        with floors.blocking(name, urls, floors.same(urls)) as contender:
            for _ in range(times):
                contender.once()
        return
    take = peers.BLOCKING[name](urls)
    for _ in range(times):
        take("traced")()


if __name__ == "__main__":
    set_up()
    repeat(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
