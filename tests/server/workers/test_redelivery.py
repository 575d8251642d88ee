"""Messages that a Redis broker delivers again while they run, because its visibility timeout has passed."""

import os
import signal
import time

import pytest

from django_redlock import locks

from .real import free, task, until

pytestmark = [pytest.mark.parametrize("broker", ["redis"], indirect=True, scope="module")]


@pytest.fixture
def impatient(start, request):
    """A queue whose broker takes messages back after a second, and what makes it look for such messages."""
    queue = f"impatient-{request.node.originalname}"
    start(queue, visibility=1)

    def take_back():
        time.sleep(1.1)
        start(queue, visibility=1)  # before kombu 5.7 workers look when they start, and then not for a long time

    return queue, take_back


def watching():
    """Return how many copies of messages are being watched."""
    rows = locks["default"].survey(count=200)[0].rows
    return sum(row.slug.startswith("{watch:") for row in rows if row.value)


def test_body_longer_than_the_visibility_timeout(impatient, results, stage, what):
    """
    A body that outlasts the visibility timeout runs once, at once and afterwards; one copy watches it, and is
    acknowledged when it has been dropped. C75 C76 C78 C79 L59
    """
    queue, take_back = impatient
    result = task("hold_watched").apply_async((what,), queue=queue)
    stage.hear("started")

    take_back()
    until(lambda: watching() == 1, timeout=60)
    assert stage.heard() == []
    stage.allow()
    assert result.get(timeout=30) == f"{what} done"

    until(lambda: watching() == 0, timeout=60)
    until(free("hold_watched", what))
    with results.client() as client:
        until(lambda: not any(result.id in message for message in client.hvals("unacked")), timeout=60)
    assert stage.heard() == ["ended"]


def test_killed_after_its_copy_arrived(impatient, stage, what):
    """
    When a run is killed after a copy of its message arrived, that copy finishes the job. C77
    """
    queue, take_back = impatient
    result = task("hold_watched").apply_async((what,), queue=queue)
    child = stage.hear("started")
    take_back()
    until(lambda: watching() == 1, timeout=60)

    os.kill(child, signal.SIGKILL)

    stage.hear("started")
    stage.allow()
    # Celery has stored the failure of the first run by then; a result that has seen it does not look again.
    until(lambda: task("hold_watched").AsyncResult(result.id).state == "SUCCESS", timeout=60)
    assert stage.heard() == ["ended"]
