"""
No node is contacted before the others.

Clients that contact one node after the other overload the first one, unless each attempt uses another order. Here an
attempt contacts all nodes at once, so there is no order to shuffle.
"""

import time

import pytest

from django_redlock import LockTakenError
from django_redlock.testing import Server, Servers
from tests.managers import Flavour, Manager, eventually

PATIENCE = 100.0  # seconds that a node without a reply must not cost


def scripts_run(server: Server) -> int:
    """Return how many requests for a lock a server has executed."""
    with server.client() as client:
        about = client.info("commandstats")
    return sum(about.get(f"cmdstat_{command}", {}).get("calls", 0) for command in ("eval", "evalsha"))


async def test_every_node_gets_every_request(real: Manager, nodes: Servers, flavour: Flavour):
    """Every node gets each request of twenty holds, and of a failed attempt during each."""
    manager = real(ttl=60.0, node_timeout=10.0)
    await flavour.release(await flavour.acquire(manager.lock("warm up")))
    for server in nodes:
        with server.client() as client:
            client.config_resetstat()

    for _ in range(20):
        lease = await flavour.acquire(manager.lock("a"))
        with pytest.raises(LockTakenError):
            await flavour.acquire(manager.lock("a", wait=0))
        await flavour.release(lease)

    # The last requests are in flight: nobody waits for their replies.
    await eventually(lambda: min(map(scripts_run, nodes)) >= 3 * 20)
    await flavour.close(manager)


@pytest.mark.parametrize("first", range(5))
async def test_no_node_is_waited_for_before_the_next_is_asked(
    real: Manager, nodes: Servers, flavour: Flavour, first: int
):
    """Whichever node does not answer, the others get the request, long before the timeout."""
    manager = real(ttl=600.0, max_ttl=600.0, node_timeout=PATIENCE)
    await flavour.release(await flavour.acquire(manager.lock("warm up")))
    nodes[first].freeze()
    started = time.monotonic()

    lease = await flavour.acquire(manager.lock("a"))
    assert await flavour.release(lease) == "released"

    assert time.monotonic() - started < PATIENCE
    nodes[first].thaw()
    await flavour.close(manager)
