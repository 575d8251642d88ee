"""Messages that come late, twice, without their header, or to a worker that cannot run them."""

import json
import math
from datetime import UTC, datetime

import pytest

from django_redlock import locks
from django_redlock.testing import Simulation

from .slots import HEADER, NAME, names

# Late and double deliveries


def test_id_that_was_used_before(make, worker):
    """A message that waited for its duplicate runs also if its id is that of a task that is long over."""
    task = make(on_overlap="wait")
    for _ in range(2):
        task.apply_async((7,), task_id="nightly")
        with locks["default"].lock(NAME, ttl=30, wait=0):
            assert worker.run() == "IGNORED"
        assert worker.run() == "SUCCESS"

    assert worker.shops == [7, 7]


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


# What fails on the way


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
