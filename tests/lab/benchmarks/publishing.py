"""Publishing a task with at most one run at a time, and answering a duplicate, beside comparable packages."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

import redis
from celery import Celery

from django_redlock.celery import singleton_task
from django_redlock.testing import Server

from .bench import Bench, manager_of
from .measure import Contender, interleave
from .report import Section

PLAIN, SET = "plain publish", "plain publish after a SET NX PX"
SINGLETON, ONCE = "celery-singleton", "celery-once"
DUPLICATE = -1  # every call with this argument but the first is a duplicate

Send = Callable[[int], object]
"""Publishes a task with this argument."""


def run(bench: Bench) -> Iterator[Section]:
    """Measure first messages, with a free lock, then duplicates."""
    with Server() as broker:
        first = Section("publishing", "publishing a task whose lock is free, to a Redis broker")
        again = Section("duplicates", "answering a duplicate of a task that waits")
        senders, numbers = _senders(first, bench, broker.url), count()
        running = [Contender(name, partial(_first, send, numbers)) for name, send in senders.items()]
        first.add_times(interleave(running, bench.rounds(100, 20)))
        first.compare(SINGLETON, 1.1, ours=_title(1))
        first.compare(SINGLETON, 1.35, ours=_title(5))
        yield first
        known = {name: send for name, send in senders.items() if name not in (PLAIN, SET) and " re" not in name}
        running = [Contender(name, partial(send, DUPLICATE)) for name, send in known.items()]
        again.add_times(interleave(running, bench.rounds(100, 20)))
        again.compare(SINGLETON, 1.5, ours=_title(5))
        yield again


def _title(nodes: int, strategy: str = "") -> str:
    return f"@singleton_task{strategy and ' ' + strategy}, N = {nodes}"


def _first(send: Send, numbers: Iterator[int]) -> None:
    send(next(numbers))


def _senders(section: Section, bench: Bench, broker: str) -> dict[str, Send]:
    """Return the functions that publish, one per contender, each with a task of its own in one app."""
    url = bench.urls(1)[0]
    app = Celery("benchmark", broker=broker, set_as_current=True)
    app.conf.update(
        broker_transport_options={"visibility_timeout": 3600},
        singleton_backend_url=url,
        ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": url, "default_timeout": 3600}},
    )
    plain = app.task(name="plain", ignore_result=True)(_body)
    senders: dict[str, Send] = {PLAIN: plain.delay, SET: partial(_after_a_set, redis.Redis.from_url(url), plain)}
    for strategy in ("", "rerun", "replace"):
        for nodes in (1, 5):
            options: dict[str, Any] = {"on_duplicate": strategy} if strategy else {}
            using = manager_of(bench.urls(nodes)).alias
            task = singleton_task(name=f"{strategy}{nodes}", using=using, ignore_result=True, **options)(_body)
            senders[_title(nodes, strategy)] = task.delay
    for name, module, base, options in (
        (SINGLETON, "celery_singleton", "Singleton", {"lock_expiry": 3600}),
        (ONCE, "celery_once", "QueueOnce", {"once": {"graceful": True}}),
    ):
        try:
            options["base"] = getattr(import_module(module), base)
        except ImportError as error:
            section.left_out.append(f"{name}: {error}")
        else:
            senders[name] = app.task(name=name, ignore_result=True, **options)(_body).delay
    app.finalize()
    return senders


def _body(number: int) -> None:
    """Do nothing; no worker runs it."""


def _after_a_set(client: "redis.Redis[Any]", plain: Any, number: int) -> None:
    client.set(f"publishing:{number}", "token", nx=True, px=3_600_000)
    plain.delay(number)
