"""An accepted call runs, though an earlier caller died before it sent."""

import signal
import subprocess
import sys

import pytest

from tests.managers import wait_until

from .real import ON_REDIS, answer, free, task

pytestmark = ON_REDIS


@pytest.fixture(scope="module", autouse=True)
def after_a_dead_caller(worker, stages, surroundings):
    """A call after one whose caller died before it sent its message; it runs when the dead caller's claim lapses."""
    what = "after a dead caller"
    died = subprocess.run([sys.executable, "-c", CALLER % (what, what)], env=surroundings, check=False)
    assert died.returncode == -signal.SIGKILL
    assert not free("hold", what)()
    stages(what).allow()
    return what, task("hold").apply_async((what,))


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
