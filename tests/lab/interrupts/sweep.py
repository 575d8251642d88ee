"""
Raise an exception at each event inside the package: where a function is called, and where it returns.

A profile function raises it, which the interpreter calls at the places where it runs signal handlers, and at more.
Lines are not swept: a signal handler also runs where a loop begins anew, and another thread's exception may arrive
between any two lines of one function. The storm reaches those, at random.
"""

import asyncio
import gc
import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import django_redlock
from django_redlock import Lease, compat, lock

PACKAGE = str(Path(django_redlock.__file__).parent)
TTL = 1.0
SLOW = TTL / 4  # seconds after which a lock that an interruption left was not released, and waits for its lease to end
PATIENCE = 20.0  # seconds after which something has failed
LATE = 3 * TTL  # seconds after which a lock that an interruption left must be free, on a busy machine

OPTIONS = {"ttl": TTL, "max_ttl": TTL, "node_timeout": 0.2}


class Interrupted(BaseException):
    """What the signal handler raises."""


MODULES = lock("a", wait=LATE)
"""A lock that outlives its blocks, as those of modules and decorators do."""
NESTED = lock("a", wait=LATE, reentrant=True)


def block() -> None:
    with lock("a", wait=LATE):
        pass


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


@lock("a", wait=LATE)
def decorated() -> None:
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


def timed_compat() -> None:
    its = compat.Lock(None, "a", timeout=TTL, blocking_timeout=LATE)
    its.acquire()
    its.release()


def endless_compat() -> None:
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


async def amodules() -> None:
    async with MODULES as lease:
        lease.ensure()


async def aby_hand() -> None:
    lease = await lock("a", wait=LATE).aacquire()
    await lease.aextend()
    await lease.arelease()


BLOCKING: list[Callable[[], None]] = [
    block,
    modules,
    stack,
    nested,
    sent,
    decorated,
    shared,
    limited,
    contended,
    by_hand,
    skipped,
    lost,
    timed_compat,
    endless_compat,
]
ASYNC: list[Callable[[], Any]] = [ablock, amodules, aby_hand]


@dataclass
class Swept:
    """
    What a sweep has found.

    Attributes:
        points: How often it interrupted.
        waits: How long the lock was then taken: each point, with the seconds.
    """

    points: int = 0
    waits: list[tuple[str, float]] = field(default_factory=list)

    def beyond(self, seconds: float) -> list[str]:
        """Return the points after which the lock was taken for longer."""
        return [where for where, waited in self.waits if waited > seconds]


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
    struck = False

    def strike() -> None:
        nonlocal struck
        struck = True
        raise Interrupted

    with suppress(Interrupted):
        at_event(action, at, strike)
    return struck


def check(where: str) -> float:
    """
    Check that the lock and all its places can be taken again, here and in another thread; return how long it took here.

    Raises:
        AssertionError: The call failed, or hangs, or the lock is renewed although nobody holds it.
    """
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


def sweep(action: Callable[[], Any], first: int = 1, every: int = 1, most: int = 1_000_000) -> Swept:
    """Interrupt *action* at the event *first* and at each *every*-th event after it; check after each interruption."""
    if not inspect.iscoroutinefunction(action):
        return _sweep(action, first, every, most)
    with asyncio.Runner() as runner:
        # An exception in a callback of the event loop would end the loop itself, so only tasks are interrupted.
        return _sweep(lambda: runner.run(_shielded(action)), first, every, most)


async def _shielded(action: Callable[[], Any]) -> None:
    with suppress(Interrupted, asyncio.CancelledError):
        await action()


def _sweep(action: Callable[[], Any], first: int, every: int, most: int) -> Swept:
    found = Swept()
    action()
    for at in range(first, first + every * most, every):
        if not interrupted(action, at):
            break
        found.points += 1
        gc.collect(0)
        where = f"{getattr(action, '__name__', 'task')}, event {at}"
        found.waits.append((where, check(where)))
    return found


@contextmanager
def witness() -> Iterator[Lease]:
    """
    Hold a lock whose renewal no interruption may end.

    Raises:
        AssertionError: The lease was not renewed once more at the end.
    """
    lease = lock("witness", wait=LATE).acquire()
    yield lease
    extensions, until = lease.extensions, time.monotonic() + PATIENCE
    while lease.extensions == extensions:
        assert lease.valid(), lease.reason
        assert time.monotonic() < until
        time.sleep(0.01)
    assert lease.release() == "released"
