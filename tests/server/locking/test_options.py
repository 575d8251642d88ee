"""Options of a lock: limit, shared, reentrant and heartbeat; and locks with very many names."""

import asyncio
from typing import Any

import pytest

from django_redlock import LockLostError, LockManager, LockTakenError
from django_redlock.core.protocol import SHARED, Kind, Release
from django_redlock.core.round import Round
from django_redlock.testing import Servers
from tests.managers import (
    Asyncio,
    Blocking,
    Flavour,
    Manager,
    Virtual,
    eventually,
    held_by,
    holders,
    on_each,
    real_manager,
)

from .test_waiting import Line, waiting


async def take(flavour: Flavour, manager: LockManager, name: Any, **options: Any) -> Any:
    return await flavour.acquire(manager.lock(name, **{"wait": 0, **options}))


# limit


async def test_waiters_for_a_permit_are_served_in_order(real: Manager, flavour: Flavour):
    """All permits share one queue; whichever becomes free goes to the first waiter."""
    manager = real()
    leases = [await take(flavour, manager, "a", limit=2) for _ in range(2)]
    line = Line(flavour, manager, manager.lock("a", limit=2, wait=60))
    tasks = [await line.join(number) for number in range(4)]
    with pytest.raises(LockTakenError):
        await take(flavour, manager, "a", limit=2)

    await flavour.release(leases[1])
    await asyncio.gather(*tasks)
    await flavour.release(leases[0])

    assert line.served == [0, 1, 2, 3]
    assert waiting(manager) == 0


SHARED_BY_ALL, TWO, THREE = {"shared": True}, {"limit": 2}, {"limit": 3}
WAYS = [({}, SHARED_BY_ALL), (SHARED_BY_ALL, {}), ({}, TWO), (TWO, {}), (SHARED_BY_ALL, TWO), (TWO, THREE)]


@pytest.mark.parametrize(("held", "wanted"), WAYS)
async def test_callers_that_hold_a_name_in_different_ways_wait_for_each_other(
    real: Manager, flavour: Flavour, held: dict[str, Any], wanted: dict[str, Any]
):
    """One holder, readers, and the holders of permits keep each other out, and so do those of another limit."""
    manager = real()
    leases = [await take(flavour, manager, "a", **held) for _ in range(held.get("limit", 1))]
    with pytest.raises(LockTakenError) as taken:
        await take(flavour, manager, "a", **wanted)
    assert ("(limit=" in str(taken.value)) is ("limit" in held)
    line = Line(flavour, manager, manager.lock("a", wait=60, **wanted))
    task = await line.join(1)
    with pytest.raises(LockTakenError):
        await take(flavour, manager, "a", **held)  # behind the waiter

    for lease in leases:
        assert await flavour.extend(lease)
        with pytest.raises(LockTakenError):
            await take(flavour, manager, "a", **wanted)
        assert await flavour.release(lease) == "released"
    await task

    assert line.served == [1]
    assert held_by(manager, "{a}")
    assert waiting(manager) == 0


# shared


async def test_shared_holders_end_each_by_itself(real: Manager, flavour: Flavour):
    """An extension is for one holder; a holder whose lease lapses does not affect the others."""
    manager, brief = real(), real(node_timeout=0.2)
    short = await take(flavour, brief, "a", wait=30, shared=True, ttl=1.0, renew=False)
    long = await take(flavour, manager, "a", shared=True, ttl=60.0, renew=False)

    assert await flavour.extend(long)
    await eventually(short.lost.is_set)

    assert long.valid()
    assert await flavour.extend(long)
    assert set(holders(manager, "{a}")) == {SHARED}
    with pytest.raises(LockTakenError):
        await take(flavour, manager, "a")
    assert await flavour.release(short) == "expired"
    assert await flavour.release(long) == "released"
    assert held_by(manager, "{a}")


