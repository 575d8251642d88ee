"""The steps of a call before its message is on its way."""

import copy
import pickle
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from unittest.mock import MagicMock

import pytest
from celery.backends.base import BaseDictBackend
from celery.contrib.abortable import AbortableAsyncResult, AbortableTask
from celery.contrib.django.task import DjangoTask
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult, ResultSet
from celery.worker.request import Request
from django.db import transaction
from kombu.exceptions import OperationalError

from django_redlock import locks
from django_redlock.celery import DuplicateTask, SingletonResult, singleton_task
from django_redlock.testing import Simulation

from .slots import HEADER, NAME, names, set_down, taken, ticket_in
from .stage import refuse


def test_duplicate_joins(make, worker):
    """The second call sends nothing, and gets the result of the first, with the reason, also when it is copied."""
    task = make()

    first, again = task.delay(7), task.delay(shop_id=7)

    assert [ticket_in(headers).name for headers in worker.headers] == [NAME]
    assert (first.duplicate, first.accepted, first.reason, first.holder_id) == (False, True, "", None)
    for each in (again, copy.copy(again), pickle.loads(pickle.dumps(again))):
        assert (each.id, each.duplicate, each.accepted) == (first.id, True, False)
        assert (each.reason, each.holder_id) == ("queued", first.id)


def test_result_set_of_duplicates(make, worker):
    """A set of results has one value for each call, also for those that joined another."""
    task = make()
    results = ResultSet([task.delay(7), task.delay(7), task.delay(8)])
    worker.run_all()

    assert results.get() == [7, 7, 8]


@pytest.mark.parametrize("options", [{}, {"on_duplicate": "rerun"}], ids=str)
@pytest.mark.parametrize("where", ["task", "setting", "call"])
def test_duplicate_of_a_task_that_stores_no_result(make, app, options, where):
    """Its ``get()`` returns at once, as that of the first call does."""
    app.conf.task_ignore_result = where == "setting"
    task = make(**options, **({"ignore_result": True} if where == "task" else {}))
    for _ in range(3):
        result = task.apply_async((7, 1), **({"ignore_result": True} if where == "call" else {}))
        assert result.get(timeout=0) is None
    assert not result.accepted


def test_skip(make, monkeypatch, caplog):
    """A skipped call has a result of its own, which is revoked, with the reason, whatever the backend stores."""
    task = make(on_duplicate="skip")
    first, skipped = task.delay(7), task.delay(7)

    assert str(skipped.result) == f"Skipped: {NAME} is queued as task {first.id}."
    assert (skipped.state, skipped.holder_id, skipped.accepted) == ("REVOKED", first.id, False)
    monkeypatch.setattr(task.backend, "mark_as_revoked", lambda *about, **more: None)
    with pytest.raises(TaskRevokedError, match=r"Skipped: .* is queued as task"):
        task.delay(7).get(timeout=1)
    monkeypatch.setattr(task.backend, "mark_as_revoked", lambda *about, **more: 1 / 0)
    assert not task.delay(7).accepted
    assert "did not store that task" in caplog.text


def test_raise(make):
    """With "raise", a duplicate is an error that says who has the slot, also after pickle, as Celery stores it."""
    task = make(on_duplicate="raise")
    first = task.delay(7)

    with pytest.raises(DuplicateTask) as caught:
        task.delay(7)

    for error in (caught.value, pickle.loads(pickle.dumps(caught.value)), DuplicateTask(*caught.value.args)):
        assert (error.holder_id, error.state, error.name) == (first.id, "queued", NAME)
        assert 3500 < (error.retry_after or 0) <= 3600
        assert str(error) == f"'{NAME}' is queued as task {first.id}."


def test_result_of_the_holder_is_gone(make, worker):
    """A duplicate of a task that is over, and whose result was forgotten, does not wait for that result for ever."""
    with Simulation() as simulation:
        task = make(hold_for=60)
        first = task.delay(7)
        worker.run()
        first.forget()
        simulation.advance(11.0)

        late = task.delay(7)

    assert (late.duplicate, late.reason, late.id == first.id, late.state) == (True, "held", False, "REVOKED")


