"""
What a run does not need may be away, slow or broken: the call runs all the same, or its caller sees why not.

The same faults with real workers and servers are in ``tests/server/workers/test_faults.py``.
"""

from functools import partial
from typing import Any

import pytest
from celery import signals
from celery.exceptions import SoftTimeLimitExceeded

from django_redlock import locks
from django_redlock.celery import (
    singleton_duplicate,
    singleton_lost,
    singleton_overlap,
    singleton_stolen,
)
from django_redlock.contrib import telemetry
from django_redlock.signals import SIGNALS
from django_redlock.testing import Simulation

from .slots import NAME, names, set_down

EVENTS = (singleton_duplicate, singleton_overlap, singleton_lost, singleton_stolen)
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body")


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
