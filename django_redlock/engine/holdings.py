"""
The leases that the running code has taken, so that it does not wait for itself (internal).

A thread that is inside ``with lock("a"):`` and waits for ``a`` once more would wait for ever: it alone can leave the
block. A lease that it took with ``acquire()`` may be released by another thread, so there is only a suspicion. The same
holds for code that runs elsewhere in a copy of its context: in a thread of ``sync_to_async``, in the event loop of
``async_to_sync``, or in a task that it started.
"""

import logging
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol
from weakref import ref

from ..exceptions import printable
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
        who: The thread or task that took it.
        inside: Whether a ``with`` block holds it, so that this thread or task alone can end the hold.
    """

    lease: "ref[Held]"
    keys: Keys
    where: Place
    who: object
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


_holdings: ContextVar[tuple[Holding, ...]] = ContextVar("django_redlock holdings", default=())


def remember(lease: Held, keys: Keys, who: object, inside: bool) -> None:
    """Remember that a thread or task took a lease: for this context, and for those that are copied from it."""
    kept = [holding for holding in _holdings.get() if holding.goes_on]
    _holdings.set((*kept, Holding(ref(lease), keys, caller(), who, inside)))


def forget_holdings() -> None:
    """Forget what was taken in this context: the nodes have forgotten it."""
    _holdings.set(())


def waiting(name: str, keys: Keys, who: object, ttl: float) -> Callable[[], object]:
    """
    Return what to do before each pause of a thread or task that waits for *keys*.

    Raises:
        RuntimeError: It would wait for a block that it is in itself.
    """
    own = [holding for holding in _holdings.get() if holding.excludes(keys) and holding.goes_on]
    for holding in own:
        if holding.inside and holding.who == who:
            raise RuntimeError(
                f"Lock {name!r} is held by this thread or task itself, since {holding.where}; at {caller()} it would "
                "wait for itself. Pass the lease on, write reentrant=True in both places, or wait=0."
            )
    return Suspicion(name, own[0].where, ttl) if own else unsuspected


class Suspicion:
    """
    Warns once, after one ttl, about code that seems to wait for a lease of its own.

    Args:
        name: The lock's name.
        since: Where the lease was taken.
        ttl: How long to wait for another thread or task to release it, in seconds.
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
                "lock %s: the code that waits for it at %s also took it, at %s, or was called or started by the code "
                "that did; if that code waits for this code, both wait for ever",
                printable(self._name),
                self._where,
                self._since,
                extra={"event": "waits_for_itself", "lock": self._name},
            )


def unsuspected() -> None:
    """Do nothing before a pause."""
