"""Options of calls, beat, reports, and the methods of ``task.singleton``, beyond the table of outcomes."""

import asyncio
import logging
import os
import socket
import time
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from celery.beat import Scheduler
from celery.schedules import schedule
from celery.signals import beat_init
from django.core.management import CommandError, call_command
from kombu.serialization import registry

from django_redlock import LockLostError, celery, locks
from django_redlock.celery import DuplicateTask, SingletonOptions, dispatch, override_singleton, singleton_task
from django_redlock.celery.dispatch import CONTENT_HEADER

from .slots import HEADER, NAME, names, set_down, take_slot, taken, ticket_in

# Calls and messages


@pytest.mark.parametrize("options", [{}, {"on_duplicate": "rerun"}])
def test_run_that_waits_for_its_own_end(make, worker, options):
    """A run that calls its own task and waits for the result gets an error, and does not wait for ever."""

    def body(self, shop_id):
        with pytest.raises(RuntimeError, match="would wait for ever"):
            self.delay(shop_id, since=None).get(disable_sync_subtasks=False)

    make(body, **options).delay(7)

    assert worker.run() == "SUCCESS"


def test_message_that_waits_keeps_its_expiry_and_what_it_hides(make, worker):
    """A message that was put back expires when it would have, and shows the text that stands in for its arguments."""
    task = make(on_overlap="wait")
    with locks["default"].lock(NAME):
        task.apply_async((7,), {"since": "PASSWORD"}, task_id="second", expires=100, kwargsrepr="HIDDEN")
        before = worker.headers[0]["expires"]
        worker.run()

    assert (worker.headers[0]["expires"], worker.headers[0]["kwargsrepr"]) == (before, "HIDDEN")


@pytest.mark.parametrize("written", [{"serializer": "pickle"}, {"compression": "bzip2"}], ids=str)
def test_message_that_waits_is_written_as_before(make, worker, received, monkeypatch, written):
    """A message that is put back has the serializer and the compression with which it was sent."""
    monkeypatch.setattr(registry, "_disabled_content_types", set())
    form = lambda message: (message.content_type, message.headers.get("compression"))  # noqa: E731
    task = make(scope="while_executing")
    task.apply_async((7, "all"), **written)
    sent = worker.take()
    with locks["default"].lock(NAME):
        worker.run(sent)
    again = worker.take()

    assert form(again) == form(sent) != ("application/json", None)
    assert received(task, sent).request_dict[CONTENT_HEADER] == sent.content_type
    assert (worker.run(again), worker.values) == ("SUCCESS", ["all"])


def test_follow_without_a_result_backend(make, worker, app):
    """Without a result backend a message that follows its duplicate waits for the slot and then runs itself."""
    app.conf.result_backend = None
    task = make(on_overlap="follow")
    task.delay(7)
    task.apply_async((7,), task_id="own")
    first, second = worker.take(), worker.take()

    assert [worker.run(second), worker.run(first), worker.run()] == ["IGNORED", "SUCCESS", "SUCCESS"]


def test_options_of_one_call(make, worker):
    """One call may choose what it gets as a duplicate, and for how long it waits in the queue."""
    task = make()
    task.apply_async((7,), singleton={"queue_ttl": 60})

    with pytest.raises(DuplicateTask) as caught:
        task.apply_async((7,), singleton={"on_duplicate": "raise"})
    assert caught.value.retry_after < 61
    for wrong, message in (
        ({"on_duplicates": "raise"}, "'on_duplicates'; did you mean 'on_duplicate'"),
        ({"on_duplicate": "replace"}, "for the task as a whole"),
        (True, "is False or a dict such as"),
        ("raise", "is False or a dict such as"),
    ):
        with pytest.raises(TypeError, match=message):
            task.apply_async((7,), singleton=wrong)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"scope": "while_executing"}, {}),
        ({"on_overlap": "wait"}, {}),
        ({"on_duplicate": "rerun"}, {}),
        ({"on_overlap": "wait"}, {"on_overlap": "fail"}),
    ],
)
def test_options_of_a_call_that_a_deploy_has_overtaken(make, worker, app, before, after):
    """A message whose own option has no meaning for the present task runs as the others do."""
    make(**before).apply_async((7,), singleton={"wait_for": 600})
    type(app.tasks["shop.sync"]).singleton_options = SingletonOptions(key=("shop_id",), **after)

    assert (worker.run(), worker.values, names()) == ("SUCCESS", [None], set())


