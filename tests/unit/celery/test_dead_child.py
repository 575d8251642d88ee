"""The slot of a child that has died, and the worker's main process."""

from dataclasses import replace

import pytest
from celery import Task
from kombu.exceptions import DecodeError

from django_redlock.celery.request import freeing_unreadable
from django_redlock.celery.sightings import peek
from django_redlock.celery.slots import RUN_HEADER, take_running, take_waiting
from django_redlock.engine.acquirer import fresh_secret
from django_redlock.engine.renewal import watchdog

from .slots import NAME, die, names, ticket_of


def begin(request):
    """Take the slot as the child does that runs the message."""
    watchdog.forget(take_running(ticket_of(request), 30, "shop.sync", request.request_dict[RUN_HEADER]))


def leave_to_a_retry(request):
    """Leave the slot to a retry that is never sent, as a child that dies before it can."""
    ticket = ticket_of(request)
    take_waiting(replace(ticket, secret=fresh_secret()), 3600, "shop.sync", adopt=ticket.secret)


@pytest.mark.parametrize("scope", ["until_executed", "until_executing", "until_and_while_executing"])
def test_child_died_before_it_sent_its_retry(make, worker, received, scope):
    """
    The slot that was kept for a retry which was never sent is free when the child is dead. C41 C51
    """
    task = make(scope=scope)
    task.delay(7)
    request = received(task, worker.take())
    leave_to_a_retry(request)

    die(request)

    assert names() == set()


def test_message_goes_on_whose_retry_was_never_sent(make, worker, received):
    """
    With ``reject_on_worker_lost`` the message gets the slot that was kept for its retry, and runs at once. C59
    """
    runs = []
    task = make(lambda self, shop_id: runs.append(shop_id), acks_late=True, reject_on_worker_lost=True)
    task.delay(7)
    message = worker.take()
    request = received(task, message)
    leave_to_a_retry(request)

    die(request)

    assert peek("default", NAME).secret == ticket_of(request).secret
    assert worker.run(message, redelivered=True) == "SUCCESS"
    assert (runs, names()) == ([7], set())


def test_worker_died_before_it_sent_its_retry(make, worker, received):
    """
    If nobody is left who could tell, the message that comes again takes that slot at its second look. C51
    """
    runs = []
    task = make(lambda self, shop_id: runs.append(shop_id), acks_late=True)
    task.delay(7)
    message = worker.take()
    leave_to_a_retry(received(task, message))

    assert worker.run(message, redelivered=True) == "IGNORED"
    assert runs == []
    assert worker.run() == "SUCCESS"
    assert (runs, names()) == ([7], set())


def test_copy_of_a_message_whose_retry_waits(make, worker):
    """
    A copy that has looked before leaves the slot to a retry that was sent. C51 C78
    """
    runs = []

    def body(self, shop_id):
        runs.append(self.request.retries)
        if self.request.retries:
            return
        worker.run(message, redelivered=True)
        raise self.retry(countdown=600)

    task = make(body, acks_late=True)
    task.delay(7)
    message = worker.take()
    worker.run(message)
    copy, retry = worker.take(), worker.take()

    assert [worker.run(copy), worker.run(retry)] == ["IGNORED", "SUCCESS"]
    assert runs == [0, 1]


@pytest.mark.parametrize("strategy", ["rerun", "replace"])
def test_no_older_message_runs_when_the_newest_was_revoked(make, worker, received, strategy):
    """
    A worker discards the newest message of a pending call. Another worker, which does not know that the call was
    revoked, runs no older arguments in its place. C69 C96
    """
    ran = []

    def body(self, shop_id):
        ran.append(self.request.args[1])
        if ran == ["running"]:
            task.delay(7, "older")
            task.delay(7, "newest")

    task = make(body, on_duplicate=strategy)
    task.delay(7, "running")
    worker.run()
    older, newest = worker.take(), worker.take()

    received(task, newest)._announce_revoked("revoked", False, None, False)

    assert worker.run(older) == "IGNORED"
    assert (ran, names()) == (["running"], set())
    later = task.delay(7, "later")
    worker.run_all()
    assert later.accepted
    assert ran == ["running", "later"]


if hasattr(Task, "retry_on_worker_lost"):  # from Celery 5.7 on

    def test_slot_is_kept_for_the_retry_of_a_dead_child(make, worker, received, monkeypatch):
        """
        Between the death of a child and the retry that Celery sends for it, nobody can take the slot. C59
        """
        runs, between = [], []
        task = make(lambda self, shop_id: runs.append(shop_id), retry_on_worker_lost=True)
        first = task.delay(7)
        request = received(task, worker.take())
        begin(request)
        real = request.task.signature_from_request

        def slowly(*about, **options):
            between.append(task.delay(7))
            return real(*about, **options)

        monkeypatch.setattr(request.task, "signature_from_request", slowly)

        die(request)

        assert [(call.id, call.reason) for call in between] == [(first.id, "queued")]
        assert worker.run_all() == ["SUCCESS"]
        assert (runs, names()) == ([7], set())

    def test_slot_is_free_when_there_are_no_retries_left(make, worker, received):
        """
        A child that dies in the last attempt leaves nothing behind. C59
        """
        task = make(retry_on_worker_lost=True, max_retries=0)
        task.delay(7)
        request = received(task, worker.take())
        begin(request)

        die(request)

        assert (names(), worker.headers) == (set(), [])


def test_message_that_cannot_be_decoded(make, worker):
    """
    Its place is free when Celery has acknowledged it, which no signal reports. C41
    """
    task = make()
    task.delay(7)
    message = worker.take()
    message.body = "no JSON"

    def receive(message):  # as Celery's own strategy begins
        return message.payload

    with pytest.raises(DecodeError):
        freeing_unreadable(receive)(message)

    assert names() == set()
