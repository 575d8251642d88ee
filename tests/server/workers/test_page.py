"""What docs/howto/celery.md says about killed processes and about chords, with real workers, row by row."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from celery import chord
from celery.exceptions import WorkerLostError

from tests.managers import wait_until

from .real import ON_REDIS, answer, consume, free, kill, take_back, task, watching

pytestmark = ON_REDIS


def processes(pid: int) -> list[int]:
    return [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.fixture(scope="module", autouse=True)
def lost(worker, start, stages):
    """
    Two workers that each run an acknowledged call and one that is not; then one is killed, and one is stopped for good.

    For everybody else, a process that is stopped is like one whose machine is lost: its connections stay open.
    """
    results = {}
    for queue in ("killed", "stopped"):
        doomed = start(queue)
        for name in ("hold", "hold_late"):
            what = f"{name} of a {queue} worker"
            results[what] = task(name).apply_async((what,), queue=queue)
            stages(what).hear("started")
        if queue == "killed":
            doomed.kill()
            doomed.wait()
        else:
            stopped = processes(doomed.pid)
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            for name in ("hold", "hold_late"):
                stages(f"{name} of a {queue} worker").allow()  # which goes to the connection of the stopped process
    for queue in ("killed", "stopped"):
        consume(queue)
    yield results
    for pid in stopped[::-1]:
        os.kill(pid, signal.SIGKILL)


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


@pytest.fixture(scope="module", autouse=True)
def after_a_dead_caller(worker, stages, surroundings):
    """A call after one whose caller died before it sent its message; it runs when the dead caller's claim lapses."""
    what = "after a dead caller"
    died = subprocess.run([sys.executable, "-c", CALLER % (what, what)], env=surroundings, check=False)
    assert died.returncode == -signal.SIGKILL
    assert not free("hold", what)()
    stages(what).allow()
    return what, task("hold").apply_async((what,))


@pytest.fixture(scope="module", autouse=True)
def delivered_again(worker, stages):
    """Two runs whose messages came again because the visibility timeout has passed; then the second run is killed."""
    calls = ["again and ends", "again and is killed"]
    found = [task("hold_late").delay(call) for call in calls]
    children = [stages(call).hear("started") for call in calls]
    take_back(*(result.id for result in found))
    wait_until(lambda: all(watching(result.id) for result in found))
    assert not any(stages(call).heard() for call in calls)
    kill(children[1])
    return calls, found


@pytest.mark.parametrize("name", ["hold_long", "hold_long_late", "hold_nothing"])
def test_killed_child(worker, stage, what, name):
    """The message of a killed child is acknowledged, also with late acknowledgement; the slot is free at once."""
    result = task(name).delay(what)
    kill(stage.hear("started"))

    with pytest.raises(WorkerLostError):
        answer(result)

    wait_until(free(name, what))  # of a lease of ten minutes
    again = task(name).delay(what)
    stage.hear("started")
    stage.allow()
    assert answer(again) == f"{what} done"
    assert stage.heard() == ["ended"]  # nothing ran twice


def test_killed_child_whose_message_is_rejected(worker, stage, what):
    """With ``reject_on_worker_lost`` as well, the message runs again, and has the slot until then."""
    result = task("hold_on").delay(what)
    kill(stage.hear("started"))
    assert task("hold_on").delay(what).id == result.id

    stage.hear("started")
    assert task("hold_on").delay(what).id == result.id
    stage.allow()

    assert answer(result) == f"{what} done"
    assert free("hold_on", what)()


def test_chord_with_a_duplicate(worker):
    """With ``on_overlap="follow"``, a chord that contains a duplicate has the value of the run twice."""
    price, total = task("price"), task("total")

    assert answer(chord([price.s(7), price.s(8), price.s(7)])(total.s())) == 2200


@pytest.mark.parametrize("queue", ["killed", "stopped"])
def test_lost_worker(lost, stages, queue):
    """The slots are free after a lease; only with late acknowledgement the message runs again, when it is delivered."""
    early, late = f"hold of a {queue} worker", f"hold_late of a {queue} worker"
    wait_until(free("hold", early))
    stages(early).allow()
    assert answer(task("hold").delay(early)) == f"{early} done"
    assert lost[early].state == "PENDING"
    assert stages(early).heard() == ["started", "ended"]

    wait_until(free("hold_late", late))
    take_back(lost[late].id)  # the visibility timeout has passed

    stages(late).hear("started")
    stages(late).allow()
    assert answer(lost[late]) == f"{late} done"
    assert stages(late).heard() == ["ended"]


def test_caller_that_dies_before_it_sends_keeps_nobody_from_sending(after_a_dead_caller):
    """The next call waits for a moment, is sent, and runs; no call joins one that was never sent."""
    what, result = after_a_dead_caller

    assert result.accepted
    assert answer(result) == f"{what} done"
    wait_until(free("hold", what))


def test_body_longer_than_the_visibility_timeout(delivered_again, results, stages):
    """A copy watches the run; it is acknowledged when the run ends, and finishes the job of a run that is killed."""
    calls, found = delivered_again
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
