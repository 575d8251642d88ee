"""Messages that come late, twice, without their header, or to a worker that cannot run them."""

import json
import math
from contextlib import suppress
from datetime import UTC, datetime

import pytest
from kombu.exceptions import OperationalError

from django_redlock import locks
from django_redlock.celery import Return
from django_redlock.signals import lock_taken
from django_redlock.testing import Simulation

from .slots import HEADER, NAME, names, set_down

# Late and double deliveries


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"redelivered": True}, {"kept": 5.0}),
        ({"kept": 90.0}, {"redelivered": True}),
    ],
    ids=["its copy ran first", "it waited long for other runs"],
)
@pytest.mark.parametrize("ignored", [False, True])
def test_message_that_was_done_is_not_done_again(make, worker, ignored, first, second):
    """Of a message that waited in its worker, and a copy that the broker gave to another one, only the first runs."""
    task = make(acks_late=True, ignore_result=ignored)
    task.delay(7)
    message = worker.take()

    assert worker.run(message, **first) == "SUCCESS"
    assert worker.run(message, **second) == "IGNORED"
    assert (worker.shops, names()) == ([7], set())


def test_copy_of_an_attempt_that_was_retried(make, worker):
    """A late copy of a first attempt does not run beside or after the second one."""

    def body(self, shop_id):
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = make(body, acks_late=True, ignore_result=True)
    task.delay(7)
    message = worker.take()
    worker.run(message)
    worker.run()

    assert worker.run(message, redelivered=True) == "IGNORED"
    assert (worker.retries, worker.headers) == ([0, 1], [])


def test_worker_died_between_the_work_and_its_result(make, worker, memory_nodes):
    """A copy whose work is done, without a result, waits for it; if there is none after a while, it is done again."""
    task = make(acks_late=True)
    result = task.delay(7)
    message = worker.take()
    worker.run(message)
    task.backend.forget(result.id)  # it was never stored

    assert worker.run(message, redelivered=True) == "IGNORED"
    assert len(worker.headers) == 1
    for node in memory_nodes:
        node.store.reset()  # the note is over
    assert worker.run_all() == ["SUCCESS"]

    assert (worker.shops, result.state) == ([7, 7], "SUCCESS")


@pytest.mark.parametrize(("options", "runs"), [({}, 2), ({"max_hold": 7200}, 1)], ids=["an hour", "two hours"])
def test_copy_of_a_run_of_90_minutes(make, worker, options, runs):
    """A slot ends after ``max_hold``, an hour by default, and a copy of the message then runs beside the run."""

    def body(self, shop_id):
        if len(worker.shops) == 1:
            simulation.advance(90 * 60)
            worker.run(message, redelivered=True)

    task = make(body, acks_late=True, **options)
    with Simulation(check=False) as simulation:
        task.delay(7)
        message = worker.take()
        worker.run(message)

    assert len(worker.shops) == runs


def test_id_that_was_used_before(make, worker):
    """A message that waited for its duplicate runs also if its id is that of a task that is long over."""
    task = make(on_overlap="wait")
    for _ in range(2):
        task.apply_async((7,), task_id="nightly")
        with locks["default"].lock(NAME, ttl=30, wait=0):
            assert worker.run() == "IGNORED"
        assert worker.run() == "SUCCESS"

    assert worker.shops == [7, 7]


# Who ends without a run leaves nothing behind


@pytest.mark.parametrize("options", [{"on_overlap": "drop"}, {"on_overlap": Return()}, {"wait_for": 0.0}])
def test_message_that_does_not_run_gives_up_its_place(make, worker, options):
    """With ``scope="until_and_while_executing"`` a message that is not run frees the queue's slot."""
    seen = []

    def body(self, shop_id):
        if not seen:
            seen.append(self.delay(shop_id))
            seen.append(worker.run())

    task = make(body, scope="until_and_while_executing", **options)
    task.delay(7)
    worker.run()

    assert names() == set()
    assert not task.delay(7).duplicate


def test_retry_does_not_give_way_to_an_equal_that_waits(make, worker):
    """With ``scope="until_executing"`` a retry runs beside its duplicates, as every run does."""

    def body(self, shop_id):
        if len(worker.retries) == 1:
            self.delay(7)
            raise self.retry(countdown=0)

    task = make(body, scope="until_executing")
    task.delay(7)
    worker.run()
    equal, retry = worker.take(), worker.take()

    assert [worker.run(retry), worker.run(equal)] == ["SUCCESS", "SUCCESS"]
    assert worker.retries == [0, 1, 0]


