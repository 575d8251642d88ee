"""The contract of a lock and of its nodes: the same with blocking code and asyncio, and over every kind of node."""

import math
from dataclasses import replace
from typing import Any

import pytest

from django_redlock import Lease, LockLostError, LockTakenError
from django_redlock.testing.contract import NodeContract, OpenNodes
from tests.managers import KINDS, Flavour, Manager, Virtual, held_by, opened


class TestEveryKind(NodeContract):
    """The contract of every kind of node, also of one that somebody else has written."""

    @pytest.fixture(params=KINDS)
    def open_nodes(self, request: pytest.FixtureRequest) -> OpenNodes:
        """Nodes of each kind."""
        return opened(request, request.param)


@pytest.mark.parametrize(
    ("lost", "outcome", "reason"),
    [
        ("", "released", "released"),
        ("its keys are gone", "expired", "forgotten"),
        ("another one has it", "taken", "superseded"),
        ("too few nodes answer", "unknown", "released"),
    ],
)
async def test_outcome_of_a_release_and_the_reason_agree(
    memory: Manager, flavour: Flavour, lost: str, outcome: str, reason: str
):
    """A repeated release has the same outcome, and the reason is no release if the lock had been lost before."""
    manager = memory()
    lease = await flavour.acquire(manager.lock("a", renew=False))
    if lost.startswith("too few"):
        for node in manager.nodes:
            node.down = True  # type: ignore[attr-defined]
    elif lost:
        manager.release("a", lease.secret)
    if lost.startswith("another"):
        await flavour.acquire(manager.lock("a"))

    outcomes = [await flavour.release(lease), await flavour.release(lease)]

    assert (outcomes, lease.reason) == ([outcome] * 2, reason)


async def test_lapsed_lease_is_never_revived(memory: Manager, flavour: Flavour):
    """Once its time has run out, a lease is lost, even if all its keys still exist."""
    manager = memory()
    lease = await flavour.acquire(manager.lock("a", renew=False))
    lease.hold.deadline = 0.0

    assert not await flavour.extend(lease)

    assert not lease.valid()
    assert (lease.reason, lease.remaining(), lease.lost.is_set()) == ("expired", 0.0, True)
    with pytest.raises(LockLostError):
        lease.ensure()
    lease.hold.deadline = math.inf
    assert not lease.valid()
    assert await flavour.release(lease) == "expired"


@pytest.mark.parametrize("renew", [True, False])
async def test_holder_is_notified_when_its_lock_is_gone(virtual: Virtual, flavour: Flavour, renew: bool):
    """Event and callback report the loss, at the latest when the lease ends by the local clock."""
    manager = virtual(ttl=30.0)
    told: list[Lease] = []
    lease = await flavour.acquire(manager.lock("a", renew=renew))
    lease.on_lost(told.append)
    manager.release("a", lease.secret)
    thief = await flavour.acquire(manager.lock("a", ttl=60.0, renew=False))

    await virtual.wait(9.0)
    assert not lease.lost.is_set()
    await virtual.wait(2.0 if renew else 21.5)

    assert lease.lost.is_set()
    assert (lease.reason, told) == ("superseded" if renew else "expired", [lease])
    await flavour.release(thief)


@pytest.mark.parametrize(
    ("options", "own", "reason", "ends"),
    [
        ({"max_hold": 15.0}, {}, "max_hold", 40.0),
        ({"max_extensions": 1}, {}, "max_extensions", 40.0),
        ({"max_hold": 5.0}, {}, "max_hold", 30.0),
        ({"max_hold": 15.0}, {"max_hold": 5.0}, "max_hold", 30.0),
    ],
)
async def test_renewal_stops_at_its_bounds(
    virtual: Virtual, flavour: Flavour, options: Any, own: Any, reason: str, ends: float
):
    """A holder that never ends loses the lock, and the loss has the reason; a lock's own bound goes first."""
    manager = virtual(ttl=30.0, **options)
    lease = await flavour.acquire(manager.lock("a", **own))

    await virtual.wait(ends - 2.0)
    assert lease.valid()
    await virtual.wait(2.0)

    assert lease.lost.is_set()
    assert lease.reason == reason


async def test_loss_is_reported_whatever_notices_it(memory: Manager, flavour: Flavour):
    """A lease that ends between two readings of the clock, during an extension, is reported like any other."""
    manager = memory()
    told: list[Lease] = []
    lease = await flavour.acquire(manager.lock("a", renew=False))
    lease.on_lost(told.append)
    times = [lease.hold.deadline - 1e-6]  # valid when it is checked, and ended from then on
    clock = lease.hold.clock = lambda: times.pop() if times else lease.hold.deadline
    manager.runtime = replace(manager.runtime, clock=clock)

    assert not await flavour.extend(lease)
    assert not lease.valid()

    assert (lease.lost.is_set(), told, lease.reason) == (True, [lease], "expired")


async def test_one_lock_object_is_not_entered_twice(memory: Manager, flavour: Flavour):
    """Entering a lock object again raises instead of waiting for itself or losing the first lease; wait=0 asks."""
    manager = memory()
    lock = manager.lock("a")

    @manager.lock("b")
    def recurse() -> None:
        recurse()

    async with flavour.entered(lock) as lease:
        with pytest.raises(RuntimeError, match="would wait for itself"):
            async with flavour.entered(lock):
                pytest.fail("entered twice")
        assert lease.valid()
    with pytest.raises(RuntimeError, match="would wait for itself"):
        recurse()
    impatient = manager.lock("a", wait=0)
    async with flavour.entered(impatient):
        with pytest.raises(LockTakenError):
            async with flavour.entered(impatient):
                pytest.fail("entered twice")
    assert held_by(manager, "{a}")
    assert held_by(manager, "{b}")


async def test_body_may_release_early(memory: Manager, flavour: Flavour):
    """A release inside the block is not a loss, and leaving the block releases no other hold."""
    manager = memory()

    async with flavour.entered(manager.lock("a")) as lease:
        assert await flavour.release(lease) == "released"
        later = await flavour.acquire(manager.lock("a", wait=0))

    assert later.valid()
    assert held_by(manager, "{a}", later.secret)
    await flavour.release(later)


async def test_waiting_ends_at_its_time(virtual: Virtual, flavour: Flavour):
    """A waiter gives up after ``wait``, reports how long it waited, and leaves nothing behind."""
    manager = virtual()
    lease = await flavour.acquire(manager.lock("a"))

    with pytest.raises(LockTakenError) as caught:
        await flavour.acquire(manager.lock("a", wait=30.0))

    assert caught.value.attempts > 1
    assert 30.0 <= caught.value.waited < 31.0
    assert held_by(manager, "{a}", lease.secret)
    assert not any(node.store.waiters("{a}") for node in virtual.sim.nodes)
    await flavour.release(lease)
