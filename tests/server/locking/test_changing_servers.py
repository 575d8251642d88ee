"""Servers that change while a process is connected: what was learned about them once stays true, or is asked again."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import pytest

from django_redlock import LockManager, LockTakenError, QuorumUnavailableError, RedlockError
from django_redlock.engine.watchdog import REAL
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.runtime.clock import steady
from django_redlock.testing import FaultProxy, Server
from tests.clusters import served
from tests.managers import Flavour, holders, made, on_each, rules

from .test_served_key import REPLICATES_AT_ONCE, replicate

TTL = 20.0  # seconds
NOBODY = "redis://127.0.0.1:1"
CALLERS = 50


class Process:
    """A manager as in a process of its own, whose clock can be set forward so that no test waits for ten seconds."""

    def __init__(self, urls: list[str], **options: Any) -> None:
        self.ahead = 0.0
        nodes = [open_node(NodeSpec(url), "t:") for url in urls]
        numbers = {"ttl": TTL, "max_ttl": TTL, "renew": False, "clock_guard": False, **options}
        runtime = replace(REAL, clock=lambda: steady() + self.ahead)
        self.manager = LockManager(nodes, rules(len(nodes), **numbers), runtime=runtime)
        made.append(self.manager)

    async def cycle(self, flavour: Flavour, name: str = "other") -> None:
        """Take and release a lock."""
        assert await flavour.release(await flavour.acquire(self.manager.lock(name, wait=0))) == "released"

    async def refusal(self, flavour: Flavour, name: str = "other") -> QuorumUnavailableError:
        """Try once to take a lock; return the error."""
        with pytest.raises(QuorumUnavailableError) as caught:
            await flavour.acquire(self.manager.lock(name, wait=0))
        return caught.value


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Three servers that have served the locks for long, and a fourth one, new to them."""
    with ExitStack() as stack:
        some = [stack.enter_context(Server(args=REPLICATES_AT_ONCE)) for _ in range(4)]
        for server in some[:3]:
            with server.client() as client:
                served(client)
        yield some


def flush(server: Server, spare: Server) -> None:
    on_each([server], "FLUSHALL")


def flush_database(server: Server, spare: Server) -> None:
    on_each([server], "FLUSHDB")


def swap(server: Server, spare: Server) -> None:
    on_each([server], "SWAPDB", 0, 1)


def promote_again(server: Server, spare: Server) -> None:
    replicate(server, spare.url)
    on_each([server], "REPLICAOF", "NO", "ONE")


LOSSES = [flush, flush_database, swap, promote_again]


@pytest.mark.parametrize(("lose", "nodes"), [*((lose, 1) for lose in LOSSES), (flush, 3)])
async def test_memory_that_was_lost_lets_no_second_holder_in(
    servers: list[Server], flavour: Flavour, lose: Callable[[Server, Server], None], nodes: int
):
    """No connection ends, yet no process counts the vote of that server before all earlier leases have ended."""
    urls = [server.url for server in servers[:nodes]]
    reached = urls if nodes == 1 else [*urls[:2], NOBODY]
    holder, other = (Process(some, restart_guard=True, node_timeout=0.3) for some in (reached, urls))
    said = ""
    await other.cycle(flavour)
    lease = await flavour.acquire(holder.manager.lock("held", wait=0))

    lose(servers[0], servers[3])

    while "votes again in" not in said:  # the first of three nodes is not waited for, and so says it later
        with pytest.raises(RedlockError) as caught:
            await flavour.acquire(other.manager.lock("held", wait=0))
        said = caught.value.nodes[other.manager.nodes[0].name]
    assert lease.valid()


@pytest.mark.parametrize("lose", LOSSES, ids=lambda lose: lose.__name__)
async def test_without_the_guard_a_server_that_was_emptied_is_asked_again_at_once(
    servers: list[Server], flavour: Flavour, lose: Callable[[Server, Server], None]
):
    """A single attempt succeeds, and an extension brings the lease back."""
    process = Process([servers[0].url])
    await process.cycle(flavour)
    lease = await flavour.acquire(process.manager.lock("held", wait=0))

    lose(servers[0], servers[3])

    assert await flavour.extend(lease)
    await process.cycle(flavour)
    assert await flavour.release(lease) == "released"


async def test_memory_that_comes_back_is_the_one_that_was_known(servers: list[Server], flavour: Flavour):
    """After a second SWAPDB everything is as before, and a server that reloads its data has lost nothing."""
    process = Process([servers[0].url], restart_guard=True)
    lease = await flavour.acquire(process.manager.lock("held", wait=0))

    for _ in range(2):
        on_each([servers[0]], "SWAPDB", 0, 1)

    assert await flavour.extend(lease)
    await process.cycle(flavour)


