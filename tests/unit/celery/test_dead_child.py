"""The slot of a child that has died, and the worker's main process."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from billiard.einfo import ExceptionInfo
from celery import Task
from celery.exceptions import TimeLimitExceeded
from kombu.exceptions import DecodeError

from django_redlock.celery import pending
from django_redlock.celery import pending as trailing
from django_redlock.celery.request import freeing_unreadable
from django_redlock.celery.slots import RUN_HEADER, claim, peek, take_running
from django_redlock.engine.manager import fresh_secret
from django_redlock.engine.watchdog import watchdog
from django_redlock.nodes.clock import steady

from .slots import NAME, die, names, ticket_of


def begin(request):
    """Take the slot as the child does that runs the message."""
    watchdog.forget(take_running(ticket_of(request), {"ttl": 30}, "shop.sync", request.request_dict[RUN_HEADER]))


def leave_to_a_retry(request):
    """Leave the slot to a retry that is never sent, as a child that dies before it can."""
    ticket = ticket_of(request)
    claim(replace(ticket, secret=fresh_secret()), 3600, "shop.sync", adopt=ticket.secret)


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


@pytest.fixture
def debounced(make, worker):
    """A task with two messages of one pending call, the older of which comes later; returns what they need."""
    ran = []
    task = make(lambda self, shop_id: ran.append(self.request.args[1]), on_duplicate="replace", queue_ttl=60)
    task.apply_async((7, "older"), countdown=7200, expires=7300)
    newest = task.apply_async((7, "newest"))
    return task, ran, newest, worker.take(), worker.take()


def test_revocation_is_known_for_as_long_as_an_older_message_waits(debounced, received):
    """
    The older message of a revoked call has a countdown that is longer than ``queue_ttl``. The note that keeps it from
    running lasts as long. C69 C96
    """
    task, _, call, _, newest = debounced

    received(task, newest)._announce_revoked("revoked", False, None, False)

    assert peek("default", f"began:{call.id}").left > 7200


def test_older_message_that_expires_does_not_revoke_the_newest(debounced, worker, received):
    """
    The older message of a pending call expires. The newest one has the same id, does not expire, and runs. C29 C96
    """
    task, ran, call, older, newest = debounced
    older.headers["expires"] = "2020-01-01T00:00:00+00:00"

    assert not received(task, older).revoked()
    assert not received(task, newest).revoked()

    assert call.state == "PENDING"
    assert [worker.run(older), worker.run(newest)] == ["IGNORED", "SUCCESS"]
    assert (ran, names()) == (["newest"], set())


def test_newest_message_that_expires_ends_its_call(debounced, worker, received):
    """
    The newest message of a pending call expires. Its callers see that, and nothing else runs. C29 C96
    """
    task, ran, call, older, newest = debounced
    newest.headers["expires"] = "2020-01-01T00:00:00+00:00"

    assert received(task, newest).revoked()

    assert call.state == "REVOKED"
    assert worker.run(older) == "IGNORED"
    assert (ran, names()) == ([], set())


def test_message_expires_while_a_call_takes_it_over(make, worker, received, monkeypatch):
    """
    A call sends a message for a pending call whose own message expires at this moment, and the worker does not get the
    turn. The call gets a result of its own, in place of the one that is about to be revoked. C29 C96 C99
    """
    monkeypatch.setattr(pending, "SHORT_LINE", 0.0)
    ran = []
    task = make(lambda self, shop_id: ran.append(self.request.args[1]), on_duplicate="replace")
    expiring = task.apply_async((7, "expires"), expires=300)
    older = worker.take()
    older.headers["expires"] = "2020-01-01T00:00:00+00:00"
    real = trailing.take_over

    def slowly(*about):
        assert received(task, older).revoked()
        return real(*about)

    monkeypatch.setattr(trailing, "take_over", slowly)

    later = task.delay(7, "later")
    for message in iter(worker.take, None):
        if not received(task, message).revoked():
            worker.run(message)

    assert (expiring.state, later.state) == ("REVOKED", "SUCCESS")
    assert (ran, names()) == (["later"], set())


@pytest.mark.parametrize("strategy", ["join", "rerun", "replace"])
def test_copy_of_a_running_message_expires(make, worker, received, strategy):
    """
    A message with late acknowledgement is delivered again during its run, when it would have expired. The run is not
    reported as revoked. C29 C75
    """

    def body(self, shop_id):
        message.headers["expires"] = "2020-01-01T00:00:00+00:00"
        assert not received(task, message).revoked()
        assert call.state == "PENDING"
        assert worker.run(message, redelivered=True) == "IGNORED"
        return "done"

    task = make(body, on_duplicate=strategy, acks_late=True)
    call = task.apply_async((7,), expires=600)
    message = worker.take()

    assert worker.run(message) == "SUCCESS"
    assert (call.state, call.get(timeout=1)) == ("SUCCESS", "done")


def test_expired_message_frees_its_slot(make, worker, received):
    """
    A message that expires before its run is revoked, and frees its slot. C29 C41
    """
    task = make()
    call = task.apply_async((7,), expires=600)
    message = worker.take()
    message.headers["expires"] = "2020-01-01T00:00:00+00:00"

    assert received(task, message).revoked()

    assert (call.state, names()) == ("REVOKED", set())


@pytest.mark.parametrize("how", ["run", "fail"])
@pytest.mark.parametrize("strategy", ["join", "replace"])
def test_expired_message_does_not_run_without_nodes(make, worker, received, memory_nodes, strategy, how):
    """
    While the nodes do not answer, a message that does not wait for them expires as in Celery. C29 C35
    """
    task = make(on_duplicate=strategy, on_unavailable={"run": how})
    call = task.apply_async((7,), expires=600)
    message = worker.take()
    message.headers["expires"] = "2020-01-01T00:00:00+00:00"
    for node in memory_nodes:
        node.down = True

    assert received(task, message).revoked()
    assert call.state == "REVOKED"


def test_expired_message_is_put_back_while_nodes_are_away(debounced, worker, received, memory_nodes):
    """
    While the nodes do not answer, nobody knows whether an expired message counts, so its call is not revoked. C29 C96
    """
    task, _, call, older, newest = debounced
    older.headers["expires"] = "2020-01-01T00:00:00+00:00"
    for node in memory_nodes:
        node.down = True

    assert not received(task, older).revoked()
    assert not received(task, newest).revoked()
    assert worker.run(older) == "IGNORED"
    assert (call.state, len(worker.headers)) == ("PENDING", 1)


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


@pytest.mark.parametrize("strategy", ["join", "rerun", "replace"])
@pytest.mark.parametrize("end", [exceed, terminate, lambda request: request.reject(requeue=False)])
def test_ended_before_its_body_began(make, worker, received, end, strategy):
    """
    A message that is ended before its body began has no slot any more: nobody joins a call that has failed. C65 C66
    """
    task = make(on_duplicate=strategy)
    task.delay(7)
    request = received(task, worker.take())
    if end in (exceed, terminate):
        request.on_accepted(1, steady())

    end(request)

    assert names() == set()
    assert not task.delay(7).duplicate


@pytest.mark.parametrize("end", [exceed, terminate])
def test_ended_while_its_body_runs(make, worker, received, end):
    """
    The slot of a body that may still be running stays for as long as that may be. C65 C66
    """
    task = make()
    task.delay(7)
    request = received(task, worker.take())
    request.on_accepted(1, steady())
    begin(request)

    end(request)

    assert names() == {NAME}


def test_message_that_is_rejected_for_later_keeps_its_slot(make, worker, received):
    """
    The broker delivers it again, and nobody is served before it. C71
    """
    task = make(acks_late=True)
    result = task.delay(7)
    request = received(task, worker.take())

    request.reject(requeue=True)

    assert task.delay(7).id == result.id
