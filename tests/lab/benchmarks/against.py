"""
Compare this checkout with another version of the package, in turns: ``--against WHEEL`` of the benchmark.

Each measurement is made in a process of its own, which imports one of the two versions; old and new take turns, so that
other load on the machine affects both alike. The figures are the least processor time of the client per lock, or per
call of a singleton task, and the most of them per second, because other load makes both worse and never better. Each
process has keys of its own: what an earlier one left on the servers would turn a free lock into one that is taken.
"""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, repeat
from pathlib import Path

from django_redlock import LockManager

from .bench import Bench, manager_of, set_up
from .report import Figure, Section, Target

ROOT = Path(__file__).parents[3]
TURNS = 7
PASSES = 5  # of one process; the best one counts
CALLS = 400
TASKS = 100
THREADS = 16

Work = Callable[[LockManager], int]
"""Uses the locks of a manager; returns how many it has taken, or how many calls it has made."""


def run(bench: Bench, other: Path) -> Iterator[Section]:
    """Measure each case with the other version and with this one; at most 1.03 times the time is allowed."""
    for case in CASES:
        section = Section(f"against-{case}", "processor time per lock or call, another version and this one")
        found: dict[str, list[tuple[float, float]]] = {"other": [], "this": []}
        for _ in range(bench.rounds(TURNS, 5)):
            for name, root in (("other", other), ("this", ROOT)):
                found[name].append(_measure(case, root, bench.urls(5)))
        for name, results in found.items():
            cpu, rate = min(cpu for cpu, _ in results), max(rate for _, rate in results)
            section.figures += [Figure(name, cpu, "µs"), Figure(f"{name}, per second", rate, "/s")]
        new, old = section.value("this"), section.value("other")
        if new and old:
            section.targets.append(Target("this version against the other", new / old, 1.03))
        yield section


def _measure(case: str, root: Path, urls: list[str]) -> tuple[float, float]:
    """Return processor time in microseconds per lock or call, and their number per second, of the version in *root*."""
    environment = os.environ | {"PYTHONPATH": f"{root.resolve()}{os.pathsep}{ROOT}"}
    program = [sys.executable, "-m", "tests.lab.benchmarks.against", str(root.resolve()), case, *urls]
    child = subprocess.run(program, check=True, capture_output=True, text=True, env=environment, cwd="/")
    cpu, rate = json.loads(child.stdout)
    return cpu, rate


def _one_after_the_other(manager: LockManager, calls: int = CALLS, name: str = "one") -> int:
    for _ in range(calls):
        manager.lock(name, wait=60.0).acquire().release()
    return calls


def _threads(manager: LockManager) -> int:
    from concurrent.futures import ThreadPoolExecutor

    calls = CALLS // THREADS
    with ThreadPoolExecutor(THREADS) as pool:
        return sum(pool.map(lambda number: _one_after_the_other(manager, calls, f"thread:{number}"), range(THREADS)))


def _tasks(loop: asyncio.AbstractEventLoop, manager: LockManager) -> int:
    async def repeat(number: int) -> None:
        for _ in range(10):
            await (await manager.lock(f"task:{number}", wait=60.0).aacquire()).arelease()

    async def all_of_them() -> None:
        await asyncio.gather(*(repeat(number) for number in range(TASKS)))

    loop.run_until_complete(all_of_them())
    return TASKS * 10


def _publisher(manager: LockManager, broker: str, kind: str) -> Work:
    """Return what publishes calls of a singleton task, which has no options that some version does not know."""
    from celery import Celery

    from django_redlock.celery import singleton_task

    app = Celery("against", broker=broker)
    options = {} if kind == "duplicate" else {"on_duplicate": kind}
    name = f"against.{os.getpid()}"
    task = singleton_task(name=name, using=manager.alias, ignore_result=True, **options)(_body)
    numbers = repeat(0) if kind == "duplicate" else count()

    def publish(manager: LockManager) -> int:
        for _ in range(CALLS):
            task.delay(next(numbers))
        app.control.purge()
        return CALLS

    return publish


def _body(number: int) -> None:
    """Do nothing; no worker runs it."""


CASES: dict[str, tuple[int, str]] = {
    "free-n1": (1, "one"),
    "free-n5": (5, "one"),
    "threads": (5, "threads"),
    "tasks-n1": (1, "tasks"),
    "tasks-n5": (5, "tasks"),
    "publishing-n1": (1, "join"),
    "publishing-n5": (5, "join"),
    "publishing-rerun-n5": (5, "rerun"),
    "publishing-replace-n5": (5, "replace"),
    "duplicates-n5": (5, "duplicate"),
}
"""The number of nodes and the kind of work of each case."""


def _child(root: str, case: str, urls: list[str]) -> tuple[float, float]:
    import django_redlock

    assert Path(django_redlock.__file__).is_relative_to(root), "this is another version than the one to measure"
    set_up()
    nodes, kind = CASES[case]
    manager = manager_of(urls[:nodes])
    loop = asyncio.new_event_loop()
    locking: dict[str, Work] = {"one": _one_after_the_other, "threads": _threads, "tasks": partial(_tasks, loop)}
    work = locking.get(kind) or _publisher(manager, urls[-1], kind)
    work(manager)
    passes = [_timed(work, manager) for _ in range(PASSES)]
    loop.run_until_complete(manager.aclose())
    loop.close()
    return min(cpu for cpu, _ in passes), max(rate for _, rate in passes)


def _timed(work: Work, manager: LockManager) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    calls = work(manager)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu / calls * 1e6, calls / wall


if __name__ == "__main__":
    print(json.dumps(_child(sys.argv[1], sys.argv[2], sys.argv[3:])))