async def test_writer_does_not_starve(real: Manager, flavour: Flavour):
    """Readers that come after a waiting writer queue behind it, and all of them follow when it is done."""
    manager = real()
    reader = await take(flavour, manager, "a", shared=True)
    writers = Line(flavour, manager)
    readers = Line(flavour, manager, manager.lock("a", shared=True, wait=60))
    readers.served = writers.served
    tasks = [await writers.join(0), await readers.join(1), await readers.join(2)]
    with pytest.raises(LockTakenError):
        await take(flavour, manager, "a", shared=True)

    await flavour.release(reader)
    await asyncio.gather(*tasks)

    assert writers.served[0] == 0
    assert sorted(writers.served) == [0, 1, 2]


async def test_operator_ends_all_shared_holds(real: Manager, flavour: Flavour):
    """A removed holder learns of it, and of the reason, at its next extension, even if nobody else has come."""
    manager = real()
    readers = [await take(flavour, manager, "a", shared=True, renew=False) for _ in range(2)]
    early, late = (
        Round.to_release(
            Release(("{a}",), SHARED, 10.0, shared=True, revoke=True, fencing_token=token), range(5), 10.0, lasting=10.0
        )
        for token in (readers[0].fencing_token, readers[1].fencing_token)
    )
    manager.driver.ask(early)
    still = [await flavour.extend(lease) for lease in readers]
    manager.driver.ask(late)

    assert {reply.kind for reply in early.replies.values()} == {Kind.BUSY}
    assert still == [True, True]
    assert {reply.kind for reply in late.replies.values()} == {Kind.RELEASED}
    assert [await flavour.extend(lease) for lease in readers] == [False, False]
    assert {lease.reason for lease in readers} == {"revoked"}


# reentrant


async def test_reentrant_lock_is_entered_again_without_a_network_call(memory: Manager, flavour: Flavour):
    """The same thread or task can enter the lock again; the lock is free when it has been left as often."""
    manager = memory()
    acquired = []
    manager.notify = lambda event, **about: acquired.append(event)

    async with flavour.entered(manager.lock("a", reentrant=True)) as outer:
        async with flavour.entered(manager.lock("a", reentrant=True, wait=0)) as inner:
            assert inner is outer
        assert outer.valid()
        assert held_by(manager, "{a}", outer.secret)

    assert outer.reason == "released"
    assert held_by(manager, "{a}")
    assert acquired == ["lock_acquired", "lock_released"]


async def test_reentrant_lock_is_entered_again_by_hand_and_by_a_function_that_may_be_skipped(
    memory: Manager, flavour: Flavour
):
    """A lease may have as many blocks as it was entered; the lock is free after the last one."""
    manager = memory()
    lock = manager.lock("a", reentrant=True, if_taken="skip")

    def work(depth: int) -> str:
        return locked(depth - 1) if depth else "done"

    async def awork(depth: int) -> str:
        return await alocked(depth - 1) if depth else "done"

    locked, alocked = lock(work), lock(awork)

    assert (await alocked(2) if isinstance(flavour, Asyncio) else locked(2)) == "done"
    assert held_by(manager, "{a}")
    async with flavour.entered(manager.lock("a", reentrant=True)) as outer:
        async with flavour.entered(await flavour.acquire(lock)) as inner:
            with pytest.raises(RuntimeError, match="in a block already"):
                async with flavour.entered(inner):
                    pytest.fail("one block more than it was entered")
        assert await flavour.release(await flavour.acquire(lock)) == "held"
        with pytest.raises(RuntimeError, match="in a block already"):
            async with flavour.entered(outer):
                pytest.fail("a block of an entry that was released")
        assert outer.valid()
    assert held_by(manager, "{a}")


async def test_reentrant_lock_is_not_shared_and_exclusive_at_once(memory: Manager, flavour: Flavour):
    """A holder that asks for the lock exclusively beside its own shared hold would wait for itself."""
    manager = memory()

    async with flavour.entered(manager.lock("a", reentrant=True, shared=True)):
        with pytest.raises(RuntimeError, match="held here, shared; it would wait for itself"):
            await flavour.acquire(manager.lock("a", reentrant=True))


# heartbeat, loss


async def test_heartbeat_keeps_a_lease(virtual: Virtual, flavour: Flavour):
    """Work that sends heartbeats keeps the lock, until the heartbeats stop."""
    manager = virtual(ttl=30.0)
    lease = await take(flavour, manager, "a", heartbeat=5.0)

    for _ in range(25):
        await virtual.wait(4.0)
        lease.heartbeat()
    assert lease.valid()
    assert lease.extensions >= 9
    await virtual.wait(40.0)

    assert lease.reason == "heartbeat"


