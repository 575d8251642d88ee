"""Locks on nodes in memory that one test leaves behind do not affect the next test."""

import os
import subprocess
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.test import override_settings

from django_redlock import Lease, LockLostError, QuorumUnavailableError, lock
from django_redlock.testing import ResetLocksMixin, Simulation, memory_nodes, reset_locks
from tests.shop.helpers import in_thread

kept: list[Any] = []


@pytest.mark.parametrize("turn", [1, 2])
def test_lock_of_one_test_is_free_in_the_next(turn: int):
    """The plugin resets nodes in memory around each test, even if an earlier test left a block open."""
    kept.append(lock("kept"))
    assert isinstance(kept[-1].__enter__(), Lease)
    kept.append(lock("reentrant", reentrant=True).acquire())
    assert kept[-1].release() == "released"
    kept.append(lock("taken", wait=0).acquire())


def test_holder_from_before_a_reset_has_the_lock_no_longer():
    """In the middle of a test, whoever takes the lock next is the only holder; the other learns that it lost it."""
    leases = [lock("a").acquire(), lock("b", renew=False).acquire(), in_thread(lock("c").acquire)]
    with Simulation():
        simulated = lock("a").acquire()
        reset_locks()
        assert simulated.valid()

    assert lock(["a", "b", "c"], wait=0).acquire().valid()
    assert [lease.extend() for lease in leases] == [False] * 3
    assert [str(lease.reason) for lease in leases] == ["forgotten"] * 3
    with pytest.raises(LockLostError), lock("d"):
        reset_locks()


PROJECT = """
import django
from django.conf import settings

settings.configure(INSTALLED_APPS={apps!r}, REDLOCK={{"default": {{"NODES": ["memory://a"]}}}})
django.setup()

from django_redlock import lock

def test_one():
    lock("kept").acquire()

def test_other():
    print("free" if lock("kept").try_acquire() else "taken")
"""


@pytest.mark.server
@pytest.mark.parametrize(("apps", "found"), [(["django_redlock"], "free"), ([], "taken")])
def test_plugin_resets_only_where_the_app_is_installed(tmp_path: Path, apps: list[str], found: str):
    """pytest loads the plugin for every project, and it changes nothing in one that has not asked for it."""
    (tmp_path / "test_project.py").write_text(PROJECT.format(apps=apps))
    command = [sys.executable, "-m", "pytest", "-qs", "--rootdir", str(tmp_path), "-p", "no:cacheprovider"]
    command += ["-p", "no:redlock", "-p", "no:django", "-p", "django_redlock.testing.plugin", "test_project.py"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert found in ran.stdout


def test_nodes_in_memory_fail_on_command():
    """A test gets the nodes in memory of an alias, and is told what to write if there are none."""
    with override_settings(REDLOCK={"default": {"NODES": ["memory://x"]}, "real": {"NODES": ["redis://127.0.0.1:1"]}}):
        (node,) = memory_nodes()
        node.down = True
        with pytest.raises(QuorumUnavailableError, match="x: refused"):
            lock("a", wait=0).acquire()
        with pytest.raises(ValueError, match=r"REDLOCK\['real'\] has no in-memory nodes; in tests, write NODES = "):
            memory_nodes("real")


class TestAround:
    """The nodes are empty before and after each test, whatever fixtures of a wider scope take."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def around(cls) -> Iterator[None]:
        """Begin before the fixtures of the test, and end after them."""
        kept.append(lock("begin", wait=0).acquire())
        yield
        lease = lock("end").try_acquire()
        assert lease is not None
        lease.release()

    def test_lock_is_left(self):
        """The lock of the fixture is free; nobody releases the other one."""
        assert lock("begin", wait=0).acquire().release() == "released"
        kept.append(lock("end", wait=0).acquire())


@pytest.mark.xdist_group("opt out")  # the second follows the first, in the same process
class TestOptOut:
    """A fixture of the same name switches the reset off."""

    @pytest.fixture(autouse=True)
    def redlock_reset(self) -> None:
        """Keep the locks."""

    @pytest.mark.parametrize("turn", [1, 2])
    def test_lock_of_one_test_is_taken_in_the_next(self, turn: int):
        """Without the reset, the second test finds the lock of the first."""
        if turn == 1:
            reset_locks()
            kept.append(lock("kept", wait=0).acquire())
        assert lock("kept").try_acquire() is None


def test_case_of_unittest_is_reset_by_its_mixin():
    """Tests of Django's runner need the mixin, also if their setUp() does not call that of its base."""

    class Case(ResetLocksMixin, unittest.TestCase):
        def setUp(self) -> None:
            kept.append(lock("case", wait=0).acquire())

        def test_one(self) -> None: ...

        def test_two(self) -> None: ...

    kept.append(lock("case", wait=0).acquire())
    result = unittest.TestResult()
    unittest.TestSuite([Case("test_one"), Case("test_two")]).run(result)
    Case("test_one").debug()

    assert (result.testsRun, result.errors, result.failures) == (2, [], [])
    assert lock("case", wait=0).acquire().release() == "released"


def test_mixin_that_would_have_no_effect_is_refused():
    """Behind the class, its methods would never be called."""
    with pytest.raises(TypeError, match=r"write class Case\(ResetLocksMixin, TestCase\)"):

        class Case(unittest.TestCase, ResetLocksMixin): ...