async def test_process_that_was_connected_votes_again_when_the_guard_time_is_over(
    servers: list[Server], flavour: Flavour
):
    """The loss costs one guard time, counted by the server, not by the connection."""
    process = Process([servers[0].url], restart_guard=True)
    await process.cycle(flavour)
    flush(servers[0], servers[3])
    error = await process.refusal(flavour)
    assert 0 < error.retry_after <= TTL + 2

    with servers[0].client() as client:
        seconds, _ = client.time()
        served(client, since=int((seconds - TTL - 2) * 1e6))
    process.ahead += TTL + 2

    await process.cycle(flavour)


@pytest.mark.parametrize("idle", [2.0, 60.0], ids=["often", "once a minute"])
async def test_what_a_server_is_set_to_counts_within_ten_seconds(servers: list[Server], flavour: Flavour, idle: float):
    """A policy that evicts ends the votes, and its end brings them back, without a new connection."""
    process = Process([servers[0].url])
    await process.cycle(flavour)
    for policy, votes in (("allkeys-lru", False), ("noeviction", True)):
        on_each([servers[0]], "CONFIG", "SET", "maxmemory", "50mb")
        on_each([servers[0]], "CONFIG", "SET", "maxmemory-policy", policy)
        for _ in range(int(10 // idle) + 1):
            process.ahead += idle
            with suppress(QuorumUnavailableError):
                await process.cycle(flavour)

        if votes:
            await process.cycle(flavour)
        else:
            assert "may evict keys" in str((await process.refusal(flavour)).nodes)


async def test_right_that_is_granted_later_counts_within_ten_seconds(servers: list[Server], flavour: Flavour):
    """A user that may not read INFO has no vote under the guard; that is no reason to restart the process."""
    user = "ACL SETUSER app on >secret ~t:* resetchannels &t:* +@all"
    on_each([servers[0]], *user.split(), "-info")
    process = Process([servers[0].url.replace("//", "//app:secret@")], restart_guard=True)
    error = await process.refusal(flavour)
    assert "refuses INFO" in str(error.nodes)

    on_each([servers[0]], *user.split())
    process.ahead += 11.0

    await process.cycle(flavour)


async def test_address_that_is_corrected_gives_its_node_a_vote_within_ten_seconds(
    servers: list[Server], flavour: Flavour
):
    """Two addresses led to one server. The open connection of the corrected one would lead there for days."""
    with FaultProxy(servers[0].url) as proxy:
        process = Process([proxy.url, servers[0].url, servers[1].url])
        await process.cycle(flavour)
        proxy.target = servers[2].url

        votes = 0
        while votes < 3:  # until all three have a link again, which no caller waits for
            process.ahead += 11.0
            lease = await flavour.acquire(process.manager.lock("held", wait=0))
            votes = len(holders(process.manager, "{held}"))
            assert await flavour.release(lease) == "released"


# An endpoint that fails over


def fail_over(proxy: FaultProxy, old: Server, new: Server) -> None:
    """Promote another server, and demote the old one, whose connections stay open; the endpoint follows later."""
    on_each([old], "REPLICAOF", *new.url.removeprefix("redis://").split("/")[0].split(":"))
    proxy.target = new.url


async def test_caller_with_an_old_connection_gets_the_lock_of_the_promoted_server(
    servers: list[Server], flavour: Flavour
):
    """One attempt is enough: it learns from the old server that this is a replica now, and is repeated."""
    with FaultProxy(servers[0].url) as proxy:
        process = Process([proxy.url])
        await process.cycle(flavour)

        fail_over(proxy, servers[0], servers[1])

        await process.cycle(flavour)


# A server that stands still


@pytest.mark.parametrize("nodes", [1, 3])
async def test_callers_are_not_refused_because_of_the_time_of_another(
    servers: list[Server], flavour: Flavour, nodes: int
):
    """They begin one after another while the servers stand still; a name that only one uses is taken for nobody."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(CALLERS))
    manager = Process([server.url for server in servers[:nodes]], node_timeout=1.0).manager
    await flavour.release(await flavour.acquire(manager.lock("warm")))
    numbers, refused = iter(range(CALLERS)), list[tuple[float, RedlockError]]()

    async def call(mine: Flavour) -> None:
        number = next(numbers)
        await asyncio.sleep(0.03 * number)
        began = steady()
        try:
            await mine.release(await mine.acquire(manager.lock(f"of nobody else {number}", wait=0)))
        except RedlockError as error:
            refused.append((steady() - began, error))

    still(servers[:nodes], 1.5)
    await flavour.at_once(CALLERS, call)

    assert [str(error) for took, error in refused if took < 0.85 or isinstance(error, LockTakenError)] == []


def still(servers: list[Server], seconds: float) -> None:
    """Let servers stand still for a while, beginning now."""
    for server in servers:
        server.freeze()
    timer = threading.Timer(seconds, lambda: [server.thaw() for server in servers])
    timer.start()
