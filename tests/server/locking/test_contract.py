"""The contract of a lock: the same with blocking code and asyncio, over nodes in memory and real servers."""

import asyncio
import math
import pickle
from dataclasses import replace
from typing import Any

import pytest

from django_redlock import Lease, LockLostError, LockTakenError, RedlockError
from django_redlock.core.names import slug
from django_redlock.core.protocol import Release
from django_redlock.inventory.survey import tell_nodes
from tests.managers import Asyncio, Flavour, Manager, Virtual, held_by, holders

LONGEST = 12.0
"""Seconds that a lock of 10 seconds may still be held for: etcd counts whole seconds, and keeps a lock too long."""


async def test_free_lock_is_granted_for_its_ttl_less_the_drift(make: Manager, flavour: Flavour):
    """It is valid for the ttl less the drift; a second release reports the first, and harms no later holder."""
    manager = make(ttl=60.0)

    lease = await flavour.acquire(manager.lock("order:1"))

    assert lease.valid()
    assert 30.0 < lease.remaining() <= 60.0 - manager.rules.drift(60.0)
    assert (lease.name, lease.names) == ("order:1", ("order:1",))
    assert len(set(holders(manager, "{order:1}"))) == 1
    assert await flavour.release(lease) == "released"
    later = await flavour.acquire(manager.lock("order:1", wait=0))
    assert (await flavour.release(lease), lease.reason) == ("released", "released")
    assert later.valid()
    assert held_by(manager, "{order:1}", later.secret)
    assert await flavour.release(later) == "released"


