"""The steps of a call before its message is on its way."""

import copy
import logging
import pickle
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import signals
from celery.backends.base import BaseDictBackend
from celery.contrib.abortable import AbortableAsyncResult, AbortableTask
from celery.result import AsyncResult
from celery.worker.request import Request
from django.db import transaction
from kombu.exceptions import EncodeError, OperationalError

from django_redlock import QuorumUnavailableError, locks
from django_redlock.celery import DuplicateTask, SingletonResult, singleton_task

from .slots import HEADER, NAME, set_down, taken, ticket_in


@pytest.fixture
def make(app):
    """Make a singleton task of this test's app."""

    def make(function: Any = None, **options: Any) -> Any:
        def sync(shop_id):
            return shop_id

        return singleton_task(**({"name": "shop.sync"} | options))(function or sync)

    return make


def pass_time(nodes, seconds):
    for node in nodes:
        node.store.skew += seconds


def test_duplicate_joins(make, worker):
    """The first call sends a message with a ticket. The second one sends nothing and gets the result of the first."""
    task = make()

    first, again = task.delay(7), task.delay(shop_id=7)

    (headers,) = worker.headers
    ticket = ticket_in(headers)
    assert (ticket.name, len(ticket.secret)) == (NAME, 32)
    assert (first.duplicate, first.accepted, first.reason, first.holder_id) == (False, True, "", None)
    assert (again.id, again.duplicate, again.accepted, again.reason) == (first.id, True, False, "queued")


def test_skip(make, worker):
    """
    With "skip", a duplicate gets an id of its own that is already revoked, with the reason.
    """
    task = make(on_duplicate="skip")
    first = task.delay(7)

    second = task.delay(7)

    assert second.id != first.id
    assert (second.state, second.holder_id, second.accepted) == ("REVOKED", first.id, False)
    assert str(second.result) == f"Skipped: {NAME} is queued as task {first.id}."
    assert len(worker.headers) == 1


def test_raise(make):
    """
    With "raise", a duplicate is an error that says who has the slot.
    """
    task = make(on_duplicate="raise")
    first = task.delay(7)

    with pytest.raises(DuplicateTask) as caught:
        task.delay(7)

    assert (caught.value.holder_id, caught.value.state, caught.value.name) == (first.id, "queued", NAME)
    assert 3500 < (caught.value.retry_after or 0) <= 3600


def test_lock_of_another_kind_cannot_be_joined(make):
    """
    When something else than a task has the lock, "join" has no result to join, and skips.
    """
    task = make()

    with locks["default"].lock(NAME):
        result = task.delay(7)

    assert (result.duplicate, result.reason, result.holder_id, result.state) == (True, "held", None, "REVOKED")


def test_links_of_a_duplicate_are_not_lost(make):
    """A duplicate with links is refused with an error: the holder would not follow them."""
    task = make()
    task.delay(7)

    with pytest.raises(DuplicateTask):
        task.apply_async((7,), link=task.si(8))


def test_missing_argument_takes_no_slot(make, worker):
    """A call with wrong arguments fails as it does for every task, before a slot is taken."""
    task = make()

    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'shop_id'"):
        task.delay()

    assert worker.headers == []
    assert not taken("task:shop.sync")


def test_argument_that_cannot_be_sent_leaves_no_slot(make):
    """An argument that has no key, and a key function that fails, take no slot; what only cannot be sent frees it."""
    task = make(key=lambda call: "7")

    with pytest.raises(TypeError, match="argument 'shop_id', a object"):
        make(name="shop.other").delay(object())
    with pytest.raises(KeyError):
        make(name="shop.failing", key=lambda call: call.arguments["nothing"]).delay(7)
    assert locks["default"].survey(count=10)[0].total == 0
    with pytest.raises(EncodeError):
        task.delay(object())

    assert not taken("task:shop.sync:7")


@pytest.mark.server
def test_broker_and_nodes_that_are_away(make, app, memory_nodes, caplog):
    """
    When the broker is away, its error reaches the caller, and the slot is free. If the lock nodes are away as well, it
    is not shown as their consequence, and nothing is reported as sent.
    """
    app.conf.broker_url = "amqp://127.0.0.1:1"
    app.conf.broker_transport_options = {"max_retries": 1, "interval_start": 0, "interval_step": 0}
    task = make()
    with pytest.raises(OperationalError):
        task.apply_async((7,), retry=False)
    assert not taken()
    set_down(memory_nodes)

    with pytest.raises(OperationalError) as caught:
        task.apply_async((7,), retry=False)
    causes, error = [], caught.value
    while error := error.__cause__ or error.__context__:
        causes.append(type(error))
    assert QuorumUnavailableError not in causes
    assert "are sent without a slot" not in caplog.text


