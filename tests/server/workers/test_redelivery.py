"""Messages that a Redis broker delivers again while they run, because its visibility timeout has passed."""

import os
import signal

from tests.managers import wait_until

from .real import ON_REDIS, free, take_back, task, watching

pytestmark = ON_REDIS


def test_body_longer_than_the_visibility_timeout(worker, results, stages, what):
    """A copy watches the run; it is acknowledged when the run ends, and finishes the job of a run that is killed."""
    calls = [f"{what} and ends", f"{what} and is killed"]
    found = [task("hold_late").delay(call) for call in calls]
    children = [stages(call).hear("started") for call in calls]
    take_back(*(result.id for result in found))
    wait_until(lambda: all(watching(result.id) for result in found))
    assert not any(stages(call).heard() for call in calls)

    os.kill(children[1], signal.SIGKILL)
    stages(calls[1]).hear("started")
    for call in calls:
        stages(call).allow()

    for call, result in zip(calls, found, strict=True):
        # Celery has stored the failure of a killed run by then; a result that has seen it does not look again.
        wait_until(lambda task_id=result.id: task("hold_late").AsyncResult(task_id).state == "SUCCESS")
        wait_until(free("hold_late", call))
        assert stages(call).heard() == ["ended"]
    with results.client() as client:
        wait_until(lambda: not any(result.id in each for result in found for each in client.hvals("unacked")))
