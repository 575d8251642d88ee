"""A worker and a message."""

from datetime import UTC, datetime, timedelta

import pytest
from celery import chain
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded, TaskRevokedError

from django_redlock import QuorumUnavailableError, locks
from django_redlock.celery import DuplicateTask

from .slots import NAME, names, put_back, set_down, taken, ticket_in


def test_slot_is_free_before_the_result_is_stored(make, worker, monkeypatch):
    """When the result becomes visible, the slot is free."""
    task = make()
    free = []
    store = task.backend.store_result
    monkeypatch.setattr(task.backend, "store_result", lambda *a, **k: (free.append(not taken()), store(*a, **k)))
    task.delay(7)

    worker.run()

    assert free == [True]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ValueError("no"), "FAILURE"),
        (Ignore(), "IGNORED"),
        (Reject("no", requeue=False), "REJECTED"),
        (SoftTimeLimitExceeded(), "FAILURE"),
        (SystemExit(1), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_way_out_frees_the_slot(make, worker, error, state, late):
    """However the body ends, its slot is free, also with late acknowledgement: Celery does not run it again."""

    def body(self, shop_id):
        raise error

    make(body, acks_late=late).delay(7)

    if state:
        assert worker.run() == state
    else:
        with pytest.raises(SystemExit):
            worker.run()
    assert not taken()


@pytest.mark.parametrize("how", ["drop", "fail"])
def test_message_that_was_sent_by_name_does_not_run_beside_another(make, worker, app, how):
    """It is revoked, or fails, and says why; it leaves the holder's slot alone. Afterwards such a message runs."""
    taken_still = []

    def body(self, shop_id):
        if not taken_still:
            app.send_task("shop.sync", (7,), task_id="second")
            worker.run()
            taken_still.append(taken())

    task = make(body, on_overlap=how)
    first = task.delay(7)
    worker.run()

    error = TaskRevokedError if how == "drop" else DuplicateTask
    with pytest.raises(error, match=f"{NAME}.* is running as task {first.id}"):
        task.AsyncResult("second").get(timeout=1)
    assert taken_still == [True]
    app.send_task("shop.sync", (7,))
    assert worker.run() == "SUCCESS"


def test_direct_call_touches_no_lock(make, worker):
    """A direct call, also of the running task by itself, runs at once and without a lock."""
    seen = []

    def body(self, shop_id):
        self.singleton.check()  # a direct call has no slot to lose
        seen.append((shop_id, taken(f"task:shop.sync:shop_id={shop_id}")))
        if len(seen) == 2:
            self(7)
            self(8)

    task = make(body)
    task(9)
    task.delay(7)

    assert worker.run() == "SUCCESS"
    assert seen == [(9, False), (7, True), (7, True), (8, False)]


@pytest.mark.parametrize("options", [{}, {"hold_for": 100}], ids=["retry", "hold_for"])
def test_run_that_leaves_its_slot_taken_has_not_lost_it(make, worker, options):
    """The lease of a run ends with the run, even if the slot stays taken: nothing reports it as lost later."""
    leases = []

    def body(self, shop_id):
        leases.append(self.singleton.lease)
        if not options:
            self.retry(countdown=100)

    make(body, **options).delay(7)
    worker.run()

    assert (leases[0].reason, leases[0].valid()) == ("released", False)
    assert taken()


def test_retry_can_start_before_the_first_attempt_is_over(make, worker):
    """A retry that another worker picks up at once runs, and the end of the first attempt does not free its slot."""
    seen = []

    def body(self, shop_id):
        if self.request.retries:
            seen.append(("second", taken()))
            return
        self.retry(countdown=0, throw=False)
        seen.append(worker.run())
        seen.append(self.singleton.lease)

    make(body).delay(7)
    assert worker.run() == "SUCCESS"

    assert seen == [("second", True), "SUCCESS", None]
    assert not taken()


def test_retry_that_cannot_be_sent(make, worker, monkeypatch):
    """When the retry cannot be sent its error counts, and the slot is free."""

    def body(self, shop_id):
        monkeypatch.setattr(self.app, "send_task", refuse)
        self.retry(countdown=0)

    def refuse(*args, **kwargs):
        raise OSError("the broker is gone")

    make(body).delay(7)

    assert worker.run() == "REJECTED"
    assert not taken()


def test_retry_with_other_arguments(make, worker):
    """A retry with other arguments leaves the old slot and takes the new one."""

    def body(self, shop_id):
        if shop_id == 7:
            raise self.retry(args=(8,), countdown=0)

    make(body).delay(7)
    worker.run()

    assert (taken(), taken("task:shop.sync:shop_id=8")) == (False, True)
    assert worker.run() == "SUCCESS"
    assert not taken("task:shop.sync:shop_id=8")


@pytest.mark.parametrize("again", ["retry", "autoretry", "replace"])
def test_body_that_changes_its_argument_keeps_its_slot(make, worker, again):
    """A call is the one that was made, also if its body changes a list or dict in place before a retry."""
    seen = []

    def body(self, shop_id):
        if not seen:
            seen.append(shop_id)
            shop_id.append(8)
            if again == "retry":
                raise self.retry(countdown=0)
            if again == "replace":
                self.replace(self.si(*self.request.args))
            raise OSError

    task = make(body, autoretry_for=(OSError,), default_retry_delay=0, retry_backoff=False)
    first = task.delay([7])
    worker.run()

    assert task.delay([7]).id == first.id
    assert worker.run_all() == ["SUCCESS"]
    assert names() == set()


def test_retry_is_sent_though_the_slot_is_lost(make, worker, memory_nodes):
    """A retry is sent also if somebody else has the slot by now, and leaves that one alone."""

    def body(self, shop_id):
        for node in memory_nodes:
            node.store.reset()
        self.delay(7)
        raise self.retry(countdown=0)

    task = make(body)
    first = task.delay(7)
    worker.run()

    other, retry = worker.headers
    assert (retry["id"], ticket_in(retry).secret) == (first.id, "")
    assert ticket_in(other).secret
    assert taken()


@pytest.mark.parametrize(("goes_on", "colour"), [("retry", "red"), ("replace", None)])
def test_work_that_goes_on_keeps_its_slot(make, worker, goes_on, colour):
    """A retry, and a task that replaces itself, has the slot, also if the caller uses headers within headers."""

    def body(self, shop_id):
        if len(worker.ids) == 1:
            raise self.retry(countdown=0) if goes_on == "retry" else self.replace(self.s(7))
        return (self.request.headers or {}).get("colour")

    task = make(body)
    result = task.apply_async((7,), headers={"headers": {"colour": "red"}})
    worker.run()

    assert task.delay(7).id == result.id
    assert worker.run() == "SUCCESS"
    assert result.get(timeout=1) == colour
    assert not taken()


def test_nodes_down_at_start(make, worker, memory_nodes):
    """Without an answer from the nodes the message goes back, uses up no retry, and pauses for a minute at most."""
    task = make(max_retries=0)
    result = task.delay(7)
    set_down(memory_nodes, True)

    assert worker.run() == worker.run() == "RETRY"
    assert worker.retries == []
    assert result.state == "RETRY"
    ticket = ticket_in(worker.headers[0])
    assert (ticket.tries, worker.headers[0]["retries"]) == (2, 0)
    message = worker.take()
    put_back(message.headers, tries=5000)
    assert worker.run(message) == "RETRY"
    assert datetime.fromisoformat(worker.headers[0]["eta"]) - datetime.now(UTC) < timedelta(seconds=70)
    set_down(memory_nodes, False)
    assert worker.run() == "SUCCESS"
    assert worker.retries == [0]
    assert not taken()


def test_nodes_down_at_start_can_run_or_fail(make, worker, memory_nodes, caplog):
    """``on_unavailable`` may say that the task fails, or that the body runs; the place in the queue is free then."""
    fail = make(name="shop.fail", on_unavailable={"run": "fail"})
    run = make(lambda self, shop_id: set_down(memory_nodes, False), on_unavailable={"run": "run"})
    run.delay(7)
    set_down(memory_nodes, True)
    failed = fail.delay(7)
    waits = worker.take()

    with pytest.raises(QuorumUnavailableError):
        make(name="shop.eager").apply((7,), throw=True)  # there is no queue to go back to
    assert [worker.run(), worker.run(waits)] == ["FAILURE", "SUCCESS"]
    assert names() == set()
    with pytest.raises(QuorumUnavailableError):
        failed.get(timeout=1)
    assert "runs without a slot" in caplog.text


def test_errback_of_a_skipped_task(make, worker, app, monkeypatch):
    """It is called, because its caller asked to hear; if something fails after that, it is not called again."""
    seen = []
    task = make()
    mark = task.backend.mark_as_failure
    monkeypatch.setattr(task.backend, "mark_as_failure", lambda *about, **more: (mark(*about, **more), 1 / 0))

    @app.task(name="shop.errback")
    def errback(request, error, trace):
        seen.append(str(error))

    with locks["default"].lock(NAME):
        result = task.apply_async((7,), task_id="mine", link_error=errback.s())
        states = worker.run_all()

    assert (states, result.state) == (["IGNORED"], "REVOKED")
    assert ["Skipped" in each for each in seen] == [True]


@pytest.mark.parametrize("way", ["wait", "release"])
def test_replaced_by_a_chain_of_its_own(app, make, worker, way):
    """A workflow whose first step has the key of the run it replaces goes on in the two ways that the docs tell."""
    seen = []

    @app.task(name="shop.tail")
    def tail(value):
        seen.append("tail")

    def body(self, shop_id):
        seen.append("body")
        if len(seen) > 1:
            return
        if way == "release":
            self.singleton.release()
        try:
            self.replace(chain(self.si(shop_id), tail.si(1)))
        finally:
            worker.run()  # another worker is quicker

    task = make(body, on_overlap="wait") if way == "wait" else make(body)
    task.delay(7)
    worker.run()
    worker.run_all()

    assert seen == ["body", "body", "tail"]
    assert names() == set()


@pytest.mark.parametrize("scope", ["until_executed", "until_executing", "while_executing", "until_and_while_executing"])
@pytest.mark.parametrize("workflow", [False, True])
def test_eager_run_that_replaces_itself(app, make, worker, scope, workflow):
    """As with a plain task of Celery, the replacement runs, and its result is that of the call."""

    @app.task(name="shop.tail")
    def tail(value):
        return f"tail {value}"

    def body(self, shop_id):
        if len(worker.ids) > 1:
            return f"done {shop_id}"
        return self.replace(chain(self.si(shop_id), tail.s()) if workflow else self.si(shop_id))

    answer = make(body, scope=scope).apply((7,))

    assert (answer.state, answer.get()) == ("SUCCESS", "tail done 7" if workflow else "done 7")
    assert len(worker.ids) == 2
    assert names() == set()
