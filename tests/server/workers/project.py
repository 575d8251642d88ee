"""
The project that the workers of ``workers/`` run: tasks that follow their arguments, and record what they do.

They tell it in a list on the broker's server, where a test waits for it, and wait there for the test's word.
"""

import ctypes
import json
import os
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

import redis
from celery import Celery, Task, shared_task
from celery.concurrency.asynpool import AsynPool
from celery.signals import task_prerun
from django.dispatch import receiver
from kombu import Exchange, Queue

from django_redlock.celery import singleton_overlap, singleton_task

LEASE = 9.0  # seconds, of the tasks whose lease is to run out; renewed after a third
LONG = 600.0  # seconds, which outlasts every test
LIMIT = 4  # seconds, the hard time limit of the tasks that exceed it

QUORUM = Queue("quorum", Exchange("quorum", type="topic"), "quorum", queue_arguments={"x-queue-type": "quorum"})

app = Celery("tests.server.workers.project", set_as_current=False)


def configure(broker: str, results: str) -> None:
    """Use this broker, and this server for results and for the talk between tests and tasks."""
    app.conf.update(
        broker_url=broker,
        result_backend=results,
        broker_connection_retry_on_startup=True,
        task_queues=[QUORUM] if "TEST_QUORUM" in os.environ else None,
        task_default_queue="quorum" if "TEST_QUORUM" in os.environ else "celery",
        worker_prefetch_multiplier=int(os.environ.get("TEST_PREFETCH", 1)),
        worker_hijack_root_logger=False,
        worker_enable_remote_control=True,
        worker_max_tasks_per_child=int(os.environ.get("TEST_MAX_TASKS", 0)) or None,
        worker_send_task_events=bool(os.environ.get("TEST_EVENTS")),
        worker_soft_shutdown_timeout=float(os.environ.get("TEST_SOFT_SHUTDOWN", 0)),
        result_backend_transport_options={"retry_policy": {"timeout": float(os.environ.get("TEST_PATIENCE", 5.0))}},
        redis_socket_timeout=float(os.environ.get("TEST_SOCKET_TIMEOUT", 120.0)),
        task_track_started=bool(os.environ.get("TEST_TRACK_STARTED")),
    )


class Stage:
    """
    What passes between one test and its tasks.

    Args:
        url: Of the server.
        what: The subject of the tasks; no two tests have the same, so none disturbs another.
    """

    def __init__(self, url: str, what: str) -> None:
        self._client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=None)
        self._events, self._word = f"events:{what}", f"word:{what}"

    def say(self, event: str) -> None:
        """Tell the test that something happened, and in which process."""
        self._client.rpush(self._events, json.dumps([event, os.getpid()]))

    def hear(self, event: str) -> int:
        """Wait until a task tells that this happened; returns its process id. Other events are forgotten."""
        while True:
            heard: Any = self._client.blpop([self._events], timeout=90)
            assert heard, f"no task ever told of {event!r}"
            name, pid = json.loads(heard[1])
            if name == event:
                return int(pid)

    def heard(self) -> list[str]:
        said: Any = self._client.lrange(self._events, 0, -1)
        return [json.loads(each)[0] for each in said]

    def allow(self) -> None:
        self._client.rpush(self._word, "go")

    def wait(self) -> bool:
        """Wait until the test allows to go on; returns whether it did."""
        return bool(self._client.blpop([self._word], timeout=600))

    def close(self) -> None:
        self._client.close()


def stage(what: str) -> Stage:
    return _stage(os.getpid(), what)


@cache
def _stage(pid: int, what: str) -> Stage:
    # One per process, and for good: a signal that arrives while a client is being deleted is lost.
    return Stage(os.environ.get("TEST_STAGE") or app.conf.result_backend, what)


if "TEST_BROKER" in os.environ:
    configure(os.environ["TEST_BROKER"], os.environ["TEST_RESULTS"])
    # How often a parent looks for children that have died, which is every five seconds otherwise.
    AsynPool.timers = property(lambda pool: {pool.maintain_pool: 0.1})


def perform(what: str) -> str:
    stage(what).say("started")
    stage(what).wait()
    stage(what).say("ended")
    return f"{what} done"


