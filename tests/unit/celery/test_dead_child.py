"""The slot of a child that has died, and the worker's main process."""

import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from billiard.einfo import ExceptionInfo
from celery.exceptions import TimeLimitExceeded
from kombu.exceptions import DecodeError

from django_redlock.testing import Simulation

from .slots import NAME, begin, names, set_down

LONG_AGO = "2020-01-01T00:00:00+00:00"


@pytest.mark.parametrize("strategy", ["join", "replace"])
def test_copy_of_a_running_message_expires(make, worker, received, strategy):
    """A message that is delivered again during its run, when it would have expired, is not reported as revoked."""

    def body(self, shop_id):
        message.headers["expires"] = LONG_AGO
        assert not received(task, message).revoked()
        assert call.state == "PENDING"
        assert worker.run(message, redelivered=True) == "IGNORED"
        return "done"

    task = make(body, on_duplicate=strategy, acks_late=True)
    call = task.apply_async((7,), expires=600)
    message = worker.take()

    assert worker.run(message) == "SUCCESS"
    assert (call.state, call.get(timeout=1)) == ("SUCCESS", "done")


@pytest.mark.parametrize("how", ["retry", "run"])
@pytest.mark.parametrize("strategy", ["join", "replace"])
def test_expired_message_is_revoked(make, worker, received, strategy, how):
    """A message that expires before its run frees its slot. Without nodes, one that does not wait for them expires."""
    task = make(on_duplicate=strategy, on_unavailable={"run": how})
    with Simulation(nodes=3, check=False) as simulation:
        call = task.apply_async((7,), expires=600)
        message = worker.take()
        message.headers["expires"] = LONG_AGO
        set_down(simulation.nodes, how != "retry")

        assert received(task, message).revoked()
        assert call.state == "REVOKED"
        if how == "retry":
            assert names() == set()


def test_expired_message_is_put_back_while_nodes_are_away(make, worker, received):
    """While the nodes do not answer, nobody knows whether an expired message counts, so its call is not revoked."""
    task = make(on_duplicate="replace")
    with Simulation(nodes=3, check=False) as simulation:
        call = task.delay(7, "older")
        task.delay(7, "newest")
        older, newest = worker.take(), worker.take()
        older.headers["expires"] = LONG_AGO
        set_down(simulation.nodes)

        assert not received(task, older).revoked()
        assert not received(task, newest).revoked()
        assert worker.run(older) == "IGNORED"
        assert (call.state, len(worker.headers)) == ("PENDING", 1)


def test_message_that_cannot_be_decoded(app, make, worker):
    """Its place is free when Celery has acknowledged it, which no signal reports."""
    task = make()
    task.delay(7)
    message = worker.take()
    message.body = "no JSON"
    receive = app.tasks[task.name].start_strategy(app, MagicMock())

    with pytest.raises(DecodeError):
        receive(message, None, None, None, [])

    assert names() == set()


def exceed(request):
    """Tell the main process, as the pool does, that the child has exceeded its hard limit and is about to be killed."""
    try:
        raise TimeLimitExceeded(1)
    except TimeLimitExceeded:
        request.on_failure(ExceptionInfo())
    request.on_timeout(False, 1)


def terminate(request):
    """Tell the main process to end the child."""
    request.terminate(SimpleNamespace(terminate_job=lambda pid, signal: None), "TERM")


@pytest.mark.parametrize("end", [exceed, terminate, lambda request: request.reject(requeue=False)])
@pytest.mark.parametrize("running", [False, True])
def test_message_that_is_ended(make, worker, received, end, running):
    """A message that is ended before its body began has no slot any more; that of a body that may still run stays."""
    task = make()
    task.delay(7)
    request = received(task, worker.take())
    if end in (exceed, terminate):
        request.on_accepted(1, time.monotonic())
        if running:
            begin(request)

    end(request)

    kept = running and end in (exceed, terminate)
    assert names() == ({NAME} if kept else set())
    assert task.delay(7).duplicate is kept


def test_message_that_is_rejected_for_later_keeps_its_slot(make, worker, received):
    """The broker delivers it again, and nobody is served before it."""
    task = make(acks_late=True)
    result = task.delay(7)
    request = received(task, worker.take())

    request.reject(requeue=True)

    assert task.delay(7).id == result.id
