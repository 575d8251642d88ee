"""
The leases that each thread and each task has taken, so that none waits for itself (internal).

A thread that is inside ``with lock("a"):`` and waits for ``a`` once more would wait for ever: it alone can leave the
block. A lease that it took with ``acquire()`` may be released by another thread, so there is only a suspicion.
"""

import asyncio
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, ref

from ..nodes.clock import steady

log = logging.getLogger("django_redlock")

Keys = tuple[Any, tuple[str, ...], int, bool]
"""The lock of a lease: the manager, the names, the limit, and whether it is shared."""


class Held(Protocol):
    """The part of a :class:`~django_redlock.engine.lease.Lease` that is used here."""

    @property
    def reason(self) -> str | None:
        """Why it ended; None while it goes on."""

    def valid(self) -> bool:
        """Return whether it is still held."""


class _Thread(threading.local):
    def __init__(self) -> None:
        self.held: list[Holding] = []


_thread = _Thread()


class Place(NamedTuple):
    """A line of the project's own code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller() -> Place:
    """Return the line outside this package that the running call comes from."""
    frame = caller_frame()
    return Place(frame.f_code.co_filename, frame.f_lineno)


def caller_frame() -> Any:
    """Return the nearest frame outside this package and the standard library's context managers."""
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(OURS):
        frame = frame.f_back
    return frame


OURS = ("django_redlock.", "contextlib", "django.utils.asyncio")


class Holding(NamedTuple):
    """
    A lease that a thread or task took.

    Attributes:
        lease: The lease, or None when nobody has it any more.
        keys: Its lock: the manager, the names, the limit, and whether it is shared.
        where: The line that took it.
        inside: Whether a ``with`` block of the same thread or task holds it, so that it alone can end the hold.
    """

    lease: "ref[Held]"
    keys: Keys
    where: Place
    inside: bool

    @property
    def goes_on(self) -> bool:
        """Whether the lease is still held."""
        lease = self.lease()
        return lease is not None and lease.reason is None and lease.valid()

    def excludes(self, keys: Keys) -> bool:
        """Return whether nobody can have *keys* while this lease is held."""
        manager, names, limit, shared = self.keys
        if manager is not keys[0] or not limit == keys[2] == 1 or (shared and keys[3]):
            return False
        return not set(names).isdisjoint(keys[1])


_task_holdings: "WeakKeyDictionary[asyncio.Task[Any], list[Holding]]" = WeakKeyDictionary()


def thread_holdings() -> list[Holding]:
    """Return the leases that the calling thread took and that have not ended."""
    if held := _thread.held:
        _thread.held = held = [holding for holding in held if holding.goes_on]
    return held


def task_holdings() -> list[Holding]:
    """Return the leases that the running task took and that have not ended."""
    task = asyncio.current_task()
    if task is None:
        return []
    _task_holdings[task] = [holding for holding in _task_holdings.get(task, ()) if holding.goes_on]
    return _task_holdings[task]


def forget_holdings() -> None:
    """Forget the leases that the calling thread took, because the nodes have forgotten them."""
    _thread.held = []


def waiting(name: str, keys: Keys, holdings: list[Holding], ttl: float) -> Callable[[], object]:
    """
    Return what to do before each pause of a thread or task that waits for *keys* and has these *holdings*.

    Raises:
        RuntimeError: It would wait for a block that it is in itself.
    """
    own = [holding for holding in holdings if holding.excludes(keys)]
    for holding in own:
        if holding.inside:
            raise RuntimeError(
                f"Lock {name!r} is held by this thread or task itself, since {holding.where}; at {caller()} it would "
                "wait for itself. Pass the lease on, write reentrant=True in both places, or wait=0."
            )
    return Suspicion(name, own[0].where, ttl) if own else unsuspected


class Suspicion:
    """
    Warns once, after one ttl, about a thread or task that seems to wait for a lease of its own.

    Args:
        name: The lock's name.
        since: Where the lease was taken.
        ttl: How long to wait for another thread to release it, in seconds.
    """

    def __init__(self, name: str, since: object, ttl: float) -> None:
        self._name = name
        self._since = since
        self._where = caller()
        self._due = steady() + ttl
        self._warned = False

    def __call__(self) -> None:
        """Look at the clock before a pause."""
        if not self._warned and steady() >= self._due:
            self._warned = True
            log.warning(
                "lock %s: the thread or task that waits for it at %s took it itself at %s, and waits for itself unless "
                "another one releases it",
                self._name,
                self._where,
                self._since,
                extra={"event": "waits_for_itself", "lock": self._name},
            )


def unsuspected() -> None:
    """Do nothing before a pause."""
