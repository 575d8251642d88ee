"""Every accepted call runs, though a lock node has an entry that no quorum has, or a caller died before it sent."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from django.test import override_settings

from django_redlock.testing import Server, Servers
from django_redlock.testing.proxy import FaultProxy
from tests.managers import wait_until

from .real import ON_REDIS, answer, free, gone, task

pytestmark = ON_REDIS


@pytest.fixture
def three() -> Iterator[Servers]:
    with Servers(3) as three:
        yield three


@pytest.fixture(scope="module", autouse=True)
def after_a_dead_caller(worker, stages, surroundings):
    """A call after one whose caller died before it sent its message; it runs when the dead caller's claim lapses."""
    what = "after a dead caller"
    died = subprocess.run([sys.executable, "-c", CALLER % (what, what)], env=surroundings, check=False)
    assert died.returncode == -signal.SIGKILL
    assert not free("hold", what)()
    stages(what).allow()
    return what, task("hold").apply_async((what,))


def redlock(urls: list[str]) -> dict[str, object]:
    """Return the settings of a caller, with the node timeout that users have."""
    return {"default": {"NODES": urls, "OPTIONS": {"restart_guard": False}}}


def entries(server: Server, what: str) -> list[str]:
    with server.client() as client:
        return [key for key in client.keys("*:h") if what in key]


def test_entry_that_one_node_kept_joins_and_drops_nobody(three, start, stage, stages, what):
    """A node that missed the end of a run does not answer for it when another node falls silent."""
    with override_settings(REDLOCK=redlock(three.urls)):
        first = task("hold").apply_async((what,), queue=what)
        wait_until(lambda: entries(three[2], what))
        three[2].freeze()
        start(what, concurrency=1, TEST_NODES=",".join(three.urls), TEST_MAX_TASKS="1")
        pid = stage.hear("started")
        stage.allow()
        assert answer(first) == f"{what} done"
        wait_until(gone(pid))
        three[2].thaw()
        assert entries(three[2], what)
        three[0].freeze()

        later = task("hold").apply_async((what,), queue=what)

        assert (later.accepted, later.id == first.id) == (True, False)
        three[0].thaw()
        stage.allow()
        assert answer(later) == f"{what} done"


def test_claim_that_arrives_after_its_run_is_refused(three, start, what):
    """A claim that reaches a node after its run leaves no entry, and the next call is no duplicate."""
    start(what, pool="threads", TEST_NODES=",".join(three.urls))
    with FaultProxy(three.urls[2]) as distant:
        distant.delay(0.05, "requests")
        with override_settings(REDLOCK=redlock([*three.urls[:2], distant.url])):
            task("double").apply_async((0,), queue=what).get(timeout=60)
            results = [task("double").apply_async((number,), queue=what) for number in range(1, 40)]
            assert [answer(result) for result in results] == [2 * number for number in range(1, 40)]

            # A call whose claim arrives behind all others: when it can be seen, so could they.
            task("double").apply_async((99,), queue="nobody")
            wait_until(lambda: entries(three[2], "=99"))
            assert [key for key in entries(three[2], "double") if "=99" not in key] == []


CALLER = """
import os, signal
import django
django.setup()
from celery.signals import before_task_publish
from tests.server.workers import project
@before_task_publish.connect
def die(**about):
    os.kill(os.getpid(), signal.SIGKILL)
project.app.tasks["tests.server.workers.project.hold"].apply_async((%r,), queue=%r)
"""


def test_caller_that_dies_before_it_sends_keeps_nobody_from_sending(after_a_dead_caller):
    """The next call waits for a moment, is sent, and runs; no call joins one that was never sent."""
    what, result = after_a_dead_caller

    assert result.accepted
    assert answer(result) == f"{what} done"
    wait_until(free("hold", what))
