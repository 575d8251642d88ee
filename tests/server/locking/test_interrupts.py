"""Exceptions from signal handlers and other threads, wherever the interpreter can raise them."""

import asyncio
import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack, suppress
from typing import Any

import pytest

from django_redlock import LockTakenError, QuorumUnavailableError
from django_redlock.celery.execution import raise_in
from django_redlock.engine import connections as wakeup
from django_redlock.engine.connections import WakeUp
from django_redlock.engine.lease import Lease, LeaseHold
from django_redlock.engine.manager import LockManager
from django_redlock.engine.notifications import Waiters
from django_redlock.engine.reentrancy import Entries
from django_redlock.engine.rounds_async import AsyncGather
from django_redlock.engine.watchdog import Watchdog, abandoned, release_abandoned, watchdog
from django_redlock.nodes.clock import steady
from django_redlock.nodes.threads import Bell, Errands, Event
from tests.lab.interrupts.async_scenarios import ASYNC
from tests.lab.interrupts.scenarios import Scenario, enter
from tests.lab.interrupts.sweep import BLOCKING, KINDS, Sweep, make_sweep
from tests.lab.interrupts.trap import Interrupted, Trap
from tests.managers import Blocking, Flavour, Manager, eventually, unwatched

SAMPLE = 4  # points of each scenario
SOME = 3  # points of each scenario that are interrupted twice, or while a node fails
SHORT = ("enter", "by hand", "renew", "missed", "abandoned")  # scenarios that also run over other kinds of node

EVERY = [*BLOCKING, *ASYNC]
SHORTLIST = [scenario for scenario in EVERY if scenario.name.removeprefix("async ") in SHORT]

of_each = pytest.mark.parametrize("scenario", EVERY, ids=lambda scenario: scenario.name)
of_some = pytest.mark.parametrize("scenario", SHORTLIST, ids=lambda scenario: scenario.name)
# Without the one that leaves locks to the end of their leases, for which it must wait.
of_few = pytest.mark.parametrize(
    "scenario", [each for each in SHORTLIST if "by hand" not in each.name], ids=lambda scenario: scenario.name
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:coroutine .* was never awaited"),
    # Python swallows what is raised in a __del__, and prints it.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning"),
]


def sampled(scenario: Scenario, points: int, first: int = 3, **options: Any) -> Sweep:
    """Interrupt a scenario at about the given number of points; return the finished sweep."""
    sweep = make_sweep(scenario, **options)
    try:
        sweep.sample(points, first)
    finally:
        sweep.close()
    assert sweep.points >= points // 3
    return sweep


@pytest.mark.endurance
@of_each
def test_lock_works_after_an_interruption_of_each_kind_of_use(scenario: Scenario):
    """L10: wherever an exception arrives, the lock can be taken, is renewed and is released afterwards."""
    sampled(scenario, SAMPLE)


@of_some
def test_lock_works_after_an_interruption(scenario: Scenario):
    """L10: a sample of the same for each run."""
    sampled(scenario, SAMPLE)


@of_some
def test_lock_works_after_an_interruption_in_another_thread(scenario: Scenario):
    """L10: the same where no signal handler runs, but other threads may raise exceptions."""
    sampled(scenario, SAMPLE, elsewhere=True)


@of_few
def test_lock_works_after_two_interruptions(scenario: Scenario):
    """L10: the same when a second exception arrives while the first one is handled."""
    sampled(scenario, SOME, first=5, twice=True)


@of_some
def test_lock_over_servers_works_after_an_interruption(nodes: Any, scenario: Scenario):
    """L10: the same when connections have replies in flight at the interruption."""
    sampled(scenario, SOME, first=5, kind="servers", urls=nodes.urls[:3])


@of_few
@pytest.mark.parametrize("kind", ["one down", "one breaking"])
def test_lock_with_a_failing_node_works_after_an_interruption(scenario: Scenario, kind: str):
    """L10, L62: the same while a node of three cannot be reached, or breaks each connection before it replies."""
    sampled(scenario, SOME, first=7, kind=kind)


@pytest.mark.endurance
def test_every_line_of_the_engine_is_interrupted_or_excused():
    """L10: each function of the engine is reached by a scenario at all of its lines, or listed with a reason."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.lab.interrupts", "--uncovered"],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    assert "are points of the sweep" in ended.stdout


@pytest.mark.endurance
@pytest.mark.parametrize("twice", [[], ["--twice"]], ids=["once", "twice"])
@pytest.mark.parametrize("kind", KINDS)
def test_lock_works_after_an_interruption_at_each_line(kind: str, twice: list[str]):
    """L10: the whole sweep, as ``python -m tests.lab.interrupts --each-line`` runs it."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.lab.interrupts", "--each-line", "--nodes", kind, *twice],
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )

    assert ended.returncode == 0, ended.stderr[-4000:]


