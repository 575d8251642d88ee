"""The project whose worker runs the scenarios of one contender; ``COMPARE`` names the contender."""

import os
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery

LIMIT = 1  # seconds, the hard time limit of the task that exceeds it
URL = os.environ.get("COMPARE_URL", "redis://127.0.0.1:1")

app = Celery("tests.lab.comparison.project", broker=URL, backend=URL)
app.conf.update(
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": URL, "default_timeout": 3600}},
    singleton_backend_url=URL,
    singleton_lock_expiry=3600,
    broker_transport_options={
        "visibility_timeout": float(os.environ.get("COMPARE_VISIBILITY", 3600)),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
)


def django_redlock(**options: Any) -> Callable[..., Any]:
    """This package, with its default options."""
    import django

    django.setup()
    from django_redlock.celery import singleton_task

    return singleton_task(**options)


def celery_once(**options: Any) -> Callable[..., Any]:
    from celery_once import QueueOnce

    return app.task(base=QueueOnce, once={"graceful": True}, **options)


def celery_singleton(**options: Any) -> Callable[..., Any]:
    from celery_singleton import Singleton

    return app.task(base=Singleton, **options)


def celery_heimdall(**options: Any) -> Callable[..., Any]:
    from celery_heimdall import HeimdallTask

    return app.task(base=HeimdallTask, heimdall={"unique": True, "unique_lock_blocking": False}, **options)


def celery_once_task(**options: Any) -> Callable[..., Any]:
    from celery_once_task import OnceTask, configure

    configure(redis_url=URL)
    return app.task(base=OnceTask, **options)


CONTENDERS = {
    "django-redlock": django_redlock,
    "celery-once": celery_once,
    "celery-singleton": celery_singleton,
    "celery-heimdall": celery_heimdall,
    "celery-once-task": celery_once_task,
}

single = CONTENDERS.get(os.environ.get("COMPARE", ""), app.task)
told = redis.Redis.from_url(URL, decode_responses=True, socket_timeout=60)


def tell(what: str, event: str) -> None:
    told.rpush(f"told:{what}", f"{event} {os.getpid()} {time.monotonic()}")


def body(what: str, seconds: float) -> str:
    tell(what, "began")
    time.sleep(seconds)
    tell(what, "ended")
    return what


@single(name="compare.work")
def work(what: str, seconds: float = 0.0) -> str:
    return body(what, seconds)


@single(name="compare.late", acks_late=True)
def late(what: str, seconds: float = 0.0) -> str:
    return body(what, seconds)


@single(name="compare.limited", time_limit=LIMIT)
def limited(what: str, seconds: float = 0.0) -> str:
    return body(what, seconds)


@single(name="compare.again", bind=True)
def again(self: Any, what: str) -> str:
    if not self.request.retries:
        tell(what, "first")
        raise self.retry(countdown=2)
    return body(what, 0.0)


@app.task(name="compare.total")
def total(values: list[str]) -> int:
    return len(values)
