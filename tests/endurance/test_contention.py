"""Many contenders of every kind: no increment is lost, and no waiter is passed by a later one."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from django_redlock.testing import Servers
from tests.conftest import needs

QUEUED = 0.1  # seconds after which a contender is surely in the queue, however busy the machine is


@pytest.mark.parametrize(
    ("kind", "processes", "contenders", "times"),
    [("threads", 1, 20, 10), ("threads", 20, 1, 10), ("greenlets", 1, 20, 10), ("tasks", 1, 200, 2)],
    ids=["20 threads", "20 processes", "20 greenlets", "200 tasks"],
)
def test_nothing_is_lost_and_no_waiter_is_passed(
    nodes: Servers, tmp_path: Path, kind: str, processes: int, contenders: int, times: int
):
    """A counter guarded by the lock alone, and the order of the queued contenders."""
    if kind == "greenlets":
        needs("gevent", find_spec("gevent"), "pip install gevent")
    (tmp_path / "counter").write_text("0")
    order = {"folder": str(tmp_path), "urls": nodes.urls, "kind": kind, "contenders": contenders, "times": times}
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

    turns = [json.loads(line) for line in (tmp_path / "turns").read_text().splitlines()]
    assert (tmp_path / "counter").read_text() == str(len(turns)) == str(processes * contenders * times)
    tokens = [token for *_, token in turns]
    assert tokens == sorted(set(tokens))
    for place, (began, *_) in enumerate(turns):
        assert sum(earlier > began + QUEUED for earlier, *_ in turns[:place]) <= 1, "passed by later contenders"