def test_entered_block_is_released_at_once_at_nearly_every_interruption():
    """L10: ``with`` leaves no key behind; the sweep counts a few points more than the interpreter has."""
    sweep = sampled(Scenario("enter", enter), 100, first=0)

    assert len(sweep.slow) <= sweep.points // 4, sweep.slow


@pytest.mark.endurance
@pytest.mark.parametrize("hits", [400, 5000])
def test_signals_at_random_moments_end_no_renewal(hits: int):
    """L10, L28: a process that gets thousands of signals takes, renews and releases locks, in all its threads."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.lab.interrupts", "--nodes", "memory", "--signals", str(hits)],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert ended.stdout.startswith("survived"), ended.stderr[-4000:]
    assert "Exception ignored" not in ended.stderr


def test_exception_that_another_thread_raises_leaves_the_lock_usable(memory: Manager, monkeypatch: Any):
    """L10: an exception from ``PyThreadState_SetAsyncExc`` in a thread that takes locks blocks no other thread."""
    monkeypatch.setattr(logging.getLogger("django_redlock"), "disabled", True)  # or it hits Python's own logging
    manager = memory(3, ttl=5.0, node_timeout=0.2)
    lock, ended = manager.lock("a", wait=5), threading.Event()
    ready = threading.Lock()  # whose methods no exception interrupts
    ready.acquire()

    def take() -> None:
        while not ended.is_set():
            with suppress(Interrupted):
                ready.release()
                while not ended.is_set():
                    with lock:
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
    with lock as lease:
        assert lease.valid()
    manager.close()


@pytest.mark.parametrize("error", [Interrupted, SystemExit, ZeroDivisionError])
async def test_exception_in_the_watchdogs_thread_ends_no_renewal(memory: Manager, error: type[BaseException]):
    """L10, L27: another thread may raise any exception there; the leases are extended without a new one coming."""
    manager = memory(3, node_timeout=0.2)
    lease = manager.lock("a", ttl=60.0).acquire()
    watchdog.forget(lease)
    raised: list[type[BaseException]] = []

    def clock() -> float:
        if not raised:
            raised.append(error)
            raise error
        return steady()

    dog = Watchdog(clock)
    lease.hold._renew_at = 0.0
    dog.watch(lease)
    await eventually(lambda: lease.extensions > 0)

    assert raised == [error]
    lease.release()
    dog.rest()
    manager.close()


# The edge of a block


class Stop(BaseException):
    """Raised at one place."""


def at_the_edge(lock: Any, name: str) -> None:
    """Enter and leave a block, interrupted as soon as the function *name* begins."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == name and "django_redlock" in frame.f_code.co_filename:
            sys.settrace(None)
            raise Stop
        return None

    before = sys.gettrace()
    try:
        with lock:
            sys.settrace(trace)
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_block_interrupted_as_it_begins_is_released_at_once(
    memory: Manager, flavour: Flavour, monkeypatch: pytest.MonkeyPatch, moment: str
):
    """L10, L28: the body does not run, so nobody waits for its lease to end, and the next block begins at once."""
    manager, other = memory(ttl=60.0), Blocking()
    lock, original = manager.lock("a", wait=0), Entries.add

    def interrupted(*arguments: Any) -> None:
        if moment == "after":
            original(*arguments)
        raise Stop

    with monkeypatch.context() as patched, pytest.raises(Stop):  # noqa: PT012
        patched.setattr(Entries, "add", interrupted)
        async with flavour.entered(lock):
            pytest.fail("the body ran")

    async def taken() -> bool:
        with suppress(LockTakenError):
            await other.release(await other.acquire(manager.lock("a", wait=0)))
            return True
        return False

    while not await taken():  # the release of a task goes on in the background
        assert not isinstance(flavour, Blocking)
        await asyncio.sleep(0.01)
    async with flavour.entered(lock) as lease:
        assert lease.valid()
    await flavour.close(manager)
    manager.close()


@pytest.mark.parametrize("name", ["__call__", "_leave"])
def test_block_interrupted_before_the_first_line_of_its_exit_was_left(memory: Manager, name: str):
    """L10, L28: no code has run that could release the lock; it is released, and the next block begins at once."""
    manager = memory()
    lock = manager.lock("a", wait=0)

    with suppress(Stop):
        at_the_edge(lock, name)

    with lock as lease:
        assert lease.valid()
    manager.close()


