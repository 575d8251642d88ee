"""A call or a message that finds its duplicate, beyond joining and skipping."""

import copy
import logging
import os
import pickle
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
from celery import chain
from celery.beat import Scheduler
from celery.exceptions import TaskRevokedError
from celery.schedules import schedule
from celery.signals import beat_init
from django.core.management import CommandError, call_command
from kombu.exceptions import SerializerNotInstalled

from django_redlock import LockLostError, QuorumUnavailableError, celery, locks
from django_redlock.celery import DuplicateTask, Return, override_singleton, singleton_task

from .slots import HEADER, NAME, names, set_down, ticket_in, tickets

# rerun


def test_rerun_runs_once_more_with_the_newest_arguments(make, worker):
    """However many duplicates come during a run, one more run follows, with the arguments of the last."""
    seen = []

    def body(self, shop_id):
        seen.append(self.request.kwargs.get("since"))
        if len(seen) == 1:
            later.extend(task.delay(7, since=day) for day in (1, 2, 3, 3))

    later: list[Any] = []
    task = make(body, on_duplicate="rerun")
    task.delay(7)

    worker.run_all()

    assert seen == [None, 3]
    assert len({result.id for result in later}) == 1
    assert [result.accepted for result in later] == [True, True, True, False]
    assert later[0].get(timeout=1) == later[-1].get(timeout=1)
    assert names() == set()


