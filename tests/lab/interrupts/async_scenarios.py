"""The code to interrupt: what tasks of an event loop do with a lock."""

import asyncio
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from unittest.mock import patch

from django_redlock import LockLostError, LockTakenError, QuorumUnavailableError
from django_redlock.engine import notifications
from django_redlock.engine import watchdog as renewal
from django_redlock.engine.lease import passed_on
from django_redlock.engine.manager import LockManager
from django_redlock.engine.watchdog import note_drops

from .background import Unfit
from .scenarios import (
    LATEST,
    TTL,
    Pair,
    Prepared,
    Scenario,
    aside,
    fail,
    held,
    mend,
    raising,
    taken,
    tell,
    usurped,
    variant,
)


async def nothing() -> None: ...


async def aenter(manager: Any, lock: Any, prepared: Any) -> None:
    async with lock:
        pass


async def aby_hand(manager: Any, lock: Any, prepared: Any) -> None:
    lease = await lock.aacquire()
    await lease.aextend()
    await lease.arelease()
    await lease.arelease()


async def asend(manager: Any, lock: Any, prepared: Any) -> None:
    lease = await lock.aacquire()
    await lease.arelease(wait=False)
    async with aside(manager, release="send"):
        pass
    await manager.driver.unattended.aextend([])


async def alose(manager: Any, lock: Any, prepared: Any) -> None:
    lease = await lock.aacquire()
    lease.on_lost(lambda lease: None)
    lease.on_lost(raising)
    lease.lost.is_set()
    lease.hold.deadline = 0.0
    with suppress(LockLostError):
        lease.ensure()
    await lease.arelease()
    with suppress(LockLostError):
        async with lock as lease:
            lease.hold.deadline = 0.0
    async with lock as lease:
        await lease.arelease()


async def alose_elsewhere(manager: Any, lock: Any, prepared: Any) -> None:
    """Have another thread notice the loss."""
    lease = await lock.aacquire()
    event = lease.lost
    lease.hold.deadline = 0.0
    await asyncio.to_thread(lease.valid)
    async with asyncio.timeout(LATEST):
        await event.wait()
    await lease.arelease()


async def await_anew(manager: Any, lock: Any, prepared: Any) -> None:
    """Wait while nodes cannot be listened to, then while they can; drop the connections when nobody waits."""
    with patch.object(notifications, "RETRY", 0.01), patch.object(notifications, "LINGER", 0.05):
        for fault in ("down", "defect"):
            fail(manager, fault, 1)
            with suppress(LockTakenError):
                await (await manager.lock(lock.name, wait=0.05).aacquire()).arelease()
            mend(manager)
        tell(manager, "CLIENT", "KILL", "TYPE", "pubsub")
        async with lock:
            pass
        await asyncio.sleep(0.12)


async def aunfit(manager: Any, lock: Any, prepared: Any) -> None:
    """Have the watchdog extend what it cannot, for longer than until its next look."""
    unfit = Unfit(ValueError), Unfit(LookupError)
    dog = renewal.AsyncWatchdog()
    with patch.object(renewal, "TICK", 0.01):
        for each in unfit:
            dog.watch(each)
        await asyncio.sleep(0.05)
        unfit[0].valid = unfit[1].valid = failing  # type: ignore[method-assign]
        await asyncio.sleep(0.05)
        for each in unfit:
            dog.forget(each)
        dog.rest()
        await asyncio.sleep(0.05)
    async with lock:
        pass


def failing() -> bool:
    raise LookupError("not to be looked at")


async def ascripts_flushed(manager: Any, lock: Any, prepared: Any) -> None:
    """Use servers that have forgotten the scripts, and connections that they have closed."""
    tell(manager, "SCRIPT", "FLUSH")
    lease = await lock.aacquire()
    tell(manager, "SCRIPT", "FLUSH")
    await lease.arelease(wait=False)
    tell(manager, "CLIENT", "KILL", "TYPE", "normal")
    async with lock:
        pass


async def amake(manager: Any, lock: Any, prepared: Any) -> None:
    """Make a manager, and use it."""
    new = LockManager(manager.nodes, manager.rules)
    async with new.lock(lock.name, ttl=TTL, wait=10 * TTL):
        pass
    await new.aclose()


def earlier_loop(manager: Any, lock: Any) -> None:
    """Use the lock in an event loop that has been closed since."""
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, aenter(manager, lock, None)).result(LATEST)


async def acancelled(manager: Any, lock: Any, prepared: Any) -> None:
    """Have the loss of the lock cancel the body of a block."""
    with suppress(LockLostError, TimeoutError):  # an interrupted callback of the event loop cancels nothing
        async with variant(lock, cancel_on_lost=True) as lease:
            lease.hold.deadline = 0.0
            lease.valid()
            async with asyncio.timeout(1.0):
                await asyncio.Event().wait()
    async with variant(lock, cancel_on_lost=True):
        pass


async def arefused(manager: Any, lock: Any, prepared: Prepared) -> None:
    """Have an extension refused, which ends the lease."""
    await prepared.lease.aextend()


