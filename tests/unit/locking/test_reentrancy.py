"""Threads and tasks inside a lock: they enter it again, leave it elsewhere, or learn that it is lost."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest

from django_redlock import LockLostError, LockManager
from tests.lab.interrupts import at_event
from tests.managers import Flavour, Manager, held_by, holders, made


@pytest.fixture
async def make(memory: Manager) -> AsyncIterator[Manager]:
    """Make managers over nodes in memory, which play no part in reentrancy; their event loop leaves them at the end."""
    yield memory
    for one in made:
        await one.aclose()


def in_a_thread(work: Callable[[], Any]) -> Any:
    """Return the result of *work* in a thread of its own, which has ended; the next thread may get its ident."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def lose(lease: Any) -> None:
    """Let the time of *lease* run out."""
    lease.hold.deadline = 0.0


# reentrant


def test_thread_whose_ident_was_used_before_is_another_one(memory: Manager):
    """The system reuses the idents of ended threads; a lock must not confuse the two."""
    manager = memory()
    idents: list[int] = []

    def take() -> Any:
        idents.append(threading.get_ident())
        return manager.lock("a", reentrant=True).try_acquire()

    manager.lock("warm up").acquire().release()  # the watchdog's thread does not take an ident in between
    first = in_a_thread(take)
    others = []
    while len(others) < 100 and idents[0] not in idents[1:]:
        others.append(in_a_thread(take))

    assert first.valid()
    assert others == [None] * len(others)
    assert first.release() == "released"


async def test_ended_task_is_not_taken_for_the_next(make: Manager):
    """An ended task leaves its lease to its new owner, not to a task in the same memory."""
    manager = make()

    leases = [await asyncio.create_task(manager.lock("a", reentrant=True).atry_acquire()) for _ in range(5)]

    assert leases[0].valid()
    assert leases[1:] == [None] * 4
    assert await leases[0].arelease() == "released"


async def test_reentrant_lock_that_was_lost_and_left_can_be_taken_again(make: Manager, flavour: Flavour):
    """A caller that tries again after the loss gets the lock, though it still has the lost lease."""
    manager = make()
    lock = manager.lock("a", reentrant=True, wait=0)

    with pytest.raises(LockLostError):  # noqa: PT012
        async with flavour.entered(lock) as lost:
            lose(lost)
            manager.release("a", lost.secret)
            with pytest.raises(LockLostError):  # not while the block is still inside
                await flavour.acquire(lock)
    async with flavour.entered(lock) as again:
        assert again.valid()

    assert lost.reason == "expired"
    assert again is not lost


# cancel_on_lost


@pytest.mark.parametrize("noticed", ["ensure", "another thread", "when it is left"])
async def test_body_that_notices_the_loss_itself_is_not_cancelled_after_it(make: Manager, noticed: str):
    """A task that has left the block with the loss continues; no cancellation hits it later."""
    with pytest.raises(LockLostError):  # noqa: PT012
        async with make().lock("a", renew=False, cancel_on_lost=True) as lease:
            lose(lease)
            if noticed == "ensure":
                lease.ensure()
            elif noticed == "another thread":
                assert in_a_thread(lease.valid) is False

    await asyncio.sleep(0)

    assert asyncio.current_task().cancelling() == 0
    assert lease.lost.is_set()


@pytest.mark.parametrize("again", [True, False], ids=["entered twice", "entered once"])
async def test_body_that_continues_after_the_loss_is_cancelled_where_it_waits(make: Manager, again: bool):
    """A loss that the body has seen and ignored cancels it at its next await, once: the outer block asked for it."""
    manager = make()
    with pytest.raises(LockLostError):  # noqa: PT012
        async with manager.lock("a", renew=False, reentrant=again, cancel_on_lost=True) as lease:
            async with manager.lock("a", reentrant=True) if again else nullcontext():
                lose(lease)
                assert not lease.valid()
                await asyncio.sleep(60)
                pytest.fail("went on")

    assert asyncio.current_task().cancelling() == 0


@pytest.mark.parametrize("cancelled", [False, True])
async def test_task_that_absorbed_a_cancellation_learns_of_the_loss(make: Manager, cancelled: bool):
    """A cancellation after which the task went on is not taken for one of the body; a later one is obeyed."""

    async def body() -> None:
        async with make().lock("a", renew=False, cancel_on_lost=True) as lease:
            lose(lease)
            assert not lease.valid()
            if cancelled:
                task.cancel()
            await asyncio.sleep(60)

    async def absorb() -> None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        with pytest.raises(asyncio.CancelledError if cancelled else LockLostError):
            await body()
        assert task.cancelling() == 1 + cancelled

    task = asyncio.create_task(absorb())
    await task


