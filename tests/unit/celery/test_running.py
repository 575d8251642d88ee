"""A worker and a message; the same with real workers and servers is in ``tests/server/workers``."""

import pytest
from celery import chain, signals
from celery.exceptions import Reject

from django_redlock import LockLostError, QuorumUnavailableError, celery, locks
from django_redlock.celery import DuplicateTask
from django_redlock.contrib import telemetry
from django_redlock.signals import SIGNALS
from django_redlock.testing import Simulation

from .slots import HEADER, NAME, end_child, names, set_down, taken


def test_direct_call_touches_no_lock(make, worker):
    """A direct call, also of the running task by itself, runs at once and without a lock or a lease."""
    seen = []

    def body(self, shop_id):
        self.singleton.check()  # a direct call has no slot to lose
        seen.append((shop_id, taken(f"task:shop.sync:shop_id={shop_id}"), self.singleton.lease is not None))
        if len(seen) == 2:
            self(7)
            self(8)

    task = make(body)
    task(9)
    task.delay(7)

    assert worker.run() == "SUCCESS"
    assert seen == [(9, False, False), (7, True, True), (7, True, False), (8, False, False)]


def test_body_that_calls_itself_is_one_run(make, worker):
    """However deep the calls are, they are part of the run, which a retry in any of them continues."""
    seen = []

    def body(self, shop_id):
        seen.append(shop_id)
        if shop_id:
            self(shop_id - 1)
        elif len(seen) == 4:
            self.retry(countdown=100)

    task = make(body)
    task.delay(3)

    assert (worker.run(), seen) == ("RETRY", [3, 2, 1, 0])
    assert task.delay(3).duplicate


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


@pytest.mark.parametrize("eager", [False, True], ids=["worker", "eager"])
def test_body_that_calls_its_task_for_another_key_takes_the_slot_of_that_key(make, worker, eager):
    """With ``lock_direct_calls`` two runs of one key never overlap; a call for its own key has the slot already."""
    seen = []

    def body(self, shop_id):
        seen.append((shop_id, taken(f"task:shop.sync:shop_id={shop_id}"), self.singleton.lease is not None))
        if len(seen) < 4:
            self([7, 8, 7][len(seen) - 1])
        else:
            with locks["default"].lock("task:shop.sync:shop_id=9"), pytest.raises(DuplicateTask):
                self(9)

    task = make(body, lock_direct_calls=True)
    assert (task.apply((7,)).state if eager else (task.delay(7), worker.run())[1]) == "SUCCESS"
    assert seen == [(7, True, True), (7, True, False), (8, True, True), (7, True, False)]
    assert not any(taken(f"task:shop.sync:shop_id={shop_id}") for shop_id in (7, 8))


def test_retry_of_a_direct_call_with_a_slot_of_its_own_fails_the_run(make, worker):
    """Celery sends no message for it, so the run must not end as one that is tried again."""

    def body(self, shop_id):
        if shop_id == 8:
            self.retry(countdown=0)
        self(8)

    task = make(body, lock_direct_calls=True)
    result = task.delay(7)

    assert worker.run() == "FAILURE"
    assert "was to be tried again, which only a message can" in str(result.result)


def test_run_without_a_slot_calls_its_body_without_one(make, worker):
    """A call that was made with ``singleton=False`` excludes nobody, also where it calls itself."""
    seen = []

    def body(self, shop_id):
        seen.append(shop_id)
        if len(seen) < 2:
            self(7)

    task = make(body, lock_direct_calls=True)
    task.apply_async((7,), singleton=False)

    with locks["default"].lock(NAME):
        assert worker.run() == "SUCCESS"
    assert seen == [7, 7]


def test_body_that_returns_its_work_fails(make, worker):
    """A generator would run when the slot is free, so the run fails; a call under the lock raises the error itself."""
    task = make(lambda self, shop_id: (pytest.fail("ran") for _ in "a"), lock_direct_calls=True)
    task.delay(7)

    assert worker.run() == "FAILURE"
    assert not taken(NAME)
    with pytest.raises(TypeError, match="returned a generator, which would run when its slot is free"):
        task(7)


