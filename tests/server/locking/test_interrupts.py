"""
Exceptions from signal handlers and other threads, wherever the interpreter can raise them.

Such an exception may cost the lock under way up to one lease. It ends no renewal, blocks no thread, and makes no later
call fail or hang.
"""

import asyncio
import ctypes
import gc
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from django.test import override_settings

from django_redlock import Lease, LockTakenError, lock, locks
from tests.lab import interrupts
from tests.lab.interrupts import (
    ASYNC,
    BLOCKING,
    OPTIONS,
    TTL,
    Interrupted,
    at_event,
    storm,
    sweep,
    witness,
)
from tests.managers import Manager, eventually, unwatched

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:coroutine .* was never awaited"),
    # Python swallows what is raised in a __del__, and prints it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def using(nodes: list[str], options: dict[str, Any] = OPTIONS) -> Any:
    return override_settings(REDLOCK={"default": {"NODES": nodes, "OPTIONS": options}})


at_any_moment = pytest.mark.xfail(
    sys.version_info[:2] == (3, 14), reason="a defect of Python 3.14, cpython#148874: it would hang", run=False
)
"""For tests in which exceptions arrive at any moment; there, Python itself may leave a mutex locked for ever."""


@pytest.fixture
def three() -> Any:
    """Three nodes in memory, whose leases last for a second."""
    with using(["memory://i1", "memory://i2", "memory://i3"]):
        yield


async def in_another_loop() -> None:
    async with lock("another loop"):
        pass


@pytest.fixture(autouse=True)
def collected(caplog: pytest.LogCaptureFixture) -> Any:
    """Collect here what interruptions leave open, because here its warnings are expected."""
    yield
    locks.reset()
    asyncio.run(in_another_loop())  # only then is dropped what belongs to loops that are closed
    for _ in range(3):  # what one collection ends may free more
        # Tracebacks in the log keep event loops, and what is open there, for the next test.
        caplog.get_records("call").clear()
        caplog.clear()
        gc.collect()


def check(found: list[tuple[int, float]], points: int) -> None:
    """Check that a sweep had that many points, and that the lock was free a lease after nearly all of them."""
    assert len(found) >= points
    late = [(event, seconds) for event, seconds in found if seconds > 1.5 * TTL]
    assert len(late) <= len(found) // 10, late


