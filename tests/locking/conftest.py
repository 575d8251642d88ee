"""Managers over real servers and over memory, in both flavours."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from django_redlock.core.rules import Rules
from django_redlock.locks import Lease, Lock, LockManager
from django_redlock.nodes import NodeSpec, open_node
from django_redlock.nodes.memory import MemoryNode
from django_redlock.testing import Servers

Manager = Callable[..., LockManager]


def rules(nodes: int = 5, **options: Any) -> Rules:
    """Rules for tests: short leases, and servers that may vote though they have just started."""
    return Rules(nodes, **{"ttl": 10.0, "restart_guard": False, "node_timeout": 2.0, **options})


def real_manager(urls: list[str], prefix: str = "t:", **options: Any) -> LockManager:
    notify = options.pop("notify", None)
    manager = LockManager([open_node(NodeSpec(url), prefix) for url in urls], rules(len(urls), **options))
    if notify:
        manager.notify = notify
    return manager


@pytest.fixture
def real(nodes: Servers) -> Iterator[Manager]:
    """Make managers over five real servers."""
    managers: list[LockManager] = []

    def make(count: int = 5, **options: Any) -> LockManager:
        managers.append(real_manager(nodes.urls[:count], **options))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


@pytest.fixture
def memory() -> Manager:
    """Make managers over five nodes in memory; those of one test share the nodes."""
    nodes = [MemoryNode(f"m{place}") for place in range(5)]

    def make(count: int = 5, **options: Any) -> LockManager:
        notify = options.pop("notify", None)
        manager = LockManager(nodes[:count], rules(count, **options))
        if notify:
            manager.notify = notify
        return manager

    return make


@pytest.fixture(params=["memory", "real"])
def manager(request: pytest.FixtureRequest) -> Manager:
    """Make managers over nodes of each kind."""
    make: Manager = request.getfixturevalue(request.param)
    return make


class Blocking:
    """The blocking flavour, callable from a test that is a coroutine."""

    async def acquire(self, lock: Lock) -> Lease:
        return lock.acquire()

    async def release(self, lease: Lease) -> str:
        return lease.release()

    async def extend(self, lease: Lease) -> bool:
        return lease.extend()

    @asynccontextmanager
    async def entered(self, lock: Lock) -> AsyncIterator[Lease]:
        with lock as lease:
            yield lease

    async def lost(self, lease: Lease) -> bool:
        return await asyncio.to_thread(lease.lost.wait, 10)

    async def at_once(self, times: int, work: Callable[["Blocking"], Awaitable[None]]) -> None:
        """Run *work* in as many threads."""
        await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(work(self))) for _ in range(times)))

    async def close(self, manager: LockManager) -> None:
        manager.close()


class Asyncio:
    """The asyncio flavour."""

    async def acquire(self, lock: Lock) -> Lease:
        return await lock.aacquire()

    async def release(self, lease: Lease) -> str:
        return await lease.arelease()

    async def extend(self, lease: Lease) -> bool:
        return await lease.aextend()

    @asynccontextmanager
    async def entered(self, lock: Lock) -> AsyncIterator[Lease]:
        async with lock as lease:
            yield lease

    async def lost(self, lease: Lease) -> bool:
        return await asyncio.wait_for(lease.lost.wait(), 10)

    async def at_once(self, times: int, work: Callable[["Asyncio"], Awaitable[None]]) -> None:
        """Run *work* in as many tasks."""
        await asyncio.gather(*(work(self) for _ in range(times)))

    async def close(self, manager: LockManager) -> None:
        await manager.aclose()


Flavour = Blocking | Asyncio


@pytest.fixture(params=[Blocking, Asyncio], ids=["blocking", "asyncio"])
def flavour(request: pytest.FixtureRequest) -> Flavour:
    return request.param()


@pytest.fixture
async def make(manager: Manager, flavour: Flavour) -> AsyncIterator[Manager]:
    """Make managers of each kind, and close them in the flavour of the test."""
    managers: list[LockManager] = []

    def made(*args: Any, **options: Any) -> LockManager:
        managers.append(manager(*args, **options))
        return managers[-1]

    yield made
    for one in managers:
        await flavour.close(one)
        one.close()  # what the test looked up itself, blocking


def holders(manager: LockManager, slug: str) -> list[str]:
    """Return the nonces that hold *slug*, one per node that has it."""
    replies = manager.survey(slugs=(slug,))
    values = [reply.rows[0].value for reply in replies.values() if reply.rows]
    return [value[:32] for value in values if value]


def held_by(manager: LockManager, slug: str, *tokens: str) -> bool:
    """
    Tell whether exactly *tokens* come to hold *slug*.

    A release is over when its outcome is certain, or at once after an attempt that failed; the last nodes may execute
    it a moment later than they answer another connection.
    """
    until = time.monotonic() + 30
    while set(holders(manager, slug)) != set(tokens):
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


async def eventually(condition: Callable[[], bool]) -> None:
    """Wait until what another process or thread does has happened."""
    until = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < until
        await asyncio.sleep(0.005)
