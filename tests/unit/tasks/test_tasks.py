"""Singleton tasks of Django's, with the backends in memory that come with Django."""

import asyncio
import copy
import json
import logging
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import date, timedelta
from enum import Enum
from functools import wraps
from inspect import signature
from io import StringIO
from types import SimpleNamespace

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError
from django.db import OperationalError, transaction
from django.tasks import task_backends
from django.tasks.exceptions import TaskResultDoesNotExist
from django.tasks.signals import task_started
from django.test import modify_settings, override_settings
from django.utils import timezone

from django_redlock import LockTakenError, QuorumUnavailableError, lock, locks
from django_redlock.engine.manager import owner_here
from django_redlock.inventory import find_lock
from django_redlock.keys import task as task_keys
from django_redlock.singleton.driver import Nodes
from django_redlock.singleton.questions import Claim
from django_redlock.tasks import DuplicateTask, Singleton, SingletonTask, reaper, singleton_task
from django_redlock.tasks.run import RowRun
from tests.managers import eventually, wait_until
from tests.shop.helpers import in_thread
from tests.unit.celery.slots import set_down

from . import jobs


def rows_backend():
    return task_backends["kept"]


def rows():
    return rows_backend().results


def raising(error):
    def raise_it(*args):
        raise error

    return raise_it


def settled(result=None):
    """Have the slots name the rows now, not in a moment; returns the result of a call."""
    locks["default"].confirmations.send(float("inf"))
    return result


def run(result):
    task_backends["default"]._execute_task(result)


def test_duplicate(caplog):
    """It stores nothing; it joins the first, is skipped with a result that says why, or raises an error about it."""
    caplog.set_level(logging.INFO, logger="django_redlock")
    first, at_once = jobs.keep.enqueue(7), jobs.keep.enqueue(7)  # whose slot does not name it yet
    settled()
    second = jobs.keep.enqueue(shop_id=7, since=None)
    skipped = jobs.keep.using(on_duplicate="skip").enqueue(7)
    with pytest.raises(DuplicateTask) as caught:
        jobs.keep.using(on_duplicate="raise", queue_name="other").enqueue(7)
    with lock(jobs.keep.singleton.key(8)):
        no_row = jobs.keep.enqueue(8)

    assert (first.duplicate, first.accepted, first.status, at_once.id) == (False, True, "READY", first.id)
    assert (second.id, second.duplicate, second.accepted) == (first.id, True, False)
    assert (second.reason, second.holder_id) == ("queued", first.id)
    assert skipped.errors[0].exception_class is DuplicateTask
    for result in (skipped, no_row):
        assert (result.id, result.status, result.is_finished, result.duplicate) == ("", "FAILED", True, True)
    assert (caught.value.holder_id, caught.value.state) == (first.id, "queued")
    assert [row.id for row in rows()] == [first.id]
    assert {record.event for record in caplog.records if "is a duplicate" in record.message} == {"singleton_duplicate"}
    with pytest.raises(LockTakenError, match=f"held by task tests.unit.tasks.jobs.keep .queued. {first.id} on "):
        lock(jobs.keep.singleton.key(7), wait=0).acquire()


def test_slot_of_rows_whose_function_has_moved_is_taken_over(monkeypatch):
    """A deploy that renames a module does not swallow the calls after it."""
    settled(jobs.keep.enqueue(7))
    monkeypatch.setattr(rows_backend(), "get_result", raising(ImportError("No module named 'shop.old'")))

    assert jobs.keep.enqueue(7).accepted


def test_refused_row_leaves_no_slot():
    """If the backend does not store the row, the slot is free; what no backend stores has no name either."""
    with pytest.raises(TypeError, match="shop_id"):
        jobs.keep.enqueue()
    for refused in (jobs.keep.enqueue, jobs.keep.singleton.key):
        with pytest.raises(TypeError):
            refused(7, since=timezone.now())

    assert not jobs.keep.singleton.is_locked(7)