async def aunknown(manager: Any, lock: Any, prepared: Any) -> None:
    """Extend and release while two nodes are silent."""
    lease = await lock.aacquire()
    fail(manager, "silent", 2)
    await lease.aextend()
    await lease.arelease(wait=False)
    mend(manager)


async def aunavailable(manager: Any, lock: Any, prepared: Any) -> None:
    """Give up, because too few nodes can be reached."""
    for fault in ("down", "defect"):
        fail(manager, fault, 3)
        with suppress(QuorumUnavailableError, LockTakenError):
            await (await manager.lock(lock.name, wait=0.1).aacquire()).arelease()
        mend(manager)
        await manager.driver.loop_side().gather.aclose()


async def amissed(manager: Any, lock: Any, prepared: Any) -> None:
    """Release while a node is down; it gets the release when it is up again."""
    lease = await lock.aacquire()
    fail(manager, "down", 1)
    await lease.arelease()
    mend(manager)


async def arenew(manager: Any, lock: Any, prepared: Any) -> None:
    """Wait until the watchdog of the event loop has extended a lease; an interruption there ends a callback of it."""
    lease = await lock.aacquire()
    lease.hold._renew_at = 0.0
    with patch.object(renewal, "TICK", 0.02):  # otherwise each interruption costs a second
        renewal.loop_watchdog().watch(lease)
        async with asyncio.timeout(LATEST):
            while not lease.extensions:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        renewal.loop_watchdog().tends(manager)
        await asyncio.sleep(0.03)  # until the timers have found nothing due
    await lease.arelease()


async def aother_ways(manager: Any, lock: Any, prepared: Any) -> None:
    """Do what the scenario of threads does in an event loop."""
    lease = await lock.atry_acquire()
    if lease:
        async with lease:
            pass

    await lock(nothing)()
    await variant(lock, if_taken="skip", wait=0)(nothing)()
    await (await variant(lock, shared=True).aacquire()).arelease(wait=False)


async def anested(manager: Any, lock: Any, prepared: Any) -> None:
    again = variant(lock, reentrant=True)
    async with again, again:
        pass
    with suppress(RuntimeError):
        async with lock:
            await lock.__aenter__()
    with suppress(RuntimeError):
        async with lock:
            await variant(lock).aacquire()
    async with Pair(lock):
        pass


async def aabandoned(manager: Any, lock: Any, prepared: Any) -> None:
    """Enter again where the release of the block before is still to be made."""
    way_out = lock.__aexit__
    await lock.__aenter__()
    del way_out
    async with lock:
        pass


async def adrop(manager: Any, lock: Any, prepared: Any) -> None:
    """Drop a lease without a release."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        await aside(manager).aacquire()
        note_drops()


async def apass_on(manager: Any, lock: Any, prepared: Any) -> None:
    """Have another holder take the lock over."""
    lease = await lock.aacquire()
    fail(manager, "silent", 1)
    with suppress(LockTakenError, QuorumUnavailableError):  # a busy machine makes a second node silent
        successor = await manager.claim(lock.name, ttl=TTL, wait=0, adopt=lease.secret).aacquire()
        passed_on(lease)
        await successor.arelease()
    await lease.arelease()
    mend(manager)


async def agive_up(manager: Any, lock: Any, other: Any) -> None:
    with suppress(LockTakenError):
        await manager.lock(lock.name, wait=0.02).aacquire()
    await manager.lock(lock.name, wait=0).atry_acquire()
    await variant(lock, if_taken="skip", wait=0)(nothing)()


async def aclose(manager: Any, lock: Any, prepared: Any) -> None:
    """Close the connections while a release is under way; then use them again."""
    lease = await lock.aacquire()
    async with aside(manager):
        await lease.arelease(wait=False)
        await manager.aclose()
    async with lock:
        pass


async def abeat(manager: Any, lock: Any, prepared: Any) -> None:
    """Send a heartbeat of the process, and stop."""
    async with lock:
        heartbeat = manager.driver.loop_side().heartbeat
        await heartbeat.aextend([heartbeat])
        heartbeat.valid()


ASYNC = [
    Scenario("async enter", aenter),
    Scenario("async by hand", aby_hand),
    Scenario("async release, sent", asend),
    Scenario("async lose", alose),
    Scenario("async lose, seen elsewhere", alose_elsewhere),
    Scenario("async cancel on lost", acancelled),
    Scenario("async refused", arefused, usurped),
    Scenario("async unknown", aunknown),
    Scenario("async unavailable", aunavailable),
    Scenario("async missed", amissed),
    Scenario("async renew", arenew),
    Scenario("async wait", aenter, taken),
    Scenario("async wait anew", await_anew, taken),
    Scenario("async unfit", aunfit),
    Scenario("async scripts flushed", ascripts_flushed),
    Scenario("async make", amake),
    Scenario("async close after an earlier loop", aclose, earlier_loop),
    Scenario("async other ways", aother_ways),
    Scenario("async nested", anested),
    Scenario("async abandoned", aabandoned),
    Scenario("async drop", adrop),
    Scenario("async pass on", apass_on),
    Scenario("async give up", agive_up, held),
    Scenario("async beat", abeat),
]
