"""Who is inside a lock: threads and tasks that enter it again, leave it elsewhere, or are told that it is lost."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from django_redlock import LockLostError, LockTakenError
from django_redlock.locks import LockManager

from .conftest import Flavour, Manager, held_by


@pytest.fixture
async def make(memory: Manager) -> AsyncIterator[Manager]:
    """Make managers over nodes in memory: who is inside a lock is no business of the nodes."""
    managers: list[LockManager] = []

    def made(*args: Any, **options: Any) -> LockManager:
        managers.append(memory(*args, **options))
        return managers[-1]

    yield made
    for one in managers:
        await one.aclose()
        one.close()


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return what *work* returned in a thread of its own, which has ended; the next one may get its ident."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def lose(lease: Any) -> None:
    """Let the time of *lease* be over."""
    lease._tenure.deadline = 0.0


# reentrant


def test_thread_whose_ident_was_used_before_is_another_one(memory: Manager):
    """L43, P16: the system gives the idents of threads that ended to new ones; a lock must not."""
    manager = memory()
    idents: list[int] = []

    def take() -> Any:
        idents.append(threading.get_ident())
        try:
            return manager.lock("a", reentrant=True, wait=0).acquire()
        except LockTakenError:
            return None

    manager.lock("warm up").acquire().release()  # the watchdog's thread does not take an ident in between
    first = in_a_thread(take)
    others = []
    while len(others) < 100 and idents[0] not in idents[1:]:
        others.append(in_a_thread(take))

    assert first.valid()
    assert others == [None] * len(others)
    assert first.release() == "released"
    manager.close()


async def test_ended_task_is_not_taken_for_the_next(make: Manager):
    """L43: a task that has ended leaves its lease to whom it handed it, not to a task in the same memory."""
    manager = make()

    async def take() -> Any:
        try:
            return await manager.lock("a", reentrant=True, wait=0).aacquire()
        except LockTakenError:
            return None

    leases = [await asyncio.create_task(take()) for _ in range(5)]

    assert leases[0].valid()
    assert leases[1:] == [None] * 4
    assert await leases[0].arelease() == "released"


async def test_reentrant_lock_that_was_lost_and_left_can_be_taken_again(make: Manager, flavour: Flavour):
    """L43, L26: who tries again after the loss gets the lock, though it still has the lease that it lost."""
    manager = make()
    lock = manager.lock("a", reentrant=True, wait=0)

    with pytest.raises(LockLostError):  # noqa: PT012
        async with flavour.entered(lock) as lost:
            lose(lost)
            manager.release("a", lost.token)
            with pytest.raises(LockLostError):  # not while the block is still inside
                await flavour.acquire(lock)
    async with flavour.entered(lock) as again:
        assert again.valid()

    assert lost.reason == "expired"
    assert again is not lost


async def test_reentrant_lock_that_was_given_back_can_be_had_the_other_way(make: Manager, flavour: Flavour):
    """L43: a lease that is over is in nobody's way, be it that its holder keeps the object."""
    manager = make()
    over = await flavour.acquire(manager.lock("a", reentrant=True, shared=True))
    await flavour.release(over)

    exclusive = await flavour.acquire(manager.lock("a", reentrant=True, wait=0))

    assert exclusive is not over
    assert await flavour.release(exclusive) == "released"


async def test_place_of_a_reentrant_lock_is_not_the_lock_itself(make: Manager, flavour: Flavour):
    """L43, P16: a lock with places and one without are two locks, also for who may enter them again."""
    manager = make()
    place = await flavour.acquire(manager.lock("a", limit=2, reentrant=True))

    whole = await flavour.acquire(manager.lock("a", reentrant=True, wait=0))

    assert whole is not place
    assert held_by(manager, "{a}", whole.token)
    for lease in (whole, place):
        assert await flavour.release(lease) == "released"