def test_key_is_that_of_the_arguments_as_the_worker_gets_them():
    """JSON knows no numbers as keys, no enums and no bytes; the run would otherwise have another slot than its row."""
    kind = Enum("Kind", {"LARGE": "large"}, type=str).LARGE
    result = settled(jobs.measure.enqueue({1: (2, 3)}, kind))
    result.args[:] = json.loads(json.dumps(result.args))

    run(result)

    assert jobs.ran == [("measure", {"1": [2, 3]}, "large")]
    assert not jobs.measure.singleton.is_locked({1: (2, 3)}, kind)
    assert jobs.keep.singleton.key(b"x") == jobs.keep.singleton.key("x")
    assert jobs.until.singleton.key(7) == "tasks:shops:7"


@pytest.mark.django_db(transaction=True)
def test_cancelled_row_does_not_run():
    """The thread that stored it can cancel it at once, also in a transaction; it ends as FAILED, and frees its slot."""
    here = jobs.keep.enqueue(7)
    assert jobs.keep.singleton.cancel(7) == here.id
    with transaction.atomic():
        within = jobs.keep.using(run_after=timezone.now() + timedelta(days=60)).enqueue(8)
        assert jobs.keep.singleton.cancel(8) == within.id
    elsewhere = in_thread(lambda: jobs.keep.enqueue(9))
    assert jobs.keep.singleton.cancel(9) == elsewhere.id  # once its slot names it
    settled()
    run(here)

    assert here.errors[0].exception_class_path == "django_redlock.tasks.run.CancelledTask"
    assert jobs.ran == []
    assert jobs.keep.singleton.cancel(7) is None
    assert not any(jobs.keep.singleton.is_locked(shop) for shop in (7, 8, 9))
    assert find_lock(f"cancelled:{here.id}").remaining > 29 * 86400  # the row may wait for days
    assert find_lock(f"cancelled:{within.id}").remaining > 89 * 86400  # when it would begin, that is still known


@pytest.mark.django_db(transaction=True)
def test_cancelling_a_row_that_is_gone():
    """If its transaction was rolled back, or if it was deleted, no row waits: its slot is free at once."""
    with suppress(InterruptedError), transaction.atomic():
        jobs.keep.enqueue(7)
        rows().clear()
        raise InterruptedError

    assert jobs.keep.singleton.cancel(7) is None
    assert not jobs.keep.singleton.is_locked(7)


def test_cancelling_a_row_too_late(monkeypatch):
    """A worker is quicker: ``cancel()`` says that no row waits, and withdraws its note."""
    result, cancel = settled(jobs.keep.enqueue(7)), Singleton._cancel
    monkeypatch.setattr(Singleton, "_cancel", lambda *about: (run(result), cancel(*about))[1])

    assert jobs.keep.singleton.cancel(7) is None
    assert jobs.ran == [("keep", 7)]
    assert find_lock(f"cancelled:{result.id}") is None


@pytest.mark.server
def test_row_that_is_cancelled_while_it_waits_in_its_worker_does_not_run():
    """A worker that has waited for the slot of the run looks again before it begins."""
    result = settled(jobs.pair.enqueue(7))
    with lock(jobs.pair.singleton.key(7)):
        worker = threading.Thread(target=lambda: run(result))
        worker.start()
        wait_until(lambda: find_lock(f"alive:{result.id}"))
        cancelled = jobs.pair.singleton.cancel(7)
    worker.join()

    assert (cancelled, result.status, jobs.ran) == (result.id, "FAILED", [])
    assert not jobs.pair.singleton.is_locked(7)


@pytest.mark.parametrize("scope", ["until_and_while_executing", "while_executing"])
def test_row_of_before_a_deploy_that_changed_the_scope(monkeypatch, scope):
    """It does not wait for its own slot, which the new scope would have under another name."""
    result = settled(jobs.keep.enqueue(7))
    function = jobs.keep.func.singleton_function
    monkeypatch.setattr(function, "singleton_options", replace(function.singleton_options, scope=scope))

    run(result)

    assert jobs.ran == [("keep", 7)]
    assert not jobs.keep.singleton.is_locked(7)


def test_row_of_before_a_deploy_that_set_a_limit(monkeypatch):
    """No permit is free while its own slot is taken, so it frees that."""
    result = settled(jobs.keep.enqueue(7))
    function = jobs.keep.func.singleton_function
    changed = replace(function.singleton_options, scope="while_executing", limit=2)
    monkeypatch.setattr(function, "singleton_options", changed)

    run(result)

    assert jobs.ran == [("keep", 7)]


