"""
Remember the leases that the running code has taken, so that it does not wait for itself (internal).

A thread that is inside ``with lock("a"):`` and waits for ``a`` once more would wait for ever, because only that thread
can leave the block. A lease from ``acquire()`` may be released by another thread, so the wait is only suspicious. The
same is true of code that runs elsewhere in a copy of the context: in a thread of ``sync_to_async``, in the event loop
of ``async_to_sync``, or in a task that the code started.
"""

import logging
import math
import sys
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias
from weakref import ref

from ..core.names import named
from ..core.protocol import EndReason
from ..exceptions import printable
from ..nodes.clock import Clock

log = logging.getLogger("django_redlock")

Keys = tuple[Any, tuple[str, ...], int, bool]
"""The lock of a lease: the manager, the names, the limit, and whether it is shared."""


class Hold(Protocol):
    """The part of a :class:`~django_redlock.engine.lease.LeaseHold` that is used here."""

    clock: Clock
    deadline: float
    ended: EndReason | None

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the holder."""


class Held(Protocol):
    """The part of a :class:`~django_redlock.engine.lease.Lease` that is used here."""

    @property
    def hold(self) -> Hold:
        """The hold."""


class Place(NamedTuple):
    """A line of the project's own code."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def caller(inner: int = 0) -> Place:
    """Return the line outside this package that the running call comes from; see :func:`caller_frame`."""
    frame = caller_frame(inner + 1)
    return Place(frame.f_code.co_filename, frame.f_lineno)


def caller_frame(inner: int = 0) -> Any:
    """
    Return the nearest frame outside this package and the standard library's context managers.

    Args:
        inner: How many frames above the caller's are known to be inside this package; they are skipped.
    """
    frame: Any = sys._getframe(inner + 1)
    while (before := frame.f_back) and frame.f_globals.get("__name__", "").startswith(OURS):
        frame = before
    return frame


OURS = ("django_redlock.", "contextlib", "django.utils.asyncio")


class Holding(NamedTuple):
    """
    A lease that a thread or task took.

    Attributes:
        lease: A reference that gives the lease, or None when nobody has it any more.
        keys: The lock: the manager, the names, the limit, and whether it is shared.
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
        """
        Whether the lease is still held.

        A loss is not reported here: its callbacks may block, and belong to another thread or event loop.
        """
        lease = self.lease()
        hold = lease.hold if lease else None
        return hold is not None and not (hold.forked or hold.ended) and hold.clock() < hold.deadline

    def excludes(self, keys: Keys) -> bool:
        """Return whether nobody can take the lock *keys* while this lease is held."""
        manager, names, limit, shared = self.keys
        if manager is not keys[0] or not limit == keys[2] == 1 or (shared and keys[3]):
            return False
        return not set(names).isdisjoint(keys[1])


Chain: TypeAlias = "tuple[Holding, Chain | None]"
"""A lease, and the leases that were taken before it."""


class Holdings(NamedTuple):
    """
    The leases that were taken in a context and may still be held.

    Taking a lock costs the same however many others are held: one link is added to the chain, and the leases are
    checked only when their number has doubled.

    Attributes:
        chain: The leases, the last one first; it never changes, because contexts that were copied share it.
        size: How many leases there are.
        limit: How many leases there may be before those that have ended are dropped.
    """

    chain: "Chain | None" = None
    size: int = 0
    limit: int = 8

    def add(self, holding: Holding) -> "Holdings":
        """Return these holdings and one more."""
        if self.size < self.limit:
            return Holdings((holding, self.chain), self.size + 1, self.limit)
        chain: Chain | None = None
        size = 0
        for each in self.kept():
            if each.goes_on:
                chain, size = (each, chain), size + 1
        return Holdings((holding, chain), size + 1, max(8, 2 * size))

    def kept(self) -> list[Holding]:
        """Return the leases in the order in which they were taken."""
        found: list[Holding] = []
        chain = self.chain
        while chain:
            holding, chain = chain
            found.append(holding)
        return found[::-1]


_holdings: ContextVar[Holdings] = ContextVar("django_redlock holdings", default=Holdings())  # noqa: B039  (immutable)


INNER = 3  # frames between a new lease and the method of the lock that was called: remember(), its caller, and take()


def remember(lease: Held, keys: Keys, who: object, inside: bool) -> None:
    """Remember that a thread or task took a lease: for this context, and for those that are copied from it."""
    _holdings.set(_holdings.get().add(Holding(ref(lease), keys, caller(INNER), who, inside)))


def is_in_block(lease: Held) -> bool:
    """Return whether this code, or code that called or started it, is inside the ``with lock(...)`` of *lease*."""
    return any(each.inside and each.lease() is lease for each in _holdings.get().kept())


def forget_holdings() -> None:
    """Forget the leases that were taken in this context, because the nodes have forgotten them."""
    _holdings.set(Holdings())


class Waiting:
    """
    Check before each pause of a thread or task that waits for a lock whether it waits for itself.

    Args:
        keys: The lock.
        who: The thread or task.
        ttl: How long to wait for another thread or task to release the lock before the wait is logged, in seconds.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, keys: Keys, who: object, ttl: float, clock: Clock) -> None:
        self._keys = keys
        self._who = who
        self._ttl = ttl
        self._clock = clock
        self._own: Holding | None = None
        self._where = ""
        self._due = math.inf  # when to log the wait; unknown before the first pause
        self._looked = False

    def __call__(self) -> None:
        """
        Look for leases of the same lock before the first pause, and at the clock before all pauses.

        Raises:
            RuntimeError: The thread or task would wait for a block that it is inside.
        """
        if not self._looked:
            self._looked = True
            self._look()
        if self._own and self._clock() >= self._due:
            self._due = math.inf
            name = named(self._keys[1])
            log.warning(
                "lock %s: the code that waits for it at %s also took it, at %s, or was called or started by the code "
                "that did; if that code waits for this code, both wait for ever",
                printable(name),
                self._where,
                self._own.where,
                extra={"event": "waits_for_itself", "lock": name},
            )

    def _look(self) -> None:
        own = [each for each in _holdings.get().kept() if each.excludes(self._keys) and each.goes_on]
        for each in own:
            if each.inside and each.who == self._who:
                raise RuntimeError(
                    f"Lock {named(self._keys[1])!r} is held by this thread or task itself, since {each.where}; at "
                    f"{caller()} it would wait for itself. Pass the lease on, write reentrant=True in both places, or "
                    "wait=0."
                )
        if own:
            self._own, self._where, self._due = own[0], str(caller()), self._clock() + self._ttl


def unsuspected() -> None:
    """Do nothing before a pause."""
