"""
Contenders for one lock in one process: threads, greenlets or tasks; run as ``python -m tests.endurance.contenders``.

Each increments a counter that only the lock protects, and records when it began, when it was first queued and when it
was served. Several such processes may share the counter's file.
"""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

order = json.loads(sys.argv[1]) if __name__ == "__main__" else {}

if order.get("kind") == "greenlets":
    from gevent import monkey

    monkey.patch_all()

import threading  # noqa: E402
import time  # noqa: E402

from django_redlock.core.rules import Rules  # noqa: E402
from django_redlock.engine.manager import LockManager  # noqa: E402
from django_redlock.engine.notifications import Waiters  # noqa: E402
from django_redlock.nodes import NodeSpec, open_node  # noqa: E402

in_line: dict[str, float] = {}


class Note:
    """One turn of one contender."""

    def __init__(self) -> None:
        self.began = time.monotonic()

    def served(self, folder: Path, token: int, waiter: str) -> None:
        """Increment the counter, and note the turn."""
        now, counter = time.monotonic(), folder / "counter"
        value = int(counter.read_text())
        with (folder / "turns").open("a") as turns:
            turns.write(json.dumps([self.began, in_line.get(waiter, now), now, token]) + "\n")
        counter.write_text(str(value + 1))


def note_the_line() -> None:
    """Make every waiter record its first refusal, from which on it is queued."""
    join = Waiters.join

    def noted(self: Any, waiter: Any) -> Any:
        in_line.setdefault(waiter.name, time.monotonic())
        return join(self, waiter)

    Waiters.join = noted  # type: ignore[method-assign]


def contend(manager: LockManager, folder: Path, times: int) -> None:
    for _ in range(times):
        note = Note()
        with manager.lock("counter") as lease:
            note.served(folder, lease.fencing_token, lease.hold._leaving)


async def acontend(manager: LockManager, folder: Path, times: int) -> None:
    for _ in range(times):
        note = Note()
        async with manager.lock("counter") as lease:
            note.served(folder, lease.fencing_token, lease.hold._leaving)


async def tasks(manager: LockManager, folder: Path, contenders: int, times: int) -> None:
    await asyncio.gather(*(acontend(manager, folder, times) for _ in range(contenders)))
    await manager.aclose()


def main() -> None:
    """Run the contenders that the arguments ask for."""
    note_the_line()
    folder, urls = Path(order["folder"]), order["urls"]
    manager = LockManager([open_node(NodeSpec(url), "t:") for url in urls], Rules(len(urls), **order["options"]))
    if order["kind"] == "tasks":
        asyncio.run(tasks(manager, folder, order["contenders"], order["times"]))
    else:
        arguments = (manager, folder, order["times"])
        threads = [threading.Thread(target=contend, args=arguments) for _ in range(order["contenders"])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    manager.close()


if __name__ == "__main__":
    main()
