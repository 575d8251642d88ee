"""
Publishing a task with at most one run at a time, and answering a duplicate, beside comparable packages.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import count
from typing import Any

import redis
from celery import Celery

from django_redlock.celery import singleton_task
from django_redlock.testing import Server

from .bench import Bench, manager_of
from .floors import Tap, connect
from .free import figure
from .measure import Contender, interleave
from .report import Section, Target

PLAIN, SET = "plain publish", "plain publish after a SET NX PX"
SINGLETON, ONCE = "celery-singleton", "celery-once"
OURS_ONE, OURS_FIVE = "@singleton_task, N = 1", "@singleton_task, N = 5"
TRAILING = {(how, nodes): f"{how}, N = {nodes}" for how in ("rerun", "replace") for nodes in (1, 5)}
FLOORS = {nodes: f"plain publish after raw sockets, N = {nodes}" for nodes in (1, 5)}
REFUSED = {nodes: f"raw sockets, the same request, N = {nodes}" for nodes in (1, 5)}

DUPLICATE = -1  # every call with this argument but the first is a duplicate
FIRST = 700_000_000  # an argument with as many digits as those that follow it

Send = Callable[[int], object]
"""Publishes a task with this argument."""


def run(bench: Bench) -> Iterator[Section]:
    """Measure first messages, with a free lock, then duplicates."""
    with Server() as broker:
        first = Section("publishing", "publishing a task whose lock is free, to a Redis broker")
        senders = _senders(first, bench, broker.url)
        taking, refused = _requests(bench.urls(1)[0])
        floors = {nodes: _ask(taking, bench.urls(nodes), b"ACCEPTED") for nodes in FLOORS}
        firsts = (
            senders | _trailing(bench) | {FLOORS[nodes]: _after(ask, senders[PLAIN]) for nodes, ask in floors.items()}
        )
        numbers = count()
        times = interleave([_first(name, send, numbers) for name, send in firsts.items()], bench.rounds(100, 20))
        first.figures = [figure(name, each) for name, each in times.items()]
        first.compare("N = 1, against celery-singleton", SINGLETON, 1.1, ours=OURS_ONE, floor=FLOORS[1])
        first.compare("N = 5, against celery-singleton", SINGLETON, 1.35, ours=OURS_FIVE, floor=FLOORS[5])
        if (mine := first.value(OURS_ONE)) and (plain := first.value(PLAIN)):
            lowest = (first.value(FLOORS[1]) or plain) - plain
            first.targets.append(Target("N = 1, added to a plain publish", mine - plain, 110, "µs", floor=lowest))
        yield first
        again = Section("duplicates", "answering a duplicate of a task that waits")
        known = {name: send for name, send in senders.items() if name not in (PLAIN, SET)}
        floors[5](DUPLICATE)
        known |= {name: _ask(refused, bench.urls(nodes), b"BUSY") for nodes, name in REFUSED.items()}
        times = interleave([_duplicate(name, send) for name, send in known.items()], bench.rounds(100, 20))
        again.figures = [figure(name, each) for name, each in times.items()]
        again.compare("N = 5, against celery-singleton", SINGLETON, 1.5, ours=OURS_FIVE, floor=REFUSED[5])
        yield again


def _first(name: str, send: Send, numbers: Iterator[int]) -> Contender:
    return Contender(name, lambda: send(next(numbers)))


def _duplicate(name: str, send: Send) -> Contender:
    return Contender(name, lambda: send(DUPLICATE))


def _senders(section: Section, bench: Bench, broker: str) -> dict[str, Send]:
    """Return the functions that publish, one per contender, each with a task of its own in one app."""
    aliases = {nodes: manager_of(bench.urls(nodes)).alias for nodes in (1, 5)}
    app = Celery("benchmark", broker=broker, set_as_current=True)
    app.conf.update(
        broker_transport_options={"visibility_timeout": 3600},
        singleton_backend_url=bench.urls(1)[0],
        ONCE={
            "backend": "celery_once.backends.Redis",
            "settings": {"url": bench.urls(1)[0], "default_timeout": 3600},
        },
    )
    one = singleton_task(name=_new_name("one"), using=aliases[1], ignore_result=True)(_body)
    five = singleton_task(name=_new_name("five"), using=aliases[5], ignore_result=True)(_body)
    plain = app.task(name="plain", ignore_result=True)(_body)
    senders: dict[str, Send] = {PLAIN: plain.delay, SET: _after_a_set(plain, bench.urls(1)[0])}
    senders |= {OURS_ONE: one.delay, OURS_FIVE: five.delay}
    for name, options in _others(section).items():
        senders[name] = app.task(name=name, ignore_result=True, **options)(_body).delay
    app.finalize()
    return senders


def _trailing(bench: Bench) -> dict[str, Send]:
    """Return the functions that publish the first call of a task whose duplicates become one pending call."""
    return {
        name: singleton_task(
            name=_new_name(how), using=manager_of(bench.urls(nodes)).alias, on_duplicate=how, ignore_result=True
        )(_body).delay
        for (how, nodes), name in TRAILING.items()
    }


_runs = count(10)


def _new_name(kind: str) -> str:
    """Return a name that no task of an earlier app has, because Celery gives every app the tasks of all modules."""
    return f"{kind}.{next(_runs)}"


def _body(number: int) -> None:
    """Do nothing; no worker runs it."""


def _after_a_set(plain: Any, url: str) -> Send:
    client = redis.Redis.from_url(url)

    def send(number: int) -> None:
        client.set(f"publishing:{number}", "token", nx=True, px=3_600_000)
        plain.delay(number)

    return send


def _requests(url: str) -> tuple[bytes, bytes]:
    """
    Return the request that ``@singleton_task`` sends to a node for the argument ``FIRST``, and then for a duplicate.
    """
    with Tap(url) as tap:
        manager = manager_of([tap.url])
        task = singleton_task(name=_new_name("tapped"), using=manager.alias, ignore_result=True)(_body)
        task.delay(FIRST - 1)  # now the node knows the script
        tap.taken()
        task.delay(FIRST)
        taking = tap.taken()
        task.delay(FIRST)
        manager.close()
        return taking, tap.taken()


def _ask(request: bytes, urls: list[str], wanted: bytes) -> Send:
    """Return the floor for this request to all nodes: written to all, read from all, packed in advance."""
    sockets = [connect(url) for url in urls]

    def send(number: int) -> None:
        packed = request.replace(b"%d" % FIRST, b"%d" % (FIRST + 2 + number))
        for sock in sockets:
            sock.send(packed)
        for sock in sockets:
            if wanted not in (reply := sock.recv(4096)):
                raise RuntimeError(f"the server replied {reply!r}: the times would mean nothing")

    return send


def _after(ask: Send, publish: Send) -> Send:
    def send(number: int) -> None:
        ask(number)
        publish(number)

    return send


def _others(section: Section) -> dict[str, dict[str, Any]]:
    """Return the base classes of the packages that are installed."""
    found: dict[str, dict[str, Any]] = {}
    try:
        found[SINGLETON] = {"base": import_module("celery_singleton").Singleton, "lock_expiry": 3600}
    except ImportError as error:
        section.left_out.append(f"{SINGLETON}: {error}")
    try:
        found[ONCE] = {"base": import_module("celery_once").QueueOnce, "once": {"graceful": True}}
    except ImportError as error:
        section.left_out.append(f"{ONCE}: {error}")
    return found
