"""
Track the threads and tasks that are inside a lock (internal).

Neither the ident of a thread nor the address of a task identifies it, because both are reused.

A signal handler may raise an exception before the first line of ``__exit__`` runs. A lock object that lives on, such as
a module's, would then count as entered for ever. So every ``with`` statement gets a *way out* of its own: an object
that only the statement refers to. Python drops the way out when the statement ends, however it ends. If the block has
not been left through it by then, the lock is released in the background.
"""

import asyncio
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import ref

from ..core.names import named
from ..exceptions import printable
from ..nodes.clock import Clock
from .watchdog import abandoned

if TYPE_CHECKING:
    from .lease import Lease


class _Thread(threading.local):
    def __init__(self) -> None:
        self.mark = object()  # a new one for each thread
        self.way_out: Callable[[], WayOut | None] = lambda: None  # of the with statement that is about to begin


_thread = _Thread()


def this_thread() -> object:
    """Return an object that stands for the calling thread, and never for another one."""
    # Greenlets share the mark if gevent patched threads only after this module had been imported.
    return threading.get_ident(), _thread.mark


def this_task() -> object:
    """Return an object that stands for the running task, and never for another one, without keeping the task alive."""
    task = asyncio.current_task()
    return task and ref(task)


class WayOut:
    """
    The ``__exit__`` or ``__aexit__`` of one ``with`` statement; only that statement keeps it alive.

    Args:
        lock: The lock that is left.
        leave: Leaves the lock.
    """

    __slots__ = ("__weakref__", "_leave", "entry", "lock")

    def __init__(self, lock: Any, leave: Callable[..., Any]) -> None:
        self.lock = lock
        self.entry: Entry | None = None
        self._leave = leave

    def __call__(self, kind: Any, error: Any, trace: Any) -> Any:
        """Leave the block."""
        return self._leave(self.lock, self, kind)  # a coroutine keeps this object alive until it has left


class WayOutOfStack(WayOut):
    """The way out of one block of an ``ExitStack``, which looks it up before it enters a lock, and passes the lock."""

    __slots__ = ()

    def __call__(self, lock: Any, kind: Any, error: Any, trace: Any) -> Any:  # type: ignore[override]
        """Leave the block."""
        return self._leave(lock, self if self.lock is lock else None, kind)


class Exit:
    """
    Gives each ``with`` statement, and each block of an ``ExitStack``, a way out of its own.

    Python looks up the methods of a ``with`` statement before it calls the first of them. An ``ExitStack`` does the
    same, but on the class. Both keep the way out for as long as the block lasts.

    Args:
        leave: Leaves a lock; takes the lock, the way out if known, and the kind of exception that ended the body.
    """

    def __init__(self, leave: Callable[..., Any]) -> None:
        self._leave = leave

    def __get__(self, lock: Any, owner: type | None = None) -> Any:
        way_out = WayOutOfStack(None, self._leave) if lock is None else WayOut(lock, self._leave)
        _thread.way_out = ref(way_out)
        return way_out


def way_out_of(lock: object) -> WayOut | None:
    """Return the way out of the ``with`` statement that is about to enter *lock* in this thread, if there is one."""
    found = _thread.way_out()
    if found is None or found.entry is not None:
        return None
    if found.lock is None:
        found.lock = lock
    return found if found.lock is lock else None


class Tie(ref[WayOut]):
    """Notes with one call into C that a way out was dropped, so that no signal handler runs meanwhile."""

    __slots__ = ("lease", "over")

    lease: "Lease"
    over: bool

    @classmethod
    def between(cls, way_out: WayOut, lease: "Lease") -> "Tie":
        """Return the tie that has *lease* released when *way_out* is gone."""
        tie = cls(way_out, abandoned.append)
        tie.lease = lease
        tie.over = False
        return tie

    def abandon(self) -> None:
        """Have the lease released in the background, unless the next block has released it."""
        if not self.over:
            self.lease.hold.abandon()
            self.over = True


class Entry:
    """
    One block that was entered.

    Args:
        who: The thread or task.
        lease: The lease that the block got.
        about: Data that is needed when the block is left.
    """

    __slots__ = ("about", "lease", "over", "tie", "who")

    def __init__(self, who: object, lease: Any, about: Any = None) -> None:
        self.who = who
        self.lease = lease
        self.about = about
        self.over = False  # whether the block was left
        self.tie: Tie | None = None

    @property
    def dropped(self) -> bool:
        """Whether the ``with`` statement has ended, although the block was not left or not forgotten."""
        return self.over or (self.tie is not None and self.tie() is None)