def test_message_whose_own_fields_cannot_be_read(make, worker):
    """A message that cannot run for this reason leaves no slot behind."""
    make().delay(7)
    message = worker.take()
    message.headers["expires"] = "tomorrow"

    assert (worker.run(message), names()) == ("FAILURE", set())


def test_switched_off_for_a_test(make, worker):
    """With ``override_singleton(enabled=False)`` tasks are sent and run as ordinary ones."""
    task = make(on_duplicate="raise", on_overlap="fail")

    @override_singleton(enabled=False)
    async def off():
        return task.delay(7)

    def fixture():
        yield

    with override_singleton(enabled=False), locks["default"].lock(NAME):
        assert len({task.delay(7).id, task.delay(7).id}) == 2
        assert worker.run_all() == ["SUCCESS"] * 2
    task.delay(7)
    with pytest.raises(DuplicateTask):
        task.delay(7)
    assert not asyncio.run(off()).duplicate  # while it runs, and not only while it is made
    for wrong in (
        fixture,
        contextmanager(fixture),
        Scheduler,
    ):  # it would be over too early, or the class lose its tests
        with pytest.raises(TypeError, match="write it as a with block"):
            override_singleton(enabled=False)(wrong)


def test_eager_call_has_its_own_options(make, app):
    """The minimum hold of one call is kept, or left out, as by a worker."""
    app.conf.task_always_eager = True
    plain, held = make(), make(name="shop.held", hold_for=60)

    plain.apply_async((7,), singleton={"hold_for": 60})
    held.apply_async((7,), singleton={"hold_for": 0})

    assert (plain.singleton.is_locked(7), held.singleton.is_locked(7)) == (True, False)


def test_eager_retry_has_the_slot_of_its_own_arguments(make, app):
    """Also if the call has options of its own, which the retry keeps."""
    app.conf.task_always_eager = True
    seen = []

    def body(self, shop_id):
        seen.append((shop_id, taken(f"task:shop.sync:shop_id={shop_id}")))
        if shop_id == 7:
            self.retry(args=(8,), countdown=0)

    make(body).apply_async((7,), singleton={"queue_ttl": 60})

    assert seen == [(7, True), (8, True)]


def test_eager_duplicate(make, app):
    """In eager mode a duplicate is skipped, or raises if the options say so, and its result says that it is one."""
    app.conf.task_always_eager = True
    task, raises = make(), make(name="shop.raises", on_duplicate="raise")

    with locks["default"].lock([NAME, "task:shop.raises:shop_id=7"], ttl=30, wait=0):
        skipped = task.delay(7)
        with pytest.raises(DuplicateTask):
            raises.delay(7)
        assert raises.apply_async((7,), task_id="own").state == "IGNORED"
        assert task.apply_async((7,), singleton=False).state == "SUCCESS"
        with pytest.raises(TypeError, match="may have 'on_duplicate'"):
            task.apply_async((7,), singleton={"key": "x"})

    assert (skipped.state, skipped.result, skipped.get()) == ("IGNORED", None, None)
    assert (skipped.duplicate, skipped.accepted, skipped.reason, skipped.holder_id) == (True, False, "held", None)
    assert (task.delay(7).get(), task.delay(7).duplicate) == (7, False)


# Beat


@pytest.fixture
def beat(app, caplog):
    """Let beat call a task, or call it as a program; returns the events in the log."""

    def beat(task, level=logging.INFO, tick=True):
        options = {"headers": {}}
        entry = Scheduler.Entry("often", task.name, args=(7,), options=options, schedule=schedule(60.0), app=app)
        caplog.clear()
        with caplog.at_level(level, "django_redlock"), suppress(DuplicateTask):
            Scheduler(app, lazy=True).apply_entry(entry) if tick else task.delay(7)
        assert HEADER not in options["headers"]
        assert not any(record.exc_info for record in caplog.records)
        return [record.event for record in caplog.records if record.name == "django_redlock"]

    return beat


