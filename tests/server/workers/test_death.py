"""The death of a process, a signal and a limit, and their effect on a slot."""

import os
import signal
from io import StringIO

import pytest
from celery import Task, _state, chain, chord
from celery.exceptions import TaskRevokedError, TimeLimitExceeded
from django.core.management import call_command

from django_redlock.celery import singleton_task
from django_redlock.inventory import held_locks
from tests.managers import wait_until

from . import project
from .real import ON_BOTH, answer, consume, free, gone, kill, take_back, task


@pytest.fixture(scope="module", autouse=True)
def killed(worker, start, stages, broker):
    """A worker that is killed while it runs a call; its message comes again."""
    doomed, what = start("doomed", concurrency=1), f"killed over {broker[:5]}"
    result = task("hold_never").apply_async((what,), queue="doomed")
    stages(what).hear("started")
    doomed.kill()
    doomed.wait()
    if broker.startswith("redis"):
        take_back(result.id)
    consume("doomed")
    return result, what


@pytest.fixture(scope="module", autouse=True)
def endless(worker, stages, broker):
    """Calls that last until their time limit, with their children."""
    calls = {name: f"{name} over {broker[:5]}" for name in ("endless", "endless_late")}
    results = {name: task(name).delay(what) for name, what in calls.items()}
    return calls, results, {name: stages(what).hear("started") for name, what in calls.items()}


@ON_BOTH
def test_revoked_before_it_started(worker):
    """A waiting message that is revoked frees its slot when the worker drops it."""
    result = task("double").apply_async((1,), queue="revoked")
    result.revoke()

    consume("revoked")

    wait_until(free("double", 1))
    wait_until(lambda: result.state == "REVOKED")  # which is said afterwards


def test_terminated_body_that_carries_on(worker, stage, what):
    """A body that ignores the signal of ``revoke(terminate=True)`` keeps its slot until it ends."""
    result = task("stubborn").delay(what)
    child = stage.hear("started")

    result.revoke(terminate=True)
    stage.hear("stopped")
    wait_until(lambda: result.state == "REVOKED")

    assert task("stubborn").delay(what).duplicate
    stage.allow()
    wait_until(free("stubborn", what))
    os.kill(child, signal.SIGKILL)  # Celery goes on to take this process for one that is being terminated
    wait_until(gone(child))


if hasattr(Task, "retry_on_worker_lost"):  # from Celery 5.7 on; elsewhere there is nothing to leave out

    def test_retried_when_the_child_died(worker, stage, what):
        """With ``retry_on_worker_lost`` the parent sends the retry, which has the slot while it waits."""
        result = task("try_on").delay(what)
        kill(stage.hear("started"))
        wait_until(lambda: result.state == "RETRY")

        joined = task("try_on").delay(what)

        assert (joined.id, joined.duplicate) == (result.id, True)
        stage.allow()
        assert answer(result) == f"{what} done"


@ON_BOTH
def test_unknown_task(worker, what):
    """A message whose task the worker does not know frees its slot when it is refused."""

    def unknown():
        pass

    only_here = singleton_task(name=what)(unknown)
    project.app.set_current()
    result = only_here.delay()

    wait_until(lambda: result.ready())

    wait_until(lambda: not only_here.singleton.is_locked())


def test_workflows_with_a_duplicate_end(worker, stage, what):
    """A chain and a chord with a duplicate end with an error; a chain of equal steps has no duplicate."""
    task("hold").delay(what)
    stage.hear("started")
    hold, add, double = task("hold"), task("add"), task("double")

    in_chain = chain(add.si(1), hold.si(what), add.si(2)).delay()
    in_chord = chord([add.si(1), hold.si(what)], add.si(2)).delay()

    for result in (in_chain, in_chord):
        with pytest.raises(Exception, match="Skipped"):
            answer(result)
    stage.allow()
    assert answer(chain(double.si(4), double.si(4)).delay()) == 8


@pytest.mark.parametrize("option", ["--terminate-task", "--polite=1"])
def test_operator_takes_a_task_its_slot(worker, stage, what, monkeypatch, option):
    """An operator has a task ended together with its slot, or takes the slot of one that was asked in vain."""
    monkeypatch.setattr(_state._tls, "current_app", project.app)
    result = task("hold_long").delay(what)
    child = stage.hear("started")
    (name,) = [held.name for held in held_locks().locks if what in held.name]
    out = StringIO()

    call_command("redlock_release", name, option, "--no-input", "--reason=stuck", stdout=out, stderr=out)

    wait_until(free("hold_long", what))
    assert f"{name}: released." in out.getvalue()
    if option == "--terminate-task":
        assert f"told the workers to revoke task {result.id}." in out.getvalue()
        wait_until(gone(child))
        with pytest.raises(TaskRevokedError):
            answer(result)
    else:
        assert f"{name}: its holder was asked to stop." in out.getvalue()
        stage.allow()
        stage.hear("ended")


@ON_BOTH
def test_dropped_after_a_killed_worker(killed, stages):
    """With ``redelivery="drop"`` the job of a killed worker does not run again, and its caller learns of that."""
    result, what = killed

    with pytest.raises(TaskRevokedError, match="second time"):
        answer(result)

    assert stages(what).heard() == []
    wait_until(free("hold_never", what))


@pytest.mark.parametrize("name", ["endless", "endless_late"])
def test_hard_time_limit(endless, name):
    """A body that a hard limit kills keeps its slot until it is dead, and no longer."""
    calls, results, children = endless

    with pytest.raises(TimeLimitExceeded):
        answer(results[name])

    wait_until(free(name, calls[name]))
    wait_until(gone(children[name]))
