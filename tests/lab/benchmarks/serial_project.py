"""The tasks of ``serial.py``, which the worker and their caller import; the environment names the servers."""

import os
import time
from typing import Any

import redis
from celery import Celery
from django.conf import settings
from kombu import pools

from django_redlock import LockTakenError, lock
from django_redlock.celery import singleton_task

from .bench import ours, set_up

if not settings.configured:
    set_up()
ours("default", os.environ["BENCH_NODES"].split(","))
app = Celery("serial")
app.conf.update(broker_connection_retry_on_startup=True, task_ignore_result=True)


def connect() -> None:
    """Use the servers that the environment names."""
    global notes
    app.conf.broker_url = os.environ["BENCH_BROKER"]
    notes = redis.Redis.from_url(os.environ["BENCH_NOTES"], decode_responses=True)


def hang_up() -> None:
    """Close all connections to the broker; the next may be another."""
    app._after_fork()
    pools.reset()
    notes.close()


connect()


def work(key: str, number: int, seconds: float) -> None:
    notes.rpush(f"{key}:began", number)
    time.sleep(seconds)
    notes.rpush(f"{key}:ended", time.time())


in_queue = singleton_task(name="serial.in_queue", key=("key",), scope="while_executing")(work)


@app.task(name="serial.with_retries", bind=True, max_retries=None)
def with_retries(self: Any, key: str, number: int, seconds: float) -> None:
    try:
        lease = lock(key, wait=0).acquire()
    except LockTakenError:
        raise self.retry(countdown=1) from None
    try:
        work(key, number, seconds)
    finally:
        lease.release()


@app.task(name="serial.other")
def other(sent: float) -> None:
    """Note how long a task of no key had to wait."""
    notes.rpush("others", time.time() - sent)