def test_raise_in_beat_is_one_line(make, worker, beat):
    """A beat schedule that meets its duplicate with ``on_duplicate="raise"`` logs one line, and no traceback."""
    task = make(on_duplicate="raise")
    beat_init.send(sender=None)

    assert [beat(task), beat(task)] == [[], ["singleton_duplicate"]]
    assert len(worker.headers) == 1


def test_tick_of_a_second_beat_is_not_worth_a_line(make, worker, beat, monkeypatch, told):
    """``hold_for`` exists for such ticks; a task that is busy for longer, and the call of a program, are logged."""
    task = make(hold_for=50)
    task.delay(7)

    assert beat(task, tick=False) == ["singleton_duplicate"]
    beat_init.send(sender=None)
    assert (beat(task), beat(task, logging.DEBUG)) == ([], ["singleton_duplicate"])
    with monkeypatch.context() as later:
        later.setattr(dispatch, "time", lambda: time.time() + 60)
        assert beat(task) == ["singleton_duplicate"]  # no worker has run the task meanwhile
    worker.run()
    assert beat(task) == []
    assert [about["state"] for _, about in told] == ["queued"] * 4 + ["held"]


# Reports

SIGNALS = ("singleton_duplicate", "singleton_overlap", "singleton_lost", "singleton_stolen")


@pytest.fixture
def told():
    """What the signals told: their names and arguments."""
    heard: list[Any] = []

    def receiver(signal, sender, **about):
        heard.append((next(name for name in SIGNALS if getattr(celery, name) is signal), about))

    for name in SIGNALS:
        getattr(celery, name).connect(receiver)
    yield heard
    for name in SIGNALS:
        getattr(celery, name).disconnect(receiver)


def events(caplog, level="INFO"):
    """Return the events, locks and texts of the records about singletons in the log."""
    ours = [each for each in caplog.records if getattr(each, "event", "").startswith("singleton")]
    return [(each.event, each.lock, each.message) for each in ours if each.levelname == level]


def test_signals(make, worker, told, caplog):
    """A duplicate and an overlap are reported by a signal and a log line with fields, with the ids of both."""

    def body(self, shop_id):
        if self.request.id != "second":
            task.delay(7)
            self.apply_async((7,), task_id="second")
            worker.run()

    task = make(body)
    first = task.delay(7)
    with caplog.at_level(logging.INFO, "django_redlock"):
        worker.run()

    assert [(name, about["holder_id"], about["state"], about["strategy"]) for name, about in told] == [
        ("singleton_duplicate", first.id, "running", "join"),
        ("singleton_overlap", first.id, "running", "drop"),
    ]
    logged = [event for level in ("INFO", "WARNING") for event in events(caplog, level)]
    assert [event[:2] for event in logged] == [("singleton_duplicate", NAME), ("singleton_overlap", NAME)]


@pytest.mark.parametrize("options", [{}, {"hold_for": 60}])
def test_run_that_ends_after_its_slot_was_freed_by_force(make, worker, told, caplog, options):
    """A run whose slot another run got is reported at its end, if no renewal has shown the loss before."""
    others, leases = [], []

    def body(self, shop_id):
        leases.append(self.singleton.lease)
        assert task.singleton.release(shop_id, since=None, force=True) == "released"
        others.append(take_slot(task.singleton_ticket("second", (shop_id,), {})))

    task, process = make(body, **options), f"{socket.gethostname()}:{os.getpid()}"
    first = task.delay(7)
    worker.run()
    assert names() == {NAME}  # the other run's slot
    others[0].release()  # otherwise it would be lost, and reported, during a later test
    assert leases[0].hold.due() == float("inf")  # the watchdog does not report it once more

    lost = f"{NAME} was lost by task {first.id} (superseded); now it is held by task shop.sync second on {process}"
    assert events(caplog, "ERROR") == [("singleton_stolen", NAME, lost)]
    assert [(name, about["task_id"], about["reason"]) for name, about in told] == [
        ("singleton_stolen", first.id, "superseded")
    ]


