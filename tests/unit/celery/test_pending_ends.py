"""Messages of a pending call that end without a run, and calls that find a revoked one."""

from threading import Thread
from typing import Any

import pytest
from celery.worker.state import revoked

from django_redlock.celery import pending, singleton_task
from django_redlock.celery import pending as trailing
from django_redlock.celery.pending import began_name
from django_redlock.celery.slots import HEADER, Ticket, peek

from .slots import die, names, ticket_of


@pytest.fixture
def during_a_run(make, worker):
    """
    Make calls while a first call runs.

    Returns a function of the calls, each a value and Celery's options, and of the task's options. It returns the task,
    the values that ran, the messages of the calls, and their results.
    """

    def during_a_run(*calls: tuple[str, dict[str, Any]], **options: Any) -> Any:
        ran, results, messages = [], [], []

        def body(self, shop_id):
            ran.append(self.request.args[1])
            if ran == ["running"]:
                results.extend(task.apply_async((7, value), **about) for value, about in calls)
                messages.extend(worker.take() for _ in calls)

        task = make(body, **options)
        task.delay(7, "running")
        worker.run()
        return task, ran, messages, results

    return during_a_run


@pytest.fixture
def no_revocations():
    """Forget the ids of expired calls, as a worker does when it ends."""
    yield
    revoked.clear()


@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_older_message_that_expires_does_not_revoke_the_newest(
    during_a_run,
    worker,
    received,
    strategy,
    no_revocations,
):
    """
    Celery revokes the id of a message that has expired. A newer message of the pending call has this id, and runs. C96
    """
    task, ran, (older, newest), results = during_a_run(
        ("older", {"expires": -1}), ("newest", {}), on_duplicate=strategy
    )

    assert not received(task, older).revoked()
    assert not received(task, newest).revoked()
    assert worker.run(older) == "IGNORED"
    assert worker.run(newest) == "SUCCESS"
    assert ran == ["running", "newest"]
    assert results[0].state == "SUCCESS"


def test_newest_message_expires(during_a_run, worker, received, no_revocations):
    """
    The newest message of a pending call ends the call when it expires, and no older one runs. C96
    """
    task, ran, (older, newest), results = during_a_run(("older", {}), ("newest", {"expires": -1}), on_duplicate="rerun")

    assert received(task, newest).revoked()
    revoked.clear()  # another worker does not know of it
    assert worker.run(older) == "IGNORED"
    assert (ran, results[1].state, names()) == (["running"], "REVOKED", set())


@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_no_older_message_runs_when_the_newest_has_waited_too_long(make, worker, strategy):
    """
    After ``wait_for``, the newest message is dropped. An older one that arrives later does not run in its place. C60
    """
    ran, kept = [], []

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if ran == ["running"]:
            kept.append(task.apply_async((7, "older"), countdown=600))
            kept.append(task.apply_async((7, "newest")))
            kept.append(worker.take())
            assert worker.run() == "IGNORED"

    task = make(body, on_duplicate=strategy, wait_for=0)
    task.delay(7, "running")
    worker.run()

    assert kept[1].state == "REVOKED"
    assert worker.run(kept[2]) == "IGNORED"
    assert (ran, kept[1].state) == (["running"], "REVOKED")


def test_no_older_message_runs_when_before_start_ends_the_newest(app, worker):
    """
    The project's ``before_start`` ends the newest message with an error, and no older one runs in its place. C96
    """
    ran = []

    class Base(app.Task):
        def before_start(self, task_id, args, kwargs):
            if args[1] == "newest":
                raise ValueError("not now")

    @singleton_task(base=Base, name="shop.sync", key=("shop_id",), on_duplicate="replace")
    def sync(shop_id, since):
        ran.append(since)

    sync.delay(7, "older")
    call = sync.delay(7, "newest")
    older = worker.take()

    assert worker.run() == "FAILURE"
    assert worker.run(older) == "IGNORED"
    assert (ran, call.state, names()) == ([], "FAILURE", set())


def test_no_older_message_runs_when_the_child_of_the_newest_died(make, worker, received):
    """
    A child dies before it begins the newest message. Its caller sees that, and no older message runs. C96
    """
    ran = []
    task = make(lambda self, shop_id: ran.append(shop_id), on_duplicate="replace")
    task.delay(7, "older")
    call = task.delay(7, "newest")
    older, newest = worker.take(), worker.take()

    die(received(task, newest))

    assert worker.run(older) == "IGNORED"
    assert (ran, call.state, names()) == ([], "FAILURE", set())


