"""What the death of a process, a signal or a limit does to a slot."""

import os
import signal
import time
from io import StringIO

import pytest
from celery import Task, _state, chain, chord, group
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError
from django.core.management import call_command

from django_redlock.celery import singleton_task
from django_redlock.inventory import held_locks

from . import project
from .real import LEASE, SLACK, free, gone, task, until


def test_killed_worker_frees_the_slot(start, worker, stage, what):
    """
    SIGKILL of the whole worker frees the slot within one lease, and the next call runs. C62
    """
    doomed = start("doomed")
    task("hold").apply_async((what,), queue="doomed")
    child = stage.hear("started")
    assert task("hold").delay(what).reason == "running"

    doomed.kill()

    assert until(free("hold", what)) < LEASE + SLACK
    assert gone(child)()
    stage.allow()
    assert task("hold").delay(what).get(timeout=10) == f"{what} done"


def test_killed_child_frees_the_slot(worker, stage, what):
    """
    SIGKILL of the child frees the slot long before its lease ends, and before the result says so. C61
    """
    result = task("hold_long").delay(what)
    os.kill(stage.hear("started"), signal.SIGKILL)

    with pytest.raises(WorkerLostError):
        result.get(timeout=10)

    again = task("hold_long").delay(what)
    assert not again.duplicate
    stage.allow()
    assert again.get(timeout=10) == f"{what} done"


def test_child_that_exits_frees_the_slot(worker):
    """
    ``os._exit`` is like SIGKILL. C63
    """
    with pytest.raises(WorkerLostError):
        task("die").delay(3).get(timeout=10)

    assert free("die", 3)()


def test_body_longer_than_its_lease(worker, stage, what):
    """
    A body of more than two leases keeps its slot to its end. C81
    """
    result = task("hold").delay(what)
    stage.hear("started")
    time.sleep(2.2 * LEASE)  # what is tested is that time passes and nothing happens

    assert task("hold").delay(what).id == result.id
    stage.allow()
    result.get(timeout=10)
    assert free("hold", what)()


def test_duplicate_joins_the_result(worker, stage, what):
    """
    A duplicate waits for the result of the task that was there first, and gets it.
    """
    first = task("hold").delay(what)
    stage.hear("started")
    second = task("hold").delay(what)
    stage.allow()

    assert (second.duplicate, second.get(timeout=10)) == (True, f"{what} done")
    assert first.id == second.id
    assert stage.heard() == ["ended"]


def test_retry_keeps_the_slot(worker, stage, what):
    """
    A duplicate during the countdown of a retry joins the same task, whose second attempt then runs. C51
    """
    first = task("once_more").delay(what)
    until(lambda: first.state == "RETRY")

    joined = task("once_more").delay(what)

    assert (joined.id, joined.reason) == (first.id, "queued")
    stage.allow()
    assert joined.get(timeout=10) == f"{what} done"
    assert free("once_more", what)()


def test_retry_at_once(worker):
    """
    A retry that another process begins before the attempt before has cleaned up runs, every time. C38 C52
    """
    results = [task("at_once").delay(number) for number in range(20)]

    assert [result.get(timeout=30) for result in results] == list(range(20))
    assert all(free("at_once", number)() for number in range(20))


def test_retries_are_used_up(worker):
    """
    ``autoretry_for`` until there are no retries left ends with the error and a free slot. C53
    """
    with pytest.raises(OSError, match="7"):
        task("failing").delay(7).get(timeout=30)

    assert free("failing", 7)()


def test_equals_in_a_group(worker, stage, what):
    """
    A group with two equal members ends, and with ``on_overlap="join"`` both have the value of the one run. C92 C94
    """
    result = group(task("hold_joined").si(what) for _ in range(2)).delay()
    until(lambda: sorted(stage.heard()) == ["overlapped", "started"])
    stage.allow()

    assert result.get(timeout=30) == [f"{what} done"] * 2
    assert sorted(stage.heard()) == ["ended", "overlapped", "started"]


