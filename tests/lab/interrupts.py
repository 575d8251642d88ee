"""
An exception at any moment, as signal handlers, soft time limits and other threads raise them.

The promise: such an exception never ends the renewal of another lock, never blocks another thread, never makes a later
call fail or hang, and never keeps a lock renewed for ever. It may cost the one lock under way up to one lease.

:func:`sweep` raises one exception at each event inside the package, where a function is called and where it returns: a
profile function raises it, which the interpreter calls at the places where it runs signal handlers, and at more.
:func:`storm` raises them from a signal handler at random moments, also where a loop begins anew.
"""

import asyncio
import gc
import inspect
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import django_redlock
from django_redlock import Lease, LockTakenError, compat, lock

PACKAGE = str(Path(django_redlock.__file__).parent)
TTL = 1.0
PATIENCE = 20.0  # seconds after which something has failed
LATE = 3 * TTL  # seconds after which a lock that an interruption left must be free, on a busy machine

OPTIONS = {"ttl": TTL, "max_ttl": TTL, "node_timeout": 0.2}


class Interrupted(BaseException):
    """What the signal handler raises."""


MODULES = lock("a", wait=LATE)
"""A lock that outlives its blocks, as those of modules and decorators do."""
NESTED = lock("a", wait=LATE, reentrant=True)


def modules() -> None:
    with MODULES as lease:
        lease.ensure()


def stack() -> None:
    with ExitStack() as stack:
        stack.enter_context(MODULES)


def nested() -> None:
    with NESTED, NESTED:
        pass


def by_hand() -> None:
    lease = lock("a", wait=LATE).acquire()
    lease.extend()
    lease.release()


def skipped() -> None:
    if (lease := lock("a").try_acquire()) is not None:
        with lease:
            pass


def sent() -> None:
    with lock("a", wait=LATE, release="send"):
        pass


def shared() -> None:
    with lock("a", wait=LATE, shared=True):
        pass


def limited() -> None:
    with lock("a", wait=LATE, limit=2):
        pass


def contended() -> None:
    """Wait for a lock that another thread has, and releases."""
    taken = threading.Event()

    def hold() -> None:
        with lock("a", wait=LATE):
            taken.set()
            time.sleep(0.02)

    other = threading.Thread(target=hold)
    other.start()
    try:
        taken.wait()
        with lock("a", wait=LATE):
            pass
    finally:
        other.join()


def through_compat() -> None:
    its = compat.Lock(None, "a", blocking_timeout=LATE)
    its.acquire()
    its.release()


def lost() -> None:
    lease = lock("a", wait=LATE, renew=False).acquire()
    lease.on_lost(lambda lease: None)
    lease.hold.deadline = 0.0
    lease.valid()
    lease.release()


async def ablock() -> None:
    async with lock("a", wait=LATE):
        await asyncio.sleep(0)


async def aby_hand() -> None:
    lease = await lock("a", wait=LATE).aacquire()
    await lease.aextend()
    await lease.arelease()


BLOCKING: list[Callable[[], None]] = [
    modules,
    stack,
    nested,
    sent,
    shared,
    limited,
    contended,
    by_hand,
    skipped,
    lost,
    through_compat,
]
ASYNC: list[Callable[[], Any]] = [ablock, aby_hand]


def at_event(action: Callable[[], object], at: int, strike: Callable[[], object]) -> bool:
    """Call *action*, and *strike* at one event inside the package; return whether there was such an event."""
    seen = 0

    def note(frame: FrameType, event: str, about: Any) -> None:
        nonlocal seen
        if event in ("call", "return") and frame.f_code.co_filename.startswith(PACKAGE):
            seen += 1
            if seen == at:
                sys.setprofile(None)
                strike()

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return seen >= at


def interrupted(action: Callable[[], object], at: int) -> bool:
    """Call *action*, and raise Interrupted at one event inside the package; return whether there was such an event."""

    def strike() -> None:
        raise Interrupted

    with suppress(Interrupted):
        return at_event(action, at, strike)
    return True