def test_abortable_task_can_be_aborted(app, worker):
    """The result of a task that is built on Celery's abortable one aborts its run, also after it was pickled."""
    seen = []

    @singleton_task(name="shop.sync", base=AbortableTask, bind=True)
    def sync(self, shop_id):
        seen.append(self.is_aborted())
        pickle.loads(pickle.dumps(sync.delay(shop_id))).abort()
        seen.append(self.is_aborted())

    first = sync.delay(7)
    worker.run()

    assert seen == [False, True]
    again = copy.copy(first)
    assert isinstance(again, AbortableAsyncResult)
    assert isinstance(again, SingletonResult)
    assert (again.id, again.duplicate, again.backend) == (first.id, False, first.backend)


def test_what_the_own_task_class_has_stays(app, worker):
    """No attribute of the class on which a singleton is built is hidden, whatever Celery uses it for."""
    used = []

    class OwnResult(AsyncResult):
        pass

    class OwnRequest(Request):
        pass

    class Mine(app.Task):
        abstract = True
        Strategy = "celery.worker.strategy:default"
        Request = OwnRequest
        backend = BaseDictBackend(app)

        def AsyncResult(self, task_id):
            used.append("AsyncResult")
            return OwnResult(task_id, backend=self.backend, app=app)

        def apply(self, *args, **options):
            used.append("apply")
            return super().apply(*args, **options)

    mine = ("Strategy", "Request", "backend")

    @singleton_task(name="shop.sync", base=Mine)
    def task(shop_id):
        return shop_id

    assert [getattr(task, name) is getattr(Mine, name) for name in mine] == [True] * 3
    assert isinstance(task.delay(7), OwnResult)
    assert task.apply((8,)).get() == 8
    assert used == ["AsyncResult", "apply"]


def test_signature_sent_twice(make, worker):
    """A signature that is used again draws a new secret each time, and the caller's headers stay as they were."""
    task = make()
    call = task.s(7).set(headers={"colour": "red"})
    call.delay()
    task.singleton.release(7)

    call.delay()

    secrets = {ticket_in(each).secret for each in worker.headers}
    assert len(secrets) == 2
    assert [each["colour"] for each in worker.headers] == ["red", "red"]
    assert call.options["headers"] == {"colour": "red"}


def test_slot_is_not_inherited(make, worker, app):
    """A task started with its parent's headers, or sent by name with them, has no part in the parent's slot."""
    task = make()
    task.delay(7)
    theirs = {HEADER: worker.headers[0][HEADER]}

    app.send_task("shop.sync", (8,), headers=theirs)
    task.apply_async((9,), headers=theirs)

    by_name, by_call = worker.headers[1:]
    assert ticket_in(by_name) is None
    assert ticket_in(by_call).name == "task:shop.sync:shop_id=9"


@pytest.mark.django_db(transaction=True)
def test_rollback_takes_no_slot(make, worker):
    """``delay_on_commit`` takes the slot after the commit, and none if there is a rollback."""
    task = make()

    with transaction.atomic():
        task.delay_on_commit(7)
        assert not taken()
        transaction.set_rollback(True)
    assert (taken(), len(worker.headers)) == (False, 0)
    with transaction.atomic():
        task.delay_on_commit(7)

    assert (taken(), len(worker.headers)) == (True, 1)


def test_countdown_is_added(make, memory_nodes):
    """A message that waits for two hours keeps its slot for them and ``queue_ttl``."""
    task = make(queue_ttl=3600)
    task.apply_async((7,), countdown=7200)

    pass_time(memory_nodes, 7200 + 3590)
    duplicate = task.delay(7).duplicate
    pass_time(memory_nodes, 20)

    assert duplicate
    assert not task.delay(7).duplicate