def test_block_of_an_exit_stack_interrupted_before_the_first_line_of_its_exit_was_left(memory: Manager):
    """L10, L28, L43: an ExitStack looks up the exit on the class; its blocks are left like those of ``with``."""
    manager = memory()
    lock = manager.lock("a", wait=0)

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if "django_redlock" in frame.f_code.co_filename:
            sys.settrace(None)
            raise Stop
        return None

    before = sys.gettrace()
    try:
        with suppress(Stop), ExitStack() as stack:
            stack.enter_context(lock)
            sys.settrace(trace)
    finally:
        sys.settrace(before)
        del stack
    gc.collect()  # a frame of the stack refers to the exception, and the exception to the frame

    with lock as lease:
        assert lease.valid()
    manager.close()


async def test_waiter_that_is_interrupted_as_it_leaves_is_not_left_over(
    memory: Manager, flavour: Flavour, monkeypatch: pytest.MonkeyPatch
):
    """L10: a process forgets a waiter even if an exception arrives when it is about to."""
    manager = memory()
    original, met = Waiters.leave, []

    def leave(waiters: Waiters[Any], waiter: Any) -> None:
        if not met:
            met.append(len(waiters))
            raise Stop
        original(waiters, waiter)

    await flavour.acquire(manager.lock("a"))
    monkeypatch.setattr(Waiters, "leave", leave)
    with pytest.raises(Stop):
        await flavour.acquire(manager.lock("a", wait=0.05))

    assert met == [1]
    driver = manager.driver
    assert not len(driver.notifications.waiters)
    assert isinstance(flavour, Blocking) or not len(driver.loop_side().notifications.waiters)
    await flavour.close(manager)
    manager.close()


@pytest.mark.parametrize("first", ["watchdog", "next block"])
async def test_lock_that_an_exit_stack_took_and_does_not_know_of_is_released(
    memory: Manager, flavour: Flavour, monkeypatch: pytest.MonkeyPatch, first: str
):
    """L10, L43: after an exception between the acquisition and the stack's note, the next block finds the lock free."""
    manager = memory()
    lock, later = manager.lock("a", wait=0), []

    def interrupted(*arguments: Any) -> None:
        raise Stop

    with monkeypatch.context() as patched, suppress(Stop):
        patched.setattr(ExitStack, "_push_cm_exit", interrupted)
        patched.setattr(AsyncExitStack, "_push_async_cm_exit", interrupted)
        if isinstance(flavour, Blocking):
            with ExitStack() as stack:
                stack.enter_context(lock)
        else:
            async with AsyncExitStack() as loop_stack:
                await loop_stack.enter_async_context(lock)
    # Nothing is released in the background for now.
    monkeypatch.setattr(LeaseHold, "release_later", lambda hold: later.append(hold))
    gc.collect()
    if first == "watchdog":
        release_abandoned()

    async with flavour.entered(lock) as lease:
        monkeypatch.undo()
        for hold in later:
            hold.release_later()
        assert lease.valid()
        with pytest.raises(LockTakenError):
            await flavour.acquire(manager.lock("a", wait=0))
    await flavour.close(manager)
    manager.close()


async def test_block_interrupted_before_its_exit_is_released_in_the_background(memory: Manager):
    """L10, L28: nobody enters the same object again, and still the key is not renewed any longer."""
    manager = memory(ttl=30.0)
    lock = manager.lock("a", wait=0)

    with suppress(Stop):
        at_the_edge(lock, "__call__")

    def free() -> bool:
        with suppress(Exception):
            return manager.lock("a", wait=0).acquire().release() == "released"
        return False

    await eventually(free)
    manager.close()