@pytest.mark.parametrize("renewed", [False, True])
def test_run_whose_slot_an_operator_freed_learns_who_did_so(make, worker, told, renewed):
    """It was stolen rather than forgotten by the nodes, whether a renewal or only the end of the run shows that."""

    def body(self, shop_id):
        assert self.singleton.release(shop_id, since=None, force=True) == "released"
        assert not renewed or not self.singleton.lease.extend()

    make(body).delay(7)
    worker.run()

    assert [(name, about["reason"]) for name, about in told] == [("singleton_stolen", "revoked")]


def test_stolen_slot_is_told(make, worker, told, caplog):
    """A run learns that somebody took its slot when it asks, by the error of ``check()``; the log has one error."""

    def body(self, shop_id):
        self.singleton.check()
        locks["default"].on_behalf(NAME, adopt=self.singleton.lease.secret, detached=True, wait=0).acquire()
        self.singleton.lease.extend()
        assert (self.singleton.lost, self.singleton.remaining) == (True, 0.0)
        self.singleton.check()

    result = make(body).delay(7)

    assert worker.run() == "FAILURE"
    assert isinstance(result.result, LockLostError)
    assert [(name, about["reason"]) for name, about in told] == [("singleton_stolen", "superseded")]
    assert names() == {NAME}
    assert [event for event, *_ in events(caplog, "ERROR")] == ["singleton_stolen"]


# By hand


def test_holder(make, worker):
    """``holder()`` says who has the slot, in which state, since when, for how long, where, and on how many nodes."""
    seen = []
    task = make(lambda self, shop_id: seen.append(task.singleton.holder(7)))
    first = task.delay(7)
    waiting = task.singleton.holder(7)
    worker.run()

    assert (waiting.id, waiting.state, waiting.nodes, 3590 < waiting.ttl <= 3600) == (first.id, "queued", 3, True)
    assert (seen[0].id, seen[0].state, 20 < seen[0].ttl <= 30) == (first.id, "running", True)
    assert waiting.hostname
    assert waiting.since > 0
    assert task.singleton.holder(7) is None


def test_place_of_the_trailing_message_can_be_seen_and_freed(make, worker):
    """A call is a duplicate also while only the message that comes next waits; the place of that can be freed."""
    calls: list[Any] = []
    task = make(lambda self, shop_id: calls or calls.append(task.delay(7)), on_duplicate="rerun")
    task.delay(7)
    worker.run()
    worker.take()  # and lose it, as a queue does that is purged

    assert task.singleton.is_locked(7)
    assert task.singleton.holder(7).id == calls[0].id
    assert f"run once after task {calls[0].id}" in task.singleton.explain(7)
    assert task.singleton.release(7) == "released"
    assert not task.delay(7).duplicate
    worker.run_all()
    assert names() == set()


def test_release(make, worker):
    """A run can give its slot up, and learns if it was lost; others free the slot of a run only by force."""
    seen = []

    def body(self, shop_id):
        seen.extend([task.singleton.release(7), self.singleton.release(), names(), self.singleton.lease])

    def losing(self, shop_id):
        seen.append(self.singleton.release(shop_id, force=True))
        with locks["default"].lock("task:shop.losing:shop_id=7"):
            seen.append(self.singleton.release())

    task = make(body)
    task.delay(7)
    worker.run()
    make(losing, name="shop.losing").delay(7)
    worker.run()
    task.delay(7)

    assert seen == ["taken", "released", set(), None, "released", "taken"]
    assert task.singleton.release(7) == "released"
    assert task.singleton.release(7) == "expired"


def test_parameter_called_force(app):
    """A task with a parameter of that name is released by the slot of the call with it."""

    @singleton_task(name="shop.forced")
    def forced(force=False):
        pass

    forced.delay(force=True)

    assert [forced.singleton.release(), forced.singleton.release(force=True)] == ["expired", "released"]


def test_cancel(make, worker, monkeypatch):
    """``cancel()`` leaves a run alone; it frees the slot of a waiting task also if the broker is away."""
    seen = []
    task = make(lambda self, shop_id: seen.append(task.singleton.cancel(7)))
    assert task.singleton.cancel(8) is None
    task.delay(7)
    worker.run()
    assert seen == [None]

    def away(task_id):
        raise OSError("the broker is away")

    task.delay(7)
    monkeypatch.setattr(task.app.control, "revoke", away)
    with pytest.raises(OSError, match="away"):
        task.singleton.cancel(7)
    assert names() == set()