def test_direct_call_has_no_slot_to_give_up():
    """``release()`` without arguments is about the call, not about the slot of a row that waits."""
    row = settled(jobs.waiting.enqueue())
    jobs.waiting.call()
    jobs.everything.call()
    jobs.everything.enqueue()

    assert jobs.ran == ["expired", "expired", "released"]
    assert jobs.waiting.singleton.holder().id == row.id


def test_call_that_fails_before_its_body_leaves_no_claim():
    """The next one finds the slot free; here the inner call would have waited for the run around it."""
    assert jobs.inside_itself.enqueue(1).return_value == "FAILED"
    assert jobs.inside_itself.enqueue(0).return_value == "done"


def test_what_people_read():
    """``explain()`` and commands know these tasks by the path of their function; Celery's workers hear nothing."""
    out = StringIO()
    with pytest.raises(CommandError, match="The slot is free"):
        call_command("redlock_inspect", "--task=tests.unit.tasks.jobs.keep", "--args=[7]", stdout=out)
    first = settled(jobs.keep.enqueue(7))

    text = jobs.keep.singleton.explain(7)
    name, err = jobs.keep.singleton.key(7), StringIO()
    call_command("redlock_release", name, "--no-input", "--revoke-task", stderr=err, stdout=err)

    assert "A call now would take the slot and be stored." in out.getvalue()
    assert f"queued, task tests.unit.tasks.jobs.keep (queued) {first.id}" in text
    assert f"store nothing, and return the result of task {first.id}, if that row is still there." in text
    assert "not held by a Celery task" in err.getvalue()
    assert "told the workers" not in err.getvalue()


def test_nodes_that_go_away(caplog, monkeypatch):
    """A call is stored without a slot, which is logged, also if they go away while it looks for the row."""
    settled(jobs.keep.enqueue(7))

    def slow(task_id):
        set_down(locks["default"].nodes)
        raise TaskResultDoesNotExist(task_id)

    monkeypatch.setattr(rows_backend(), "get_result", slow)

    assert [jobs.keep.enqueue(7).accepted, jobs.keep.enqueue(7).accepted] == [True, True]
    assert "enqueued without a slot" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_row_of_another_backend_is_joined():
    """All backends of a task share its slots, so a row that another one has is not gone; also before the commit."""
    with transaction.atomic():
        first = jobs.keep.using(backend="other").enqueue(7)
        within = jobs.keep.enqueue(7)
    settled()
    second = jobs.keep.enqueue(7)
    waits = settled(jobs.report.using(backend="kept").enqueue(1))
    at_once = jobs.report.enqueue(1)  # whose own backend knows no rows

    assert {(each.id, each.duplicate, each.backend) for each in (within, second)} == {(first.id, True, "other")}
    assert (at_once.id, at_once.duplicate, at_once.backend) == (waits.id, True, "kept")
    assert [row.id for row in rows()] == [waits.id]


def test_call_that_is_too_late_for_the_slot_of_a_row_that_is_gone(monkeypatch):
    """Another call has just taken it over: its row is joined, and not the one that is over."""
    settled(jobs.keep.enqueue(7))
    rows().clear()
    get_result, others = rows_backend().get_result, []

    def slow(task_id):
        monkeypatch.undo()
        others.append(jobs.keep.enqueue(7))
        settled()
        return get_result(task_id)

    monkeypatch.setattr(rows_backend(), "get_result", slow)
    late = jobs.keep.enqueue(7)

    assert (late.duplicate, late.id) == (True, others[0].id)


def test_slot_lasts_until_the_delayed_row_has_begun(monkeypatch):
    """``queue_ttl`` counts from ``run_after``, which may have a time zone whatever the project uses."""
    hour = timezone.now() + timedelta(hours=1)
    jobs.keep.using(run_after=hour).enqueue(7)
    jobs.keep.using(queue_ttl=60).enqueue(8)
    monkeypatch.setattr(settings, "USE_TZ", False)  # not override_settings, which uses connections of other tests
    jobs.keep.using(run_after=hour).enqueue(9)
    jobs.keep.using(run_after=timezone.make_naive(hour)).enqueue(10)
    settled()

    assert all(4100 < jobs.keep.singleton.holder(shop).ttl <= 4200 for shop in (7, 9, 10))
    assert 50 < jobs.keep.singleton.holder(8).ttl <= 60


