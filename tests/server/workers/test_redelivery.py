"""Messages that a Redis broker delivers again while they run, because its visibility timeout has passed."""

import os
import signal

import pytest

from tests.managers import wait_until

from .real import ON_REDIS, answer, free, take_back, task, watching

pytestmark = ON_REDIS

CALLS = ["outlasts the timeout", "is killed"]


@pytest.fixture(scope="module")
def copied(worker, stages):
    """Return the results of two bodies; one is killed once a copy of each message watches its run."""
    results = {call: task("hold_late").delay(call) for call in CALLS}
    children = {call: stages(call).hear("started") for call in CALLS}
    take_back(*(result.id for result in results.values()))
    wait_until(lambda: all(watching(result.id) for result in results.values()))
    assert not any(stages(call).heard() for call in CALLS)
    os.kill(children["is killed"], signal.SIGKILL)
    return results


def test_body_longer_than_the_visibility_timeout(copied, results, stages):
    """A body that outlasts the visibility timeout runs once, and the copy that watched it is acknowledged."""
    call, result = CALLS[0], copied[CALLS[0]]
    stages(call).allow()
    assert answer(result) == f"{call} done"

    with results.client() as client:
        wait_until(lambda: not any(result.id in message for message in client.hvals("unacked")))
    wait_until(free("hold_late", call))
    assert stages(call).heard() == ["ended"]


def test_killed_after_its_copy_arrived(copied, stages):
    """When a run is killed after a copy of its message arrived, that copy finishes the job."""
    call, result = CALLS[1], copied[CALLS[1]]

    stages(call).hear("started")
    stages(call).allow()
    # Celery has stored the failure of the first run by then; a result that has seen it does not look again.
    wait_until(lambda: task("hold_late").AsyncResult(result.id).state == "SUCCESS")
    assert stages(call).heard() == ["ended"]
    wait_until(lambda: not watching(result.id))