class Slow(Task):
    """Tells the test before a body begins, and waits for its word."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        stage(args[0]).say("before")
        stage(args[0]).wait()


# Of each pair, the short lease shows what happens when nobody frees a slot, the long one that somebody does.
PERFORMING: dict[str, dict[str, Any]] = {
    "hold": {"lease": LEASE},
    "hold_long": {"lease": LONG},
    "hold_late": {"lease": LEASE, "acks_late": True},
    "hold_long_late": {"lease": LONG, "acks_late": True},
    "hold_nothing": {"scope": "until_executing"},
    "hold_ignored": {"lease": LEASE, "ignore_result": True},
    "hold_never": {"lease": LEASE, "acks_late": True, "redelivery": "drop"},
    "hold_on": {"lease": LONG, "acks_late": True, "reject_on_worker_lost": True},
    "resume": {"lease": LEASE, "acks_late": True, "on_overlap": "drop"},
    "try_on": {"lease": LONG, "retry_on_worker_lost": True, "default_retry_delay": 1},
    "endless_late": {"lease": LONG, "acks_late": True, "time_limit": LIMIT},
    "slow_start": {"lease": LONG, "base": Slow},
    "slow_receiver": {"lease": LONG},
}
for name, options in PERFORMING.items():
    singleton_task(name=f"{__name__}.{name}", **options)(perform)


@receiver(singleton_overlap)
def tell_overlap(sender: Any, **about: Any) -> None:
    """Tell the test, where it waits for it, that a message came while its duplicate ran."""
    if sender.name.endswith(".resume"):
        stage(sender.request.args[0]).say("overlapped")


@task_prerun.connect
def wait_in_a_receiver(sender: Any, args: Any, **about: Any) -> None:
    if sender.name.endswith(".slow_receiver"):
        stage(args[0]).say("before")
        stage(args[0]).wait()


@singleton_task(lease=LONG)
def stubborn(what: str) -> None:
    """Carry on when told to stop, as often as that may be."""
    event = "started"
    while event:
        try:
            stage(what).say(event)
            event = "" if stage(what).wait() else event
        except SystemExit:
            event = "stopped"


@singleton_task(lease=LONG, time_limit=LIMIT)
def endless(what: str) -> None:
    """Carry on for ever, also when told to stop."""
    stage(what).say("started")
    while True:
        with suppress(SystemExit):
            stage(what).wait()


@singleton_task(bind=True, lease=LONG)
def once_more(self: Any, what: str) -> str:
    if not self.request.retries:
        raise self.retry(countdown=0.5)
    return perform(what)


@singleton_task(bind=True, lease=LEASE)
def compute(self: Any, what: str) -> bool:
    """Let no other greenlet run until the slot has been renewed, compute until it is again, wait; was it ever lost?"""
    stage(what).say("started")
    lease, turns, sleep = self.singleton.lease, 0, ctypes.CDLL(None).usleep
    while lease.extensions < 1 and not self.singleton.lost:
        sleep(20_000)
    sleep(int(1e6 * (LEASE / 3 - 0.5)))
    while lease.extensions < 2 and not self.singleton.lost:
        turns += 1
    stage(what).wait()
    return bool(self.singleton.lost)


@singleton_task(lease=LEASE, bind=True)
def spin(self: Any, what: str) -> None:
    stage(what).say("started")
    while True:
        time.sleep(0.01)
        self.singleton.check()


@singleton_task(on_overlap="follow")
def price(product: int) -> int:
    return product * 100


@shared_task
def total(prices: list[int]) -> int:
    return sum(prices)


@singleton_task(lease=LONG, on_overlap="wait")
def leave(what: str, status: int) -> str:
    """End the process, by the way that Python programs end."""
    stage(what).say("left")
    sys.exit(status)


@singleton_task(lease=LONG)
def report(what: str) -> list[Any]:
    until, names = time.monotonic() + 30, list[str]()
    while "django_redlock watchdog" not in names and time.monotonic() < until:  # another thread starts it
        names = [thread.name for thread in threading.enumerate()]
    return [os.getpid(), names]


@singleton_task(bind=True, key=("what",))
def show_headers(self: Any, what: str) -> None:
    """Tell the headers of both attempts, because a returned value may be overwritten by RETRY."""
    stage(what).say(json.dumps(dict(self.request.headers)))
    if not self.request.retries:
        raise self.retry(countdown=0)


@singleton_task
def double(number: int) -> int:
    return number * 2


@shared_task
def add(*numbers: int) -> int:
    return sum(numbers)


def work(what: str, number: int) -> int:
    stage(what).say(f"{number} began {time.time()}")
    time.sleep(0.2)
    stage(what).say(f"{number} ended {time.time()}")
    return number


# Those of one key wait for each other, in the queue of the key.
QUEUE: dict[str, dict[str, Any]] = {"one_by_one": {}, "three_at_once": {"limit": 3}}
for name, options in QUEUE.items():
    singleton_task(
        name=f"{__name__}.{name}", key=("what",), scope="while_executing", lease=LEASE, acks_late=True, **options
    )(work)


@singleton_task(key=("what",), scope="while_executing", lease=LONG)
def turn(what: str, number: int) -> int:
    """Run until the test allows to go on."""
    stage(what).say(f"{number} began")
    stage(what).wait()
    return number