def test_run_knows_its_slot():
    """A coroutine and a task with Django's context have it, and may give it up; a direct call in a run has none."""
    assert jobs.later.enqueue(1).return_value == [1, True]
    assert not jobs.later.singleton.is_locked(1)
    assert jobs.attempt.enqueue(1).return_value == [1, 1, ["released", "released"], True]
    assert not jobs.attempt.singleton.is_locked(1)
    # These call themselves, the first one with its context.
    assert jobs.nested.enqueue(2).return_value == [[True, True], [False, False], [False, False]]
    assert jobs.anested.enqueue(2).return_value == [True, False, False]
    with lock("task:tests.unit.tasks.jobs.report:day=1"):
        assert (jobs.report.call(1), jobs.report.func(2)) == (1, 2)
    assert asyncio.run(jobs.later.acall(1)) == [1, False]


@pytest.mark.parametrize("task", [jobs.begun, jobs.abegun])
def test_body_that_returns_its_work_fails(task):
    """A generator would run when the slot is free, so the run fails."""
    result = task.enqueue()

    assert "returned a generator, which would run when its slot is free" in result.errors[0].traceback
    assert not task.singleton.is_locked()


def test_run_that_would_wait_for_itself_fails():
    """A serial task that enqueues itself, on a backend that runs it at once, gets an error and does not hang."""
    result = jobs.again.enqueue(1)

    assert "would wait for itself, in a call of its own run" in result.return_value
    assert jobs.ran == [("again", 1)]


@pytest.mark.django_db(transaction=True)
def test_release_of_a_slot_that_names_no_row_yet():
    """Before the commit it frees the slot as later, for good; it leaves the lock of something else alone."""
    with transaction.atomic():
        jobs.keep.enqueue(7)
        outcome = jobs.keep.singleton.release(7)
    settled()

    assert outcome == "released"
    assert not jobs.keep.singleton.is_locked(7)
    with lock(jobs.keep.singleton.key(7)):
        assert jobs.keep.singleton.release(7) == "taken"


@pytest.mark.server
def test_coroutine_that_is_cancelled_while_it_waits_for_its_slot():
    """The thread that waits for it keeps no slot for a body that never runs."""

    cancelled = threading.Event()

    async def call():
        with suppress(TimeoutError):
            await asyncio.wait_for(jobs.slow.aenqueue(1), 0.5)
        cancelled.set()

    with lock(jobs.slow.singleton.key(1)):
        caller = threading.Thread(target=lambda: asyncio.run(call()))
        caller.start()
        wait_until(lambda: find_lock(jobs.slow.singleton.key(1)).waiting)
        cancelled.wait(60)
    caller.join()

    wait_until(lambda: not jobs.slow.singleton.is_locked(1))


@pytest.mark.server
@pytest.mark.parametrize("task", [jobs.slow, jobs.endless], ids=["returns", "is cancelled twice"])
def test_coroutine_needs_no_thread_of_its_event_loop(task):
    """It takes and frees its slot though they are all busy, as with runs that wait for this slot."""
    row, over, checked = settled(task.using(backend="kept").enqueue(1)), threading.Event(), threading.Event()

    async def work():
        task_started.send(sender=None, task_result=row)
        jobs.ran.append(await task.acall(1))

    async def run():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        working = asyncio.create_task(work())
        if task is jobs.endless:
            await eventually(lambda: jobs.ran)
        loop.run_in_executor(None, checked.wait, 60)
        for _ in range(2 if task is jobs.endless else 0):
            working.cancel()
            for _ in range(10):
                await asyncio.sleep(0)
        await asyncio.wait([working], timeout=30)
        over.set()

    caller = threading.Thread(target=lambda: asyncio.run(run()))
    caller.start()
    over.wait(60)
    ran = jobs.ran.copy()  # a lease that is known here is renewed until it is released
    try:
        wait_until(lambda: not task.singleton.is_locked(1))
    finally:
        checked.set()
        caller.join()

    assert ran == [1] or not ran[0].valid()