def test_explain(make, worker, memory_nodes):
    """``explain()`` has the key, the arguments, the holder on every node, and what the next call would do."""
    task = make()
    first = task.delay(7)
    memory_nodes[2].down = True

    text = task.singleton.explain(7, since=3)

    for part in (
        "arguments  shop_id=7,since=3",
        f"lock       {NAME}",
        f"a  queued, task shop.sync (queued) {first.id}",
        "c  no answer",
        f"return the result of task {first.id}",
    ):
        assert part in text
    assert ticket_in(worker.headers[0]).secret not in text
    task.singleton.release(7)
    with locks["default"].lock(NAME, ttl=30, wait=0):
        assert "already revoked, because the holder is not a task" in task.singleton.explain(7)


SENDS, JOINS, WAITS = "A call now would take the slot", "return the result of task", "A worker that"


@pytest.mark.parametrize(
    ("options", "says", "says_not"),
    [
        ({}, [JOINS, WAITS], [SENDS]),
        ({"scope": "until_and_while_executing"}, [SENDS, WAITS], [JOINS]),
        ({"scope": "while_executing"}, ["any number may wait", WAITS], [JOINS]),
        ({"scope": "while_executing", "limit": 2}, ["any number may wait", "1 of 2 permits in use"], [JOINS, WAITS]),
        ({"scope": "until_executing"}, [SENDS], [JOINS, WAITS]),
    ],
    ids=str,
)
def test_explanation_during_a_run_says_what_a_call_does_then(make, worker, options, says, says_not):
    """A call depends on the slot of messages that wait, a worker on the slot of runs."""
    texts = []

    def body(self, shop_id):
        texts.append(task.singleton.explain(shop_id))
        results.append(task.delay(shop_id))

    results = []
    task = make(body, **options)
    task.delay(7)
    worker.run()

    for part in says:
        assert part in texts[0]
    for part in says_not:
        assert part not in texts[0]
    assert results[0].duplicate is (JOINS in says)


def test_explanation_of_a_call_that_waits_for_nobody(make, worker):
    """A worker that gets it runs it."""
    task = make(scope="until_and_while_executing")
    task.delay(7)

    text = task.singleton.explain(7)

    assert JOINS in text
    assert WAITS not in text


def test_command(make, app, capsys, memory_nodes):
    """``redlock_inspect --task`` explains a call; it names the nearest task, and says what arguments look like."""
    task = make()
    make(name="shop.broken", key=lambda bound: {}[bound.arguments["shop_id"]])
    app.finalize()
    this = ("--task", "shop.sync", "--args", "[7]")

    with pytest.raises(CommandError, match="is free") as free:
        call_command("redlock_inspect", *this)
    assert f"lock       {NAME}" in capsys.readouterr().out
    task.delay(7)
    call_command("redlock_inspect", *this)
    assert "A call now would send nothing" in capsys.readouterr().out
    set_down(memory_nodes, True)
    with pytest.raises(CommandError, match="Too few") as unknown:
        call_command("redlock_inspect", *this)
    set_down(memory_nodes, False)
    assert (free.value.returncode, unknown.value.returncode) == (1, 3)
    for arguments, message in (
        (["--task", "shop.synk"], "did you mean 'shop.sync'"),
        (["--task", "shop.sync", "--args", "7"], "takes a list in JSON"),
        (["--task", "shop.sync", "--args", "["], "are not JSON"),
        (["--task", "shop.sync", "--args", "[]"], "does not take these arguments"),
        (["--task", "shop.broken", "--args", "[7]"], "has no key for these arguments: KeyError: 7"),
        (["--task", "shop.sync", "shop"], "leave out the name"),
        (["shop.sync", "--args", "[7]"], "write --task TASK instead of shop.sync"),
        ([], "Say which lock"),
    ):
        with pytest.raises(CommandError, match=message):
            call_command("redlock_inspect", *arguments)
