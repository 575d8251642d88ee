"""
Compare this checkout with another version of the package, in turns: ``--against WHEEL`` of the benchmark.

Each measurement is made in a process of its own, with keys of its own; old and new take turns. The figures are the
least processor time of the client per lock or call and the most of them per second: other load makes both worse only.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, repeat
from pathlib import Path

from .bench import Bench, ours, set_up
from .report import Section

ROOT = Path(__file__).parents[3]
TURNS = 7
PASSES = 5  # of one process; the best one counts
CALLS = 400
TASKS = 100
THREADS = 16

Work = Callable[[], int]  # takes locks or makes calls; returns how many

CASES: dict[str, tuple[int, str, float]] = {
    "free-n1": (1, "one", 0.75),
    "free-n5": (5, "one", 0.85),
    "threads-n5": (5, "threads", 1.03),
    "tasks-n1": (1, "tasks", 1.03),
    "tasks-n5": (5, "tasks", 1.03),
    "publishing-n1": (1, "join", 0.95),
    "publishing-n5": (5, "join", 0.95),
    "publishing-rerun-n5": (5, "rerun", 1.03),
    "publishing-replace-n5": (5, "replace", 1.03),
    "duplicates-n5": (5, "duplicate", 1.03),
}
"""The number of nodes and the kind of work of each case, and the share of the other version's time that it may take."""


def run(bench: Bench, wheel: Path, cases: str = "") -> Iterator[Section]:
    """Measure each case with the other version and with this one."""
    for case, (_, _, limit) in CASES.items():
        if not case.startswith(tuple(cases.split(","))):
            continue
        section = Section(f"against-{case}", "processor time per lock or call, another version and this one")
        found: dict[str, list[tuple[float, float]]] = {"other": [], "this": []}
        for _ in range(bench.rounds(TURNS)):
            for name, root in (("other", wheel), ("this", ROOT)):
                found[name].append(measure(case, root, bench.urls(5)))
        for name, results in found.items():
            section.add(name, min(cpu for cpu, _ in results), "µs")
            section.add(f"{name}, per second", max(rate for _, rate in results), "/s")
        section.compare("other", limit, ours="this")
        yield section


def measure(case: str, root: Path, urls: list[str]) -> tuple[float, float]:
    """Return processor time in microseconds per lock or call, and their number per second, of the version in *root*."""
    environment = os.environ | {"PYTHONPATH": f"{root.resolve()}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-m", "tests.lab.benchmarks.against", str(root.resolve()), case, *urls]
    child = subprocess.run(program, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd="/")
    cpu, rate = json.loads(child.stdout)
    return cpu, rate


def _one_after_the_other(calls: int = CALLS, name: str = "one") -> int:
    from django_redlock import lock

    for _ in range(calls):
        with lock(name):
            pass
    return calls


def _threads() -> int:
    from concurrent.futures import ThreadPoolExecutor

    calls = CALLS // THREADS
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(lambda number: _one_after_the_other(calls, f"thread:{number}"), range(THREADS)))


def _tasks(loop: asyncio.AbstractEventLoop) -> int:
    from django_redlock import lock

    async def repeat(number: int) -> None:
        for _ in range(10):
            async with lock(f"task:{number}"):
                pass

    async def all_of_them() -> None:
        await asyncio.gather(*(repeat(number) for number in range(TASKS)))

    loop.run_until_complete(all_of_them())
    return TASKS * 10


def _publisher(broker: str, kind: str) -> Work:
    """Return what publishes calls of a singleton task, which has no options that some version does not know."""
    from celery import Celery

    from django_redlock.celery import singleton_task

    app = Celery("against", broker=broker)
    options = {} if kind == "duplicate" else {"on_duplicate": kind}
    task = singleton_task(name=f"against.{os.getpid()}", ignore_result=True, **options)(_body)
    numbers = repeat(0) if kind == "duplicate" else count()

    def publish() -> int:
        for _ in range(CALLS):
            task.delay(next(numbers))
        app.control.purge()
        return CALLS

    return publish


def _body(number: int) -> None:
    """Do nothing; no worker runs it."""


def _child(root: str, case: str, urls: list[str]) -> tuple[float, float]:
    import django_redlock

    assert Path(django_redlock.__file__).is_relative_to(root), "this is another version than the one to measure"
    set_up()
    nodes, kind, _ = CASES[case]
    manager = ours("default", urls[:nodes], prefix=f"against-{os.getpid()}")
    loop = asyncio.new_event_loop()
    locking: dict[str, Work] = {"one": _one_after_the_other, "threads": _threads, "tasks": lambda: _tasks(loop)}
    work = locking.get(kind) or _publisher(urls[-1], kind)
    work()
    passes = [_timed(work) for _ in range(PASSES)]
    loop.run_until_complete(manager.aclose())
    loop.close()
    return min(cpu for cpu, _ in passes), max(rate for _, rate in passes)


def _timed(work: Work) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    calls = work()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu / calls * 1e6, calls / wall


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], sys.argv[2], sys.argv[3:])))