def test_run_without_nodes(make, worker, memory_nodes, caplog):
    """If ``on_unavailable`` lets it run, that is logged. A call that cannot be put back fails otherwise."""
    make(on_unavailable={"run": "run"}).delay(7)
    direct = make(name="shop.direct", lock_direct_calls=True)
    set_down(memory_nodes)

    assert worker.run() == "SUCCESS"
    assert "runs without a slot" in caplog.text
    for call in (lambda: direct(7), lambda: direct.apply((7,), throw=True)):
        with pytest.raises(QuorumUnavailableError):
            call()


def test_message_is_shown_as_tried_again_while_nodes_are_away(make, worker, memory_nodes):
    """Its state is that of a retry, and the number of its retries stays the same."""
    result = make(max_retries=0).delay(7)
    set_down(memory_nodes)

    assert worker.run() == result.state == "RETRY"
    assert worker.headers[0]["retries"] == 0


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

    assert (leases[0].reason, leases[0].valid(), taken()) == ("released", False, True)


@pytest.mark.parametrize("again", ["retry", "autoretry", "replace"])
def test_body_that_changes_its_argument_keeps_its_slot(make, worker, again):
    """A call is the one that was made, also if its body changes a list or dict in place before a retry."""

    def body(self, shop_id):
        if len(worker.ids) == 1:
            shop_id.append(8)
            if again == "retry":
                self.retry(countdown=0)
            if again == "replace":
                self.replace(self.si(*self.request.args))
            raise OSError

    task = make(body, autoretry_for=(OSError,), default_retry_delay=0, retry_backoff=False)
    first = task.delay([7])
    worker.run()

    assert task.delay([7]).id == first.id
    assert worker.run_all() == ["SUCCESS"]
    assert names() == set()


@pytest.mark.parametrize(
    ("options", "own", "again", "held"),
    [
        ({}, {"hold_for": 60}, {}, {NAME}),
        ({}, {"hold_for": 60}, {"kwargs": {"since": 2}}, {NAME}),
        ({}, {"hold_for": 60}, {"args": (7,), "kwargs": {"since": 2}}, {NAME}),
        ({}, {"hold_for": 60}, {"singleton": {"hold_for": 0}}, set()),
        ({"hold_for": 60}, {"hold_for": 0}, {"kwargs": {"since": 2}}, set()),
        ({}, {"hold_for": lambda call: 60 * call.arguments["shop_id"]}, {}, {NAME}),
        ({"hold_for": lambda call: 60 * (call.arguments["since"] or 0)}, {}, {"kwargs": {"since": 2}}, {NAME}),
    ],
)
def test_retry_has_the_options_of_its_call(make, worker, options, own, again, held):
    """A call's own options hold for its retries, whatever their arguments, unless a retry has others."""

    def body(self, shop_id):
        if not self.request.retries:
            self.retry(countdown=0, **again)

    make(body, **options).apply_async((7,), singleton=own)

    assert (worker.run_all(), names()) == (["RETRY", "SUCCESS"], held)


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


@pytest.fixture
def tail(app):
    """A task at the end of a workflow."""

    @app.task(name="shop.tail")
    def tail(value):
        return f"tail {value}"

    return tail


@pytest.mark.parametrize("way", ["wait", "release"])
def test_replaced_by_a_chain_of_its_own(make, worker, tail, way):
    """A workflow whose first step has the key of the run it replaces goes on in the two ways that the docs tell."""

    def body(self, shop_id):
        if len(worker.ids) > 1:
            return
        if way == "release":
            self.singleton.release()
        try:
            self.replace(chain(self.si(shop_id), tail.si(1)))
        finally:
            worker.run()  # another worker is quicker

    result = make(body, **({"on_overlap": "wait"} if way == "wait" else {})).delay(7)
    worker.run()
    worker.run_all()

    assert (len(worker.ids), result.get(timeout=1), names()) == (2, "tail 1", set())


