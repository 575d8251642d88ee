"""Two Redis servers and one database are a majority of three: any one of them may die."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from django_redlock.testing import Servers
from tests.managers import (
    EACH_TABLE_ONCE,
    Blocking,
    Flavour,
    Tables,
    connect,
    eventually,
    real_manager,
)
from tests.server.locking.test_waiting import Line
from tests.services import PostgreSQL, django_database

ENDURANCE = pytest.mark.endurance
pytestmark = pytest.mark.usefixtures("unblocked")

# A restarted server gives no vote for as long as a lease may last. This includes PostgreSQL, which runs without fsync
# in the tests.
OPTIONS = {"ttl": 4.0, "max_ttl": 4.0, "node_timeout": 0.5, "retry_delay": 0.01, "restart_guard": True}


class Contenders:
    """Processes that increment a counter that only the lock protects."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process

    @property
    def tokens(self) -> list[int]:
        return [int(line) for line in (self.folder / "tokens").read_text().split()]

    def go_on(self, times: int) -> None:
        """Wait until they have incremented the given number of times more."""
        enough, until = len(self.tokens) + times, time.monotonic() + 60
        while len(self.tokens) < enough:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < until, f"only {len(self.tokens)} of {enough}"
            time.sleep(0.02)


@contextmanager
def contending(folder: Path, urls: list[str], databases: dict[str, Any], **options: Any) -> Iterator[Contenders]:
    """Run four processes that contend; at the end they must have exited with success."""
    (folder / "counter").write_text("0")
    (folder / "tokens").touch()
    order = {"folder": str(folder), "urls": urls, "databases": databases, "processes": 4, "options": options}
    command = [sys.executable, "-m", "tests.service.locking.database_workers", json.dumps(order)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield Contenders(folder, process)
        (folder / "stop").touch()
        errors = process.communicate(timeout=60)[1]
        assert process.returncode == 0, errors
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


@pytest.mark.endurance
def test_any_one_of_two_redis_and_a_database_may_die(nodes: Servers, postgresql: PostgreSQL, tmp_path: Path):
    """
    A counter that nothing else protects loses nothing, and continues with any one server dead.

    Each Redis server is killed and comes back empty; PostgreSQL is stopped, killed and frozen; one after the other,
    while four processes increment.
    """
    with postgresql.database() as name, django_database("counting", postgresql.settings(name)):
        call_command("migrate", "redlock", database="counting", verbosity=0, skip_checks=True)
        databases = {"default": {}, "counting": postgresql.settings(name)}
        urls = [*nodes.urls[:2], "database://counting"]

        with contending(tmp_path, urls, databases, **OPTIONS) as contenders:
            contenders.go_on(20)
            for strike, revive in (
                (nodes[0].kill, nodes[0].start),
                (nodes[1].kill, nodes[1].start),
                (postgresql.stop, postgresql.start),
                (postgresql.kill, postgresql.start),
                (postgresql.freeze, postgresql.thaw),
                (nodes[0].kill, nodes[0].start),
            ):
                strike()
                contenders.go_on(15)
                revive()
                contenders.go_on(5)
                time.sleep(OPTIONS["max_ttl"] + 1)  # until it votes again, because the other two can spare no vote
                contenders.go_on(5)

        tokens = contenders.tokens
        assert tokens == sorted(set(tokens))
        assert (tmp_path / "counter").read_text() == str(len(tokens))


@EACH_TABLE_ONCE
async def test_waiters_of_a_mixed_majority_are_notified_by_the_redis_servers(
    nodes: Servers, tables: Tables, flavour: Flavour
):
    """Two Redis servers are enough to notify the next waiter; the database sends no notifications."""
    manager = real_manager([*nodes.urls[:2], tables.urls[0]])
    connect(manager)
    holder = await flavour.acquire(manager.lock("a"))
    line = Line(flavour, manager)
    tasks = [await line.join(number) for number in range(3)]
    notifications = (
        manager.driver.notifications if isinstance(flavour, Blocking) else manager.driver.loop_side().notifications
    )
    await eventually(lambda: notifications.waiters.notified)

    await flavour.release(holder)
    await asyncio.gather(*tasks)

    assert line.served == [0, 1, 2]
    assert notifications.waiters.listening == {0, 1}
    await flavour.close(manager)
    manager.close()
