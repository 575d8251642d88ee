"""The project whose workers run the serial tasks of the benchmark; each run records when it began."""

import os
import time
from typing import Any

import redis
from celery import Celery
from celery.signals import after_task_publish

from django_redlock import lock
from django_redlock.celery import singleton_task

BODY = 0.02  # seconds

app = Celery("tests.lab.benchmarks.serial_project", set_as_current=False)
app.conf.update(
    broker_url=os.environ.get("SERIAL_SERVER", "memory://"),
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    task_ignore_result=True,
)
book: Any = redis.Redis.from_url(os.environ.get("SERIAL_SERVER", "redis://localhost"), decode_responses=True)


@after_task_publish.connect
def count(sender: str, headers: dict[str, Any], **about: Any) -> None:
    """Count how often each message was sent."""
    book.hincrby("sends", headers["id"], 1)


def work(key: str) -> None:
    """Do some work; record its beginning and its end."""
    began = time.time()
    time.sleep(BODY)
    book.rpush(f"runs:{key}", f"{began} {time.time()}")


@singleton_task(key=("key",), scope="while_executing")
def serial(key: str, number: int) -> None:
    work(key)


@app.task
def in_a_lock(key: str, number: int) -> None:
    with lock(f"body:{key}", wait=None):
        work(key)
