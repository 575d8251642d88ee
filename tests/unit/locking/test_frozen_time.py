"""Tests of projects freeze the time of day, and move it; locks over nodes in memory and over servers do not notice."""

import os
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import time_machine
from freezegun import freeze_time

from django_redlock import LockTakenError, lock

frozen = partial(freeze_time, real_asyncio=True)
stopped = partial(time_machine.travel, tick=False)


def use_locks_across_years(at: Any) -> None:
    """Hold locks while the time moves forward and back."""
    with at("2026-01-31") as time:
        lease = lock("a", wait=0).acquire()
        time.move_to("2031-03-03")
        with pytest.raises(LockTakenError):
            lock("a", wait=0.05).acquire()
        assert lease.extend()
        time.move_to("2019-01-01")
        assert 20 < lease.remaining() <= 30
        assert lease.release() == "released"
        later = lock("a", wait=0).acquire()
    assert later.fencing_token > lease.fencing_token
    assert later.valid()
    with pytest.raises(LockTakenError):
        lock("a", wait=0).acquire()
    assert later.release() == "released"
    assert lock("a", wait=0).acquire().fencing_token > later.fencing_token


@pytest.mark.parametrize("at", [frozen, stopped, time_machine.travel])
@pytest.mark.parametrize("kind", ["memory", "real"])
def test_lock_is_held_while_the_time_moves(request: pytest.FixtureRequest, settings: Any, at: Any, kind: str):
    """No node gives it up, no guard objects to the jump, and tokens increase when the time has gone back."""
    settings.REDLOCK = {"default": {"NODES": "memory://a,memory://b,memory://c"}}
    if kind == "real":
        urls = request.getfixturevalue("nodes").urls[:3]
        settings.REDLOCK = {"default": {"NODES": urls, "OPTIONS": {"restart_guard": False, "node_timeout": 5.0}}}
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
    command = [sys.executable, "-c", ELSEWHERE.format(absent=absent)]
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