# Never twice


@pytest.mark.parametrize("outcome", ["SUCCESS", "REVOKED"])
@pytest.mark.parametrize("strategy", ["join", "replace"])
def test_message_is_dropped_when_its_run_has_ended(make, worker, strategy, outcome):
    """With ``redelivery="drop"`` a copy during a run waits for its end, and ends as the run did, or is revoked."""

    def body(self, shop_id):
        assert worker.run(message, redelivered=True) == "IGNORED"
        assert result.state == "PENDING"
        if outcome == "REVOKED":
            raise SystemExit(-241)

    task = make(body, redelivery="drop", acks_late=True, on_duplicate=strategy)
    result = task.delay(7)
    message = worker.take()
    with suppress(SystemExit):
        worker.run(message)

    assert worker.run_all() == ["IGNORED"]
    assert (result.state, worker.shops) == (outcome, [7])
    assert names() - {f"begun:{result.id}:0"} == set()


def test_message_that_never_began_is_not_dropped(make, worker, memory_nodes):
    """With ``redelivery="drop"`` a message that waited for longer than its slot, and comes again, runs."""
    task = make(redelivery="drop", queue_ttl=1)
    task.delay(7)
    for node in memory_nodes:
        node.store.reset()  # the slot is over

    assert worker.run(redelivered=True) == "SUCCESS"
    assert worker.shops == [7]


# What fails on the way


def test_duplicate_is_known_to_run(make, worker, memory_nodes):
    """``on_unavailable={"run": "run"}`` is for nodes that say nothing; once they have said "taken", nothing runs."""
    runs = []

    def switch(down=True, **about):
        set_down(memory_nodes, down)

    def body(self, shop_id):
        runs.append("in")
        if len(runs) == 1:
            lock_taken.connect(switch)
            assert worker.run(message, redelivered=True) == "RETRY"
            lock_taken.disconnect(switch)
            switch(down=False)
        runs.append("out")

    task = make(body, acks_late=True, on_unavailable={"run": "run"})
    task.delay(7)
    message = worker.take()

    assert worker.run(message) == "SUCCESS"
    assert runs == ["in", "out"]


@pytest.mark.parametrize(("late", "state"), [(True, "REJECTED"), (False, "IGNORED")])
def test_broker_fails_when_a_copy_is_put_back(app, make, worker, monkeypatch, late, state):
    """A copy that cannot be put back goes back if it has not been acknowledged, and its run fails by no means."""
    seen = []

    def body(self, shop_id):
        with monkeypatch.context() as patch:
            patch.setattr(app.amqp, "send_task_message", failing)
            seen.extend([worker.run(message, redelivered=True), self.AsyncResult(self.request.id).state])

    def failing(*about, **more):
        raise OperationalError("away")

    task = make(body, acks_late=late)
    task.delay(7)
    message = worker.take()

    assert worker.run(message) == "SUCCESS"
    assert seen == [state, "PENDING"]
    assert names() == set()


def test_message_comes_back_when_the_nodes_vote_again(make, worker):
    """After an outage the nodes name the seconds for which they give no vote: a message is put back for that long."""
    task = make()
    with Simulation(nodes=3, check=False) as simulation:
        task.delay(7)
        for node in simulation.nodes[:2]:
            node.crash()
            node.restart()
        simulation.advance(20.0)
        before = datetime.now(UTC)

        assert worker.run() == "RETRY"

        (headers,) = worker.headers
        pause = (datetime.fromisoformat(headers["eta"]) - before).total_seconds()
        assert 30.0 < pause < 45.0  # of 60 seconds and some drift, 20 are over
        simulation.advance(pause)
        assert worker.run() == "SUCCESS"


@pytest.mark.parametrize(
    "garbled",
    [
        lambda fields: "[" * 100_000,
        lambda fields: json.dumps([*fields[:5], math.inf, *fields[6:]]),
        lambda fields: json.dumps([*fields[:8], 10**400, *fields[9:]]),
    ],
    ids=["nested", "tries", "waited"],
)
def test_header_that_makes_no_sense_counts_as_lost(make, worker, garbled):
    """A message whose header was garbled runs, under the slot that its arguments name."""
    task = make()
    task.delay(7)
    message = worker.take()
    message.headers[HEADER] = garbled(json.loads(message.headers[HEADER]))

    assert worker.run(message) == "SUCCESS"
    assert (worker.shops, names()) == ([7], set())
