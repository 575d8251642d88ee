"""
Contenders for one lock in one process: threads, greenlets or tasks; run as ``python -m tests.endurance.contenders``.

Each increments a counter that only the lock protects, and records when it began and when it was served. Several such
processes may share the counter's file.
"""

import asyncio
import json
import sys
from pathlib import Path

order = json.loads(sys.argv[1])

if order["kind"] == "greenlets":
    from gevent import monkey

    monkey.patch_all()

import threading  # noqa: E402
import time  # noqa: E402

from django.conf import settings  # noqa: E402

from django_redlock import lock, locks  # noqa: E402


def served(began: float, token: int) -> None:
    """Increment the counter, and note the turn."""
    folder = Path(order["folder"])
    value = int((folder / "counter").read_text())
    with (folder / "turns").open("a") as turns:
        turns.write(json.dumps([began, time.monotonic(), token]) + "\n")
    (folder / "counter").write_text(str(value + 1))


def contend() -> None:
    with lock(f"elsewhere:{time.time_ns()}"):  # connects: from now on, a caller is soon in the queue
        pass
    for _ in range(order["times"]):
        began = time.monotonic()
        with lock("counter") as lease:
            served(began, lease.fencing_token)


async def tasks() -> None:
    async def acontend() -> None:
        for _ in range(order["times"]):
            began = time.monotonic()
            async with lock("counter") as lease:
                served(began, lease.fencing_token)

    await asyncio.gather(*(acontend() for _ in range(order["contenders"])))
    await locks["default"].aclose()


settings.configure(REDLOCK={"default": {"NODES": order["urls"], "OPTIONS": {"ttl": 30.0, "restart_guard": False}}})
if order["kind"] == "tasks":
    asyncio.run(tasks())
else:
    threads = [threading.Thread(target=contend) for _ in range(order["contenders"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
locks["default"].close()
