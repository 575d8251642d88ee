"""A worker and a message."""

from datetime import UTC, datetime, timedelta

import pytest
from celery import chain

from django_redlock import LockLostError, QuorumUnavailableError, locks
from django_redlock.celery import DuplicateTask

from .slots import NAME, names, put_back, set_down, taken, ticket_in


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


def test_direct_calls_can_be_locked(make, worker):
    """With ``lock_direct_calls`` a direct call takes the slot, knows when it is lost, and is refused during a run."""
    seen = []

    def body(self, shop_id):
        seen.append((names(), self.singleton.lease.name, self.singleton.remaining > 0))
        locks["default"].release(NAME, self.singleton.lease.secret)
        locks["default"].lock(NAME, ttl=30, wait=0, renew=False).acquire()
        self.singleton.lease.extend()
        seen.append(self.singleton.lost)
        self.singleton.check()

    task = make(body, lock_direct_calls=True)

    with pytest.raises(LockLostError):
        task(7)
    with pytest.raises(DuplicateTask):
        task(7)
    assert seen == [({NAME}, NAME, True), True]
    assert task.singleton.lease is None


def test_direct_call_without_nodes(make, memory_nodes):
    """Without an answer a direct call runs only if ``on_unavailable`` says so."""
    set_down(memory_nodes)

    assert make(lock_direct_calls=True, on_unavailable={"run": "run"})(7) == 7
    with pytest.raises(QuorumUnavailableError):
        make(lock_direct_calls=True, name="shop.other")(7)


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


def test_run_without_a_slot_is_logged(make, worker, memory_nodes, caplog):
    """``on_unavailable`` may say that the body runs. An eager call has no queue to go back to, and fails."""
    make(on_unavailable={"run": "run"}).delay(7)
    set_down(memory_nodes)

    assert worker.run() == "SUCCESS"
    assert "runs without a slot" in caplog.text
    with pytest.raises(QuorumUnavailableError):
        make(name="shop.eager").apply((7,), throw=True)


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
