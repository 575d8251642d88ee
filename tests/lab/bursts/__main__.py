"""
Have threads call one key at the same time while a run of it is under way, and check how the calls end.

    python -m tests.lab.bursts --bursts 50
    python -m tests.lab.bursts --bursts 5 --pool threads --strategy replace
"""

import argparse
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django_redlock.testing import Server, start_servers
from django_redlock.testing.servers import spawn

POOLS, STRATEGIES = ("prefork", "threads"), ("rerun", "replace")
THREADS, CALLS = 10, 3
PATIENCE = 120.0  # seconds within which something must happen


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its argument, when it began and returned, and its answer."""

    value: str
    began: float
    returned: float
    result: Any


def until(condition: Callable[[], Any]) -> None:
    """Wait until *condition* holds."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def burst(project: Any, strategy: str, pool: str, number: int) -> list[str]:
    """Make one burst of calls during a run; returns what is wrong with their outcome."""
    task, key = project.task(strategy), f"{pool} {strategy} {number}"
    first = task.apply_async((key, project.FIRST), queue=pool)
    until(lambda: project.book.llen(f"runs:{key}"))
    calls: list[Call] = []
    together = threading.Barrier(THREADS)

    def call(thread: int) -> None:
        together.wait()
        for turn in range(CALLS):
            value, began = f"{thread}.{turn}", time.monotonic()
            result = task.apply_async((key, value), queue=pool)
            calls.append(Call(value, began, time.monotonic(), result))

    threads = [threading.Thread(target=call, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    project.book.rpush(f"word:{key}", "go")
    return judge(project, key, first, calls)


def judge(project: Any, key: str, first: Any, calls: list[Call]) -> list[str]:
    """Wait for the end of all calls; returns what is wrong with it."""
    wrong = [] if len(calls) == THREADS * CALLS else [f"{key}: {len(calls)} calls returned"]
    by_id = {call.result.id: call.result for call in calls} | {first.id: first}
    try:
        until(lambda: all(result.ready() for result in by_id.values()))
    except TimeoutError:
        return [*wrong, f"{key}: no end of {[result.id for result in by_id.values() if not result.ready()]}"]
    ids = {call.result.id for call in calls}
    if len(ids) != 1:
        wrong.append(f"{key}: {len(ids)} ids")
    wrong += [f"{key}: {call.value} is no duplicate of the run" for call in calls if not call.result.duplicate]
    _, *trailing = project.book.lrange(f"runs:{key}", 0, -1)
    last_began = max(call.began for call in calls)
    newest = {call.value for call in calls if call.returned >= last_began}  # those that no other call came after
    if len(trailing) != 1 or trailing[0] not in newest:
        wrong.append(f"{key}: the runs {trailing} trailed, and one of {sorted(newest)} was to")
    return wrong


def start_worker(pool: str) -> subprocess.Popen[bytes]:
    """Start a worker for the queue of a pool."""
    options = [f"--pool={pool}", "--concurrency=4", f"--queues={pool}", f"--hostname={pool}@bursts"]
    quiet = ["--without-gossip", "--without-mingle", "--loglevel=ERROR"]
    command = [sys.executable, "-m", "celery", "-A", "tests.lab.bursts.project", "worker", *options, *quiet]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return spawn(command, env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def run(pools: list[str], strategies: list[str], bursts: int) -> list[str]:
    """Run bursts with each pool and strategy, and print a line for each; returns what went wrong."""
    from . import project

    found = []
    workers = [start_worker(pool) for pool in pools]
    try:
        for pool in pools:
            until(lambda pool=pool: project.app.control.ping(destination=[f"{pool}@bursts"], timeout=1))
            for strategy in strategies:
                start = time.monotonic()
                wrong = [line for number in range(bursts) for line in burst(project, strategy, pool, number)]
                seconds = time.monotonic() - start
                print(
                    f"{pool:<8} {strategy:<8} {bursts} bursts of {THREADS} x {CALLS} calls in {seconds:.0f} s, "
                    f"{len(wrong)} wrong",
                    flush=True,
                )
                found += wrong
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    return found


def main() -> int:
    """Return 1 if something went wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.bursts", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bursts", type=int, default=50, help="how many with each pool and strategy")
    parser.add_argument("--pool", choices=POOLS, help="default: both, one after the other")
    parser.add_argument("--strategy", choices=STRATEGIES, help="default: both")
    chosen = parser.parse_args()
    with Server() as server, start_servers(3) as nodes:
        os.environ |= {
            "DJANGO_SETTINGS_MODULE": "tests.lab.bursts.settings",
            "BURSTS_SERVER": server.url,
            "BURSTS_NODES": ",".join(nodes.urls),
        }
        import django

        django.setup()
        pools = [chosen.pool] if chosen.pool else list(POOLS)
        wrong = run(pools, [chosen.strategy] if chosen.strategy else list(STRATEGIES), chosen.bursts)
    print("\n".join(wrong) or "nothing went wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
