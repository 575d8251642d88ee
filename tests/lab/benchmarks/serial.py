"""
A burst of messages of one key that must run one after the other, and a message of another key behind them.
"""

import os
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from django_redlock.testing import Server
from tests.waiting import wait_until

from ..processes import end, worker
from .bench import Bench, ours
from .report import Section

APP = "tests.lab.benchmarks.serial_project"
WORKERS, PROCESSES, MESSAGES = 2, 3, 100
GOALS = {"last": 8.0, "other key": 1.0, "sends of one message, at most": 3.0}
OURS, BODY = '@singleton_task(scope="while_executing")', "a task with a lock in its body"


def run(bench: Bench) -> Iterator[Section]:
    """Measure bursts that workers of several processes receive, with one lock node and with three."""
    with Server() as server:
        for nodes in (1, 3):
            by = f"{WORKERS} workers of {PROCESSES} processes"
            section = Section(f"serial-{nodes}", f"{MESSAGES} messages of one key, bodies of 20 ms, {by}, N = {nodes}")
            section.left_out.append("celery-singleton: it sends no call of a key that waits, so it serialises none")
            lab = {"DJANGO_SETTINGS_MODULE": "tests.lab.settings", "LAB_OPTIONS": '{"restart_guard": false}'}
            os.environ |= lab | {"SERIAL_SERVER": server.url, "LAB_NODES": ",".join(bench.urls(nodes))}
            ours("default", bench.urls(nodes))
            for name, task in ((OURS, "serial"), (BODY, "in_a_lock")):
                for what, value in _burst(f"{task}{nodes}", task).items():
                    limit = GOALS.get(what) if task == "serial" else None
                    section.add(f"{name}: {what}", value, "" if "sends" in what else "s", limit)
            yield section


def _burst(key: str, task: str) -> dict[str, float]:
    """Send a burst of messages to new workers, and return what they did with it."""
    from . import serial_project as project

    options = ("--pool=prefork", f"--concurrency={PROCESSES}", "--loglevel=ERROR")
    workers = [worker(APP, f"--hostname={number}@{key}", *options) for number in range(WORKERS)]
    try:
        wait_until(lambda: len(project.app.control.ping(timeout=1)) == WORKERS)
        project.book.delete("sends")
        sent: Any = project.app.tasks[f"{APP}.{task}"]
        for number in range(MESSAGES):
            sent.delay(key, number)
        behind = time.time()
        sent.delay(f"other {key}", 0)
        wait_until(
            lambda: project.book.llen(f"runs:{key}") == MESSAGES and project.book.llen(f"runs:other {key}"), seconds=300
        )
        runs = sorted(tuple(map(float, each.split())) for each in project.book.lrange(f"runs:{key}", 0, -1))
        assert all(one[1] <= other[0] for one, other in pairwise(runs)), "two runs at once"
        other = float(project.book.lrange(f"runs:other {key}", 0, 0)[0].split()[0])
        sends = [int(each) for each in project.book.hvals("sends")]
        most, mean = max(sends), sum(sends) / len(sends)
        times = {"last": runs[-1][1] - behind, "other key": other - behind}
        return times | {"sends of one message, at most": most, "sends of one message, on average": mean}
    finally:
        end(workers)