def test_duplicate_before_the_result_of_the_holder_is_stored(make, worker, monkeypatch):
    """It has the result of the run whose slot is held, however long that run was."""
    with Simulation() as simulation:
        task = make(lambda self, shop_id: simulation.advance(100.0) or "value", hold_for=3600)
        first, during = task.delay(7), []
        store = task.backend._store_result
        monkeypatch.setattr(
            task.backend, "_store_result", lambda *about, **more: during.append(task.delay(7)) or store(*about, **more)
        )
        worker.run()

    assert {(each.duplicate, each.reason, each.id, each.get(timeout=1)) for each in during} == {
        (True, "held", first.id, "value")
    }


def test_nodes_that_are_away_are_logged_once_and_hide_no_error(make, app, memory_nodes, monkeypatch, caplog):
    """Messages are sent without a slot, with one warning; an error of the broker shows nothing of the nodes."""
    task = make()
    set_down(memory_nodes)
    with monkeypatch.context() as patch:
        patch.setattr(app.amqp, "send_task_message", refuse)
        with pytest.raises(OperationalError) as caught:
            task.delay(7)
    assert (caught.value.__cause__, caught.value.__context__, "without a slot" in caplog.text) == (None, None, False)

    results = [task.delay(7) for _ in range(3)]

    assert [result.accepted for result in results] == [True] * 3
    assert [each.partition(",")[0] for each in caplog.messages if "without a slot" in each] == [
        "singleton tasks are sent without a slot"
    ]


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
    assert isinstance(first, AbortableAsyncResult)
    assert isinstance(first, SingletonResult)


def test_what_the_own_task_class_has_stays(app, worker):
    """Nothing of the class on which a singleton is built is hidden or runs twice; its request is mixed with ours."""
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

        def __call__(self, *args, **kwargs):
            used.append("call")
            return self.run(*args, **kwargs)

        def before_start(self, *about):
            used.append("before")

        def after_return(self, *about):
            used.append("after")

    mine = ("Strategy", "Request", "backend")

    @singleton_task(name="shop.sync", base=Mine, ignore_result=True)
    def task(shop_id):
        return shop_id

    assert [getattr(task, name) is getattr(Mine, name) for name in mine] == [True] * 3
    assert isinstance(task.delay(7), OwnResult)
    assert task.apply((8,)).get() == 8
    worker.run()
    assert used == ["AsyncResult", "apply", *(each for _ in range(2) for each in ("before", "call", "after"))]

    task = app.tasks["shop.sync"]
    task.start_strategy(app, MagicMock())
    mixed = task.Request
    task.start_strategy(app, MagicMock())

    assert issubclass(mixed, OwnRequest)
    assert mixed is not OwnRequest
    assert task.Request is mixed


def test_slot_is_not_inherited(make, worker, app):
    """A signature used again, and a call with the headers of another one, have no part in the first one's slot."""
    task = make()
    call = task.s(7).set(headers={"colour": "red"})
    call.delay()
    task.singleton.release(7)
    theirs = {HEADER: worker.headers[0][HEADER]}

    call.delay()
    app.send_task("shop.sync", (8,), headers=theirs)
    task.apply_async((9,), headers=theirs)

    first, again, by_name, by_call = worker.headers
    assert ticket_in(first).secret != ticket_in(again).secret
    assert again["colour"] == "red"
    assert call.options["headers"] == {"colour": "red"}
    assert ticket_in(by_name) is None
    assert ticket_in(by_call).name == "task:shop.sync:shop_id=9"


@pytest.mark.parametrize("written", [lambda moment: moment, datetime.isoformat], ids=["moment", "text"])
def test_slot_lasts_until_the_message_expires(make, written):
    """If no worker drops it, however the moment is written; the table of outcomes has seconds."""
    task, now = make(queue_ttl=3600), datetime.now(UTC)
    task.apply_async((7,), eta=now + timedelta(seconds=5), expires=written(now + timedelta(seconds=10)))
    assert 5 < task.singleton.holder(7).ttl <= 10