async def test_held_lock_is_refused_with_its_holder(make: Manager, flavour: Flavour):
    """A held lock is *taken*; the error has lock, attempts, nodes, holder and time left, and nothing is left behind."""
    manager = make()
    lease = await flavour.acquire(manager.lock("order:1", label="invoice run"))

    with pytest.raises(LockTakenError) as caught:
        async with flavour.entered(manager.lock("order:1", wait=0)):
            pytest.fail("the body ran without the lock")

    error = caught.value
    assert (error.name, error.attempts) == ("order:1", 1)
    assert error.holder["label"] == "invoice run"
    assert "taken" in error.nodes.values()
    assert error.retry_after is not None
    assert 0 < error.retry_after <= LONGEST
    assert "'order:1' is held by manual invoice run on" in str(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert held_by(manager, "{order:1}", lease.secret)
    await flavour.release(lease)
    assert held_by(manager, "{order:1}")


async def test_fencing_tokens_increase_from_hold_to_hold(make: Manager, flavour: Flavour):
    """Every later holder has a greater token, also from another manager and for several names."""
    first, second = make(), make()
    tokens = []

    for turn in range(20):
        lease = await flavour.acquire((first, second)[turn % 2].lock(["a", "b"] if turn % 3 else "a"))
        tokens.append(lease.fencing_token)
        await flavour.release(lease)

    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize(
    ("revoke", "taken", "reason", "says"),
    [
        (False, False, "forgotten", "no longer know this holder"),
        (False, True, "superseded", "another caller"),
        (True, False, "revoked", "an operator took it away"),
        (True, True, "superseded", "another caller"),
    ],
)
async def test_lock_that_was_freed_is_reported_when_the_block_ends(
    make: Manager, flavour: Flavour, revoke: bool, taken: bool, reason: str, says: str
):
    """Leaving the block raises the loss, as the work may not have been exclusive; it says if another came, or who."""
    manager = make()

    with pytest.raises(LockLostError, match=f"'a' was lost after.*{says}") as caught:  # noqa: PT012
        async with flavour.entered(manager.lock("a", renew=False)) as lease:
            tell_nodes(manager, Release((slug("a"),), lease.secret, tombstone=60.0 * revoke, revoke=revoke))
            if taken:
                await flavour.acquire(manager.on_behalf("a", detached=True))

    assert caught.value.reason == reason


async def test_error_of_the_body_is_not_masked_by_a_loss(memory: Manager, flavour: Flavour):
    """The exception of the body is raised, even if the lock was lost."""
    manager = memory()

    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        async with flavour.entered(manager.lock("a")) as lease:
            manager.release("a", lease.secret)
            raise ZeroDivisionError


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


@pytest.mark.parametrize(("shared", "holder"), [(False, "manual run of tonight on "), (True, "others, who share it")])
async def test_superseded_holder_learns_of_it_at_its_next_extension(
    make: Manager, flavour: Flavour, shared: bool, holder: str, caplog: pytest.LogCaptureFixture
):
    """A majority that knows a newer holder ends the lease at once, and one error tells who has the lock now."""
    manager = make()
    lease = await flavour.acquire(manager.lock("a", renew=False))
    manager.release("a", lease.secret)
    newer = await flavour.acquire(manager.lock("a", label="run of tonight", shared=shared))

    assert not await flavour.extend(lease)

    assert lease.reason == "superseded"
    assert newer.valid()
    [record] = [each for each in caplog.records if getattr(each, "event", "") == "lock_lost"]
    assert record.getMessage().startswith(f"lock lost: a (superseded); now it is held by {holder}")
    assert newer.secret not in caplog.text
    await flavour.release(newer)


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


@pytest.mark.parametrize("flavour", [Asyncio], ids=["asyncio"], indirect=True)
@pytest.mark.parametrize(("options", "reason"), [({"max_hold": 5.0}, "max_hold"), ({"renew": False}, "expired")])
async def test_task_waits_for_the_loss(virtual: Virtual, options: Any, reason: str):
    """A task that waits for the event wakes when the lock is lost, and not before."""
    manager = virtual(ttl=30.0)
    lease = await manager.lock("a", **options).aacquire()
    waiting = asyncio.create_task(lease.lost.wait())

    await virtual.wait(28.0)
    assert not waiting.done()
    await virtual.wait(2.0)

    assert waiting.done()
    assert lease.reason == reason


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


async def test_hold_ends_on_the_nodes_by_their_own_clock(make: Manager, flavour: Flavour):
    """A dead holder blocks nobody once its lease has ended."""
    manager = make()
    await flavour.acquire(manager.on_behalf("a", ttl=0.5, renew=False, detached=True))

    later = await flavour.acquire(manager.lock("a", wait=60))

    assert held_by(manager, "{a}", later.secret)
    await flavour.release(later)


async def test_several_names_are_locked_all_or_none(make: Manager, flavour: Flavour):
    """All names have one lease and one token; a caller that is refused one of them gets none."""
    manager = make()
    lease = await flavour.acquire(manager.lock(["b", "a"]))

    with pytest.raises(LockTakenError, match="'b, c'"):
        await flavour.acquire(manager.lock(["c", "b"], wait=0))

    assert lease.names == ("a", "b")
    assert held_by(manager, "{c}")
    assert await flavour.release(lease) == "released"
    assert held_by(manager, "{a}")
    assert held_by(manager, "{b}")


async def test_lock_is_taken_over_from_the_holder_that_is_named(make: Manager, flavour: Flavour):
    """A lock without a holder object passes only to the process that knows its token."""
    manager = make()
    queued = await flavour.acquire(manager.on_behalf("slot", ttl=600.0, secret="1" * 32, detached=True))

    with pytest.raises(LockTakenError):
        await flavour.acquire(manager.on_behalf("slot", wait=0, adopt="2" * 32))
    running = await flavour.acquire(manager.on_behalf("slot", wait=0, adopt="1" * 32))

    assert running.fencing_token > queued.fencing_token
    assert held_by(manager, "{slot}", running.secret)
    assert manager.release("slot", "1" * 32) == "taken"
    assert await flavour.release(running) == "released"


async def test_holder_that_was_replaced_does_not_come_back(make: Manager, flavour: Flavour):
    """A request to take the lock is refused after a later holder took it over, and even released it."""
    manager = make()
    later = manager.on_behalf("slot", wait=0, secret="2" * 32, adopt="1" * 32, detached=True)

    await flavour.release(await flavour.acquire(later))

    with pytest.raises(RedlockError):
        await flavour.acquire(manager.on_behalf("slot", wait=0, secret="1" * 32, detached=True))
    assert held_by(manager, "{slot}")


async def test_holder_that_was_replaced_gets_the_lock_back_from_the_present_one(make: Manager, flavour: Flavour):
    """Nobody else can bring it back."""
    manager = make()
    first, second = "1" * 32, "2" * 32
    await flavour.acquire(manager.on_behalf("slot", wait=0, secret=first, detached=True))
    await flavour.acquire(manager.on_behalf("slot", wait=0, secret=second, adopt=first, detached=True))

    await flavour.acquire(manager.on_behalf("slot", wait=0, secret=first, adopt=second, detached=True))

    assert held_by(manager, "{slot}", first)
    assert manager.release("slot", second) == "taken"
    assert manager.release("slot", first) == "released"


async def test_contended_lock_lets_one_in_at_a_time(make: Manager, flavour: Flavour):
    """Contenders that share a lock object get a lease each, one at a time, in the order of their tokens."""
    lock = make(retry_delay=0.002).lock("a")
    inside: list[int] = []
    tokens: list[int] = []

    async def enter(mine: Flavour) -> None:
        async with mine.entered(lock) as lease:
            inside.append(1)
            await asyncio.sleep(0)
            assert len(inside) == 1
            assert lease.valid()
            tokens.append(lease.fencing_token)
            inside.pop()

    await flavour.at_once(12, enter)

    assert len(tokens) == 12
    assert tokens == sorted(set(tokens))


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


@pytest.mark.parametrize("options", [{"shared": True}, {"limit": 2}], ids=["shared", "limit"])
async def test_one_lock_object_is_entered_twice_where_two_would_be(
    memory: Manager, flavour: Flavour, options: dict[str, Any]
):
    """A thread or task may hold two permits, or share a lock twice, also if it keeps one lock object."""
    lock = memory().lock("a", wait=5, **options)

    async with flavour.entered(lock) as outer:
        async with flavour.entered(lock) as inner:
            assert inner is not outer
        assert outer.valid()

    assert (outer.reason, inner.reason) == ("released", "released")


async def test_body_may_release_early(memory: Manager, flavour: Flavour):
    """A release inside the block is not a loss, and leaving the block releases no other hold."""
    manager = memory()

    async with flavour.entered(manager.lock("a")) as lease:
        assert await flavour.release(lease) == "released"
        later = await flavour.acquire(manager.lock("a", wait=0))

    assert later.valid()
    assert held_by(manager, "{a}", later.secret)
    await flavour.release(later)


HOSTILE = [
    "a{b}c",
    "}",
    "{",
    "a\nb\r\n$3\r\n",
    "*?[]\\",
    "schloß-äöü-锁",
    "a:h",
    "a~" + "0" * 32,
    " ",
    "\0",
    "x" * 200,
    "x" * 300 + "1",  # longer names are cut to a readable beginning and a digest
    "x" * 300 + "2",
    "é" * 150,
]


async def test_hostile_names_are_names_like_any_other(make: Manager, flavour: Flavour):
    """Names with braces, newlines, globs and any script are separate locks, and can be listed."""
    manager = make()

    leases = [await flavour.acquire(manager.lock(name, wait=0)) for name in HOSTILE]

    # Any one node may have been too slow to get the first requests.
    listed = {row.slug for reply in manager.survey(count=50).values() for row in reply.rows}
    assert len([slug for slug in listed if not slug.endswith("~p")]) == len(HOSTILE)  # those are signs of life
    for lease in leases:
        assert await flavour.release(lease) == "released"


async def test_secrets_are_not_shown(make: Manager, flavour: Flavour, caplog: pytest.LogCaptureFixture):
    """No repr, log or error contains the secret."""
    manager = make()
    lease = await flavour.acquire(manager.lock("a"))

    with pytest.raises(LockTakenError) as caught:
        await flavour.acquire(manager.lock("a", wait=0))
    manager.release("a", lease.secret)
    await flavour.release(lease)

    shown = repr(lease) + repr(manager) + repr(manager.lock("a")) + str(caught.value) + repr(caught.value) + caplog.text
    assert lease.secret not in shown


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