def test_claim_that_names_no_row_cannot_be_cancelled():
    """Its caller may have died before it stored the row, or be in a transaction: nobody knows which row it would be."""
    ticket = jobs.keep.func.singleton_function.singleton_ticket("", (7,), {}, "a" * 32)
    Nodes("default", "jobs.keep").claim(Claim(ticket, 60.0))

    with pytest.raises(QuorumUnavailableError, match="may not have been sent"):
        jobs.keep.singleton.cancel(7)


def test_default_that_json_does_not_have(monkeypatch):
    """It has no form of its own without Celery, whose encoder is that of keys; the error says what to write."""
    monkeypatch.setitem(sys.modules, "kombu.utils.json", None)
    task_keys._encoder.cache_clear()
    key = task_keys.TaskKey(None, signature(lambda since=date(2020, 1, 1): None))

    with pytest.raises(TypeError, match=r"'since', a date, cannot be part of a singleton's key.*key=\(...\)"):
        key.lock_name((), {})
    task_keys._encoder.cache_clear()


def test_tasks_and_results_can_be_pickled_and_copied():
    """Django 6.1 asks that of tasks; a key may be a lambda all the same."""
    task = jobs.until.using(priority=5, on_duplicate="skip")
    result = jobs.until.enqueue(7)

    for copied in (pickle.loads(pickle.dumps(task)), copy.deepcopy(task)):
        assert isinstance(copied, SingletonTask)
        assert (copied.priority, copied.on_duplicate, copied.func) == (5, "skip", jobs.until.func)
    for same in (pickle.loads(pickle.dumps(result)), copy.deepcopy(result)):
        assert (same.id, same.duplicate, same.accepted) == (result.id, False, True)


def test_reaper_says_what_it_needs():
    """Without the app, and with a backend that keeps its rows elsewhere, it would find nothing for ever."""
    with pytest.raises(CommandError, match=r"install it, and add 'django_tasks_db' to INSTALLED_APPS") as missing:
        call_command("redlock_reap_tasks")
    pytest.importorskip("django_tasks_db")
    with (
        modify_settings(INSTALLED_APPS={"append": "django_tasks_db"}),
        pytest.raises(CommandError, match=r"TASKS has no 'kept' with the backend of django-tasks-db") as wrong,
    ):
        call_command("redlock_reap_tasks", backend="kept")

    assert (missing.value.returncode, wrong.value.returncode) == (2, 2)


def test_reaper_leaves_alone_what_may_have_a_slot_of_another_name(monkeypatch):
    """If the nodes go away before all locks are listed, nobody knows whether a run has one from before a deploy."""
    function = jobs.keep.func.singleton_function
    known, gone = function.singleton_ticket("known", (7,), {}), function.singleton_ticket("gone", (7,), {})
    before = locks["default"].on_behalf("task:of:before", owner_here("task", ref="known"))
    with before:
        assert (reaper.is_held(known), reaper.is_held(gone)) == (True, False)
        for node in locks["default"].nodes:
            monkeypatch.setattr(node, "down", True)

        with pytest.raises(QuorumUnavailableError):
            reaper.is_held(gone)


def test_reaper_leaves_out_a_row_of_an_alias_that_the_settings_lack(monkeypatch):
    """It deals with the others."""
    function = jobs.keep.func.singleton_function
    row = SimpleNamespace(id="1", task=jobs.keep, args_kwargs={"args": (7,), "kwargs": {}})
    assert reaper.slot_of(row)[0] is function
    monkeypatch.setattr(function, "singleton_options", replace(function.singleton_options, using="gone"))

    assert reaper.slot_of(row)[0] is None


@pytest.mark.server
@pytest.mark.django_db
def test_reaper_goes_on_after_an_error_of_the_database(monkeypatch):
    """With ``--every``, a database that is locked for a moment does not end the command."""
    errors = iter([OperationalError("database is locked"), KeyboardInterrupt()])
    seen = SimpleNamespace(look=lambda: raising(next(errors))())
    monkeypatch.setattr(reaper, "Reaper", lambda *args, **options: seen)
    err = StringIO()

    with pytest.raises(CommandError, match="Interrupted"):
        call_command("redlock_reap_tasks", "--every=0.01", stderr=err)

    assert "database is locked" in err.getvalue()


