"""``assert_locked()`` and ``current_lease()``: code far from the ``with`` knows under which locks it runs."""

import asyncio
import contextvars
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.management import BaseCommand, call_command
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory, override_settings

from django_redlock import (
    Lease,
    LockLostError,
    assert_locked,
    current_lease,
    lock,
    locked_command,
    locked_view,
)
from django_redlock.testing import Simulation
from tests.shop.helpers import in_thread

NOT_HELD = r"Lock 'a' is not held here\. Call this inside 'with lock\('a'\):'.*elsewhere, pass the lease\."


def is_held(name: str = "a") -> bool:
    with suppress(RuntimeError):
        assert_locked(name)
        return True
    return False


def in_block() -> Any:
    with lock(["a", "b"]) as lease:
        return lease, current_lease("a"), current_lease("b"), current_lease()


async def in_async_block() -> Any:
    async with lock("a") as lease:
        return lease, current_lease("a"), current_lease()


def by_hand() -> Any:
    lease = lock("a").acquire()
    found = current_lease("a")
    lease.release()
    return lease, found


@pytest.mark.parametrize("way", [in_block, lambda: asyncio.run(in_async_block()), by_hand])
def test_code_finds_the_lease_under_which_it_runs(way: Callable[[], Any]):
    """By the name, or one of the names, of the lock; without a name, the last lock that was taken; nothing later."""
    lease, *found = way()

    assert all(each is lease for each in found)
    assert not is_held()


def test_lease_that_is_found_can_be_used():
    """Deep inside, code extends it, sends heartbeats, and checks it."""
    with Simulation(ttl=10) as sim, lock("a", heartbeat=5) as lease:
        for _ in range(20):
            sim.advance(4)
            current_lease("a").heartbeat()
        assert current_lease("a").extend()
        assert_locked("a")

        assert lease.extensions > 20


def test_lock_that_is_not_held_here_is_an_error_that_says_what_to_write():
    """Held elsewhere is not held here: by another thread, under another name or alias, or before the block ended."""
    with (
        override_settings(REDLOCK={"default": {"NODES": ["memory://a"]}, "other": {"NODES": ["memory://b"]}}),
        lock("a", using="other"),
    ):
        with pytest.raises(RuntimeError, match=NOT_HELD):
            assert_locked("a")
        assert_locked("a", using="other")
        with pytest.raises(RuntimeError, match=r"No lock is held here\. Call this inside 'with lock\(\.\.\.\):'"):
            current_lease()
    with lock("b"), pytest.raises(RuntimeError, match=NOT_HELD):
        current_lease("a")
    with lock("a"):
        assert in_thread(is_held) is False
        assert is_held()


def test_lock_of_a_rival_is_not_held_here():
    """In a simulation, the lease that a rival takes in the same thread is no lease of the code under test."""
    with Simulation(ttl=10) as sim:
        sim.rival().lock("a").acquire()
        with pytest.raises(RuntimeError, match=NOT_HELD):
            assert_locked("a")
        with pytest.raises(RuntimeError, match="No lock is held here"):
            current_lease()

        with pytest.raises(LockLostError, match="'b' was lost"), lock("b"):  # noqa: PT012
            sim.lose("b")
            assert_locked("b")


@pytest.mark.parametrize("others", [0, 30])
def test_lost_lock_is_reported_as_lost(others: int):
    """Code inside the block learns of it, however many locks it has taken since; after the block, nothing is held."""
    with Simulation(ttl=10) as sim:
        with pytest.raises(LockLostError), lock("a") as lease:  # noqa: PT012
            sim.pause(11)
            assert not lease.valid()
            for number in range(others):
                with lock(f"b{number}"):
                    pass
            with pytest.raises(LockLostError, match="'a' was lost"):
                assert_locked("a")
            with pytest.raises(LockLostError, match="'a' was lost"):
                current_lease("a")

        assert not is_held()


def test_holder_that_has_the_lock_again_holds_it():
    """A lease that was lost is no reason to stop where another one of the same lock is valid."""
    with Simulation(ttl=10) as sim:
        with suppress(LockLostError), lock("a"):
            sim.pause(20)
            with lock("a") as again:
                assert current_lease("a") is again


async def test_code_that_was_started_inside_the_block_knows_the_lock():
    """A task and a thread with a copy of the context run under it; a plain thread is another one."""
    async with lock("a"):
        assert await asyncio.create_task(asyncio.to_thread(is_held))
        assert await sync_to_async(is_held)()
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(is_held()), **no_context())
        thread.start()
        await asyncio.to_thread(thread.join)
        assert found == [False]


def no_context() -> dict[str, Any]:
    """Return the arguments with which a thread gets an empty context; some builds of Python copy the caller's."""
    return {"context": contextvars.Context()} if sys.version_info >= (3, 14) else {}


def test_views_and_commands_run_under_their_locks():
    """Their locks have the names that lists show."""
    held: list[Lease] = []

    @locked_view("order:{pk}", methods=["GET"])
    def view(request: HttpRequest, pk: int) -> HttpResponse:
        held.append(current_lease())
        return HttpResponse()

    @locked_command("nightly")
    class Command(BaseCommand):
        def handle(self, **options: Any) -> None:
            assert_locked("command:nightly")
            held.append(current_lease())

    view(RequestFactory().get("/"), pk=7)
    call_command(Command())

    assert [lease.name.rpartition(":")[2] for lease in held] == ["7", "nightly"]
    assert [str(lease.reason) for lease in held] == ["released"] * 2


async def test_loss_can_be_awaited():
    """Like any event of asyncio, or by itself; a task that waits for it goes on when the lock is lost."""
    with Simulation(ttl=10) as sim:
        lease = await lock("a", renew=False).aacquire()

        async def wait() -> object:
            return await lease.lost

        waits = [asyncio.create_task(wait()), asyncio.create_task(lease.lost.wait())]
        await asyncio.sleep(1)
        assert not any(task.done() for task in waits)
        sim.advance(11)

        assert await asyncio.gather(*waits) == [True, True]
        assert await lease.lost
