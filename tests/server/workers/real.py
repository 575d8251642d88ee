"""The common parts of the tests of real workers."""

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from django_redlock.inventory import held_locks
from tests.managers import wait_until
from tests.services import ended

from . import project
from .project import LEASE as LEASE

# For tests of what RabbitMQ does in its own way. The others are about our code alone, which knows no broker.
ON_BOTH = pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True, scope="package")
ON_REDIS = pytest.mark.parametrize("broker", ["redis"], indirect=True, scope="package")
ON_RABBITMQ = pytest.mark.parametrize("broker", ["rabbitmq"], indirect=True, scope="package")


def task(name: str) -> Any:
    return project.app.tasks[f"tests.server.workers.project.{name}"]


def answer(result: Any, pause: float = 0.03) -> Any:
    """
    Return what a task has returned, or raise what it has raised.

    Celery asks once and then waits for a message. On a busy machine Redis may read that question, the result and the
    wish for a message in this order, and then ``get()`` waits in vain; so this asks again.
    """
    wait_until(result.ready, pause)
    return result.get(timeout=90)


def gone(pid: int) -> Callable[[], bool]:
    """Return what tells whether a process has ended, reaped or not."""
    return partial(ended, pid)


def kill(child: int) -> None:
    """Kill a child of the shared worker whose parent has read that it took its task; before, another would get that."""
    worker = "celery@tests"
    inspect = project.app.control.inspect(destination=[worker], timeout=1)
    wait_until(lambda: child in (each["worker_pid"] for each in (inspect.active() or {}).get(worker, ())))
    os.kill(child, signal.SIGKILL)


def free(name: str, *args: Any) -> Callable[[], bool]:
    return lambda: not task(name).singleton.is_locked(*args)


def renewal(name: str, *args: Any) -> Callable[[], bool]:
    """Return what tells whether a run has renewed its slot since it was last asked."""
    left = [float("inf")]

    def renewed() -> bool:
        left.append(task(name).singleton.holder(*args).ttl)
        return left[-1] > left[-2] + 0.5

    return renewed


def consume(queue: str) -> None:
    """Have the worker that most tests share take messages of this queue too."""
    wait_until(lambda: project.app.control.add_consumer(queue, reply=True, timeout=1, destination=["celery@tests"]))


def take_back(*task_ids: str) -> None:
    """Have a Redis broker deliver messages again, as it does when their visibility timeout has passed."""
    with project.app.connection_for_read() as connection:
        channel = connection.default_channel
        for tag, message in channel.client.hgetall("unacked").items():
            if any(task_id.encode() in message for task_id in task_ids):
                channel.qos.restore_by_tag(tag)


def stop_with_all_noted(worker: int, queue: str, results: Iterable[Any]) -> None:
    """
    Stop the main process of a worker at a moment at which a Redis broker knows every message that has to run.

    Kombu takes a message out of its list before it notes that the message is not acknowledged. A worker that is killed
    in between loses the message, as docs/howto/celery-reliability.md says.
    """

    def noted() -> bool:
        os.kill(worker, signal.SIGSTOP)
        with project.app.connection_for_read() as connection:
            client = connection.default_channel.client
            known = b"".join([*client.hvals("unacked"), *client.lrange(queue, 0, -1)])
        if all(result.id.encode() in known or result.ready() for result in results):
            return True
        os.kill(worker, signal.SIGCONT)
        return False

    wait_until(noted)


def watching(task_id: str) -> bool:
    """Return whether a copy of this task's message watches another."""
    return any(lock.name == f"watch:{task_id}" for lock in held_locks().notes)