@pytest.mark.parametrize("scope", ["until_executed", "until_executing", "while_executing", "until_and_while_executing"])
@pytest.mark.parametrize("workflow", [False, True])
def test_eager_run_that_replaces_itself(make, worker, tail, scope, workflow):
    """As with a plain task of Celery, the replacement runs, and its result is that of the call."""

    def body(self, shop_id):
        if len(worker.ids) > 1:
            return f"done {shop_id}"
        return self.replace(chain(self.si(shop_id), tail.s()) if workflow else self.si(shop_id))

    answer = make(body, scope=scope).apply((7,))

    assert (answer.state, answer.get()) == ("SUCCESS", "tail done 7" if workflow else "done 7")
    assert (len(worker.ids), names()) == (2, set())


@pytest.mark.parametrize("late", [False, True], ids=["", "late"])
@pytest.mark.parametrize("event", ["child dies", "is terminated", "exceeds its hard limit"])
@pytest.mark.parametrize("how", [{"scope": "until_executing"}, {"singleton": False}], ids=str)
def test_end_of_a_child_whose_run_has_no_slot(make, worker, received, how, event, late):
    """As with a plain task of Celery, the call ends, or its message is delivered again."""
    free = {"singleton": how["singleton"]} if "singleton" in how else {}
    options = {} if free else how
    task = make(**options, acks_late=late, reject_on_worker_lost=late)
    result = task.apply_async((7,), **free)
    message = worker.take()
    request = received(task, message)
    request.on_accepted(1, 0.0)
    end_child(request, event)

    back = late and event == "child dies"
    expected = "PENDING" if back else "REVOKED" if event == "is terminated" else "FAILURE"
    assert (result.state, worker.returned) == (expected, [message] * back)
    assert task.delay(7).accepted


# A message that takes the place of another one has the same id


@pytest.mark.parametrize("options", [{"scope": "while_executing", "acks_late": True}, {"redelivery": "drop"}], ids=str)
def test_replacement_is_no_copy_of_the_message_that_it_replaces(make, worker, options):
    """It has its id and, as that one, was never retried; it runs, also after it was put back."""

    def body(self, shop_id):
        if len(worker.ids) == 2 and replacements:
            worker.run(replacements.pop())  # another run has the slot now
        if worker.ids.count(self.request.id) == 1:
            self.replace(self.si(shop_id))
        return "done"

    with Simulation() as simulation:
        task = make(body, **options)
        first = task.delay(7)
        worker.run()
        replacements = [worker.take()] if "scope" in options else []
        other = task.delay(7) if replacements else first
        while message := worker.take():
            simulation.advance(3.0)
            worker.run(message)

    assert (first.get(timeout=1), other.get(timeout=1)) == ("done", "done")


@pytest.mark.parametrize("scope", ["until_executed", "until_executing", "while_executing", "until_and_while_executing"])
@pytest.mark.parametrize("again", ["autoretry", "autoretry, eager", "replacement", "replacement, eager", "Reject"])
def test_run_that_is_to_begin_again_does_not_wait_for_its_minimum_hold(make, worker, again, scope):
    """Otherwise its own hold would put it back until that has passed, or end it as a duplicate of itself."""

    def body(self, shop_id):
        if len(worker.ids) == 1:
            if "replacement" in again:
                return self.replace(self.si(shop_id))
            raise Reject("later", requeue=True) if again == "Reject" else KeyError(shop_id)
        return "done"

    retries = {"autoretry_for": (KeyError,), "default_retry_delay": 0}
    task = make(body, hold_for=3600, acks_late=True, scope=scope, **retries)
    if "eager" in again:
        result = task.apply((7,))
    else:
        result = task.delay(7)
        worker.run()
        worker.run(*worker.returned)

    assert (result.get(timeout=1), len(worker.ids)) == ("done", 2)
    if "executed" in scope:
        assert task.delay(7).reason == "held"


