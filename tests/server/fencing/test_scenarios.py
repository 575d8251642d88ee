"""
Holders in processes of their own that are stopped (SIGSTOP), outside their transactions and inside.

The first is the client of Martin Kleppmann's figure that is paused past its lease ("How to do distributed locking",
2016), here with a fence. test_fenced.py shows that each kind of database refuses; here, one or two stand for all.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from django.db import OperationalError, connections
from django.test import override_settings

from django_redlock import fenced, lock
from django_redlock.testing.servers import spawn
from tests.waiting import wait_until

from .counting import CounterTable, prepare
from .sources import claim

CHECKOUT = Path(__file__).parents[3]
IMPATIENT = {"sqlite": "PRAGMA busy_timeout = 1000", "postgresql": "SET lock_timeout = 700"}

Stopped = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def stopped(counting, engine, prepared, nodes) -> Iterator[Stopped]:
    """Start a holder over three real nodes, and return it once it has stopped; its successor is this process."""
    redlock = {"default": {"NODES": nodes.urls[:3], "OPTIONS": {"node_timeout": 0.5, "restart_guard": False}}}
    settings = {"database": engine.settings(prepared.database(engine, prepare)), "redlock": redlock}
    environment = {**os.environ, "HOLDER": json.dumps(settings, default=str)}
    started: list[subprocess.Popen[bytes]] = []

    def start(place: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.server.fencing.holder", place]
        started.append(spawn(command, cwd=CHECKOUT, env=environment, stdout=subprocess.PIPE))
        how = os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG
        wait_until(lambda: os.waitid(os.P_PID, started[-1].pid, how))
        return started[-1]

    with override_settings(REDLOCK=redlock):
        yield start
    for each in started:
        each.kill()
        each.communicate()


def end(holder: subprocess.Popen[bytes]) -> list[str]:
    """Let a stopped holder go on to its end; return its error, and why it lost its lease."""
    holder.send_signal(signal.SIGCONT)
    return holder.communicate(timeout=120)[0].decode().split()


@pytest.mark.parametrize("engine", ["sqlite"], indirect=True)
def test_paused_holder_is_refused_with_a_fence(stopped: Stopped, counting: str):
    """A holder that is stopped between its look at the clock and its claim is refused when it wakes."""
    earlier, counter = stopped("before"), CounterTable(counting)

    with lock("story", wait=60) as later:
        with fenced(later, using=counting):
            counter.write(counter.read() + 1)
        error, reason = end(earlier)

    assert (error, counter.read()) == ("StaleTokenError", 1)
    assert reason in ("fenced", "expired")  # its watchdog woke, too


@pytest.mark.parametrize("engine", ["sqlite", "postgresql"], indirect=True)  # MariaDB gives up as PostgreSQL does
def test_holder_stopped_inside_its_transaction_holds_up_its_successor(stopped: Stopped, counting: str):
    """A successor's claim times out, as the database is configured, until the holder has woken and may not commit."""
    earlier, counter = stopped("inside"), CounterTable(counting)

    with lock("story", wait=60) as later:
        with connections[counting].cursor() as cursor:
            cursor.execute(IMPATIENT[connections[counting].vendor])
        with pytest.raises(OperationalError):
            claim(later, counting)
        assert end(earlier)[0] == "LockLostError"
        with fenced(later, using=counting):
            assert counter.read() == 0
