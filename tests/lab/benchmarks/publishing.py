"""Publishing a task with at most one run at a time, beside comparable packages."""

from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import count
from typing import Any

from celery import Celery

from django_redlock.celery import singleton_task
from django_redlock.testing import Server

from .bench import Bench, Contender, interleave, manager_of
from .report import Section

OURS = "@singleton_task, N = {}"
SINGLETON, ONCE = "celery-singleton", "celery-once"


def run(bench: Bench) -> Iterator[Section]:
    """Measure a task of each package, called with another argument each time."""
    with Server() as broker:
        section = Section("publishing", "publishing a task whose lock is free, to a Redis broker")
        numbers = count()
        running = [
            Contender(name, partial(publish, send, numbers)) for name, send in senders(section, bench, broker).items()
        ]
        section.add_times(interleave(running, bench.rounds(100)))
        section.compare(SINGLETON, 1.1, ours=OURS.format(1))
        section.compare(SINGLETON, 1.35, ours=OURS.format(5))
        yield section


def publish(send: Callable[[int], object], numbers: Iterator[int]) -> None:
    send(next(numbers))


def senders(section: Section, bench: Bench, broker: Server) -> dict[str, Callable[[int], object]]:
    """Return the functions that publish, one per contender, each with a task of its own in one app."""
    url = bench.urls(1)[0]
    app = Celery("benchmark", broker=broker.url, set_as_current=True)
    app.conf.update(
        broker_transport_options={"visibility_timeout": 3600},
        singleton_backend_url=url,
        ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": url, "default_timeout": 3600}},
    )
    found: dict[str, Callable[[int], object]] = {
        "plain publish": app.task(name="plain", ignore_result=True)(body).delay
    }
    for nodes in (1, 5):
        using = manager_of(bench.urls(nodes)).alias
        task = singleton_task(name=f"on {nodes}", using=using, ignore_result=True)(body)
        found[OURS.format(nodes)] = task.delay
    options: dict[str, Any]
    for name, module, base, options in (
        (SINGLETON, "celery_singleton", "Singleton", {"lock_expiry": 3600}),
        (ONCE, "celery_once", "QueueOnce", {"once": {"graceful": True}}),
    ):
        try:
            options["base"] = getattr(import_module(module), base)
        except ImportError as error:
            section.left_out.append(f"{name}: {error}")
        else:
            found[name] = app.task(name=name, ignore_result=True, **options)(body).delay
    app.finalize()
    return found


def body(number: int) -> None:
    """Do nothing; no worker runs it."""
