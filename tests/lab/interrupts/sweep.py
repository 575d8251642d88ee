"""
Raise an exception at each event inside the package: where a function is called, and where it returns.

A profile function raises it, which the interpreter calls at the places where it runs signal handlers, and at more.
"""

import asyncio
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import django_redlock
from django_redlock import Lease, lock

PACKAGE = str(Path(django_redlock.__file__).parent)
TTL = 1.0
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


BLOCKING: list[Callable[[], None]] = [block, modules, stack, nested, by_hand, skipped, sent, decorated, lost]
ASYNC: list[Callable[[], Any]] = [ablock, amodules, aby_hand]


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


def check(where: str) -> None:
    """
    Check that the lock can be taken again, here and in another thread.

    Raises:
        AssertionError: The call failed, or hangs, or the lock is renewed although nobody holds it.
    """
    ended: list[object] = []

    def take() -> None:
        try:
            with lock("a", wait=LATE) as lease:
                ended.append(lease.valid())
        except BaseException as error:
            ended.append(error)

    take()
    other = threading.Thread(target=take, daemon=True)
    other.start()
    other.join(2 * LATE)
    assert ended == [True, True], f"{where}: {ended or 'hangs'}"


def sweep(action: Callable[[], Any], first: int = 1, every: int = 1, most: int = 1_000_000) -> int:
    """Interrupt *action* at every so many events, and check after each; return how often it was interrupted."""
    if asyncio.iscoroutinefunction(action):
        with asyncio.Runner() as runner:
            # An exception in a callback of the event loop would end the loop itself, so only tasks are interrupted.
            return _sweep(lambda: runner.run(_shielded(action)), first, every, most)
    return _sweep(action, first, every, most)


async def _shielded(action: Callable[[], Any]) -> None:
    with suppress(Interrupted, asyncio.CancelledError):
        await action()


def _sweep(action: Callable[[], Any], first: int, every: int, most: int) -> int:
    number = 0
    action()
    for at in _from(first, every, most):
        if not interrupted(action, at):
            break
        number += 1
        gc.collect(0)
        check(f"{getattr(action, '__name__', 'task')}, event {at}")
    return number


def _from(first: int, every: int, most: int) -> Iterator[int]:
    return iter(range(first, first + every * most, every))


def witness() -> Lease:
    """Take a lock whose renewal no interruption may end."""
    return lock("witness", wait=LATE).acquire()
