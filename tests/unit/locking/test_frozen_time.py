"""Tests of projects freeze the time of day, and move it; locks over nodes in memory and over servers do not notice."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import time_machine
from freezegun import freeze_time

from django_redlock import LockTakenError, lock
from django_redlock.testing import Servers

Move = Callable[[str], None]


@contextmanager
def frozen(day: str) -> Iterator[Move]:
    with freeze_time(day, real_asyncio=True) as time:
        yield time.move_to


@contextmanager
def stopped(day: str) -> Iterator[Move]:
    with time_machine.travel(day, tick=False) as time:
        yield time.move_to


@contextmanager
def travelled(day: str) -> Iterator[Move]:
    with time_machine.travel(day) as time:
        yield time.move_to


LIBRARIES = pytest.mark.parametrize("at", [frozen, stopped, travelled])


def use_locks_across_years(at: Any) -> None:
    """Hold locks while the time moves forward and back."""
    with at("2026-01-31") as move:
        lease = lock("a", wait=0).acquire()
        move("2031-03-03")
        with pytest.raises(LockTakenError):
            lock("a", wait=0.05).acquire()
        assert lease.extend()
        move("2019-01-01")
        assert 20 < lease.remaining() <= 30
        assert lease.release() == "released"
        later = lock("a", wait=0).acquire()
    assert later.fencing_token > lease.fencing_token
    assert later.valid()
    with pytest.raises(LockTakenError):
        lock("a", wait=0).acquire()
    assert later.release() == "released"
    assert lock("a", wait=0).acquire().fencing_token > later.fencing_token


@LIBRARIES
def test_lock_is_held_while_the_time_moves(settings: Any, at: Any):
    """No node gives it up, no guard objects to the jump, and tokens increase when the time has gone back."""
    settings.REDLOCK = {"default": {"NODES": "memory://a,memory://b,memory://c"}}
    use_locks_across_years(at)


@LIBRARIES
def test_lock_on_servers_is_held_while_the_time_moves(nodes: Servers, settings: Any, at: Any):
    """Servers keep the real time, and so does the lease."""
    settings.REDLOCK = {"default": {"NODES": nodes.urls[:3], "OPTIONS": {"restart_guard": False}}}
    use_locks_across_years(at)


ELSEWHERE = """
import time
for name in {absent}:
    delattr(time, name)
import django
django.setup()
from tests.unit.locking.test_frozen_time import frozen, use_locks_across_years
use_locks_across_years(frozen)
"""


@pytest.mark.server  # it starts a process
@pytest.mark.parametrize("absent", [["CLOCK_BOOTTIME"], ["CLOCK_BOOTTIME", "clock_gettime"]], ids=len)
def test_clock_of_other_systems_is_left_alone_as_well(absent: list[str]):
    """Without the clock that counts suspension, the one that is used instead is not frozen either."""
    script = ELSEWHERE.format(absent=absent)
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
