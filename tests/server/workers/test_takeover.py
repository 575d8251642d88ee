"""A waiting call's slot on a lock node that misses the moment in which a worker takes it over."""

import pytest

from django_redlock import locks
from tests.managers import wait_until

from .real import ON_REDIS, answer, consume, free, task

pytestmark = ON_REDIS

MISSED = 4  # which node it is


@pytest.fixture
def node(servers):
    """The node that misses it; it runs in the end."""
    yield servers[MISSED]
    servers[MISSED].thaw()


def on_node(node, name, *args):
    """Return the secret that one node has for a call's slot; empty if it has none."""
    with node.client() as client:
        keys = [key for key in client.keys("*:h") if key.endswith(f"{{{task(name).singleton.key(*args)}}}:h")]
        return (client.get(keys[0]) or "")[:32] if keys else ""


def test_node_that_is_there_again(worker, node, stages, what):
    """A node learns of a run with its next renewal, and of one that is over as soon as it can be reached."""
    calls = {"hold": f"{what} during", "hold_long": f"{what} after"}
    results = {name: task(name).apply_async((call,), queue="missed") for name, call in calls.items()}
    wait_until(lambda: all(on_node(node, name, call) for name, call in calls.items()))
    before = on_node(node, "hold", calls["hold"])
    node.freeze()
    consume("missed")
    for call in calls.values():
        stages(call).hear("started")
    stages(calls["hold_long"]).allow()
    assert answer(results["hold_long"]) == f"{what} after done"
    assert free("hold_long", calls["hold_long"])()

    node.thaw()

    wait_until(lambda: on_node(node, "hold", calls["hold"]) not in ("", before))
    wait_until(lambda: not on_node(node, "hold_long", calls["hold_long"]))
    stages(calls["hold"]).allow()
    assert answer(results["hold"]) == f"{what} during done"
    wait_until(lambda: not on_node(node, "hold", calls["hold"]))


def test_node_is_there_again_after_a_message_was_dropped(worker, node, what):
    """A node that misses the release of a revoked call's slot, by the worker's main process, gets it later."""
    result = task("hold").apply_async((what,), queue="dropped")
    wait_until(lambda: on_node(node, "hold", what))
    node.freeze()
    result.revoke()  # every worker hears of it before it hears of the queue
    consume("dropped")
    wait_until(lambda: result.state == "REVOKED")

    node.thaw()

    wait_until(lambda: not on_node(node, "hold", what))


def test_nodes_that_die_and_come_back_empty(worker, servers, stage, what):
    """While a majority knows the run, nodes that die and come back empty let nobody else in."""
    wait_until(lambda: all(reply.time for reply in locks["default"].survey(count=1).values()))
    result = task("hold_long").apply_async((what,))
    stage.hear("started")

    for node in servers[:2]:
        node.kill()
    assert task("hold_long").delay(what).id == result.id
    for node in servers[:2]:
        node.start()
    assert task("hold_long").delay(what).id == result.id

    stage.allow()
    assert answer(result) == f"{what} done"
    wait_until(free("hold_long", what))