def test_rerun_with_a_trailing_message_that_cannot_be_sent(make, worker, monkeypatch):
    """When the trailing message cannot be sent its caller gets the error, and no note of it stays behind."""
    task = make(on_duplicate="rerun")
    task.delay(7)
    monkeypatch.setattr(task.app, "send_task", lambda *a, **k: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        task.delay(7, since=1)

    assert names() == {NAME}


def test_place_of_the_trailing_message_can_be_seen_and_freed(make, worker):
    """
    While only the message that comes next waits, a call is a duplicate, and its answer says so; its place can be
    freed.
    """

    def body(self, shop_id):
        if not calls:
            calls.append(task.delay(7))

    calls: list[Any] = []
    task = make(body, on_duplicate="rerun")
    task.delay(7)
    worker.run()
    worker.take()  # and lose it, as a queue does that is purged

    assert task.singleton.is_locked(7)
    assert task.singleton.holder(7).id == calls[0].id
    assert f"run once after task {calls[0].id}" in task.singleton.explain(7)
    assert task.singleton.release(7) == "released"
    assert not task.delay(7).duplicate
    worker.run_all()
    assert names() == set()


# replace


def test_replace_gives_the_call_that_waits_the_newest_arguments(make, worker):
    """The call that waits keeps its id and takes the arguments and the time of the newest; its message is dropped."""
    seen = []
    task = make(lambda self, shop_id: seen.append(self.request.kwargs.get("since")), on_duplicate="replace")
    first = task.apply_async((7,), {"since": 1}, countdown=7200)

    second = task.apply_async((7,), {"since": 2}, countdown=60)

    assert (second.accepted, second.duplicate, second.holder_id, second.id) == (True, True, first.id, first.id)
    early, late = worker.take(), worker.take()
    assert worker.run(late) == "SUCCESS"
    assert worker.run(early) == "IGNORED"
    assert (seen, first.state) == ([2], "SUCCESS")


def test_call_with_an_id_of_its_own_waits_for_the_run(make, worker):
    """A step of a workflow that meets its duplicate waits for it and runs, where calls are not to be lost."""
    seen = []

    def body(self, shop_id):
        seen.append(self.request.id)
        if len(seen) == 1:
            task.apply_async((7,), task_id="step")
            seen.append(worker.run())

    task = make(body, on_duplicate="replace")
    task.delay(7)

    worker.run_all()

    assert seen[1:] == ["IGNORED", "step"]
    assert task.AsyncResult("step").state == "SUCCESS"


# Revoked before their time


def test_call_that_was_revoked_before_its_time_is_out_of_the_way(make, worker):
    """A call with a countdown that was revoked, as its result says, keeps no other call out."""
    task = make()
    first = task.apply_async((7,), countdown=7200)
    assert task.delay(7).duplicate
    task.backend.mark_as_revoked(first.id, "by an operator")

    second = task.delay(7)

    assert (second.duplicate, second.accepted) == (False, True)
    assert tickets(worker)[1].secret


@pytest.mark.parametrize("options", [{}, {"on_duplicate": "rerun"}])
def test_run_that_waits_for_its_own_end(make, worker, options):
    """A run that calls its own task and waits for the result gets an error, and does not wait for ever."""
    errors = []

    def body(self, shop_id):
        if not errors:
            with pytest.raises(RuntimeError, match="would wait for ever") as caught:
                self.delay(shop_id, since=None).get(disable_sync_subtasks=False)
            errors.append(caught.value)

    task = make(body, **options)
    task.delay(7)
    worker.run()

    assert len(errors) == 1


# on_overlap


def test_wait_is_bounded(make, worker, caplog):
    """``wait_for`` ends the waiting of a message: it is skipped then, and its caller and the log say so."""
    task = make(on_overlap="wait", wait_for=2)
    with locks["default"].lock(NAME), caplog.at_level(logging.INFO, "django_redlock"):
        task.apply_async((7,), task_id="second")
        states = worker.run_all()

    assert states == ["IGNORED"] * 3  # after one second, and the one that is left of two
    with pytest.raises(TaskRevokedError, match=r"after 2\.0 s"):
        task.AsyncResult("second").get(timeout=1)
    held = f"{NAME} is held by something that is not a task"
    assert [record.message for record in caplog.records if record.name == "django_redlock"] == [
        f"{held}; task second is put back to wait for its slot",
        f"task second is dropped. Skipped: {held}, after 2.0 s.",
    ]


def test_message_keeps_what_its_caller_was_promised(make, worker, app):
    """A message sent with ``scope="while_executing"`` is not dropped by a worker that has another scope by now."""
    before = make(scope="while_executing")
    accepted = [before.delay(7).id for _ in range(3)]
    app.tasks.pop(before.name)
    ran = []
    task = make(lambda self, shop_id: ran.append(self.request.id))

    with locks["default"].lock(NAME):
        states = [worker.run(worker.take()) for _ in accepted]

    assert states == ["IGNORED"] * 3
    assert {task.AsyncResult(each).state for each in accepted} == {"PENDING"}
    assert worker.run_all() == ["SUCCESS"] * 3
    assert set(ran) == set(accepted)


def test_message_that_waits_keeps_its_expiry_and_what_it_hides(make, worker):
    """A message that was put back expires when it would have, and shows the text that stands in for its arguments."""
    task = make(on_overlap="wait")
    with locks["default"].lock(NAME):
        task.apply_async((7,), {"since": "PASSWORD"}, task_id="second", expires=100, kwargsrepr="HIDDEN")
        before = worker.headers[0]["expires"]
        worker.run()

    assert (worker.headers[0]["expires"], worker.headers[0]["kwargsrepr"]) == (before, "HIDDEN")


def test_join_runs_itself_if_the_holder_is_lost(make, worker):
    """A message that waits for a holder that died without a result runs itself."""
    seen = []
    task = make(lambda self, shop_id: seen.append(self.request.id), on_overlap="follow")
    first = task.delay(7)
    message = worker.take()
    task.apply_async((7,), task_id="second")
    assert worker.run() == "IGNORED"
    task.singleton.release(7)

    assert worker.run() == "SUCCESS"
    assert (seen, message is not None, first.state) == (["second"], True, "PENDING")


def test_succeed(make, worker):
    """With ``on_overlap=Return(3)`` the message ends with that value and the chain goes on."""
    task = make(on_overlap=Return(3))
    after = make(lambda self, shop_id: shop_id + 1, name="shop.after")
    with locks["default"].lock(NAME):
        result = chain(task.s(7), after.s()).delay()
        worker.run_all()

    assert result.get(timeout=1) == 4


# on_unavailable


def test_nodes_down_when_sending_can_raise(make, memory_nodes, worker):
    """
    With ``on_unavailable={"enqueue": "raise"}`` the caller gets the error, and nothing is sent.
    """
    task = make(on_unavailable={"enqueue": "raise"})
    set_down(memory_nodes, True)

    with pytest.raises(QuorumUnavailableError):
        task.delay(7)
    assert worker.headers == []


def test_nodes_down_at_the_start_can_run_or_fail(make, memory_nodes, worker, caplog):
    """Without an answer from the nodes the task fails, or the body runs, and its place in the queue is free then."""
    fail = make(name="shop.fail", on_unavailable={"run": "fail"})
    run = make(lambda self, shop_id: set_down(memory_nodes, False), on_unavailable={"run": "run"})
    run.delay(7)
    set_down(memory_nodes, True)
    failed = fail.delay(7)
    waits = worker.take()

    assert [worker.run(), worker.run(waits)] == ["FAILURE", "SUCCESS"]
    assert names() == set()
    with pytest.raises(QuorumUnavailableError):
        failed.get(timeout=1)
    assert "runs without a slot" in caplog.text


# redelivery


def test_only_one_copy_watches(make, worker):
    """However often the broker delivers a message while it runs, one copy of it waits."""
    seen: list[Any] = []

    def body(self, shop_id):
        seen.append(self.request.id)
        if len(seen) == 1:
            states.extend(worker.run(message, redelivered=True) for _ in range(3))
            watching = worker.take()
            states.append(worker.run(watching))
            states.append(worker.run(watching))  # which the broker delivers again, too
            states.append(str(len(worker.headers)))

    states: list[str] = []
    task = make(body, acks_late=True)
    result = task.delay(7)
    message = worker.take()

    assert worker.run(message) == "SUCCESS"
    assert states == ["IGNORED"] * 5 + ["1"]
    assert worker.run_all() == ["IGNORED"]
    assert seen == [result.id]


# By the call, and all of them


def test_call_without_a_slot(make, worker):
    """``singleton=False`` sends and runs a call whoever has the slot, and leaves that alone, also over a retry."""
    seen: list[Any] = []

    def body(self, shop_id):
        seen.append((self.request.retries, self.singleton.lease, names()))
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = make(body)
    task.apply_async((7,), singleton=False)

    with locks["default"].lock(NAME):
        assert worker.run_all() == ["RETRY", "SUCCESS"]
    assert seen == [(0, None, {NAME}), (1, None, {NAME})]


def test_options_of_one_call(make, worker):
    """One call may choose what it gets as a duplicate, and for how long it waits in the queue."""
    task = make()
    task.apply_async((7,), singleton={"queue_ttl": 60})

    with pytest.raises(DuplicateTask) as caught:
        task.apply_async((7,), singleton={"on_duplicate": "raise"})
    assert caught.value.retry_after < 61
    with pytest.raises(TypeError, match="'on_duplicates'; did you mean 'on_duplicate'"):
        task.apply_async((7,), singleton={"on_duplicates": "raise"})
    with pytest.raises(TypeError, match="for the task as a whole"):
        task.apply_async((7,), singleton={"on_duplicate": "replace"})
    for chosen in (True, "raise"):
        with pytest.raises(TypeError, match="is False or a dict such as"):
            task.apply_async((7,), singleton=chosen)


def test_switched_off_for_a_test(make, worker):
    """With ``override_singleton(enabled=False)`` tasks are sent and run as ordinary ones."""
    task = make(on_duplicate="raise", on_overlap="fail")

    with override_singleton(enabled=False), locks["default"].lock(NAME):
        results = [task.delay(7), task.delay(7)]
        states = worker.run_all()

    assert (states, len({result.id for result in results})) == (["SUCCESS"] * 2, 2)
    task.delay(7)
    with pytest.raises(DuplicateTask):
        task.delay(7)


# Beat


def test_raise_in_beat_is_one_line(make, worker, app, caplog, monkeypatch):
    """
    A beat schedule that meets its duplicate with ``on_duplicate="raise"`` logs one line per tick, and no
    traceback.
    """
    task = make(on_duplicate="raise")
    beat_init.send(sender=None)
    scheduler = Scheduler(app, lazy=True)
    entry = scheduler.Entry(
        name="often", task=task.name, args=(7,), schedule=schedule(1.0), app=app, options={"headers": {}}
    )
    scheduler.apply_entry(entry)
    caplog.clear()

    with caplog.at_level(logging.INFO, "django_redlock"):
        scheduler.apply_entry(entry)

    ours = [record for record in caplog.records if record.name == "django_redlock"]
    holder = worker.headers[0]["id"]
    assert [record.message for record in ours] == [
        f"{NAME} is queued as task {holder}; this call sends nothing, and has the result of that task"
    ]
    assert not any(record.exc_info for record in caplog.records)
    assert len(worker.headers) == 1
    assert HEADER not in entry.options["headers"]


# Reports

SIGNALS = ("singleton_duplicate", "singleton_overlap", "singleton_lost", "singleton_stolen")


@pytest.fixture
def told():
    """What the signals told: their names and arguments."""
    heard: list[Any] = []

    def receiver(signal, sender, **about):
        heard.append((next(name for name in SIGNALS if getattr(celery, name) is signal), about))

    for name in SIGNALS:
        getattr(celery, name).connect(receiver)
    yield heard
    for name in SIGNALS:
        getattr(celery, name).disconnect(receiver)


def test_signals(make, worker, told, caplog):
    """A duplicate and an overlap are reported by a signal and a log line with fields, with the ids of both."""

    def body(self, shop_id):
        if self.request.id != "second":
            task.delay(7)
            self.apply_async((7,), task_id="second")
            worker.run()

    task = make(body)
    first = task.delay(7)
    with caplog.at_level(logging.INFO, "django_redlock"):
        worker.run()

    assert [(name, about["holder_id"], about["state"], about["strategy"]) for name, about in told] == [
        ("singleton_duplicate", first.id, "running", "join"),
        ("singleton_overlap", first.id, "running", "drop"),
    ]
    events = [record for record in caplog.records if getattr(record, "event", "").startswith("singleton")]
    running = f"{NAME} is running as task {first.id}"
    assert [(record.event, record.lock, record.message) for record in events] == [
        ("singleton_duplicate", NAME, f"{running}; this call sends nothing, and has the result of that task"),
        ("singleton_overlap", NAME, f"{running}; task second is dropped"),
    ]


@pytest.mark.parametrize(
    ("options", "consequence"),
    [
        ({"on_duplicate": "skip"}, "is skipped"),
        ({"on_duplicate": "raise"}, "raises an error"),
        ({"on_duplicate": "rerun", "scope": "until_and_while_executing"}, "gives its arguments to the waiting task"),
        ({"on_duplicate": "rerun"}, "is sent, and runs afterwards"),
    ],
)
def test_log_says_what_happens_to_a_duplicate(make, caplog, options, consequence):
    """The line about a duplicate says what happens to the call, not only who has the slot."""
    task = make(**options)
    task.delay(7)

    with caplog.at_level(logging.INFO, "django_redlock"), suppress(DuplicateTask):
        task.delay(7, since=1)

    [line] = [record.message for record in caplog.records if record.name == "django_redlock"]
    assert line.partition("; this call ")[2].startswith(consequence)


def errors_in(caplog):
    """Return the events and texts of our errors in the log."""
    ours = [record for record in caplog.records if record.name == "django_redlock" and record.levelname == "ERROR"]
    return [(getattr(record, "event", ""), record.message) for record in ours]


@pytest.mark.parametrize("options", [{}, {"hold_for": 60}, {"on_lost": "raise"}, {"ignore_result": True}])
def test_run_that_ends_after_its_slot_was_freed_by_force(make, worker, told, caplog, options):
    """A run whose slot another run got is reported at its end, if no renewal has shown the loss before."""
    others, leases = [], []

    def body(self, shop_id):
        leases.append(self.singleton.lease)
        assert task.singleton.release(shop_id, since=None, force=True) == "released"
        ticket = task.singleton_ticket("second", (shop_id,), {})
        others.append(ticket.take_running({"ttl": 30.0, "max_hold": None}, "shop.sync", ""))

    task, process = make(body, **options), f"{socket.gethostname()}:{os.getpid()}"
    first = task.delay(7)
    worker.run()
    assert names() == {NAME}  # the other run's slot
    others[0].release()  # otherwise it would be lost, and reported, during a later test
    assert leases[0].hold.due() == float("inf")  # the watchdog does not report it once more

    lost = f"{NAME} was lost by task {first.id} (superseded); now it is held by task shop.sync second on {process}"
    assert errors_in(caplog) == [("singleton_stolen", lost)]
    assert [(name, about["task_id"], about["reason"]) for name, about in told] == [
        ("singleton_stolen", first.id, "superseded")
    ]


def test_early_release_of_a_lost_slot(make, worker):
    """A body that gives up a slot which it has lost is not told that it had it until then."""
    seen = []

    def body(self, shop_id):
        task.singleton.release(shop_id, since=None, force=True)
        with locks["default"].lock(NAME):
            seen.append(self.singleton.release())

    task = make(body)
    task.delay(7)
    worker.run()

    assert seen == ["taken"]


def test_stolen_slot_is_told(make, worker, told, caplog):
    """
    A run learns that somebody took its slot when it asks, by the error of ``check()``, which ends it, and so do all
    receivers; the log has one error.
    """
    seen = []

    def body(self, shop_id):
        self.singleton.check()
        locks["default"].on_behalf(NAME, adopt=self.singleton.lease.secret, detached=True, wait=0).acquire()
        self.singleton.lease.extend()
        seen.append((self.singleton.lost, self.singleton.remaining))
        self.singleton.check()

    result = make(body).delay(7)

    assert worker.run() == "FAILURE"
    assert isinstance(result.result, LockLostError)
    assert seen == [(True, 0.0)]
    assert [(name, about["reason"]) for name, about in told] == [("singleton_stolen", "superseded")]
    assert names() == {NAME}
    [(event, text)] = errors_in(caplog)
    assert event == "singleton_stolen"
    assert text.startswith(f"{NAME} was lost by task {result.id} (superseded); now it is held by manual on ")


# Losing the slot


def test_early_release_in_the_body(make, worker):
    """A body can give its slot up before its end."""
    seen = []

    def body(self, shop_id):
        seen.extend([self.singleton.remaining > 0, self.singleton.release(), names(), self.singleton.lease])

    make(body).delay(7)

    assert worker.run() == "SUCCESS"
    assert seen == [True, "released", set(), None]


# By hand


def test_holder(make, worker):
    """``holder()`` says who has the slot, in which state, since when, for how long, where, and on how many nodes."""
    seen = []
    task = make(lambda self, shop_id: seen.append(task.singleton.holder(7)))
    first = task.delay(7)
    waiting = task.singleton.holder(7)
    worker.run()

    assert (waiting.id, waiting.state, waiting.nodes, 3590 < waiting.ttl <= 3600) == (first.id, "queued", 3, True)
    assert (seen[0].id, seen[0].state, 20 < seen[0].ttl <= 30) == (first.id, "running", True)
    assert waiting.hostname
    assert waiting.since > 0
    assert task.singleton.holder(7) is None


def test_cancel_frees_a_waiting_slot_at_once(make, worker, monkeypatch):
    """``cancel()`` revokes a waiting task and frees its slot, also if no worker can be told; it leaves a run alone."""
    seen = []
    task = make(lambda self, shop_id: seen.append(task.singleton.cancel(7)))
    first = task.apply_async((7,), countdown=7200)

    assert task.singleton.cancel(7) == first.id
    assert first.state == "REVOKED"
    assert not task.delay(7).duplicate
    assert task.singleton.cancel(8) is None
    worker.take()
    worker.run()
    assert seen == [None]

    def away(task_id):
        raise OSError("the broker is away")

    task.delay(7)
    monkeypatch.setattr(task.app.control, "revoke", away)
    with pytest.raises(OSError, match="away"):
        task.singleton.cancel(7)
    assert names() == set()


def test_explain(make, worker, memory_nodes):
    """``explain()`` has the key, the arguments, the holder on every node, and what the next call would do."""
    task = make()
    first = task.delay(7)
    memory_nodes[2].down = True

    text = task.singleton.explain(7, since=3)

    assert "arguments  shop_id=7,since=3" in text
    assert f"lock       {NAME}" in text
    nodes = [node.name for node in memory_nodes]
    assert f"{nodes[0]}  queued, task shop.sync (queued) {first.id}" in text
    assert f"{nodes[2]}  no answer" in text
    assert f"return the result of task {first.id}" in text
    assert worker.headers[0]["id"] == first.id
    assert ticket_in(worker.headers[0]).secret not in text
    task.singleton.release(7)
    with locks["default"].lock(NAME, ttl=30, wait=0):
        assert "already revoked, because the holder is not a task" in task.singleton.explain(7)


def test_command(make, app, capsys, memory_nodes):
    """``redlock_inspect --task`` explains a call; it names the nearest task, and says what arguments look like."""
    task = make()
    make(name="shop.broken", key=lambda bound: {}[bound.arguments["shop_id"]])
    app.finalize()

    with pytest.raises(CommandError, match="is free") as free:
        call_command("redlock_inspect", "--task", "shop.sync", "--args", "[7]")
    assert f"lock       {NAME}" in capsys.readouterr().out
    assert free.value.returncode == 1
    task.delay(7)
    call_command("redlock_inspect", "--task", "shop.sync", "--args", "[7]")
    assert "A call now would send nothing" in capsys.readouterr().out
    set_down(memory_nodes, True)
    with pytest.raises(CommandError, match="Too few") as unknown:
        call_command("redlock_inspect", "--task", "shop.sync", "--args", "[7]")
    assert unknown.value.returncode == 3
    set_down(memory_nodes, False)
    for arguments, message in (
        (["--task", "shop.synk"], "did you mean 'shop.sync'"),
        (["--task", "shop.sync", "--args", "7"], "takes a list in JSON"),
        (["--task", "shop.sync", "--args", "["], "are not JSON"),
        (["--task", "shop.sync", "--args", "[]"], "does not take these arguments"),
        (["--task", "shop.broken", "--args", "[7]"], "has no key for these arguments: KeyError: 7"),
        (["--task", "shop.sync", "--format", "json"], "leave out the name"),
        (["--task", "shop.sync", "shop"], "leave out the name"),
        (["shop.sync", "--args", "[7]"], "write --task TASK instead of shop.sync"),
        ([], "Say which lock"),
    ):
        with pytest.raises(CommandError, match=message):
            call_command("redlock_inspect", *arguments)


def test_run_in_its_callers_process_cannot_be_joined(make, worker):
    """Nobody ever stores a result for a direct call, or for ``apply()``: its duplicate is not told to wait for one."""
    got = []
    task = make(lambda self, shop_id: got.append(self.delay(shop_id)), lock_direct_calls=True)

    task(7)
    task.apply((7,))

    assert [(each.duplicate, each.reason, each.holder_id, each.state) for each in got] == [
        (True, "running", None, "REVOKED"),
        (True, "running", None, "REVOKED"),
    ]
    assert "running where it was called" in str(got[0].info)


def test_replacement_that_is_not_sent_replaces_nothing(make, worker):
    """The message that waits keeps its slot, and runs, if the one in its place could not be sent."""
    runs = []
    task = make(lambda self, shop_id: runs.append(shop_id), on_duplicate="replace")
    first = task.delay(7)

    with pytest.raises(SerializerNotInstalled):
        task.apply_async((7,), serializer="nonesuch")

    assert names() == {f"next:{NAME}"}
    assert task.singleton.holder(7).id == first.id
    assert worker.run_all() == ["SUCCESS"]
    assert (runs, first.state, names()) == ([7], "SUCCESS", set())


@pytest.mark.parametrize("again", [copy.copy, lambda result: pickle.loads(pickle.dumps(result))])
def test_copy_of_a_result(make, again):
    """A copy of a result knows whether its call was a duplicate."""
    task = make()
    first = task.delay(7)

    copied = again(task.delay(7))

    assert (copied.id, copied.duplicate, copied.accepted) == (first.id, True, False)
    assert (copied.reason, copied.holder_id) == ("queued", first.id)
    assert not again(first).duplicate


def test_parameter_called_force(app, worker):
    """A task with a parameter of that name is released by the slot of the call with it."""

    @singleton_task(name="shop.forced")
    def forced(force=False):
        pass

    forced.delay(force=True)

    assert forced.singleton.release() == "expired"
    assert forced.singleton.release(force=True) == "released"


def test_eager_call_without_a_slot(make, app):
    """In eager mode a run has its slot; ``singleton=False`` runs beside its duplicate; wrong options are refused."""
    app.conf.task_always_eager = True
    got = []

    def body(self, shop_id):
        if not got:
            got.append(names())
            got.append(self.delay(shop_id).state)
            got.append(self.apply_async((shop_id,), singleton=False).state)

    task = make(body)
    task.delay(7)

    assert (got, names()) == ([{NAME}, "IGNORED", "SUCCESS"], set())
    with pytest.raises(TypeError, match="may have 'on_duplicate'"):
        task.apply_async((7,), singleton={"key": "x"})


def test_skip_without_a_backend_that_can_store_it(make, monkeypatch, caplog):
    """A backend that cannot store that a call was skipped is logged, and the call returns."""
    task = make(on_duplicate="skip")
    task.delay(7)
    monkeypatch.setattr(task.backend, "mark_as_revoked", lambda *about, **more: 1 / 0)

    assert not task.delay(7).accepted
    assert "did not store that task" in caplog.text


@pytest.mark.parametrize("how", ["join", "skip", "rerun", "raise"])
def test_eager_duplicate(make, app, how):
    """In eager mode a duplicate is skipped, or raises if the options say so, and its result says that it is one."""
    app.conf.task_always_eager = True
    task = make(on_duplicate=how)

    with locks["default"].lock(NAME, ttl=30, wait=0):
        if how == "raise":
            with pytest.raises(DuplicateTask):
                task.delay(7)
            assert task.apply_async((7,), task_id="own").state == "IGNORED"
            return
        skipped = task.delay(7)

    assert (skipped.state, skipped.result, skipped.get()) == ("IGNORED", None, None)
    assert (skipped.duplicate, skipped.accepted, skipped.reason, skipped.holder_id) == (True, False, "held", None)
    assert (task.delay(7).get(), task.delay(7).duplicate) == (7, False)


@pytest.mark.parametrize("ignored", [False, True])
def test_result_of_the_holder_is_gone(make, worker, monkeypatch, ignored):
    """A duplicate of a task that is over, and whose result was forgotten, does not wait for that result for ever."""
    task = make(hold_for=60, ignore_result=ignored)
    first = task.delay(7)
    worker.run()

    joined = task.delay(7)
    assert joined.id == first.id
    first.forget()
    later = time.time() + 11.0
    with monkeypatch.context() as patch:
        patch.setattr("django_redlock.celery.dispatch.time", lambda: later)
        late = task.delay(7)

    assert (late.duplicate, late.accepted, late.reason) == (True, False, "held")
    assert (late.id == first.id) is ignored
    if not ignored:
        with pytest.raises(TaskRevokedError):
            late.get(timeout=1)


@pytest.mark.parametrize("strategy", ["rerun", "replace"])
@pytest.mark.parametrize("scope", ["until_executed", "until_executing", "until_and_while_executing"])
def test_calls_after_a_linked_one_share_a_run(make, worker, app, strategy, scope):
    """A linked call keeps its arguments, for its link; calls after it have one id, and one run with the newest ones."""
    ran = []

    def body(self, shop_id):
        ran.append(self.request.args[1])
        return self.request.args[1]

    sync = make(body, on_duplicate=strategy, scope=scope)

    @app.task(name="shop.after")
    def after(value):
        ran.append(f"after {value}")

    sync.apply_async((7, "linked"), link=after.s())

    calls = [sync.delay(7, value) for value in ("second", "third")]

    linked, *waiting = [worker.take() for _ in range(3)]
    assert {(call.id, call.accepted, call.reason) for call in calls} == {(calls[0].id, True, "queued")}
    assert [worker.run(message) for message in waiting] == ["IGNORED", "IGNORED"]
    worker.run(linked)
    worker.run_all()
    assert sorted(ran) == ["after linked", "linked", "third"]


@pytest.mark.parametrize("backend", [None, "disabled://"])
def test_follow_without_a_result_backend(make, worker, app, backend):
    """Without a result backend a message that follows its duplicate waits for the slot and then runs itself."""
    app.conf.result_backend, ran = backend, []
    task = make(lambda self, shop_id: ran.append(shop_id), on_overlap="follow")
    task.delay(7)
    task.apply_async((7,), task_id="own")
    first, second = worker.take(), worker.take()

    assert worker.run(second) == "IGNORED"
    assert worker.run(first) == "SUCCESS"
    assert (worker.run(), ran) == ("SUCCESS", [7, 7])
