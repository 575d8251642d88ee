"""
Have threads call one key at the same time while a run of it is under way, and check how the calls end.

    python -m tests.lab.bursts --bursts 50
"""

import argparse
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from django_redlock.testing import Server, start_servers
from tests.lab.processes import end, set_up, worker
from tests.waiting import wait_until

POOLS, STRATEGIES = ("prefork", "threads"), ("rerun", "replace")
THREADS, CALLS = 10, 3


@dataclass(frozen=True, slots=True)
class Call:
    """One call: its argument, when it began and returned, and its answer."""

    value: str
    began: float
    returned: float
    result: Any


def burst(project: Any, strategy: str, pool: str, number: int) -> list[str]:
    """Make one burst of calls during a run; returns what is wrong with their outcome."""
    task, key = project.task(strategy), f"{pool} {strategy} {number}"
    first = task.apply_async((key, project.FIRST), queue=pool)
    wait_until(lambda: project.book.llen(f"runs:{key}"))
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
        wait_until(lambda: all(result.ready() for result in by_id.values()))
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


def run(bursts: int) -> list[str]:
    """Run bursts with each pool and strategy, and print a line for each; returns what went wrong."""
    from . import project

    found = []
    app, options = "tests.lab.bursts.project", ("--concurrency=4", "--loglevel=ERROR")
    workers = [
        worker(app, f"--pool={pool}", f"--queues={pool}", f"--hostname={pool}@bursts", *options) for pool in POOLS
    ]
    try:
        for pool in POOLS:
            wait_until(lambda pool=pool: project.app.control.ping(destination=[f"{pool}@bursts"], timeout=1))
            for strategy in STRATEGIES:
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
        end(workers)
    return found


def main() -> int:
    """Return 1 if something went wrong, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab.bursts", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bursts", type=int, default=50, help="how many with each pool and strategy")
    chosen = parser.parse_args()
    with Server() as server, start_servers(3) as nodes:
        # On a busy machine nodes may answer late, and without their answer a call is sent without a slot.
        options = {"restart_guard": False, "node_timeout": 5.0, "max_ttl": 600}
        set_up(nodes.urls, options, BURSTS_SERVER=server.url)
        wrong = run(chosen.bursts)
    print("\n".join(wrong) or "nothing went wrong")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
