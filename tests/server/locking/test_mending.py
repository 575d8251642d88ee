"""Nodes that died and came back empty: how soon they know the held leases again."""

import asyncio
import threading
from contextlib import suppress

import pytest

from django_redlock import RedlockError
from django_redlock.engine import rounds, rounds_async
from django_redlock.runtime.clock import steady
from django_redlock.testing import FaultProxy, Server, Servers
from tests.managers import Asyncio, Flavour, Manager, connect, eventually, real_manager, renew_now

THREADS = 4


@pytest.fixture(autouse=True)
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only rounds that heal nodes wait for connections."""
    for module in (rounds_async, rounds):
        monkeypatch.setattr(module, "GRACE", 0.0)


def key_on(node: Server, name: str = "a") -> str:
    with node.client() as client:
        return (client.get(f"t:{{{name}}}:h") or "")[:32]


@pytest.mark.parametrize("dead", [1, 2])
async def test_first_extension_gives_an_empty_node_the_key_back(nodes: Servers, flavour: Flavour, dead: int):
    """The round waits for the connections, although the others have decided; no second extension is needed."""
    manager = real_manager(nodes.urls, ttl=60.0, max_ttl=60.0, node_timeout=10.0)
    lease = await flavour.acquire(manager.lock("a", renew=False))
    assert await flavour.extend(lease)
    for node in nodes[:dead]:
        node.restart()
    if isinstance(flavour, Asyncio):  # a loop notices the end of a connection in its next turn
        lines = manager.driver.loop_side().gather._lines
        await eventually(lambda: all(lines[node].link.broken for node in range(dead)))

    assert await flavour.extend(lease)

    await eventually(lambda: all(key_on(node) == lease.secret for node in nodes[:dead]))
    await flavour.release(lease)


async def test_minimum_hold_reaches_a_node_whose_connection_is_still_being_made(nodes: Servers, flavour: Flavour):
    """
    The first lock of a process often finds one. If only a quorum had the hold, one node that loses its memory would end
    it, as soon as the process is dead.
    """
    with FaultProxy(nodes[0].url) as proxy:
        proxy.delay(0.05)
        manager = real_manager([proxy.url, *nodes.urls[1:]], ttl=60.0, max_ttl=60.0, node_timeout=10.0)
        lease = await flavour.acquire(manager.lock("a", renew=False, hold_for=600.0))

        await eventually(lambda: all(key_on(node) == lease.secret for node in nodes))

        for node in nodes:
            with node.client() as client:
                assert client.pttl("t:{a}:h") > 60_000
        assert await flavour.release(lease) == "held"


async def test_watchdog_gives_empty_nodes_the_key_back(nodes: Servers, real: Manager):
    """Empty nodes are healed while other threads use locks with their own connections, and other leases are due."""
    dead, manager = 2, real(5, ttl=60.0, node_timeout=10.0)
    connect(manager)
    others = [manager.lock(f"c{number}").acquire() for number in range(THREADS)]
    lease = manager.lock("a").acquire()
    breakers, over = manager.driver.gather.breakers, threading.Event()

    def use(number: int) -> None:
        while not over.wait(0.02):
            with suppress(RedlockError):  # a machine may be too busy for these
                manager.lock(f"b{number}", wait=0).acquire().release()

    busy = asyncio.gather(*(asyncio.to_thread(use, number) for number in range(THREADS)))
    try:
        for node in nodes[:dead]:
            node.kill()
        await eventually(lambda: sum(breaker.rest > 0 for breaker in breakers) == dead)
        nodes.start()
        before = lease.extensions
        while not all(key_on(node) == lease.secret for node in nodes[:dead]):
            assert lease.extensions - before <= 3
            # An extension during the pause of a node does not reach it; the next one does.
            await eventually(lambda: steady() > max(breaker.until for breaker in breakers))
            extensions = lease.extensions
            for one in [*others, lease]:
                renew_now(one)
            await eventually(lambda extensions=extensions: lease.extensions > extensions)
    finally:
        over.set()
        await busy

    assert lease.valid()
    for other in [lease, *others]:
        other.release()
