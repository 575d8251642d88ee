"""
What a run does not need may be away, slow or broken: the call runs all the same, or its caller sees why not.

The same faults with real workers and servers are in ``tests/server/workers/test_faults.py``.
"""

import pytest
from celery import signals

from django_redlock import locks
from django_redlock.celery import singleton_duplicate, singleton_lost, singleton_overlap, singleton_stolen
from django_redlock.contrib import telemetry
from django_redlock.signals import SIGNALS

from .slots import NAME, names

EVENTS = (singleton_duplicate, singleton_overlap, singleton_lost, singleton_stolen)
pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body")


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
    make(on_overlap="wait").apply_async((7,), task_id="second")
    with locks["default"].lock(NAME, ttl=30, wait=0):
        assert worker.run() == "IGNORED"

    assert worker.run_all() == ["SUCCESS"]
