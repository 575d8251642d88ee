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


def begin(stage, node, what, name, queue):
    """Have a worker take a call's slot over while a node is frozen; returns the result, and the secret before."""
    result = task(name).apply_async((what,), queue=queue)
    wait_until(lambda: on_node(node, name, what))
    before = on_node(node, name, what)
    node.freeze()
    consume(queue)
    stage.hear("started")
    return result, before


def test_node_is_there_again_during_the_run(worker, node, stage, what):
    """The node learns of the run with its next renewal, and has nothing when it is over."""
    result, before = begin(stage, node, what, "hold", "during")

    node.thaw()
    wait_until(lambda: on_node(node, "hold", what) not in ("", before))
    stage.allow()

    assert answer(result) == f"{what} done"
    wait_until(lambda: not on_node(node, "hold", what))


def test_node_is_there_again_after_the_run(worker, node, stage, what):
    """The node gives the slot up, though it was to wait for an hour, as soon as it can be reached."""
    result, _ = begin(stage, node, what, "hold_long", "after")
    stage.allow()
    assert answer(result) == f"{what} done"
    assert free("hold_long", what)()

    node.thaw()

    wait_until(lambda: not on_node(node, "hold_long", what))


def test_node_is_there_again_after_a_message_was_dropped(worker, node, stage, what):
    """A node that misses the release of a revoked call's slot gets the release later."""
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