def test_note_lasts_until_the_latest_older_message_arrives(make, worker, received):
    """
    An older message with a long countdown still finds the note that the newest one was discarded. C69 C96
    """
    task = make(on_duplicate="replace")
    task.apply_async((7, "older"), countdown=7200)
    call = task.delay(7, "newest")
    worker.take()
    newest = worker.take()

    received(task, newest)._announce_revoked("revoked", False, None, False)

    assert peek("default", began_name(call.id)).left > 7200


def test_revoked_message_for_an_alias_that_is_not_configured(make, worker, received, caplog):
    """
    A worker's main process survives a revoked message whose alias its settings do not have. C96
    """
    task = make(on_duplicate="replace")
    call = task.delay(7)
    request = received(task, worker.take())
    ticket = ticket_of(request)
    request.request_dict[HEADER] = Ticket(
        ticket.name, "other", ticket.task_id, ticket.secret, number=ticket.number
    ).pack()

    request._announce_revoked("revoked", False, None, False)

    assert call.state == "REVOKED"
    assert "could not be noted as over" in caplog.text


def test_message_is_revoked_before_its_caller_has_written_the_record(make, worker, received, monkeypatch):
    """
    A worker discards a message whose caller has just sent it. No record of the revoked call is left. C69 C96
    """
    monkeypatch.setattr(pending, "SHORT_LINE", 60.0)
    task = make(on_duplicate="replace")
    task.delay(7, "older")
    worker.take()
    real, waiting = trailing.take_over, []

    def take_over(*about):
        request = received(task, worker.take())
        waiting.append(Thread(target=request._announce_revoked, args=("revoked", False, None, False)))
        waiting[0].start()
        waiting[0].join(0.2)
        assert waiting[0].is_alive()  # without the turn, it would have ended
        real(*about)

    monkeypatch.setattr(trailing, "take_over", take_over)
    call = task.delay(7, "newest")
    waiting[0].join()

    assert (call.state, names()) == ("REVOKED", set())


# Revoked before its time


@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_pending_call_that_was_revoked_is_out_of_the_way(make, worker, strategy):
    """
    A pending call with a countdown was revoked. An equal call is a duplicate of the run only. C69
    """
    answers = []

    def body(self, shop_id):
        if not answers:
            pending = task.apply_async((7, "same"), countdown=7200)
            task.backend.mark_as_revoked(pending.id, "by an operator")
            answers.extend([pending, task.delay(7, "same")])

    task = make(body, on_duplicate=strategy)
    first = task.delay(7)
    worker.run()
    pending, again = answers

    assert again.id != pending.id
    assert (again.accepted, again.duplicate, again.reason, again.holder_id) == (True, True, "running", first.id)


@pytest.mark.parametrize("cancelled", [False, True])
def test_no_message_of_a_revoked_call_runs_later(make, worker, cancelled):
    """
    A pending call was revoked or cancelled while no worker could know, and made way. None of its messages runs. C69 C96
    """
    ran = []
    task = make(lambda self, shop_id: ran.append(self.request.args[1]), on_duplicate="replace")
    task.delay(7, "older")
    first = task.apply_async((7, "newest"), countdown=7200)
    older, newest = worker.take(), worker.take()

    if cancelled:
        task.singleton.cancel(7)
    else:
        task.backend.mark_as_revoked(first.id, "by an operator")
    task.delay(7, "next")
    worker.run_all()

    assert (worker.run(older), worker.run(newest)) == ("IGNORED", "IGNORED")
    assert (ran, first.state, names()) == (["next"], "REVOKED", set())


@pytest.mark.parametrize("scope", ["until_executed", "until_executing", "until_and_while_executing"])
@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_waiting_call_that_was_revoked_is_out_of_the_way(make, worker, strategy, scope):
    """
    A call with a countdown was revoked while nothing runs. The next call runs at once. C69
    """
    ran = []
    task = make(lambda self, shop_id: ran.append(self.request.args[1]), on_duplicate=strategy, scope=scope)
    first = task.apply_async((7, "same"), countdown=7200)
    task.backend.mark_as_revoked(first.id, "by an operator")
    worker.take()

    again = task.delay(7, "same")

    assert (again.id != first.id, again.accepted, again.duplicate) == (True, True, False)
    assert worker.run() == "SUCCESS"
    assert (ran, names()) == (["same"], set())


def test_call_does_not_wait_for_a_revoked_retry(make, worker):
    """
    A retry with a countdown was revoked. Calls that come later take the slot that was kept for it. C69
    """
    ran = []

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if ran == ["retried"]:
            raise self.retry(countdown=7200)

    task = make(body, on_duplicate="replace")
    first = task.delay(7, "retried")
    worker.run()
    task.backend.mark_as_revoked(first.id, "by an operator")
    worker.take()

    again = task.delay(7, "next")

    assert (again.duplicate, worker.run()) == (False, "SUCCESS")
    assert ran == ["retried", "next"]
