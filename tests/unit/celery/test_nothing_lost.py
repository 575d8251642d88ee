"""
What a run does not need may be away, slow or broken: the call runs all the same, or its caller sees why not.

The same faults with real workers and servers are in ``tests/server/workers/test_faults.py``.
"""

from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from celery import signals
from celery.exceptions import Reject, SoftTimeLimitExceeded
from kombu.exceptions import OperationalError

from django_redlock import locks
from django_redlock.celery import (
    Return,
    singleton_duplicate,
    singleton_lost,
    singleton_overlap,
    singleton_stolen,
    singleton_task,
)
from django_redlock.contrib import telemetry
from django_redlock.signals import SIGNALS, lock_acquired
from django_redlock.testing import Simulation

from .slots import NAME, names, set_down

EVENTS = (singleton_duplicate, singleton_overlap, singleton_lost, singleton_stolen)
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body")

TRIES = 10  # how often a copy is put back while the backend is away
AWAY = ("reads", "writes")


class Backend:
    """Breaks a task's result backend, and notes the questions to it."""

    def __init__(self, task: Any, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.fails: tuple[str, ...] = ()
        for name, kind in (("get_task_meta", "reads"), ("_store_result", "writes")):
            patch.setattr(task.backend, name, partial(self._reach, kind, getattr(task.backend, name)))

    def _reach(self, kind: str, do: Any, task_id: str, *about: Any, **more: Any) -> Any:
        self.asked.append(task_id)
        if kind in self.fails:
            raise ConnectionError("away")
        return do(task_id, *about, **more)


@pytest.fixture
def break_backend(monkeypatch):
    return lambda task: Backend(task, monkeypatch)


# The result backend


@pytest.mark.parametrize("options", [{"on_overlap": "follow"}, {"redelivery": "drop"}])
def test_ignored_results_are_not_asked_for(make, worker, break_backend, options):
    """With ``ignore_result=True`` nothing on the way to a run asks the backend, whatever becomes of the message."""

    def body(self, shop_id):
        worker.run(copy, redelivered=True)
        worker.run(by_name)
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = make(body, acks_late=True, ignore_result=True, **options)
    backend = break_backend(task)
    task.delay(7)
    copy = worker.take()
    task.apply_async((7,), task_id="by name")
    by_name = worker.take()

    worker.run(copy, kept=5.0)
    worker.run_all()

    assert (worker.retries[:2], backend.asked) == ([0, 1], [])


def test_slot_that_a_dead_worker_left_to_a_retry(app, make, worker, monkeypatch):
    """A worker dies before it has sent a retry. The slot waits for that retry for a moment, and then a copy runs."""

    def body(self, shop_id):
        if len(worker.retries) == 1:
            with monkeypatch.context() as patch:
                patch.setattr(app.amqp, "send_task_message", die)
                self.retry(countdown=0)

    def die(*about, **more):
        set_down(simulation.nodes)
        raise SystemExit(-9)

    task = make(body, acks_late=True)
    with Simulation(nodes=3, check=False) as simulation:
        result = task.delay(7)
        copy = worker.take()
        with pytest.raises(SystemExit):
            worker.run(copy)
        set_down(simulation.nodes, False)
        assert worker.run(copy, redelivered=True) == "IGNORED"
        assert task.singleton.holder(7).state == "claimed"
        simulation.advance(11.0)
        assert worker.run_all() == ["SUCCESS"]

    assert (worker.retries, result.state) == ([0, 0], "SUCCESS")


@pytest.mark.parametrize("ignored", [True, False, None])
def test_put_back_without_the_backend(make, worker, break_backend, monkeypatch, ignored):
    """A message is put back without a word to the backend, to which Celery subscribes under gevent; it stays itself."""
    task = make(on_overlap="wait")
    options = {} if ignored is None else {"ignore_result": ignored}
    result = task.apply_async((7,), task_id="second", **options)
    monkeypatch.setattr(task.backend, "on_task_call", lambda *about: 1 / 0)
    with locks["default"].lock(NAME, ttl=30, wait=0):
        assert worker.run() == "IGNORED"
        assert worker.run() == "IGNORED"

    assert worker.run_all() == ["SUCCESS"]
    assert result.state == ("PENDING" if ignored else "SUCCESS")


@pytest.mark.parametrize(
    ("options", "state"),
    [
        ({}, "REVOKED"),
        ({"wait_for": 0.0, "on_overlap": "wait"}, "REVOKED"),
        ({"on_overlap": "fail"}, "FAILURE"),
        ({"on_overlap": Return("other")}, "SUCCESS"),
    ],
)
def test_outcome_that_cannot_be_stored(make, worker, break_backend, options, state):
    """A message that is to end without a run is put back until its caller can be told. Then it may as well run."""
    task = make(**options)
    backend = break_backend(task)
    with locks["default"].lock(NAME, ttl=30, wait=0):
        result = task.apply_async((7,), task_id="second")
        backend.fails = ("writes",)
        assert worker.run() == "IGNORED"
        assert len(worker.headers) == 1
        backend.fails = ()
        worker.run_all()
        assert (worker.shops, result.state) == ([], state)
        assert state != "SUCCESS" or result.result == "other"

        other = task.apply_async((7,), task_id="third")
        backend.fails = ("writes",)
        assert worker.run() == "IGNORED"
    backend.fails = ()

    assert worker.run_all() == ["SUCCESS"]
    assert (worker.shops, other.state) == ([7], "SUCCESS")


def test_dropped_copy_whose_outcome_cannot_be_stored(make, worker, break_backend):
    """With ``redelivery="drop"`` a message whose run died never runs again, and its caller learns of that."""

    def body(self, shop_id):
        raise SystemExit(-9)

    task = make(body, redelivery="drop", acks_late=True)
    result = task.delay(7)
    copy = worker.take()
    with pytest.raises(SystemExit):
        worker.run(copy)
    backend = break_backend(task)
    backend.fails = AWAY

    assert worker.run(copy, redelivered=True) == "IGNORED"
    assert result.backend is task.backend
    for _ in range(TRIES + 5):
        assert worker.run() == "IGNORED"
    backend.fails = ()
    assert worker.run_all() == ["IGNORED"]

    assert (worker.shops, result.state) == ([7], "REVOKED")


def test_followed_result_cannot_be_read(make, worker, break_backend):
    """A message that follows another one ends with its result, also if the backend was away in between."""

    def body(self, shop_id):
        if len(worker.ids) == 1:
            assert worker.run() == "IGNORED"
        return "the value"

    task = make(body, on_overlap="follow")
    task.delay(7)
    first = worker.take()
    follower = task.apply_async((7,), task_id="follower")
    backend = break_backend(task)
    backend.fails = ("reads",)
    worker.run(first)
    assert worker.run() == "IGNORED"  # the slot is free, and nobody knows why

    backend.fails = ()
    assert worker.run_all() == ["SUCCESS"]
    assert (len(worker.ids), follower.result) == (1, "the value")


def test_soft_limit_is_not_taken_for_an_answer(make, worker, monkeypatch):
    """A soft time limit that strikes while the backend is asked ends the task, and its slot."""
    task = make(acks_late=True)
    task.delay(7)

    def slow(task_id):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(task.backend, "get_task_meta", slow)

    assert worker.run(redelivered=True) == "FAILURE"
    assert names() == set()


def test_started_is_stored(make, worker, break_backend, monkeypatch):
    """With ``track_started`` the state is STARTED while the body runs, and a backend that is away prevents no run."""
    states = []
    task = make(lambda self, shop_id: states.append(self.AsyncResult(self.request.id).state), track_started=True)
    task.delay(7)
    worker.run()
    task.delay(7)
    backend = break_backend(task)
    backend.fails = ("writes",)
    monkeypatch.setattr(task.backend, "mark_as_done", lambda *about, **more: None)

    assert worker.run() == "SUCCESS"
    assert states == ["STARTED", "PENDING"]


# The lock nodes, right after the slot was taken


@pytest.mark.parametrize(
    ("how", "strategy", "state"),
    [
        ("retry", "join", "RETRY"),
        ("retry", "replace", "IGNORED"),
        ("run", "join", "SUCCESS"),
        ("fail", "join", "FAILURE"),
    ],
)
def test_nodes_fall_silent_after_the_slot_was_taken(make, worker, memory_nodes, how, strategy, state):
    """The message is put back, runs or fails, as ``on_unavailable`` says."""
    task = make(acks_late=True, on_duplicate=strategy, on_unavailable={"run": how})
    result = task.delay(7)

    def fall_silent(lease, **about):
        if lease.name == NAME:
            set_down(memory_nodes)

    lock_acquired.connect(fall_silent)
    assert worker.run(redelivered=True) == state
    lock_acquired.disconnect(fall_silent)

    assert worker.shops == ([7] if how == "run" else [])
    if how == "retry":
        for node in memory_nodes:
            node.down = False
            node.store.reset()  # the lease of the run that never began has ended
        worker.run_all()
    assert result.state == ("FAILURE" if how == "fail" else "SUCCESS")


def test_slot_is_lost_before_the_body_begins(make, worker):
    """A body does not begin without its slot because the questions before it took longer than the lease."""
    with Simulation(nodes=3, check=False) as simulation:
        task = make()
        result = task.delay(7)

        def pause(lease, **about):
            if lease.name == NAME:
                simulation.pause(31.0)
                lock_acquired.disconnect(pause)
                task.apply_async((7,), task_id="second")

        lock_acquired.connect(pause)
        assert worker.run() == "RETRY"
        assert worker.shops == []
        worker.run_all()

    assert (len(worker.shops), result.state) == (2, "SUCCESS")


# What began and did not end


@pytest.mark.parametrize(("late", "first"), [(True, "REJECTED"), (False, "FAILURE")])
def test_broker_refuses_a_message_that_is_put_back(app, make, worker, monkeypatch, late, first):
    """A message that cannot be put back returns to the broker if it can; else its caller sees the failure."""
    task = make(acks_late=late, on_overlap="wait")
    result = task.apply_async((7,), task_id="second")
    message = worker.take()
    refused = lambda *about, **more: (_ for _ in ()).throw(OperationalError("full"))  # noqa: E731
    with monkeypatch.context() as patch, locks["default"].lock(NAME, ttl=30, wait=0):
        patch.setattr(app.amqp, "send_task_message", refused)
        assert worker.run(message) == first

    assert result.state == ("PENDING" if late else "FAILURE")
    if late:
        assert worker.run(message, redelivered=True) == "SUCCESS"
    assert names() == set()


# Ended before the body begins


class Limit(BaseException):
    """A limit or a kill that arrives as gevent's do."""


@pytest.mark.parametrize("error", [SystemExit(-15), Limit(), SoftTimeLimitExceeded(), Reject()])
@pytest.mark.parametrize("options", [{}, {"on_duplicate": "replace"}, {"acks_late": True}])
@pytest.mark.parametrize("where", ["prerun", "init", "before_start"])
def test_ended_before_the_body_begins(app, worker, monkeypatch, where, options, error):
    """An end before the body frees the slot as well, unless the process is stopped and acknowledges late."""

    def fail(*about, **more):
        raise error

    class Mine(app.Task):
        before_start = fail if where == "before_start" else app.Task.before_start

    @singleton_task(name="shop.sync", base=Mine, **options)
    def sync(shop_id): ...

    first = sync.delay(7)
    if where == "init":
        monkeypatch.setattr(app.loader, "on_task_init", fail)
    if where == "prerun":
        signals.task_prerun.connect(fail)
    try:
        with suppress(SystemExit, Limit, Reject):
            worker.run()
    finally:
        signals.task_prerun.disconnect(fail)

    if where != "prerun" or not isinstance(error, Exception):  # Celery logs those, and runs the task
        keeps = "acks_late" in options and error.args == (-15,)
        assert names() == ({NAME} if keeps else set())
        assert (sync.delay(7).id == first.id) is keeps


# Receivers, history, metrics, events


@pytest.fixture
def all_fail():
    """Receivers of all signals, of the locks and of the tasks, and a listener of the metrics; all raise."""
    called: list[str] = []

    def fail(*about, **more):
        called.append("called")
        raise RuntimeError("broken")

    theirs = (signals.task_prerun, signals.task_postrun, signals.before_task_publish, signals.after_task_publish)
    every = [*SIGNALS.values(), *EVENTS, *theirs, signals.task_success, signals.task_received]
    for signal in every:
        signal.connect(fail, weak=False, dispatch_uid="broken")
    telemetry.listen("broken", **dict.fromkeys(SIGNALS, fail))
    yield called
    telemetry.unlisten("broken")
    for signal in every:
        signal.disconnect(dispatch_uid="broken")


def test_receivers_that_fail(make, worker, all_fail):
    """Whatever the receivers of signals do, calls are sent, messages are put back, and bodies run."""

    def body(self, shop_id):
        if len(worker.ids) == 1:
            self.apply_async((7,), task_id="second")
            worker.run()

    task = make(body, on_duplicate="replace", on_overlap="wait")
    first = task.delay(7)
    assert task.delay(7).id
    worker.run_all()

    assert worker.ids[0] == first.id
    assert "second" in worker.ids
    assert (all_fail[:1], names()) == (["called"], set())


def test_events_that_cannot_be_sent(app, make, worker, monkeypatch):
    """Celery events are reports; while the broker does not take them, messages are put back and run as usual."""
    app.conf.worker_send_task_events = app.conf.task_send_sent_event = True
    monkeypatch.setattr(type(app.events), "default_dispatcher", lambda *about, **more: 1 / 0)
    task = make(on_overlap="wait")
    task.apply_async((7,), task_id="second")
    with locks["default"].lock(NAME, ttl=30, wait=0):
        assert worker.run() == "IGNORED"

    assert worker.run_all() == ["SUCCESS"]
    assert worker.shops == [7]