async def test_loss_that_another_thread_notices_is_reported_in_the_loop(make: Manager):
    """An event that wakes tasks is set by their loop, so that asyncio's debug mode finds nothing wrong."""
    manager = make()
    asyncio.get_running_loop().set_debug(True)
    asyncio.get_running_loop().slow_callback_duration = 60  # pauses of the machine are not under test
    told: list[Any] = []
    lease = await manager.lock("a", renew=False).aacquire()
    lease.on_lost(told.append)
    waits = asyncio.create_task(lease.lost.wait())
    await asyncio.sleep(0)
    lose(lease)

    noticed = await asyncio.to_thread(lambda: (lease.valid(), lease.valid()))

    assert noticed == (False, False)
    assert await asyncio.wait_for(waits, 30)
    assert told == [lease]
    late: list[Any] = []
    lease.on_lost(late.append)
    assert late == [lease]


# left elsewhere


async def test_generator_that_is_left_early_gives_its_lock_back(make: Manager):
    """An async generator is closed by a task of the loop that has not entered the lock; that task leaves it."""
    manager = make()
    lock = manager.lock("a", wait=0)

    async def rows() -> AsyncIterator[Any]:
        async with lock as lease:
            yield lease

    found = rows()
    lease = await anext(found)
    await asyncio.create_task(found.aclose())

    assert lease.reason == "released"
    async with lock as next_one:  # nobody is inside any more
        assert next_one.valid()


async def test_leaving_what_nobody_or_more_than_one_entered_is_an_error(make: Manager):
    """A thread that has not entered a lock cannot tell which of several holds to end; it ends none."""
    manager = make()
    lock = manager.lock("a", shared=True)
    inside = [asyncio.create_task(lock.__aenter__()) for _ in range(2)]
    leases = await asyncio.gather(*inside)

    with pytest.raises(RuntimeError, match="'a' is not entered here, but in 2 other tasks or threads"):
        await lock.__aexit__(None, None, None)
    with pytest.raises(RuntimeError, match="'a' is not entered: there is nothing to leave"):
        lock.__exit__(None, None, None)

    assert all(lease.valid() for lease in leases)
    for lease in leases:
        await lease.arelease()


# decorated functions


class Report:
    async def __call__(self, manager: LockManager) -> bool:
        return await held(manager)


async def held(manager: LockManager) -> bool:
    await asyncio.sleep(0)
    return bool(holders(manager, "{a}"))


@pytest.mark.parametrize("function", [held, partial(Report())])
async def test_whatever_is_awaited_is_awaited_under_the_lock(make: Manager, function: Any):
    """An object whose call is a coroutine is locked like a coroutine function."""
    manager = make()

    assert await manager.lock("a", wait=0)(function)(manager)

    assert held_by(manager, "{a}")


def steps() -> Iterator[None]:
    yield pytest.fail("ran")


async def asteps() -> AsyncIterator[None]:
    yield pytest.fail("ran")


async def work() -> None:
    pytest.fail("ran")


@pytest.mark.parametrize(
    ("begun", "what"),
    [
        (work, "an awaitable"),
        (steps, "a generator"),
        (asteps, "a generator"),
        (contextmanager(steps), "a context manager"),
        (asynccontextmanager(asteps), "a context manager"),
    ],
)
async def test_function_that_returns_its_work_in_place_of_a_result_is_refused(make: Manager, begun: Any, what: str):
    """Work that a function only begins would run when the lock is no longer held; it never runs."""
    manager = make()

    @manager.lock("a", wait=0)
    def wrapped() -> Any:
        return begun()

    @manager.lock("a", wait=0)
    async def awrapped() -> Any:
        return begun()

    with pytest.raises(TypeError, match=f"wrapped returned {what}, which would run without lock 'a'"):
        wrapped()
    with pytest.raises(TypeError, match=f"awrapped returned {what}, which would run without lock 'a'"):
        await awrapped()
    assert held_by(manager, "{a}")


async def test_coroutine_function_may_return_what_can_be_awaited(make: Manager):
    """A future, for example, or a client: the function's own work is done."""
    future = asyncio.get_running_loop().create_future()

    @make().lock("a", wait=0)
    async def begin() -> Any:
        return future

    assert await begin() is future


def in_a_step_of_a_node(frame: Any) -> bool:
    """Return whether a node in memory carries out a request, which nothing in its thread may interrupt with another."""
    while frame and "node_state" not in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return frame is not None


def test_handler_takes_a_lock_at_any_moment_of_the_first_lock_of_a_thread(memory: Manager):
    """A signal handler may run anywhere, also while the thread prepares what it needs for its first lock."""
    manager, outcomes, moment = memory(), [], 1

    def first() -> None:
        with manager.lock("a"):
            pass

    def handler() -> None:
        if not in_a_step_of_a_node(sys._getframe()):
            outcomes.append(manager.lock("handler", wait=0).acquire().release())

    while in_a_thread(partial(at_event, first, moment, handler)):
        moment += 1

    assert len(outcomes) > 100
    assert set(outcomes) == {"released"}