class Entries:
    """
    Which threads, or which tasks, are inside the ``with`` blocks of one lock.

    Args:
        names: The lock's names, for errors.
    """

    __slots__ = ("_entries", "_names")

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._entries: dict[object, tuple[Entry, ...]] = {}

    def __contains__(self, who: object) -> bool:
        return any(not entry.dropped for entry in self._entries.get(who, ()))

    def add(self, who: object, lease: Any, way_out: WayOut | None, about: Any = None) -> None:
        """Note that *who* has entered, with its way out if that is known."""
        entry = Entry(who, lease, about)
        if way_out is not None:
            entry.tie = Tie.between(way_out, lease)
            way_out.entry = entry
        self._entries[who] = (*self._entries.get(who, ()), entry)

    def leaving(self, who: object) -> Entry:
        """
        Return the entry that *who* is about to leave, which may be that of another thread or task.

        A generator may be closed by another thread or task than the one that entered. So a thread or task that
        has not entered leaves for the only one that has.

        Raises:
            RuntimeError: There is no entry, or several are possible.
        """
        return self._entries[who if who in self._entries else self._only_one()][-1]

    def forget(self, entry: Entry) -> None:
        """Note that a block was left."""
        entry.over = True
        entry.tie = None
        others = tuple(other for other in self._entries.get(entry.who, ()) if other is not entry)
        if others:
            self._entries[entry.who] = others
        else:
            self._entries.pop(entry.who, None)

    def undo(self, who: object, lease: Any) -> None:
        """Forget the newest entry of *who* if it is that of *lease*, because an exception came before its body."""
        for entry in self._entries.get(who, ())[-1:]:
            if entry.lease is lease:
                self.forget(entry)

    def dropped(self, who: object) -> Iterator[Any]:
        """
        Yield the leases that *who* may not have released when its ``with`` statements ended, to be released now.

        A lease is forgotten only when the next one is requested, because its release may be interrupted, or a watchdog
        may be having it released in the background, for which the next request would not wait.
        """
        for entry in self._entries.get(who, ()):
            if entry.dropped:
                tie = entry.tie
                if tie is not None and (not tie.over or tie.lease.hold.ended):
                    yield tie.lease
                    tie.over = True
                self.forget(entry)

    def _only_one(self) -> object:
        inside = list(self._entries)
        if len(inside) == 1:
            return inside[0]
        if not inside:
            raise RuntimeError(f"Lock {named(self._names)!r} is not entered: there is nothing to leave.")
        raise RuntimeError(
            f"Lock {named(self._names)!r} is not entered here, but in {len(inside)} other tasks or threads. "
            "Leave it where it was entered, or make a lock for each."
        )


class Interruption:
    """
    Cancels the body of an ``async with`` block when its lock is lost, but never what comes after the body.

    Args:
        task: The task that has entered.
    """

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task
        self._loop = task.get_loop()
        self._struck = False
        self._over = False

    def __call__(self, lease: object) -> None:
        """Cancel the body soon, whichever thread noticed the loss."""
        with suppress(RuntimeError):  # its loop has been closed
            self._loop.call_soon_threadsafe(self._strike)

    def _strike(self) -> None:
        if not self._over:
            self._struck = True  # first: an exception may arrive as soon as the task has been cancelled
            self._task.cancel()

    def end(self, kind: type[BaseException] | None) -> bool:
        """Note that the body ended, with an exception of *kind*; return whether this interruption ended it."""
        self._over = True
        if not self._struck or asyncio.current_task() is not self._task:
            return False
        others = self._task.uncancel()
        return kind is asyncio.CancelledError and others == 0


log = logging.getLogger("django_redlock")

Keys = tuple[Any, tuple[str, ...], int, bool]
"""The lock of a lease: the manager, the names, the limit, and whether it is shared."""


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

    lease: "ref[Lease]"
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


def remember(lease: "Lease", keys: Keys, who: object, inside: bool) -> None:
    """Remember that a thread or task took a lease: for this context, and for those that are copied from it."""
    _holdings.set(_holdings.get().add(Holding(ref(lease), keys, caller(INNER), who, inside)))


def is_in_block(lease: "Lease") -> bool:
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