def test_result_then_call(worker):
    """
    A call right after ``get()`` is accepted every time. C39
    """
    results = []
    for _ in range(50):
        results.append(task("double").delay(21))
        assert results[-1].get(timeout=10, interval=0.001) == 42

    assert not any(result.duplicate for result in results)


def test_revoked_before_it_started(worker):
    """
    A waiting message that is revoked frees its slot when the worker drops it. C68
    """
    result = task("double").apply_async((1,), queue="revoked")
    result.revoke()

    project.app.control.add_consumer("revoked", reply=True, timeout=5, limit=1)

    assert until(free("double", 1)) < 10
    until(lambda: result.state == "REVOKED")  # which is said afterwards


def test_terminated_body_that_carries_on(worker, stage, what):
    """
    A body that ignores the signal of ``revoke(terminate=True)`` keeps its slot until it ends. C66
    """
    result = task("stubborn").delay(what)
    child = stage.hear("started")

    result.revoke(terminate=True)
    stage.hear("stopped")
    until(lambda: result.state == "REVOKED")

    assert task("stubborn").delay(what).duplicate
    stage.allow()
    until(free("stubborn", what))
    os.kill(child, signal.SIGKILL)  # Celery goes on to take this process for one that is being terminated
    until(gone(child))


def test_terminated_with_kill(worker, stage, what):
    """
    ``revoke(terminate=True, signal="KILL")`` frees the slot once the process is gone. C67
    """
    result = task("hold_long").delay(what)
    stage.hear("started")

    result.revoke(terminate=True, signal="SIGKILL")

    until(free("hold_long", what))
    with pytest.raises(TaskRevokedError):
        result.get(timeout=10)


def test_rejected_when_the_child_died(worker, stage, what):
    """
    With ``reject_on_worker_lost`` the job of a killed child comes back, and runs once more, alone. C64
    """
    result = task("hold_on").delay(what)
    os.kill(stage.hear("started"), signal.SIGKILL)

    stage.hear("started")
    assert task("hold_on").delay(what).id == result.id
    stage.allow()

    assert result.get(timeout=10) == f"{what} done"
    assert stage.heard() == ["ended"]


if hasattr(Task, "retry_on_worker_lost"):  # from Celery 5.7 on; elsewhere there is nothing to leave out

    def test_retried_when_the_child_died(worker, stage, what):
        """
        With ``retry_on_worker_lost`` the parent sends the retry, which has the slot while it waits. C59
        """
        result = task("try_on").delay(what)
        os.kill(stage.hear("started"), signal.SIGKILL)
        until(lambda: result.state == "RETRY")

        joined = task("try_on").delay(what)

        assert (joined.id, joined.reason) == (result.id, "queued")
        stage.allow()
        assert result.get(timeout=10) == f"{what} done"


def test_hard_time_limit(worker, stage, what):
    """
    A body that a hard limit kills keeps its slot until it is dead, and frees it within one lease. C65
    """
    result = task("endless").delay(what)
    child = stage.hear("started")

    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=10)

    until(free("endless", what), timeout=LEASE + SLACK)
    until(gone(child), timeout=SLACK)


def test_hard_time_limit_of_a_long_lease(worker, stage, what):
    """
    After a hard limit nobody waits for a long lease to end, though the child can free nothing any more. C65
    """
    result = task("endless_long").delay(what)
    stage.hear("started")

    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=10)

    assert until(free("endless_long", what), timeout=20) < 20


def test_hard_time_limit_with_late_acknowledgement(worker, stage, what):
    """
    The child that is stopped for its limit does not give the slot to a message that never comes again. C65
    """
    result = task("endless_late").delay(what)
    stage.hear("started")

    with pytest.raises(TimeLimitExceeded):
        result.get(timeout=10)

    assert until(free("endless_late", what), timeout=30) < 30