@pytest.mark.parametrize("flavour", [Asyncio], indirect=True)
async def test_body_is_cancelled_when_the_lock_is_lost(virtual: Virtual):
    """An asyncio body need not check; the block raises the loss in place of the cancellation."""
    manager = virtual(ttl=30.0)
    ended = []

    async def work() -> None:
        async with manager.lock("a", cancel_on_lost=True) as lease:
            manager.release("a", lease.secret)
            thieves.append(await manager.lock("a", ttl=60.0, renew=False, wait=0).aacquire())
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(virtual.sim.clock() - began)

    thieves: list[Any] = []
    began = virtual.sim.clock()
    with pytest.raises(LockLostError, match="another caller has tried to take it"):
        await work()

    assert len(ended) == 1
    assert ended[0] < 11.0
    assert asyncio.current_task().cancelling() == 0
    await thieves[0].arelease()


async def test_cancellation_from_elsewhere_is_not_taken_for_a_loss(memory: Manager):
    """A task that is cancelled from outside ends as cancelled."""
    manager = memory()
    entered = asyncio.Event()

    async def body() -> None:
        async with manager.lock("a", cancel_on_lost=True):
            entered.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(body())
    await entered.wait()
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert held_by(manager, "{a}")
    await manager.aclose()


# ttl, many names


async def test_lease_that_is_made_much_shorter_is_looked_at_in_time(virtual: Virtual, flavour: Flavour):
    """A lease is renewed every third of its new ttl, and the loss of one that is not is noticed at its new end."""
    manager, lost = virtual(ttl=60.0, node_timeout=0.1), []
    leases = [await take(flavour, manager, name, renew=renew) for name, renew in (("a", True), ("b", False))]
    leases.append(await flavour.acquire(manager.on_behalf("c", wait=0, detached=True)))
    leases[1].on_lost(lambda lease: lost.append(virtual.sim.clock()))
    began = virtual.sim.clock()

    for lease in leases:
        assert await flavour.extend(lease, ttl=3.0)
    await virtual.wait(10.0)

    assert leases[0].valid()
    assert leases[2].extensions == 1  # a detached lease is not renewed
    assert [2.0 < noticed - began < 4.0 for noticed in lost] == [True]
    await flavour.release(leases[0])


async def test_very_many_names_are_one_lock(nodes: Servers, flavour: Flavour):
    """More than 200 names are sent in parts, all or nothing, also to nodes that forgot their scripts."""
    manager = real_manager(nodes.urls)
    await flavour.release(await take(flavour, manager, "warm up"))
    on_each(nodes, "SCRIPT", "FLUSH")
    lease = await take(flavour, manager, [f"n{number:04}" for number in range(1001)])
    with pytest.raises(LockTakenError):
        await take(flavour, manager, [f"m{number:03}" for number in range(400)] + ["n0999"])
    assert await flavour.extend(lease)
    assert len(set(holders(manager, "{n1000}"))) == 1
    assert await flavour.release(lease) == "released"

    for slug in ("{n0000}", "{n1000}", "{m000}", "{m399}"):
        assert held_by(manager, slug)


# renewal in batches


async def test_leases_are_extended_together(nodes: Servers, flavour: Flavour):
    """Leases that are due at the same time share a round; each has its own outcome."""
    manager = real_manager(nodes.urls, ttl=30.0, node_timeout=1.0)
    leases = [await take(flavour, manager, f"n{number}") for number in range(250)]
    manager.release("n7", leases[7].secret)
    thief = await take(flavour, manager, "n7")
    on_each(nodes, "CONFIG", "RESETSTAT")

    if isinstance(flavour, Blocking):
        longer = manager.extend(leases)
    else:
        longer = await manager.aextend(leases)

    assert longer == 249
    assert leases[7].reason == "superseded"
    assert thief.valid()
    with nodes[0].client() as client:
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] <= 3
    for lease in [*leases, thief]:
        await flavour.release(lease)