def test_rejected_message_that_was_acknowledged_keeps_its_minimum_hold(make, worker):
    """Its broker does not deliver it again."""

    def body(self, shop_id):
        raise Reject("later", requeue=True)

    task = make(body, hold_for=60)
    task.delay(7)
    worker.run()

    assert task.delay(7).reason == "held"


@pytest.mark.parametrize("how", ["singleton=False", "direct", "before its run", "nodes away"])
def test_release_in_a_body_without_a_slot_frees_nothing(make, worker, memory_nodes, how):
    """Also not the slot of another call: without arguments, it is about the run."""
    outcomes = []

    def body(self, shop_id):
        outcomes.append(self.singleton.release())
        return "done"

    scope = {"scope": "until_executing"} if how == "before its run" else {}
    task = make(body, on_unavailable={"run": "run"}, **scope)
    if how == "direct":
        waiting = task.delay(7)
        assert task(7) == "done"
    else:
        result = task.apply_async((7,), **({"singleton": False} if how == "singleton=False" else {}))
        message = worker.take()
        waiting = task.delay(7) if how == "singleton=False" else None
        set_down(memory_nodes, how == "nodes away")
        worker.run(message)
        set_down(memory_nodes, False)
        assert result.get(timeout=1) == "done"

    assert outcomes == ["expired"]
    assert not waiting or task.delay(7).id == waiting.id


def test_message_of_an_alias_that_the_worker_lacks_ends_as_a_plain_one(make, worker, received, caplog):
    """During a deploy, its sender may have other settings. Its slot ends with its time, and that is logged."""
    task = make()
    for event, state in (
        ("child dies", "FAILURE"),
        ("exceeds its hard limit", "FAILURE"),
        ("is terminated", "REVOKED"),
    ):
        result = task.delay(event)
        message = worker.take()
        message.headers[HEADER] = message.headers[HEADER].replace('"default"', '"renamed"')
        request = received(task, message)
        request.on_accepted(1, 0.0)
        end_child(request, event)

        assert result.state == state
        assert "could not be freed" in caplog.text
        caplog.clear()


# ``hold_for`` of runs that have no slot: that of their message is held


@pytest.mark.parametrize("how", ["by id", "by name", "eager", "nodes away"])
def test_message_without_a_slot_holds_it_all_the_same(make, worker, memory_nodes, how):
    task = make(scope="until_executing", hold_for=600)
    set_down(memory_nodes, how == "nodes away")
    match how:
        case "by id":
            task.apply_async((7,), task_id="own")
        case "by name":
            task.app.send_task(task.name, (7,))
        case "eager":
            task.apply((7,))
        case _:
            task.delay(7)
    set_down(memory_nodes, False)
    worker.run_all()

    assert task.delay(7).reason == "held"


def test_slot_is_not_that_of_a_message_that_runs(make, worker):
    """If the nodes are away for the moment at which it would be held, it is free when they are back."""
    with Simulation() as simulation:
        task = make(scope="until_executing", hold_for=60)
        task.delay(7)
        set_down(simulation.nodes)
        worker.run()
        simulation.advance(1.0)
        set_down(simulation.nodes, False)
        simulation.advance(120.0)

        assert task.delay(7).accepted


# Receivers, history, metrics, events: what a run does not need may be away, slow or broken


@pytest.fixture
def all_fail():
    """Receivers of all signals, of the locks and of the tasks, and a listener of the metrics; all raise."""
    called: list[str] = []

    def fail(*about, **more):
        called.append("called")
        raise RuntimeError("broken")

    ours = [getattr(celery, f"singleton_{event}") for event in ("duplicate", "overlap", "lost", "stolen")]
    theirs = (signals.task_prerun, signals.task_postrun, signals.before_task_publish, signals.after_task_publish)
    every = [*SIGNALS.values(), *ours, *theirs, signals.task_success, signals.task_received]
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
