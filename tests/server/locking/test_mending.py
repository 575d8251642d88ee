"""Nodes that died and came back empty: how soon they know of the leases again that are held."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from django_redlock import RedlockError
from django_redlock.core.admission import Admission
from django_redlock.core.messages import Acquire, Ballot, Kind
from django_redlock.core.rules import Rules
from django_redlock.leases import Lease
from django_redlock.locks import LockManager
from django_redlock.nodes.aio import AsyncGather
from django_redlock.nodes.gather import Breakers, steady
from django_redlock.nodes.memory import AsyncMemoryLink, MemoryNode
from django_redlock.testing import FaultProxy, Server, Servers
from tests.managers import Asyncio, Flavour, Manager, connect, eventually, real_manager

TTL = 30.0

THREADS = 4
TABLE = Path("/proc/net/tcp")  # columns: number, own address, the other's, ...; the tenth is the inode


@pytest.fixture
def manager(real: Manager) -> LockManager:
    return real(ttl=TTL)


def key_on(node: Server, name: str = "a") -> str:
    with node.client() as client:
        return (client.get(f"t:{{{name}}}:h") or "")[:32]


def comes_back(nodes: list[Server], lease: Lease) -> None:
    """Wait until all *nodes* have the key again."""
    until = time.monotonic() + 30
    while any(key_on(node) != lease.token for node in nodes):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("dead", [1, 2])
async def test_first_extension_gives_an_empty_node_the_key_back(nodes: Servers, flavour: Flavour, dead: int):
    """
    L32, P19: it waits for the connections, although the others have decided; no second extension is needed.
    """
    manager = real_manager(nodes.urls, ttl=60.0, max_ttl=60.0, node_timeout=10.0)
    lease = await flavour.acquire(manager.lock("a", renew=False))
    assert await flavour.extend(lease)
    for node in nodes[:dead]:
        node.restart()
    if isinstance(flavour, Asyncio):  # a loop hears of the end of a connection in its next turn
        lines = manager._loop_side().gather._lines
        await eventually(lambda: all(lines[node].link.broken for node in range(dead)))

    assert await flavour.extend(lease)

    await eventually(lambda: all(key_on(node) == lease.token for node in nodes[:dead]))
    await flavour.release(lease)
    await flavour.close(manager)


async def test_node_that_failed_before_the_last_pause_is_asked(nodes: Servers, manager: LockManager):
    """
    L32: how long a node is left alone counts from its failure, not from when somebody learns of that.
    """
    lease = manager.lock("a", renew=False).acquire()
    assert lease.extend()
    nodes[0].kill()
    assert lease.extend()
    breaker = manager._gather.breakers[0]
    await eventually(lambda: breaker.rest > 0)
    nodes[0].start()
    await eventually(lambda: steady() > breaker.until)

    assert lease.extend()

    await eventually(lambda: key_on(nodes[0]) == lease.token)


@contextmanager
def busy(manager: LockManager, until: Callable[[], bool]) -> Iterator[None]:
    """Have threads take locks, each its own, and give them up."""

    def use(name: str) -> None:
        while not until():
            with suppress(RedlockError):  # a machine may be too busy for these
                manager.lock(name, wait=0).acquire().release()

    threads = [threading.Thread(target=use, args=(f"b{number}",)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(30)


@pytest.mark.parametrize("dead", [1, 2])
def test_watchdog_gives_empty_nodes_the_key_back(nodes: Servers, real: Manager, dead: int):
    """
    L32: also while other threads of the process use locks, each with connections of its own, and other leases are due.
    """
    manager = real(5, ttl=6.0, node_timeout=1.0)
    connect(manager)
    over = threading.Event()
    others = [manager.lock(f"c{number}", ttl=6.0 + number).acquire() for number in range(THREADS)]
    lease = manager.lock("a").acquire()
    with busy(manager, over.is_set), ExitStack() as stack:
        stack.callback(over.set)
        for node in nodes[:dead]:
            node.kill()
        while sum(breaker.rest > 0 for breaker in manager._gather.breakers) < dead:
            assert not over.wait(0.01)
        for node in nodes[:dead]:
            node.start()
        before = lease.extensions
        comes_back(nodes[:dead], lease)

    assert lease.extensions - before <= 3  # while a node is left alone, for two seconds at most, it gets none
    assert lease.valid()
    for other in [lease, *others]:
        other.release()


@pytest.mark.skipif(not TABLE.exists(), reason="counts connections as Linux shows them")
def test_black_hole_gets_no_end_of_connections(nodes: Servers):
    """
    L8, P23: a process has no more connections to a silent node at once than it has threads that ask, and a courier.
    """
    with FaultProxy(nodes[2].url) as proxy, ExitStack() as stack:
        manager = real_manager([*nodes.urls[:2], proxy.url], node_timeout=0.2)
        stack.callback(manager.close)
        proxy.black_hole()
        until = time.monotonic() + 4.0
        most = 0
        with busy(manager, lambda: time.monotonic() > until):
            while time.monotonic() < until:
                most = max(most, connections_to(proxy.port))
                time.sleep(0.02)

        assert 0 < most <= THREADS + 1
        manager.close()
        while connections_to(proxy.port):
            assert time.monotonic() < until + 30
            time.sleep(0.02)


def connections_to(port: int) -> int:
    """Return how many connections to a port of this machine are open, as who opened them sees it."""
    rows = [row.split() for row in TABLE.read_text().splitlines()[1:]]
    return sum(int(row[2].split(":")[1], 16) == port and row[9] != "0" for row in rows)


class Halting(MemoryNode):
    """A node that takes as long as a test says to connect, and to answer."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.connects, self.answers = asyncio.Event(), asyncio.Event()

    async def aconnect(self, timeout: float) -> AsyncMemoryLink:
        await self.connects.wait()
        await asyncio.sleep(0)  # one turn, as the answers that are held back need
        return HaltingLink(self)


class HaltingLink(AsyncMemoryLink):
    """Holds replies back."""

    def __init__(self, node: Halting) -> None:
        super().__init__(node.connect(1.0))
        self._node = node

    def send(self, request, packed, on_reply, *, in_full=False):
        def answer(_=None):
            super(HaltingLink, self).send(request, packed, on_reply)

        if self._node.answers.is_set():
            answer()
        else:
            asyncio.ensure_future(self._node.answers.wait()).add_done_callback(answer)


async def test_link_that_comes_with_the_deciding_vote():
    """
    L32: a round that mends is also sent to a node whose link comes in the very turn in which the round is decided.
    """
    nodes = [Halting(name) for name in "abc"]
    rules = Rules(3, ttl=TTL, restart_guard=False)
    admission = Admission(rules, ("a", "b", "c"), steady, time.time)
    gather = AsyncGather(nodes, admission, Breakers(3))
    request = Acquire(("{a}",), "0" * 32, "0" * 32, TTL, 1, 600.0, 600.0)
    ballot = Ballot(dict.fromkeys(range(3), request), lambda replies: len(replies) == 2, 10.0, mending=True)

    for node in nodes[:2]:
        node.connects.set()
    nodes[0].answers.set()
    nodes[2].answers.set()
    asked = asyncio.create_task(gather.ask(ballot))
    await eventually(lambda: len(gather._lines) == 2 and len(ballot.replies) == 1)
    nodes[1].answers.set()  # of both the round hears in one turn, of the vote first
    nodes[2].connects.set()
    await asked

    assert {reply.kind for reply in (ballot.replies | ballot.late).values()} == {Kind.ACCEPTED}
    assert sorted(ballot.replies | ballot.late) == [0, 1, 2]
    await gather.aclose()