@pytest.mark.parametrize(
    "options",
    [
        {"expires": 10},
        {"expires": lambda: datetime.now(UTC) + timedelta(seconds=10)},
        {"expires": lambda: (datetime.now(UTC) + timedelta(seconds=10)).isoformat()},
        {"eta": lambda: datetime.now(UTC) + timedelta(seconds=5), "expires": 10},
    ],
)
def test_expiry_ends_the_slot(make, memory_nodes, options):
    """A message that expires has its slot until then, also if no worker is there to drop it."""
    task = make()
    task.apply_async((7,), **{name: value() if callable(value) else value for name, value in options.items()})

    pass_time(memory_nodes, 9)
    before = task.singleton.is_locked(7)
    pass_time(memory_nodes, 2)

    assert before
    assert not task.singleton.is_locked(7)


def test_our_options_do_not_travel(make, worker):
    """The broker sees none of our options."""
    sent: dict[str, Any] = {}
    hook = signals.before_task_publish.connect(
        lambda properties=None, **about: sent.update(properties or {}), weak=False
    )

    make(key=("shop_id",), lease=20, group="shops").delay(7)

    signals.before_task_publish.disconnect(hook)
    assert not {"key", "lease", "group", "singleton_options", "using", "queue_ttl"} & sent.keys()


def test_nodes_down_when_sending(make, worker, memory_nodes, caplog, monkeypatch):
    """With the lock nodes down the message is sent without a secret, and one warning is logged."""
    task = make()
    set_down(memory_nodes)

    with caplog.at_level(logging.WARNING, "django_redlock"):
        results = [task.delay(7) for _ in range(3)]

    assert [result.accepted for result in results] == [True] * 3
    assert [ticket_in(each).secret for each in worker.headers] == [""] * 3
    assert [record.message.partition(",")[0] for record in caplog.records if "singleton" in record.message] == [
        "singleton tasks are sent without a slot"
    ]


def test_release_by_hand(make, worker):
    """``release()`` frees the slot of a message that was lost, that of a running task if forced to, and says so."""
    outcomes = []

    def sync(shop_id):
        outcomes.extend([task.singleton.release(7), task.singleton.release(7, force=True)])

    task = make(sync)
    task.delay(7)
    worker.run()

    assert outcomes == ["taken", "released"]
    task.delay(7)
    assert task.singleton.release(7) == "released"
    assert task.singleton.release(7) == "expired"


def rounds(monkeypatch, call):
    """
    Return how often a call asks the nodes and waits for their answers.

    Over real nodes, a claim is confirmed in the background.
    """
    asked = []
    gather = locks["default"].driver.gather
    ask = gather.ask
    with monkeypatch.context() as patch:
        patch.setattr(gather, "ask", lambda round, *rest: (asked.append(round), ask(round, *rest))[1])
        call()
    return sum(round.timeout > 0 and type(round.requests.get(0)).__name__ != "Extend" for round in asked)


@pytest.mark.parametrize("how", ["join", "skip"])
def test_calls_cost_one_round_trip(make, monkeypatch, how):
    """A call costs one round trip to the nodes, whether it is accepted or a duplicate."""
    task = make(on_duplicate=how, name=f"shop.{how}")

    assert rounds(monkeypatch, lambda: task.delay(7)) == 1
    assert rounds(monkeypatch, lambda: task.delay(7)) == 1


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({"on_duplicate": "rerun"}, 2),
        ({"on_duplicate": "replace"}, 3),
        ({"on_duplicate": "rerun", "scope": "until_executing"}, 3),
    ],
)
def test_first_call_where_others_may_be_pending(make, monkeypatch, options, cost):
    """Such a call looks for a pending one first, and waits for its turn only if later calls can take it over."""
    task = make(**options)

    assert rounds(monkeypatch, lambda: task.delay(7)) == cost


@pytest.mark.parametrize(
    ("kept", "release", "cost"),
    [(True, None, 2), (True, "send", 2), (False, None, 1), (False, "send", 1), (False, "wait", 2)],
)
def test_round_trips_of_a_run(make, worker, monkeypatch, kept, release, cost):
    """
    A run costs one round trip to take its slot. It waits for the release if its result is stored, so that whoever sees
    the result finds the slot free; otherwise only if the settings say so.
    """
    monkeypatch.setattr(locks["default"], "rules", replace(locks["default"].rules, release=release))
    make(ignore_result=not kept).delay(7)
    message = worker.take()

    assert rounds(monkeypatch, lambda: worker.run(message)) == cost
