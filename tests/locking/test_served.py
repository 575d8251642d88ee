"""The served key: since when a server has served the locks of a prefix, which every process sees."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from django_redlock import QuorumUnavailableError
from django_redlock.core.rules import Rules
from django_redlock.locks import LockManager
from django_redlock.nodes import NodeSpec, open_node
from django_redlock.testing import FaultProxy, Server, Servers, start_servers

from .conftest import Flavour

REPLICATES_AT_ONCE = ("--repl-diskless-sync-delay", "0")
TTL = 3.0  # seconds; the guard time is a little more


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def guarded(urls: list[str], **options: object) -> LockManager:
    """Return a manager as a fresh process has it: it knows nothing of the nodes."""
    numbers = {"ttl": TTL, "max_ttl": TTL, "renew": False, "restart_guard": True, "node_timeout": 0.5, **options}
    return LockManager([open_node(NodeSpec(url), "t:") for url in urls], Rules(len(urls), **numbers))


def replicate(replica: Server, master: str) -> None:
    """Have a server copy all that another one has, and return when it has."""
    with replica.client() as client:
        client.replicaof(*master.removeprefix("redis://").removesuffix("/0").split(":"))
        until(lambda: client.info("replication")["master_link_status"] == "up")


@pytest.fixture
def endpoint_that_moves() -> Iterator[tuple[Servers, list[FaultProxy], Callable[[], None]]]:
    """Three masters and a replica of the second, all behind endpoints, and what moves the second endpoint to it."""
    with start_servers(4, args=REPLICATES_AT_ONCE) as servers, ExitStack() as stack:
        endpoints = [stack.enter_context(FaultProxy(server.url)) for server in servers[:3]]
        wire = stack.enter_context(FaultProxy(servers[1].url))
        replicate(servers[3], wire.url)

        def move() -> None:
            with servers[3].client() as client:
                client.replicaof("NO", "ONE")
            endpoints[1].target = servers[3].url
            endpoints[1].reset()

        with servers[3].client() as client:
            until(lambda: client.info("server")["uptime_in_seconds"] > TTL + 2)
        wire.black_hole()  # from now on the replica gets nothing
        yield servers, endpoints, move


async def test_promoted_replica_gives_no_vote_to_a_process_that_did_not_know_the_master(
    endpoint_that_moves: tuple[Servers, list[FaultProxy], Callable[[], None]], flavour: Flavour
):
    """P20: one node misses the lock, another one's endpoint moves to a replica that lost it; nobody gets it twice."""
    servers, endpoints, move = endpoint_that_moves
    urls = [endpoint.url for endpoint in endpoints]
    holder, newcomer = guarded(urls), guarded(urls)
    await flavour.release(await flavour.acquire(holder.lock("warm", wait=30)))
    endpoints[2].stop()  # unreachable for a moment
    lease = await flavour.acquire(holder.lock("a", wait=30))
    endpoints[2].start()

    move()
    with pytest.raises(QuorumUnavailableError, match=r"votes again in \d s"):
        await flavour.acquire(newcomer.lock("a", wait=0.0))

    assert lease.valid()
    for manager in (holder, newcomer):
        await flavour.close(manager)
        manager.close()
