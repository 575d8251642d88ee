"""The tasks that the workers run. Each run appends when it began and ended to a file, named after its subject."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from django.utils import timezone

from django_redlock.tasks import singleton_task

LEASE = 5.0  # seconds, of the tasks whose workers are killed
LONG = 600.0  # seconds that a body waits at most


def note(what: str, text: str) -> None:
    """Append a line to the file of a subject, in one step."""
    with Path(os.environ["TEST_NOTES"], what).open("a") as file:
        file.write(f"{text}\n")


@contextmanager
def noted(what: str, task_id: str) -> Iterator[None]:
    note(what, f"began {task_id} {time.time()} {os.getpid()}")
    yield
    note(what, f"ended {task_id} {time.time()} {os.getpid()}")


def until_told(what: str) -> None:
    until = time.monotonic() + LONG
    while not is_told(what) and time.monotonic() < until:
        time.sleep(0.01)


def is_told(what: str) -> bool:
    return Path(os.environ["TEST_NOTES"], f"{what}.go").exists()


@singleton_task(takes_context=True, key=("what",))
def once(context, what, seconds=0.03):
    with noted(what, context.task_result.id):
        time.sleep(seconds)
    return what


@singleton_task(takes_context=True)
def parent(context, what):
    child = once.using(run_after=timezone.now() + timedelta(hours=1)).enqueue(f"{what} child")
    note(what, f"stored {child.id}")


@singleton_task(takes_context=True, key=("what",), scope="while_executing", lease=LEASE)
def serial(context, what, number):
    with noted(what, context.task_result.id):
        until_told(what)


@singleton_task(takes_context=True, key=("what",), scope="while_executing", limit=2, lease=LEASE)
def two_at_once(context, what, number):
    with noted(what, context.task_result.id):
        until_told(what)


@singleton_task(takes_context=True, lease=LEASE)
def long(context, what):
    with noted(what, context.task_result.id):
        until_told(what)
    return long.singleton.lost


@singleton_task(takes_context=True, lease=LEASE, max_hold=1)
def bounded(context, what):
    with noted(what, context.task_result.id):
        until_told(what)


@singleton_task(takes_context=True, lease=LEASE, version=int(os.environ.get("TEST_VERSION", "1")))
def versioned(context, what):
    with noted(what, context.task_result.id):
        until_told(what)


@singleton_task(takes_context=True, lease=LEASE, max_hold=1)
async def watchful(context, what):
    """Notice in the event loop that the slot is lost, before anybody else does."""
    with noted(what, context.task_result.id):
        while not is_told(what):
            _ = watchful.singleton.lost
            await asyncio.sleep(0)
