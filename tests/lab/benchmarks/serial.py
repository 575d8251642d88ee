"""Bursts of calls of which one runs at a time: in the queue of their key, or with a lock and retries."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from itertools import combinations
from typing import Any, NamedTuple

from django_redlock.testing import Server
from django_redlock.testing.servers import spawn
from tests.services import RabbitMQ, ServiceMissingError
from tests.waiting import wait_until

from .bench import Bench
from .report import Figure, Section

CHILDREN = 4
EVERY = 0.25  # seconds between two tasks of no key
BURSTS = ((12, 1.0), (8, 0.5), (6, 3.0), (40, 0.02))  # how many calls there are, and for how long each runs
BROKERS: dict[str, Any] = {"redis": Server, "rabbitmq": RabbitMQ}
QUEUE, RETRIES = "the queue of the key", "lock() and retry(countdown=1)"
TASKS = {QUEUE: "in_queue", RETRIES: "with_retries"}


class Burst(NamedTuple):
    """What was measured of one burst: seconds until all had run, their order, and the waits of tasks of no key."""

    took: float
    order: list[int]
    waits: list[float]

    @property
    def inversions(self) -> int:
        """How many pairs began in another order than they were sent."""
        return sum(first > second for first, second in combinations(self.order, 2))

    @property
    def p95(self) -> float:
        """The wait that 95 of 100 of the other tasks did not exceed."""
        return sorted(self.waits)[len(self.waits) * 95 // 100]


def run(bench: Bench) -> Iterator[Section]:
    """Measure each burst over each broker that is installed."""
    for name, kind in BROKERS.items():
        try:
            with kind() as broker, workers(broker.url, bench.urls(3)) as project:
                for calls, seconds in list(BURSTS)[1:2] if bench.quick else BURSTS:
                    yield compare(project, name, calls, seconds)
        except ServiceMissingError as error:
            print(f"{name} is left out: {error}")


def compare(project: Any, broker: str, calls: int, seconds: float) -> Section:
    section = Section(f"serial-{broker}-{calls}", f"{calls} calls of {seconds:g} s for one key, over {broker}")
    for what, task in TASKS.items():
        found = measure(project, task, calls, seconds)
        more = {"other tasks, p95": found.p95, "pairs out of order": float(found.inversions)}
        section.figures.append(Figure(what, found.took, "s", more))
    return section


@contextmanager
def workers(broker: str, nodes: list[str]) -> Iterator[Any]:
    """Start a worker, and return the project of its tasks when it is ready."""
    with Server() as notes:
        os.environ |= {"BENCH_NODES": ",".join(nodes), "BENCH_BROKER": broker, "BENCH_NOTES": notes.url}
        project = import_module(f"{__package__}.serial_project")
        project.connect()
        options = [f"--concurrency={CHILDREN}", "--loglevel=ERROR", "--without-mingle", "--without-gossip"]
        command = [sys.executable, "-m", "celery", "-A", project.__name__, "worker", *options]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        worker = spawn(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            project.other.delay(time.time())
            wait_until(lambda: project.notes.llen("others"))
            yield project
        finally:
            worker.kill()
            worker.wait()
            project.hang_up()


def measure(project: Any, task: str, calls: int, seconds: float) -> Burst:
    """Send a burst, and other tasks until all its calls have run."""
    key, notes, send = f"{task}-{calls}", project.notes, getattr(project, task).delay
    notes.delete("others")
    start = time.time()
    for number in range(calls):
        send(key, number, seconds)
    while notes.llen(f"{key}:ended") < calls:
        project.other.delay(time.time())
        time.sleep(EVERY)
    took = float(notes.lrange(f"{key}:ended", -1, -1)[0]) - start
    wait_until(lambda: notes.llen("others"))
    order = [int(each) for each in notes.lrange(f"{key}:began", 0, -1)]
    return Burst(took, order, [float(each) for each in notes.lrange("others", 0, -1)])
