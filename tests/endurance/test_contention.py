"""Many contenders of every kind: no increment is lost, and no waiter is passed by a later one."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from django_redlock.testing import Servers
from tests.conftest import needs

OPTIONS = {"ttl": 30.0, "restart_guard": False}


QUEUED = 0.1  # seconds after which a contender is surely in the queue, however busy the machine is


class Turn(NamedTuple):
    """When one contender began and was served, and its fencing token."""

    began: float
    served: float
    token: int


def run(folder: Path, nodes: Servers, kind: str, processes: int, contenders: int, times: int) -> list[Turn]:
    """Let contenders work on the counter; return their turns in the order of service."""
    if kind == "greenlets":
        needs("gevent", find_spec("gevent"), "pip install gevent")
    (folder / "counter").write_text("0")
    (folder / "turns").touch()
    order: dict[str, Any] = {
        "folder": str(folder),
        "urls": nodes.urls,
        "kind": kind,
        "contenders": contenders,
        "times": times,
        "options": OPTIONS,
    }
    command = [sys.executable, "-m", "tests.endurance.contenders", json.dumps(order)]
    children = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(processes)]
    try:
        for child in children:
            errors = child.communicate(timeout=150)[1]
            assert child.returncode == 0, errors
    finally:
        for child in children:
            child.kill()
            child.communicate()
    return [Turn(*json.loads(line)) for line in (folder / "turns").read_text().splitlines()]


def overtaken(turns: list[Turn]) -> int:
    """Return the greatest number of later contenders that passed one queued contender."""
    return max(
        sum(earlier.began > turn.began + QUEUED for earlier in turns[:place]) for place, turn in enumerate(turns)
    )


def check(folder: Path, turns: list[Turn], expected: int) -> None:
    assert (folder / "counter").read_text() == str(expected)
    assert len(turns) == expected
    tokens = [turn.token for turn in turns]
    assert tokens == sorted(set(tokens))
    assert overtaken(turns) <= 1


KINDS = [("threads", 1, 20, 10), ("threads", 20, 1, 10), ("greenlets", 1, 20, 10), ("tasks", 1, 200, 2)]
NAMES = ["20 threads", "20 processes", "20 greenlets", "200 tasks"]


@pytest.mark.parametrize(("kind", "processes", "contenders", "times"), KINDS, ids=NAMES)
def test_nothing_is_lost_and_no_waiter_is_passed(
    nodes: Servers, tmp_path: Path, kind: str, processes: int, contenders: int, times: int
):
    """A counter guarded by the lock alone, and the order of the queued contenders."""
    turns = run(tmp_path, nodes, kind, processes, contenders, times)

    check(tmp_path, turns, processes * contenders * times)