def check(where: str) -> float:
    """Check that the lock and all its places can be taken, here and in another thread; return how long it took here."""
    ended: list[object] = []

    def take() -> None:
        try:
            with lock("a", wait=LATE) as lease:
                ended.append(lease.valid())
            # Both places at once, so that none of them is still taken.
            with lock("a", wait=LATE, limit=2) as one, lock("a", wait=LATE, limit=2) as two:
                ended.append(one.valid() and two.valid())
        except BaseException as error:
            ended.append(error)

    began = time.monotonic()
    take()
    waited = time.monotonic() - began
    other = threading.Thread(target=take, daemon=True)
    other.start()
    other.join(2 * LATE)
    assert ended == [True] * 4, f"{where}: {ended or 'hangs'}"
    return waited


def sweep(action: Callable[[], Any], first: int, every: int) -> list[tuple[int, float]]:
    """
    Interrupt *action* at the event *first* and at each *every*-th event after it, and check after each interruption;
    return the events, with the seconds for which the lock was then taken.
    """
    if inspect.iscoroutinefunction(action):
        with asyncio.Runner() as runner:
            # An exception in a callback of the event loop would end the loop itself, so only tasks are interrupted.
            return swept(action.__name__, lambda: runner.run(shielded(action)), first, every)
    return swept(action.__name__, action, first, every)


def swept(name: str, action: Callable[[], object], first: int, every: int) -> list[tuple[int, float]]:
    found, at = [], first
    action()
    while interrupted(action, at):
        gc.collect(0)
        found.append((at, check(f"{name}, event {at}")))
        at += every
    return found


async def shielded(action: Callable[[], Any]) -> None:
    with suppress(Interrupted, asyncio.CancelledError):
        await action()


@contextmanager
def witness() -> Iterator[Lease]:
    """Hold a lock whose renewal no interruption may end: it is renewed once more at the end."""
    lease = lock("witness", wait=LATE).acquire()
    yield lease
    extensions, until = lease.extensions, time.monotonic() + PATIENCE
    while lease.extensions == extensions:
        assert lease.valid(), lease.reason
        assert time.monotonic() < until
        time.sleep(0.01)
    assert lease.release() == "released"


NAMES = 5


def usual_block() -> float:
    """Return how many seconds a block takes that nothing interrupts."""
    began = time.perf_counter()
    for number in range(NAMES):
        with lock(f"n{number}"):
            time.sleep(0)
    return (time.perf_counter() - began) / NAMES


def storm(hits: int) -> Counter[str]:
    """Interrupt blocks *hits* times beside another thread that takes locks; return how often what happened."""
    found: Counter[str] = Counter()
    armed = False
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.001):  # a thread that never waits would leave the watchdog no turn of the interpreter
            with lock("elsewhere", wait=LATE):
                found["blocks elsewhere"] += 1

    beside = threading.Thread(target=work, daemon=True)
    beside.start()

    def strike(number: int, frame: object) -> None:
        if armed:  # otherwise the signal came too late
            raise Interrupted

    def note(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is not Interrupted:
            found[f"unraisable {unraisable.exc_value!r}"] += 1

    # A signal may strike while an object is freed, where nothing can raise. pytest's report of that takes
    # long, and must not be struck itself.
    report, sys.unraisablehook = sys.unraisablehook, note
    before = signal.signal(signal.SIGALRM, strike)
    longest = max(0.002, 3 * usual_block())  # blocks are struck as often on a slow machine
    while found["interrupted"] < hits:
        name = f"n{found['blocks'] % NAMES}"
        found["blocks"] += 1
        try:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, longest))
                with lock(name, wait=LATE):
                    time.sleep(0)
            finally:
                armed = False
        except Interrupted:
            found["interrupted"] += 1
        except LockTakenError:
            found["waited in vain"] += 1
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)
    sys.unraisablehook = report
    for number in range(NAMES):
        with lock(f"n{number}", wait=LATE) as lease:
            assert lease.valid()
    until, soon = time.monotonic() + PATIENCE, found["blocks elsewhere"] + 3
    while found["blocks elsewhere"] < soon:
        assert beside.is_alive()
        assert time.monotonic() < until
        time.sleep(0.01)
    over.set()
    beside.join(PATIENCE)
    return found