@pytest.mark.server
@pytest.mark.django_db
@pytest.mark.parametrize("failing", [1, 2])
def test_reaper_that_could_look_only_once_says_so(monkeypatch, failing):
    """It knows the row of a dead worker only by two looks, so one that failed leaves it open whether there is one."""
    looks = []

    def look():
        looks.append(1)
        if len(looks) == failing:
            raise OperationalError("database is locked")
        return iter(())

    monkeypatch.setattr(reaper, "Reaper", lambda *args, **options: SimpleNamespace(look=look))
    monkeypatch.setattr(reaper, "APART", 0)

    with pytest.raises(CommandError, match="database is locked") as caught:
        call_command("redlock_reap_tasks")

    assert (caught.value.returncode, len(looks)) == (1, 2)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"on_overlap": "drop"}, TypeError, "no option 'on_overlap': a row whose slot another run has waits"),
        ({"redelivery": "drop"}, TypeError, "redlock_reap_tasks"),
        ({"lock_direct_calls": True}, TypeError, r"with lock\(...\)"),
        ({"on_duplicate": "rerun"}, ValueError, "scope='until_executing'"),
        ({"on_duplicate": "replace"}, ValueError, "cannot be changed"),
        ({"ttl": 5}, TypeError, "no option 'ttl'; its own are key, "),
        ({"acks_late": True}, TypeError, "unexpected keyword argument 'acks_late'"),
        ({"run_after": None}, TypeError, r"task.using\(run_after=...\)"),
        ({"key": ("shop",)}, ValueError, "not a parameter of the task"),
    ],
)
def test_option_that_cannot_work_is_refused_at_once(options, error, text):
    with pytest.raises(error, match=text):
        singleton_task(**options)(jobs.keep.func.__wrapped__)


def test_key_of_a_decorated_function_that_takes_the_context():
    """The key may name the parameters of a function behind a decorator that passes them on."""

    @wraps(jobs.nested.func.__wrapped__)
    def passing_on(context, *args, **kwargs):
        raise NotImplementedError

    task = singleton_task(takes_context=True, key=("depth",))(passing_on)

    assert task.singleton.key(5).endswith(":depth=5")


def test_wrong_calls_of_the_decorator_and_of_using():
    for decorated in ("shop:{shop_id}", dict):
        with pytest.raises(TypeError, match="@singleton_task decorates a function, not "):
            singleton_task(decorated)
    with pytest.raises(TypeError, match="the slot would be free before the body of steps runs"):
        singleton_task(jobs.steps)
    for how in ("rerun", "jion"):
        with pytest.raises(ValueError, match=how):
            jobs.keep.using(on_duplicate=how)
    with pytest.raises(ValueError, match="queue_ttl"):
        jobs.keep.using(queue_ttl=0)


def test_lease_that_the_settings_do_not_allow():
    """A call raises before it stores a row, and the system checks report it."""
    options = {"ttl": 10, "max_ttl": 20}
    with override_settings(REDLOCK={"default": {"NODES": ["memory://a"], "OPTIONS": options}}):
        with pytest.raises(ValueError, match=r"lease=30\.0 of the singleton tests.unit.tasks.jobs.keep"):
            jobs.keep.enqueue(7)
        with pytest.raises(
            SystemCheckError, match=r"E011.*tests\.unit\.tasks\.jobs\.keep', which cannot be taken: ttl"
        ):
            call_command("check")

    assert rows() == []


def test_sign_of_life_that_could_not_be_extended_is_shown_again():
    """Nodes that still have it do not take it for that of another process, so the row is not put back meanwhile."""
    row = settled(jobs.keep.enqueue(7))
    run = RowRun(jobs.keep.func.singleton_function, row, (7,), {})
    run.show_life()
    shown = find_lock(f"alive:{row.id}").fencing_token
    run._life.hold.abandon()  # as after its time, by the clock of this process

    run.show_life()

    assert find_lock(f"alive:{row.id}").fencing_token > shown
    run.close()