@pytest.mark.parametrize("options", [{}, {"on_duplicate": "rerun"}, {"on_duplicate": "replace"}], ids=str)
@pytest.mark.parametrize("returns", [lambda sent: None, lambda sent: AsyncResult(sent.id), lambda sent: sent.id])
def test_own_class_that_returns_what_it_likes(app, make, worker, returns, options):
    """The caller gets a result of its message, with what is known of the call, also where tasks run at once."""

    class Own(app.Task):
        def apply_async(self, *args, **options):
            return returns(super().apply_async(*args, **options))

    task = make(base=Own, **options)
    first, second = task.delay(7, 1), task.delay(7, 2)
    own = task.apply_async((8,), singleton=False)
    assert (first.id, first.duplicate, first.accepted) == (worker.headers[0]["id"], False, True)
    assert (second.duplicate, second.reason, second.holder_id) == (True, "queued", first.id)
    assert second.id in [headers["id"] for headers in worker.headers]
    assert (own.id, own.duplicate) == (worker.headers[-1]["id"], False)

    app.conf.task_always_eager = True

    assert (task.delay(9).duplicate, task.apply_async((9,), task_id="own").id) == (False, "own")


@contextmanager
def transaction_that_fails():
    with suppress(InterruptedError), transaction.atomic():
        yield
        raise InterruptedError


@pytest.mark.parametrize("options", [{}, {"on_duplicate": "rerun"}, {"on_duplicate": "replace"}], ids=str)
def test_own_class_that_chooses_ids(app, make, worker, caplog, options):
    """Its messages run, without a slot while they wait, and one warning says what to write instead."""

    class Readable(app.Task):
        def apply_async(self, *args, task_id, **options):
            return super().apply_async(*args, task_id=f"{self.name}-{task_id}", **options)

    task = make(base=Readable, **options)
    results = [task.delay(7), task.delay(7)]

    assert names() == set()
    assert worker.run_all() == ["SUCCESS"] * 2
    assert worker.ids == [result.id for result in results]
    assert [each for each in caplog.messages if "apply_async(task_id=...)" in each] == [
        f"the class of task shop.sync sent a message as {worker.ids[0]}, not under its id {worker.ids[0][10:]}: such "
        "messages have no slot while they wait, so every call is sent. Leave task_id in apply_async() as it is; a "
        "caller may choose it, with apply_async(task_id=...)."
    ]


@pytest.mark.django_db(transaction=True)
def test_own_class_that_sends_after_the_commit(app, make, worker):
    """Its slot is taken at the call, and after a rollback kept for ``queue_ttl``."""

    class Later(app.Task):
        def apply_async(self, *args, **options):
            transaction.on_commit(lambda: super(Later, self).apply_async(*args, **options))

    task = make(base=Later, queue_ttl=60)
    with transaction.atomic():
        task.delay(7)
        assert (taken(), worker.headers) == (True, [])
    assert worker.run() == "SUCCESS"
    with transaction_that_fails():
        task.delay(7)

    assert (task.singleton.holder(7).state, worker.headers) == ("queued", [])
    assert 50 < task.singleton.holder(7).ttl <= 60


@pytest.mark.django_db(transaction=True)
def test_call_on_commit(make, worker):
    """It takes the slot, and sends its message, after the commit; after a rollback it does neither."""
    task = make(base=DjangoTask)
    with transaction_that_fails():
        task.delay_on_commit(7)
    assert (taken(), worker.headers) == (False, [])
    with transaction.atomic():
        task.delay_on_commit(7)
        assert not taken()

    assert (taken(), len(worker.headers)) == (True, 1)


def rounds(monkeypatch, call):
    """Return how often a call asks the nodes and waits; over real nodes, a claim is confirmed in the background."""
    asked = []
    gather = locks["default"].driver.gather
    ask = gather.ask
    with monkeypatch.context() as patch:
        patch.setattr(gather, "ask", lambda round, *rest: (asked.append(round), ask(round, *rest))[1])
        call()
    return sum(round.timeout > 0 and type(round.requests.get(0)).__name__ != "Extend" for round in asked)


@pytest.mark.parametrize(
    ("options", "cost"),
    [
        ({}, 1),
        ({"on_duplicate": "skip"}, 1),
        ({"on_duplicate": "rerun"}, 2),
        ({"on_duplicate": "replace"}, 3),
        ({"on_duplicate": "rerun", "scope": "until_executing"}, 3),
    ],
)
def test_round_trips_of_a_call(make, monkeypatch, options, cost):
    """A call costs one round trip, also a duplicate, unless it looks for a pending one that it could take over."""
    task = make(**options)

    assert rounds(monkeypatch, lambda: task.delay(7)) == cost
    assert cost > 1 or rounds(monkeypatch, lambda: task.delay(7)) == 1