def test_unknown_task(worker, what):
    """
    A message whose task the worker does not know frees its slot when it is refused. C37
    """

    def unknown():
        pass

    only_here = singleton_task(name=what)(unknown)
    project.app.set_current()
    result = only_here.delay()

    until(lambda: result.ready())

    until(lambda: not only_here.singleton.is_locked())


def test_message_by_name(worker, stage, what):
    """
    A message sent by name does not run beside a running task. C36
    """
    task("hold").delay(what)
    stage.hear("started")

    by_name = project.app.send_task("tests.server.workers.project.hold", (what,))

    with pytest.raises(TaskRevokedError, match="Skipped"):
        by_name.get(timeout=10)
    stage.allow()
    stage.hear("ended")
    assert stage.heard() == []


def test_workflows_with_a_duplicate_end(worker, stage, what):
    """
    A chain and a chord with a duplicate in them end with an error that says so, instead of never. C90 C91
    """
    task("hold").delay(what)
    stage.hear("started")
    hold, add = task("hold"), task("add")

    in_chain = chain(add.si(1), hold.si(what), add.si(2)).delay()
    in_chord = chord([add.si(1), hold.si(what)], add.si(2)).delay()

    for result in (in_chain, in_chord):
        with pytest.raises(Exception, match="Skipped"):
            result.get(timeout=10)
    stage.allow()


def test_chain_of_equals(worker):
    """
    A chain whose next step has the same key is not a duplicate of itself. C40
    """
    double = task("double")

    assert chain(double.si(4), double.si(4)).delay().get(timeout=10) == 8


def test_late_ack_after_a_killed_worker(start, worker, stage, what):
    """
    With late acknowledgement the job of a killed worker comes back, and runs once more, alone. C62 C77
    """
    doomed = start("late")
    result = task("hold_late").apply_async((what,), queue="late")
    stage.hear("started")
    doomed.kill()
    time.sleep(1.1)  # Celery 5.5 looks for such messages when it starts, and then not for a long time
    start("late", visibility=1)

    stage.hear("started")
    assert task("hold_late").delay(what).id == result.id
    stage.allow()

    assert result.get(timeout=10) == f"{what} done"
    assert stage.heard() == ["ended"]


def test_warm_shutdown(start, stage, what):
    """
    A worker that is asked to stop lets the body finish, and its slot is held to the end. C70
    """
    leaving = start("leaving")
    result = task("hold").apply_async((what,), queue="leaving")
    stage.hear("started")

    leaving.terminate()

    time.sleep(1.2 * LEASE)  # what is tested is that time passes and nothing happens
    assert task("hold").delay(what).id == result.id
    stage.allow()
    leaving.wait(timeout=10)
    assert result.get(timeout=10) == f"{what} done"
    assert free("hold", what)()


@pytest.mark.parametrize("option", ["--terminate-task", "--polite=1"])
def test_operator_takes_a_task_its_slot(worker, stage, what, monkeypatch, option):
    """
    L74: an operator releases the slot of a running task and has the task revoked and ended in the same action; asked
    politely, a body that does not look at its lease loses its slot all the same when the time is over.
    """
    monkeypatch.setattr(_state._tls, "current_app", project.app)
    result = task("hold_long").delay(what)
    child = stage.hear("started")
    (name,) = [held.name for held in held_locks().locks if what in held.name]
    out = StringIO()

    call_command("redlock_release", name, option, "--no-input", "--reason=stuck", stdout=out, stderr=out)

    until(free("hold_long", what))
    assert f"{name}: released." in out.getvalue()
    if option == "--terminate-task":
        assert f"told the workers to revoke task {result.id}." in out.getvalue()
        until(gone(child))
        with pytest.raises(TaskRevokedError):
            result.get(timeout=10)
    else:
        assert f"{name}: its holder was asked to stop." in out.getvalue()
        stage.allow()
        stage.hear("ended")