@pytest.mark.parametrize("every", [53, pytest.param(1, marks=pytest.mark.endurance)])
@pytest.mark.parametrize("action", [*BLOCKING, *ASYNC], ids=lambda action: action.__name__)
def test_lock_works_after_an_interruption(three: None, action: Callable[[], Any], every: int):
    """Wherever an exception arrives, the lock is free a lease later, and the renewal of another one goes on."""
    if action in (interrupts.by_hand, interrupts.aby_hand):
        every *= 3  # nearly each of them costs a lease
    with witness():
        check(sweep(action, first=3, every=every), points=6 * 53 // every)


@pytest.mark.parametrize("away", [False, True])
def test_lock_over_servers_works_after_an_interruption(nodes: Any, away: bool):
    """The same when connections have replies in flight at the interruption, and while a node cannot be reached."""
    without_a_node = [interrupts.contended, interrupts.skipped, interrupts.through_compat]
    actions = without_a_node if away else [interrupts.modules, interrupts.sent]
    with using(["redis://127.0.0.1:1", "memory://i2", "memory://i3"] if away else nodes.urls[:3]):
        for action in [*actions, interrupts.ablock]:
            check(sweep(action, first=7, every=53 if away else 29), points=6 if away else 11)


@at_any_moment
@pytest.mark.parametrize("hits", [400, pytest.param(10_000, marks=pytest.mark.endurance)])
def test_signals_at_random_moments_make_no_later_block_fail(three: None, hits: int):
    """The next block waits like any other caller: it is not told that its thread holds the lock already."""
    with witness():
        found = storm(hits)

    assert found.keys() <= {"blocks", "interrupted", "waited in vain", "blocks elsewhere"}
    assert found["waited in vain"] <= hits // 10
    assert found["blocks"] - found["interrupted"] - found["waited in vain"] >= hits // 4
    assert found["blocks elsewhere"] >= hits // 40


def test_watchdog_rests_while_a_callback_takes_long(three: None):
    """It looks again later whether the loss was reported, not again and again meanwhile."""
    lease = lock("a", renew=False).acquire()
    due: list[float] = []
    lease.on_lost(lambda lease: due.append(lease.hold.due() - lease.hold.clock()))
    lease.hold.deadline = 0.0

    assert not lease.valid()
    assert due[0] > 0.5
    assert lease.hold.due() == float("inf")


def in_time(work: Callable[[], object], seconds: float = 20.0) -> object:
    """Do something in another thread; return the result, or ``hangs``."""
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else "hangs"


class Handler:
    """Takes a lock, as a signal handler may, and remembers the outcome and the longest time that it took."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.longest = 0.0

    def __call__(self) -> None:
        began = time.monotonic()
        try:
            with lock("a", wait=0.05):
                outcome = "entered"
        except LockTakenError:
            outcome = "taken"
        except Exception as error:
            outcome = repr(error)
        self.outcomes[outcome] += 1
        self.longest = max(self.longest, time.monotonic() - began)


def test_signal_handler_takes_a_lock_during_the_first_use_of_an_alias(three: None):
    """The first use of an alias imports and makes its nodes; a handler that interrupts it anywhere gets its lock."""
    handler = Handler()

    def first_use() -> bool:
        locks.reset()
        return at_event(lambda: locks["default"], number, handler)

    number = 1
    while (struck := in_time(first_use)) is True:
        number += 1

    assert struck is False, f"event {number}: {struck}"
    assert number > 20
    assert handler.outcomes == {"entered": number - 1}
    assert handler.longest < 5.0


def test_signal_handler_takes_a_lock_during_a_wait(nodes: Any):
    """A handler that interrupts a waiter waits there as well; neither waits longer than it says."""
    with using(nodes.urls[:1], {**OPTIONS, "ttl": 60.0, "max_ttl": 60.0, "node_timeout": 10.0}):
        wait_while_a_handler_waits()


def wait_while_a_handler_waits() -> None:
    holder = lock("a", wait=0).acquire()
    handler, caller = Handler(), Handler()

    def wait() -> bool:
        return at_event(caller, number, handler)

    number, calls = 1, 1
    while (struck := in_time(wait)) is True:
        number, calls = number + 29, calls + 1

    assert struck is False, f"event {number}: {struck}"
    assert calls > 10
    assert (handler.outcomes, caller.outcomes) == ({"taken": calls - 1}, {"taken": calls})
    assert handler.longest < 5.0
    assert caller.longest < 5.0
    assert holder.release() == "released"


def raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))


@pytest.mark.usefixtures("short_turns")
@at_any_moment
def test_exception_that_another_thread_raises_leaves_the_lock_usable(memory: Manager, monkeypatch: Any):
    """An exception from ``PyThreadState_SetAsyncExc`` in a thread that takes locks blocks no other thread."""
    monkeypatch.setattr(logging.getLogger("django_redlock"), "disabled", True)  # or it hits Python's own logging
    manager = memory(3, ttl=5.0, node_timeout=0.2)
    taken, ended = manager.lock("a", wait=10), threading.Event()
    ready = threading.Lock()  # whose methods no exception interrupts
    ready.acquire()

    def take() -> None:
        while not ended.is_set():
            with suppress(Interrupted):
                ready.release()
                while not ended.is_set():
                    with taken:
                        pass

    thread = threading.Thread(target=take)
    thread.start()
    assert ready.acquire(timeout=20)
    for _ in range(300):
        raise_in(thread.ident or 0, Interrupted)
        with manager.lock("b", wait=5):
            pass
        # Two at a time would arrive outside of the suppression as well.
        while not ready.acquire(timeout=3):  # Python has swallowed that one in a __del__
            assert thread.is_alive()
            raise_in(thread.ident or 0, Interrupted)
    ended.set()
    thread.join(20)

    assert not thread.is_alive()
    with taken as lease:
        assert lease.valid()


# Callbacks


def lost(manager: Any, name: str, callback: Callable[[Lease], object] = lambda lease: None) -> Lease:
    """Return a lease that has ended; the watchdog may notice before this returns."""
    lease: Lease = manager.lock(name, ttl=5.0, renew=False).acquire()
    lease.on_lost(callback)
    lease.hold.deadline = 0.0
    manager.runtime.watchdog.watch(lease)  # look now
    return lease


async def test_callback_that_blocks_delays_no_renewal(memory: Manager):
    """A callback that blocks delays neither a renewal nor another callback."""
    manager = memory(3, ttl=5.0, node_timeout=0.2)
    blocked, go_on, told = threading.Event(), threading.Event(), threading.Event()
    kept = manager.lock("kept", ttl=1.0).acquire()
    try:
        lease = lost(manager, "lost", lambda lease: (blocked.set(), go_on.wait(60)))
        await eventually(blocked.is_set)
        other = lost(manager, "other", lambda lease: told.set())
        await eventually(lambda: kept.extensions > 0)
        await eventually(told.is_set)  # and no other callback
    finally:
        go_on.set()
    assert not lease.valid()
    assert not other.valid()
    kept.release()


async def test_callbacks_run_whatever_earlier_ones_raise(memory: Manager, caplog: Any):
    """``sys.exit()`` in one callback does not prevent the next one, and they run in order, once each."""
    manager = memory(3, node_timeout=0.2)
    told: list[int] = []

    def call(lease: Lease) -> None:
        lease.on_lost(lambda lease: told.append(1) or sys.exit(1))  # type: ignore[func-returns-value]
        lease.on_lost(lambda lease: told.append(2) or 1 / 0)  # type: ignore[func-returns-value]
        lease.on_lost(lambda lease: told.append(3))

    lease = lost(manager, "a", call)
    await eventually(lambda: 3 in told)

    assert not lease.valid()
    assert told == [1, 2, 3]
    assert "SystemExit" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_callback_that_exits_in_the_holders_thread_ends_it_after_the_others(memory: Manager):
    """The holder that notices the loss runs the callbacks itself; an exit is raised once all have been called."""
    manager = unwatched(memory())
    told: list[int] = []
    lease = manager.lock("a", renew=False).acquire()
    lease.on_lost(lambda lease: sys.exit(3))
    lease.on_lost(lambda lease: told.append(2))
    lease.hold.deadline = 0.0

    with pytest.raises(SystemExit, match="3"):
        lease.valid()

    assert told == [2]
    assert not lease.valid()
