"""
Assign each test to a tier according to its needs: a pytest plugin.

CONTRIBUTING.md describes the tiers. A test belongs to that of its folder under ``tests/``, or to a later one if it uses
a fixture or a parameter from there, or has that tier's marker.
"""

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TIERS = ("unit", "server", "service", "browser", "container", "endurance")
HERE = Path(__file__).parent

LONG = ("test_tutorial.py", "test_views_unchanged.py", "test_workers.py")
"""Files with tests that take half a minute each: one that began last would leave the other processes without work."""

SERVICES = ("postgresql", "mariadb", "rabbitmq", "etcd", "zookeeper")
# Fixtures and parameters that move a test to a later tier than that of its folder.
NEEDS = {
    **dict.fromkeys(("servers", "redlock_servers", "real", "clusters"), "server"),
    **dict.fromkeys(SERVICES, "service"),
    **dict.fromkeys((f"{name}_server" for name in SERVICES), "service"),
}


def pytest_configure(config: pytest.Config) -> None:
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: belongs to this tier at least; see tests/tiers.py")
    config.addinivalue_line("markers", "xdist_group: which tests one process runs; pytest-xdist may be switched off")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Run two tests at a time for each processor, because most of them wait more than they compute."""
    named = os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS")
    return int(named) if named else 2 * processors()


def processors() -> int:
    """Return how many this process may use; only Linux knows that it may not use all of them."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test with its tier, and let one process of pytest-xdist run all tests of one service."""
    for item in items:
        needed = needs_of(item)
        item.add_marker(tier_of(item, needed))
        for service in SERVICES:
            if service in needed and not item.get_closest_marker("xdist_group"):
                item.add_marker(pytest.mark.xdist_group(service))
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=place_in_the_run)


def place_in_the_run(item: pytest.Item) -> int:
    """Return 0 for what takes longest, and then 1 for groups of the latest tier: the longest begin first."""
    grouped = item.get_closest_marker("xdist_group") is not None
    if item.path.name in LONG:
        return 0
    return len(TIERS) - TIERS.index(tier_of(item, needs_of(item))) if grouped else len(TIERS) + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Make groups of pytest-xdist take effect: 3.8 writes them into an attribute that pytest 9.2 no longer reads."""
    for item in session.items:
        if (grouped := getattr(item, "_nodeid", item.nodeid)) != item.nodeid:
            item._id = type(item._id).parse(grouped)  # type: ignore[attr-defined]


def needs_of(item: pytest.Item) -> set[str]:
    """Return the names of fixtures that a test uses, by name or as the value of a parameter."""
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec else ()
    return {*getattr(item, "fixturenames", ()), *(value for value in values if isinstance(value, str))}


def tier_of(item: pytest.Item, needed: set[str]) -> str:
    folder = item.path.relative_to(HERE).parts[0]
    asked = [folder, *(NEEDS[name] for name in needed & NEEDS.keys()), *(mark.name for mark in item.iter_markers())]
    return max((tier for tier in asked if tier in TIERS), key=TIERS.index)


@pytest.fixture(autouse=True)
def nothing_but_python(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a test of the unit tier fail if it needs more than Python."""
    if request.node.get_closest_marker("unit") and tier_of(request.node, needs_of(request.node)) == "unit":
        for owner, name in ((time, "sleep"), (socket.socket, "connect"), (subprocess.Popen, "__init__"), (os, "fork")):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, refused_to_tests(getattr(owner, name)))


def refused_to_tests(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fails in the thread of the test; background threads are not affected."""

    def refused(*args: Any, **options: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            pytest.fail("A unit test sleeps, connects or starts a process: see tests/tiers.py")
        return original(*args, **options)

    return refused
