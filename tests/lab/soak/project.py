"""The project whose workers the soak runs."""

import os
import random
import time
from functools import cache
from pathlib import Path
from threading import get_ident
from typing import Any

from celery import Celery
from celery.signals import after_task_publish, task_postrun
from kombu.transport.redis import Channel, QoS

from django_redlock.celery import singleton_task
from django_redlock.singleton.line import GRACE, LONGEST_GUESS

from .records import Records

LEASE = 5.0  # seconds
QUEUE_TTL = 7200.0  # seconds: an orphaned slot still exists at the end
KEYS = 60
VISIBILITY = 10  # seconds after which the broker redelivers unacknowledged messages

# The slot of a killed run lasts for a lease, and its message comes again; the place of a lost one is kept for its pause
# and a moment, and the next one comes back after its own.
LONGEST_IDLE = LEASE + VISIBILITY + 1 + 2 * LONGEST_GUESS + GRACE

# A worker that is killed while it redelivers messages leaves kombu's mutex, during which nobody redelivers any.
REDIS_OPTIONS = {"visibility_timeout": VISIBILITY, "unacked_restore_interval": 1, "unacked_restore_throttle": 1}
REDIS_OPTIONS["unacked_mutex_expire"] = 2

app = Celery("tests.lab.soak.project", set_as_current=False)
app.conf.update(
    broker_url=os.environ.get("SOAK_BROKER", "memory://"),
    result_backend=os.environ.get("SOAK_RESULTS", "cache+memory://"),
    broker_transport_options=REDIS_OPTIONS if os.environ.get("SOAK_BROKER", "").startswith("redis") else {},
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
    worker_hijack_root_logger=False,
    beat_schedule={
        f"every second {key}": {"task": "tests.lab.soak.project.work", "schedule": 1.0, "args": (key,)}
        for key in range(5)
    },
)


@cache
def records(pid: int, thread: int) -> Records:
    return Records(Path(os.environ["SOAK_RECORDS"]))


def book_here() -> Records:
    """Return the records, for this thread: a worker that is stopped acknowledges in another one."""
    return records(os.getpid(), get_ident())


class WatchedQoS(QoS):
    """Records the fate of messages between Redis, as a broker, and this worker."""

    def append(self, message: Any, delivery_tag: str) -> None:
        super().append(message, delivery_tag)
        about = message.headers
        book_here().broker(delivery_tag, about.get("id", ""), about.get("retries") or 0, "noted")

    def ack(self, delivery_tag: str) -> None:
        book_here().broker(delivery_tag, "", 0, "acknowledged")
        super().ack(delivery_tag)

    def reject(self, delivery_tag: str, requeue: bool = False) -> None:
        if not requeue:
            book_here().broker(delivery_tag, "", 0, "acknowledged")
        super().reject(delivery_tag, requeue)


Channel.QoS = WatchedQoS


@after_task_publish.connect
def note_sent(headers: dict[str, Any], **about: Any) -> None:
    """Record that the broker has got a message."""
    book_here().sent(headers["id"], headers.get("retries") or 0)


@task_postrun.connect
def note_over(task_id: str, **about: Any) -> None:
    """Record that a run has freed its slot."""
    book_here().over(task_id)


def work_on(self: Any, key: int) -> int:
    """Work for a while, in steps; sometimes for longer than a lease, sometimes only at the second attempt."""
    book = book_here()
    run = book.began(key, self.request.id)
    duration = random.choice([0.02, 0.1, 0.3, 0.6]) if random.random() < 0.97 else 1.6 * LEASE
    until = time.monotonic() + duration
    while time.monotonic() < until:
        time.sleep(0.02)
        self.singleton.check()
        book.seen(run)
    if random.random() < 0.05 and not self.request.retries:
        raise self.retry(countdown=random.choice([0, 1]))
    book.seen(run, ended=True)
    return key


def named(name: str, **options: Any) -> Any:
    options = {"lease": LEASE, "acks_late": True, "reject_on_worker_lost": True, **options}
    return singleton_task(name=f"{__name__}.{name}", bind=True, **options)(work_on)


work = named("work", queue_ttl=QUEUE_TTL)
serial = named("serial", scope="while_executing")
three_at_once = named("three_at_once", scope="while_executing", limit=3)
# The keys of the calls that come in bursts, and how many runs of each there may be at once
BURSTS = {1001: serial, 1002: serial, 1003: serial, 1004: serial, 1005: three_at_once, 1006: three_at_once}
LIMITS = {key: task.singleton_options.limit for key, task in BURSTS.items()}
