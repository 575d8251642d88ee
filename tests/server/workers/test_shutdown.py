"""What becomes of slots and messages when a worker is told to stop."""

import signal
from contextlib import suppress

import pytest

from . import project
from .real import free, task, until

# Celery calls what redis-py 8.1 warns of.
pytestmark = [pytest.mark.filterwarnings("ignore:Call to deprecated setex")]


@pytest.mark.parametrize("soft", ["0", "1"], ids=["cold", "soft"])
def test_shutdown_with_late_ack(start, stage, what, soft):
    """
    A cold or soft shutdown gives the slot back to its message, which nothing overtakes, and which then runs. C71
    """
    queue = f"late-{soft}"
    stopping = start(queue, TEST_SOFT_SHUTDOWN=soft)
    result = task("hold_on").apply_async((what,), queue=queue)
    stage.hear("started")

    stopping.send_signal(signal.SIGQUIT)
    stopping.wait(timeout=30)

    duplicate = task("hold_on").apply_async((what,), queue=queue)
    assert (duplicate.id, duplicate.reason) == (result.id, "queued")
    start(queue, visibility=1)
    stage.hear("started")
    stage.allow()
    assert result.get(timeout=30) == f"{what} done"
    until(free("hold_on", what))
    assert stage.heard() == ["ended"]


def test_cold_shutdown_with_early_ack(start, stage, what):
    """
    A cold shutdown leaves no slot of a task that was acknowledged early, and is gone. C72
    """
    stopping = start("early")
    task("hold_long").apply_async((what,), queue="early")
    stage.hear("started")

    stopping.send_signal(signal.SIGQUIT)
    stopping.wait(timeout=30)

    until(free("hold_long", what))
    start("early")
    again = task("hold_long").apply_async((what,), queue="early")
    stage.hear("started")
    stage.allow()
    assert again.get(timeout=30) == f"{what} done"


def test_revoked_with_a_countdown(start, stage, what):
    """
    ``cancel()`` frees the slot of a task with a countdown at once; Celery's ``revoke()`` when it is due. C68 C69
    """
    start("delayed")
    first = task("hold_long").apply_async((what,), queue="delayed", countdown=3600)
    assert task("hold_long").singleton.cancel(what) == first.id

    second = task("hold_long").apply_async((what,), queue="delayed", countdown=5)
    assert not second.duplicate
    second.revoke()
    assert task("hold_long").apply_async((what,), queue="delayed").duplicate

    until(free("hold_long", what), timeout=30)
    until(lambda: second.state == "REVOKED")
    assert stage.heard() == []


def test_replaced_with_a_countdown(start, stage, what):
    """
    ``replace`` of a task that waits for its countdown moves the time: the earlier message never runs. C99
    """
    start("replaced")
    early = task("newest").apply_async((what, "early"), queue="replaced", countdown=4)

    late = task("newest").apply_async((what, "late"), queue="replaced", countdown=1)

    assert late.get(timeout=30) == "late"
    assert early.state == "REVOKED"
    marker = task("double").apply_async((3,), queue="replaced", countdown=5)  # after the early one was due
    assert marker.get(timeout=30) == 6
    assert stage.heard() == ["late"]


def test_rerun(start, stage, what):
    """
    Five calls during a run cause one more, with the arguments of the last, right after it. C96 C97
    """
    start("rerun")
    first = task("trailing").apply_async((what, 0), queue="rerun")
    stage.hear("run 0")

    later = [task("trailing").apply_async((what, number), queue="rerun") for number in range(1, 6)]
    stage.allow()
    assert first.get(timeout=30) == 0
    stage.hear("run 5")
    stage.allow()

    assert later[0].get(timeout=30) == later[4].get(timeout=30) == 5
    until(lambda: not task("trailing").singleton.is_locked(what, 0))
    assert stage.heard() == []


def test_events(start, stage, what, broker):
    """
    A worker tells of an overlap in a Celery event, where the project has switched them on.
    """
    start("told", TEST_EVENTS="1")
    heard = []
    with project.app.connection_for_read() as connection:
        receiver = project.app.events.Receiver(connection, handlers={"singleton-overlap": heard.append})
        with receiver.consumer_context() as (consuming, _, _):
            receive(consuming, heard)  # over Redis, it subscribes with the first look, and what came before is lost
            first = task("hold").apply_async((what,), queue="told")
            stage.hear("started")
            project.app.send_task("tests.server.workers.project.hold", (what,), queue="told", task_id=f"{what}-2")
            until(lambda: receive(consuming, heard), timeout=30)
    stage.allow()
    first.get(timeout=30)

    assert (heard[0]["uuid"], heard[0]["holder_id"]) == (f"{what}-2", first.id)
    assert heard[0]["lock"] == task("hold").singleton.key(what)


def receive(connection, heard):
    """Receive what there is; returns whether something was heard."""
    with suppress(TimeoutError):
        connection.drain_events(timeout=0.2)
    return heard
