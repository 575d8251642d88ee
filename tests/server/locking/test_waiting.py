"""Waiters get their turn: in order, notified, and without requests without end."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from django_redlock import Lock, LockManager, LockTakenError
from django_redlock.core import acquisition
from django_redlock.core.protocol import Failure, Kind
from django_redlock.core.round import Round
from django_redlock.engine.notifications import Listener, Waiters
from django_redlock.nodes.base import LinkError
from django_redlock.nodes.memory import MemoryNode
from django_redlock.testing import FaultProxy, Servers
from tests.managers import Asyncio, Blocking, Flavour, Manager, eventually, on_each, real_manager


def waiting(manager: LockManager, name: str = "a") -> int:
    """Return how many waiters most nodes have queued; a node without the holder keeps no queue."""
    replies = manager.survey(slugs=(f"{{{name}}}",), waiters=0).values()
    return sorted(sum(row.waiting for row in reply.rows) for reply in replies)[len(replies) // 2]


async def notified(manager: LockManager, flavour: Flavour) -> None:
    """Wait until the nodes can notify the waiters of this process."""
    side = manager.driver if isinstance(flavour, Blocking) else manager.driver.loop_side()
    await eventually(lambda: side.notifications.waiters.notified)


class Line:
    """Lets contenders join one after the other, and records the order of service."""

    def __init__(self, flavour: Flavour, manager: LockManager, lock: Lock | None = None) -> None:
        self.flavour, self.manager = flavour, manager
        self.served: list[int] = []
        self.lock = lock or manager.lock("a", wait=60)
        self.threads = ThreadPoolExecutor(50)

    async def serve(self, number: int) -> None:
        lease = await self.flavour.acquire(self.lock)
        self.served.append(number)
        await self.flavour.release(lease)

    async def join(self, number: int) -> "asyncio.Future[None]":
        """Start one more waiter, and return once it is queued."""
        before = waiting(self.manager)
        if isinstance(self.flavour, Blocking):
            loop = asyncio.get_running_loop()
            task = loop.run_in_executor(self.threads, lambda: asyncio.run(self.serve(number)))
        else:
            task = asyncio.ensure_future(self.serve(number))
        await eventually(lambda: waiting(self.manager) > before)
        return task


async def serve_five(
    manager: LockManager, flavour: Flavour, before_the_release: Callable[[], None] = lambda: None
) -> None:
    """Have five callers wait for a lock, and check that they get it in the order of their arrival."""
    line = Line(flavour, manager)
    holder = await flavour.acquire(manager.lock("a"))
    tasks = [await line.join(number) for number in range(5)]
    before_the_release()

    await flavour.release(holder)
    await asyncio.gather(*tasks)

    assert line.served == list(range(5))
    assert waiting(manager) == 0


async def test_waiters_are_served_in_the_order_of_their_arrival(real: Manager, flavour: Flavour):
    """First come, first served, and the queue is empty afterwards."""
    await serve_five(real(), flavour)


async def test_order_is_kept_when_notification_connections_are_killed(nodes: Servers, flavour: Flavour):
    """The connections come back, and waiters ask about what they missed meanwhile."""
    await serve_five(real_manager(nodes.urls), flavour, lambda: on_each(nodes, "CLIENT", "KILL", "TYPE", "pubsub"))


async def test_free_lock_is_reserved_for_the_first_waiter(real: Manager, flavour: Flavour):
    """A caller that does not wait is refused with "others wait", and may barge in with ``barge=True``."""
    manager = real()
    holder = await flavour.acquire(manager.lock("a"))
    wanted = manager.lock("a").description().wanted
    steps = manager.acquirer.acquisition(wanted, "elsewhere|1").steps(manager.runtime.instant())
    round = next(steps)
    await manager.driver.aask(round) if isinstance(flavour, Asyncio) else manager.driver.ask(round)
    assert {reply.kind for reply in round.replies.values()} == {Kind.BUSY}
    await flavour.release(holder)

    with pytest.raises(LockTakenError, match="is free, but others wait for it"):
        await flavour.acquire(manager.lock("a", wait=0))
    pushy = await flavour.acquire(manager.lock("a", wait=0, barge=True))

    assert pushy.valid()
    await flavour.release(pushy)


async def test_cancelled_waiter_leaves_the_queue(real: Manager):
    """A cancelled waiter also leaves the queue."""
    manager = real()
    holder = await manager.lock("a").aacquire()
    waiter = asyncio.ensure_future(manager.lock("a").aacquire())
    await eventually(lambda: waiting(manager) == 1)

    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter

    await eventually(lambda: waiting(manager) == 0)
    assert await holder.arelease() == "released"
    await manager.aclose()


async def test_waiter_wakes_by_a_notification_and_not_by_its_own_clock(
    real: Manager, flavour: Flavour, monkeypatch: Any
):
    """After its notification, a waiter needs one more attempt, however long its pause would have been."""
    manager = real()
    monkeypatch.setattr(acquisition, "POLL", 30.0)
    holder = await flavour.acquire(manager.lock("a", ttl=30.0))
    line = Line(flavour, manager, manager.lock("a", wait=25))
    task = await line.join(0)
    await notified(manager, flavour)
    start = time.monotonic()

    await flavour.release(holder)
    await task

    assert time.monotonic() - start < 20


async def test_waiter_for_several_names_does_not_starve(real: Manager, flavour: Flavour):
    """A waiter for several names gets them although others take one of the names again and again."""
    manager = real()
    served, names = threading.Event(), iter("aabb")

    async def take(mine: Flavour) -> None:
        name = next(names)
        while not served.is_set():
            lease = await mine.acquire(manager.lock(name, wait=60))
            await asyncio.sleep(0.01)
            await mine.release(lease)

    async def serve(mine: Flavour) -> None:
        await mine.release(await mine.acquire(manager.lock(["a", "b"], wait=60)))
        served.set()

    await asyncio.gather(flavour.at_once(4, take), flavour.at_once(1, serve))


async def test_waiters_of_a_process_take_turns_in_reading_the_notifications(nodes: Servers, monkeypatch: Any):
    """When the waiter that reads for all has reached its timeout, another one continues to read, and so on."""
    monkeypatch.setattr(acquisition, "POLL", 30.0)
    manager = real_manager(nodes.urls[:3])
    holder = manager.lock("a", ttl=60.0).acquire()
    line = Line(Blocking(), manager, manager.lock("a", wait=60))
    loop = asyncio.get_running_loop()
    first = loop.run_in_executor(line.threads, manager.lock("a", wait=0.5).acquire)  # it reads for all
    await eventually(lambda: manager.driver.notifications.waiters.notified and waiting(manager) == 1)
    tasks = [loop.run_in_executor(line.threads, lambda: asyncio.run(line.serve(0))) for _ in range(3)]

    with pytest.raises(LockTakenError):
        await first
    await eventually(lambda: waiting(manager) == 3)
    allowed = {thread.name for thread in threading.enumerate()} | {"django_redlock redelivery"}  # if a node is late
    holder.release()
    await asyncio.wait_for(asyncio.gather(*tasks), 60)

    assert line.served == [0, 0, 0]
    assert {thread.name for thread in threading.enumerate()} <= allowed


def test_connection_that_is_dropped_while_a_waiter_takes_it_over_is_no_error():
    """When the manager is closed, the thread that has just connected drops what the waiter is looking at."""
    nodes = [MemoryNode("a"), MemoryNode("b")]

    def clock() -> float:
        listener._closed = True
        listener._drop_arrivals()
        listener._arrived.append((1, LinkError(Failure.REFUSED)))
        return 0.0

    listener = Listener(nodes, Waiters(1, threading.Event), lambda: 0.0)
    listener._arrived.append((0, LinkError(Failure.REFUSED)))
    listener._clock = clock

    listener._take_arrivals()

    assert [node for node, _ in listener._arrived] == [1]


async def test_notification_that_comes_before_the_wait_is_not_lost(real: Manager, monkeypatch: Any):
    """The lock is released between a waiter's first refusal and its wait; it asks again at once."""
    one = real()
    line = Line(Blocking(), one)
    holder = one.lock("a").acquire()
    first = await line.join(0)
    await eventually(lambda: one.driver.notifications.waiters.notified)
    holder.release()
    await first
    monkeypatch.setattr(acquisition, "POLL", 60.0)
    holder = one.lock("a", ttl=60.0).acquire()
    ask = one.driver.ask

    def ask_and_be_called(round: Round) -> None:
        ask(round)
        monkeypatch.undo()
        holder.release()  # with their replies, a quorum of nodes has also notified the next waiter
        monkeypatch.setattr(acquisition, "POLL", 60.0)

    monkeypatch.setattr(one.driver, "ask", ask_and_be_called)
    start = time.monotonic()

    lease = one.lock("a", wait=50).acquire()

    assert time.monotonic() - start < 9
    lease.release()


async def test_notification_connection_that_is_reset_has_ended(nodes: Servers):
    """Redis-py drops the socket of a connection that is reset; this counts as its end, not as an unexpected error."""
    with FaultProxy(nodes[0].url) as proxy:
        manager = real_manager([proxy.url])
        link = manager.nodes[0].listen("p", 5.0, print)
        proxy.reset()

        with pytest.raises(LinkError):
            await eventually(lambda: bool(link.read()))

        link.close()