@pytest.mark.parametrize("first", ["watchdog", "next block"])
def test_block_is_entered_again_while_the_one_before_is_released_in_the_background(
    memory: Manager, monkeypatch: pytest.MonkeyPatch, first: str
):
    """L10, L43: the watchdog, or the next block, is about to release the lease; meanwhile nobody waits for himself."""
    manager = memory(ttl=30.0)
    lock = manager.lock("a", wait=5)
    with suppress(Stop):
        at_the_edge(lock, "__call__")
    owner, method = (LeaseHold, "abandon") if first == "watchdog" else (Lease, "release")
    original, entered = getattr(owner, method), []

    def slowly(lease: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(owner, method, original)
        if first == "next block":
            raise Stop
        with lock:
            entered.append(lease)
        return original(lease, *arguments)

    monkeypatch.setattr(owner, method, slowly)
    if first == "watchdog":
        release_abandoned()
    else:
        with pytest.raises(Stop), lock:
            pass
        with lock as lease:
            entered.append(lease)

    assert len(entered) == 1
    manager.close()


@pytest.mark.parametrize("first", ["watchdog", "next block"])
def test_block_that_is_left_by_an_interruption_leaves_the_block_around_it_alone(memory: Manager, first: str):
    """L10, L42: a reentrant lock stays held until the last of its blocks was left, and is released then."""
    manager = memory()
    lock = manager.lock("a", wait=0, reentrant=True)

    with lock as outer:
        with suppress(Stop):
            at_the_edge(lock, "__call__")
        if first == "watchdog":
            release_abandoned()
        with lock:
            pass
        release_abandoned()
        assert outer.valid()

    assert outer.reason == "released"
    manager.close()


async def test_blocks_that_are_left_as_usual_are_not_taken_for_abandoned(memory: Manager):
    """L28: the exit of an ``async with`` lives until the block was left, although Python itself drops it sooner."""
    manager = memory()
    before = len(abandoned)
    with manager.lock("a"):
        pass
    async with manager.lock("a"):
        pass

    assert len(abandoned) == before
    await manager.aclose()
    manager.close()


def test_lock_in_an_exit_stack_is_entered_and_left(memory: Manager):
    """L43: an ExitStack looks up the methods on the class, and calls them with the lock."""
    manager = memory()
    lock = manager.lock("a", wait=0)

    with ExitStack() as stack:
        lease = stack.enter_context(lock)
        assert lease.valid()
        with pytest.raises(RuntimeError, match="already entered here"):
            stack.enter_context(lock)

    assert lease.reason == "released"
    manager.close()


def test_blocks_of_several_threads_end_their_own(memory: Manager):
    """L42: a block knows its own lease, even if another thread leaves it and others are inside the same lock."""
    manager = memory()
    lock = manager.lock("a", shared=True, wait=0)

    def rows() -> Any:
        with lock as lease:
            yield lease

    found: list[Any] = []
    generators = [rows(), rows()]
    for generator in generators:
        thread = threading.Thread(target=lambda generator=generator: found.append(next(generator)))
        thread.start()
        thread.join()
    generators[0].close()

    assert [lease.reason for lease in found] == ["released", None]
    generators[1].close()
    assert found[1].reason == "released"
    manager.close()


# Callbacks


def lost(manager: LockManager, name: str, callback: Callable[[Lease], object] = lambda lease: None) -> Lease:
    """Return a lease that the watchdog tends, and that has ended; the watchdog may notice before this returns."""
    lease = manager.lock(name, renew=False).acquire()
    lease.on_lost(callback)
    lease.hold.deadline = 0.0
    return lease


async def test_callback_that_blocks_delays_no_renewal(memory: Manager):
    """L22, L27: a callback that blocks delays neither a renewal nor another callback."""
    manager = memory(3, ttl=5.0, node_timeout=0.2)
    blocked, go_on = threading.Event(), threading.Event()
    kept = manager.lock("kept").acquire()
    lease = lost(manager, "lost", lambda lease: (blocked.set(), go_on.wait(60)))
    told = threading.Event()
    other = lost(manager, "other", lambda lease: told.set())
    try:
        watchdog.watch(lease)
        await eventually(blocked.is_set)
        kept.hold._renew_at = 0.0
        watchdog.watch(kept)
        watchdog.watch(other)
        await eventually(lambda: kept.extensions > 0)
        await eventually(told.is_set)  # and no other callback
    finally:
        go_on.set()
    kept.release()
    manager.close()


async def test_callbacks_run_whatever_earlier_ones_raise(memory: Manager, caplog: Any):
    """L22: sys.exit() in one callback does not prevent the next one, and they run in order, once each."""
    manager = memory(3, node_timeout=0.2)
    told: list[int] = []
    lease = lost(manager, "a")
    lease.on_lost(lambda lease: told.append(1) or sys.exit(1))  # type: ignore[func-returns-value]
    lease.on_lost(lambda lease: told.append(2) or 1 / 0)  # type: ignore[func-returns-value]
    lease.on_lost(lambda lease: told.append(3))

    watchdog.watch(lease)
    await eventually(lambda: 3 in told)

    assert not lease.valid()
    assert told == [1, 2, 3]
    assert "SystemExit" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    manager.close()


def test_callback_that_exits_in_the_holders_thread_ends_it_after_the_others(memory: Manager):
    """L22: the holder that notices the loss runs the callbacks itself; an exit is raised once all have been called."""
    manager = unwatched(memory())
    told: list[int] = []
    lease = lost(manager, "a")
    lease.on_lost(lambda lease: sys.exit(3))
    lease.on_lost(lambda lease: told.append(2))

    with pytest.raises(SystemExit, match="3"):
        lease.valid()

    assert told == [2]
    assert not lease.valid()
    manager.close()


async def test_loss_whose_report_was_interrupted_is_reported_by_the_watchdog(memory: Manager):
    """L22, L10: callbacks cut short by an exception are finished, and none runs twice."""
    for at in range(0, 400, 7):
        manager = memory(3, node_timeout=0.2)
        told: list[int] = []
        lease = lost(manager, f"lost{at}")
        for number in range(3):
            lease.on_lost(lambda lease, number=number, told=told: told.append(number))  # type: ignore[misc]
        trap = Trap(at)
        with trap.set():
            lease.valid()
        await eventually(lambda: told == [0, 1, 2] or not lease._loss._callbacks)  # noqa: B023
        assert told == [0, 1, 2] or trap.where.endswith("(<lambda>)"), trap.where
        if not trap.sprung:
            break


# The end of a round in an event loop


@pytest.mark.parametrize("release", [False, True], ids=["acquire", "release"])
async def test_round_whose_timeout_is_interrupted_ends(memory: Manager, monkeypatch: Any, release: bool):
    """L10: asyncio logs an exception in a timer's callback and goes on; no task may wait for that callback for ever."""
    manager = memory(3, node_timeout=0.05)
    lock, original, calls = manager.lock("a", wait=0), AsyncGather._time_out, []

    def interrupted(gather: Any, poll: Any, late: bool) -> bool:
        calls.append(poll)
        if len(calls) == 1:
            raise Interrupted
        return original(gather, poll, late)

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    monkeypatch.setattr(AsyncGather, "_time_out", interrupted)
    lease = await lock.aacquire() if release else None
    for node in manager.nodes:
        node.silent = True  # type: ignore[attr-defined]
    async with asyncio.timeout(20):
        if lease:
            await lease.arelease(wait=False)
            await manager.aclose()
        else:
            with pytest.raises(QuorumUnavailableError):
                await lock.aacquire()

    assert len(calls) > 1
    manager.close()


# Waking threads


def test_wake_up_of_a_busy_thread_is_not_lost():
    """P33: a thread that is notified while it is busy does not sleep afterwards."""
    bell = Bell(threading.Lock())
    bell.ring()
    bell.ring()

    assert bell.wait(0.0)
    assert not bell.wait(0.0)


def test_bell_that_was_interrupted_can_be_rung_and_wakes_its_thread():
    """L10: wherever an exception arrives while a bell is rung or waited for, other threads can use it afterwards."""
    for at in range(60):
        for use in (Bell.ring, lambda bell: bell.wait(0.001)):
            bell, trap = Bell(threading.Lock()), Trap(at)
            sys.settrace(None)
            with trap.set():
                use(bell)
            ringing = threading.Thread(target=bell.ring, daemon=True)
            ringing.start()
            ringing.join(10)
            assert not ringing.is_alive(), trap.where
            woken: list[bool] = []
            waiting = threading.Thread(target=lambda bell=bell, woken=woken: woken.append(bell.wait(10)), daemon=True)
            waiting.start()
            waiting.join(20)
            assert woken == [True], trap.where


def test_event_that_was_interrupted_while_somebody_waited_can_be_set():
    """L10: an exception in a waiting thread leaves nothing locked for the thread that sets the event."""
    for at in range(60):
        event, trap = Event(), Trap(at)
        sys.settrace(None)
        with trap.set():
            event.wait(0.001)
        setting = threading.Thread(target=event.set, daemon=True)
        setting.start()
        setting.join(10)
        assert not setting.is_alive(), trap.where
        assert event.wait(0)
        event.clear()
        assert not event.is_set()


async def test_errands_do_not_wait_for_one_that_blocks():
    """P33: each errand that may block lets others run what comes after it."""
    errands, go_on, done = Errands("errands", most=3), threading.Event(), []
    for number in range(5):
        errands.run(lambda number=number: go_on.wait(60) if number < 2 else done.append(number))  # type: ignore[misc]

    await eventually(lambda: sorted(done) == [2, 3, 4])
    go_on.set()


def test_pair_of_sockets_that_was_interrupted_while_it_was_made_ends_in_silence(monkeypatch: Any):
    """L40: a pair that was never completed is not closed, and Python has no exception to print."""
    ignored: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", ignored.append)

    def interrupted() -> Any:
        raise Interrupted

    monkeypatch.setattr(wakeup.socket, "socketpair", interrupted)
    with pytest.raises(Interrupted):
        WakeUp()

    gc.collect()
    assert ignored == []
