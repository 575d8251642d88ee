"""
Track the threads and tasks that are inside a lock (internal).

Neither the ident of a thread nor the address of a task identifies it, because both are reused.

A signal handler may raise an exception before the first line of ``__exit__`` runs. A lock object that lives on, such as
a module's, would then count as entered for ever. So every ``with`` statement gets a *way out* of its own: an object
that only the statement refers to. Python drops the way out when the statement ends, however it ends. If the block has
not been left through it by then, the lock is released in the background.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol
from weakref import ref

from ..core.names import named
from .watchdog import abandoned


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


class Abandoned(Protocol):
    """The part of a hold that is used here."""

    @property
    def ended(self) -> object:
        """Why the hold ended; None while it lasts."""

    def abandon(self) -> None:
        """Leave the lock, and have it released in the background if that was the last time."""


class Held(Protocol):
    """The part of a :class:`~django_redlock.engine.lease.Lease` that is used here."""

    @property
    def hold(self) -> Abandoned:
        """The hold to abandon."""


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

    lease: Held
    over: bool

    @classmethod
    def between(cls, way_out: WayOut, lease: Held) -> "Tie":
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
