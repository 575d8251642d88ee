"""
More work than one process has processor time for, each piece under a lock of its own that nobody else wants.

    python -m tests.server.locking.crowd threads|tasks NAME URL [URL ...]

It prints one line of JSON: how many locks were taken, the errors of the others, and the nodes that were reported down.
"""

import asyncio
import json
import sys
import threading
import time
from collections import Counter
from typing import Any

import django
from django.conf import settings

THREADS, WORK = 60, 0.008  # seconds of computing under each lock
TASKS, TASK_WORK = 200, 0.005
TURNS, TASK_TURNS = 4, 2


def compute(seconds: float) -> None:
    """Keep the processor busy; other threads take turns, but no other task does."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def crowd_of_threads(name: str, outcomes: "Counter[str]") -> None:
    """Have many threads take locks at the same moment."""
    from django_redlock import RedlockError, lock

    together = threading.Barrier(THREADS)

    def work(number: int) -> None:
        together.wait()
        for turn in range(TURNS):
            try:
                with lock(f"{name}-{number}-{turn}", wait=0):
                    compute(WORK)
                outcomes["taken"] += 1
            except RedlockError as error:
                outcomes[str(error)] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def crowd_of_tasks(name: str, outcomes: "Counter[str]") -> None:
    """Have many tasks of one event loop take locks at the same moment."""
    from django_redlock import RedlockError, lock, locks

    async def work(number: int, turn: int) -> None:
        try:
            async with lock(f"{name}-{number}-{turn}", wait=0):
                compute(TASK_WORK)
            outcomes["taken"] += 1
        except RedlockError as error:
            outcomes[str(error)] += 1

    for turn in range(TASK_TURNS):
        await asyncio.gather(*(work(number, turn) for number in range(TASKS)))
    await locks["default"].aclose()


def main(kind: str, name: str, *urls: str) -> dict[str, Any]:
    """Run one crowd; return what became of it."""
    settings.configure(
        INSTALLED_APPS=["django_redlock"],
        REDLOCK={"default": {"NODES": list(urls), "OPTIONS": {"restart_guard": False}}},
    )
    django.setup()
    from django_redlock import locks
    from django_redlock.signals import node_down

    down: Counter[str] = Counter()

    def note(reason: str, **about: Any) -> None:
        down[reason] += 1

    node_down.connect(note)
    outcomes: Counter[str] = Counter()
    if kind == "threads":
        crowd_of_threads(name, outcomes)
    else:
        asyncio.run(crowd_of_tasks(name, outcomes))
    locks["default"].close()
    return {"outcomes": outcomes, "down": down}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
