"""Slots and messages of a worker that has to stop."""

import signal
from contextlib import suppress

import pytest

from tests.managers import wait_until

from . import project
from .real import ON_BOTH, answer, consume, free, renewal, task

# Celery calls what redis-py 8.1 warns of.
pytestmark = [pytest.mark.filterwarnings("ignore:Call to deprecated setex")]


@pytest.fixture(scope="module", autouse=True)
def leaving(start):
    """Workers that are going to be stopped, each with a queue of its name."""
    soft = start("soft", TEST_SOFT_SHUTDOWN="1")
    return {"cold": start("cold"), "soft": soft, "warm": start("warm", concurrency=1, TEST_MAX_TASKS="1")}


@ON_BOTH
@pytest.mark.parametrize("how", ["cold", "soft"])
def test_shutdown(leaving, worker, stages, what, how):
    """A shutdown gives a slot back to its message, which then runs, or frees that of an acknowledged task."""
    late, early = f"{what} late", f"{what} early"
    result = task("hold_on").apply_async((late,), queue=how)
    task("hold_long").apply_async((early,), queue=how)
    for call in (late, early):
        stages(call).hear("started")

    leaving[how].send_signal(signal.SIGQUIT)
    leaving[how].wait(timeout=90)

    duplicate = task("hold_on").apply_async((late,), queue=how)
    assert (duplicate.id, duplicate.reason) == (result.id, "queued")
    wait_until(free("hold_long", early))
    again = task("hold_long").apply_async((early,), queue=how)
    consume(how)
    for call in (late, early):
        stages(call).hear("started")
        stages(call).allow()
    assert answer(result) == f"{late} done"
    assert answer(again) == f"{early} done"
    wait_until(free("hold_on", late))
    assert stages(late).heard() == stages(early).heard() == ["ended"]


def test_recycled_children_leave_no_slot(leaving, what):
    """A worker that replaces its children after each task leaves no slot behind; each child renews by itself."""
    calls = [f"{what} {number}" for number in range(3)]

    answers = [answer(task("report").apply_async((call,), queue="warm")) for call in calls]

    assert len({pid for pid, _ in answers}) == 3
    assert all("django_redlock watchdog" in threads for _, threads in answers)
    assert all(free("report", call)() for call in calls)


def test_warm_shutdown(leaving, stage, what):
    """A worker that is asked to stop lets the body finish, and its slot is renewed to the end."""
    result = task("hold").apply_async((what,), queue="warm")
    stage.hear("started")

    leaving["warm"].terminate()

    wait_until(lambda: not project.app.control.ping(destination=["warm@tests"], timeout=1))
    wait_until(renewal("hold", what))
    assert task("hold").delay(what).id == result.id
    stage.allow()
    leaving["warm"].wait(timeout=90)
    assert answer(result) == f"{what} done"
    assert free("hold", what)()


def test_events(worker, stage, what):
    """A worker tells of an overlap in a Celery event, where the project has switched them on."""
    heard = []
    with project.app.connection_for_read() as connection:
        receiver = project.app.events.Receiver(connection, handlers={"singleton-overlap": heard.append})
        with receiver.consumer_context() as (consuming, _, _):
            receive(consuming, heard)  # over Redis, it subscribes with the first look, and what came before is lost
            first = task("hold").apply_async((what,))
            stage.hear("started")
            project.app.send_task("tests.server.workers.project.hold", (what,), task_id=f"{what}-2")
            wait_until(lambda: receive(consuming, heard))
    stage.allow()
    answer(first)

    assert (heard[0]["uuid"], heard[0]["holder_id"]) == (f"{what}-2", first.id)
    assert heard[0]["lock"] == task("hold").singleton.key(what)


def receive(connection, heard):
    with suppress(TimeoutError):
        connection.drain_events(timeout=0.2)
    return heard
