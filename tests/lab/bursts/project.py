"""The project whose workers run the bursts: tasks that record their runs; the first run waits for a signal."""

import os
from typing import Any

import redis
from celery import Celery

from django_redlock.celery import singleton_task

app = Celery("tests.lab.bursts.project", set_as_current=False)
app.conf.update(
    broker_url=os.environ.get("BURSTS_SERVER", "memory://"),
    result_backend=os.environ.get("BURSTS_SERVER", "cache+memory://"),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
)
book: Any = redis.Redis.from_url(os.environ.get("BURSTS_SERVER", "redis://localhost"), decode_responses=True)

FIRST = "first"


def record(key: str, value: str) -> str:
    """Record a run; the first of a burst waits for the signal to go on."""
    book.rpush(f"runs:{key}", value)
    if value == FIRST:
        assert book.blpop([f"word:{key}"], timeout=300)
    return value


@singleton_task(key=("key",), on_duplicate="rerun", lease=60)
def rerun(key: str, value: str) -> str:
    return record(key, value)


@singleton_task(key=("key",), on_duplicate="replace", lease=60)
def replace(key: str, value: str) -> str:
    return record(key, value)


def task(strategy: str) -> Any:
    """Return the task of a strategy."""
    return app.tasks[f"tests.lab.bursts.project.{strategy}"]
