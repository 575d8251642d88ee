"""What the tests of real workers have in common."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import project

LEASE = 2.0  # seconds, of the tasks whose lease runs out
SLACK = 0.7  # seconds that a busy machine may take to notice


def task(name: str) -> Any:
    return project.app.tasks[f"tests.server.workers.project.{name}"]


def until(condition: Callable[[], Any], timeout: float = 10.0) -> float:
    """Wait until *condition* holds; returns how long it took, in seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() < start + timeout, "it never happened"
        time.sleep(0.02)
    return time.monotonic() - start


def gone(pid: int) -> Callable[[], bool]:
    """Return what tells whether a process has ended, reaped or not."""

    def gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            return True

    return gone


def free(name: str, *args: Any) -> Callable[[], bool]:
    return lambda: not task(name).singleton.is_locked(*args)


def waiting(queue: str = "celery") -> int:
    """Return how many messages are in a queue and not yet with a worker."""
    with project.app.connection_for_read() as connection:
        return connection.default_channel.queue_declare(queue, passive=True).message_count
