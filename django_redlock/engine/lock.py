"""
What to lock, and how: the object that ``with``, ``async with`` and decorators use.

A :class:`Lock` can be kept and used from any thread or task. Acquiring it gives a :class:`~.lease.Lease`, the proof of
holding it.
"""

import asyncio
from collections.abc import Callable, Coroutine, MutableMapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from ..core.names import named
from ..core.wanted import Wanted
from ..nodes.threads import exiting
from .decorator import Function, decorated
from .lease import Lease
from .reentrancy import Entries, Exit, Interruption, WayOut, this_task, this_thread, way_out_of


class Manager(Protocol):
    """What takes the lock: a :class:`~.manager.LockManager`."""

    retired: bool

    @property
    def entered(self) -> MutableMapping[tuple[Any, ...], Lease]:
        """The leases of reentrant locks, by name and thread or task."""
        ...

    def take(self, wanted: Wanted, renew: bool, note: Callable[[Lease], object]) -> Lease:
        """Acquire; calls *note* with the lease before anything can interrupt."""
        ...

    async def atake(self, wanted: Wanted, renew: bool, note: Callable[[Lease], object]) -> Lease:
        """Acquire, in an event loop."""
        ...


class Lock:
    """
    What to lock and how. Holds nothing itself: every acquisition gives a :class:`Lease` of its own.

    Use it as ``with`` or ``async with``, as a decorator of a function or coroutine function, or call
    :meth:`acquire`. Made by :func:`django_redlock.lock` or ``locks[alias].lock()``.
    """

    def __init__(
        self,
        manager: "Manager",
        wanted: Wanted,
        renew: bool,
        reentrant: bool = False,
        cancel_on_lost: bool = False,
    ) -> None:
        self._manager = manager
        self._wanted = wanted
        self._renew = renew
        self._reentrant = reentrant
        self._cancel_on_lost = cancel_on_lost
        self._anew: Callable[[], Lock] | None = None
        self._threads = Entries(wanted.names)
        self._tasks = Entries(wanted.names)

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}>"

    @property
    def name(self) -> str:
        """The lock's name; several names are joined by commas."""
        return named(self._wanted.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names to lock, sorted."""
        return self._wanted.names

    def acquire(self) -> Lease:
        """
        Take the lock, blocking for at most ``wait`` seconds and one node timeout.

        Raises:
            LockTakenError: Another owner kept it.
            QuorumUnavailableError: Too few nodes answered.
        """
        if self._cancel_on_lost:
            raise RuntimeError(f"Lock {self.name!r} has cancel_on_lost, which works with 'async with' only.")
        self._follow_settings()
        who = this_thread()
        lease = self._entered_before(who)
        if lease is None:
            lease = self._manager.take(self._wanted, self._renew, partial(self._remember, who))
        return lease

    async def aacquire(self) -> Lease:
        """Do what :meth:`acquire` does without blocking; a cancelled call leaves no key behind."""
        self._follow_settings()
        who = this_task()
        lease = self._entered_before(who)
        if lease is None:
            lease = await self._manager.atake(self._wanted, self._renew, partial(self._remember, who))
        return lease

    def made_by(self, anew: "Callable[[], Lock]") -> "Lock":
        """Have *anew* describe it again after the settings have changed; returns the lock itself."""
        self._anew = anew
        return self

    def _follow_settings(self) -> None:
        """Move to the nodes of the present settings: a decorator outlives those of the moment it was written in."""
        if self._manager.retired and self._anew:
            anew = self._anew()
            self._manager, self._wanted, self._renew = anew._manager, anew._wanted, anew._renew

    def __enter__(self) -> Lease:
        way_out, who = way_out_of(self), this_thread()
        self._refuse_nesting(who, self._threads)
        for left in self._threads.dropped(who):
            left.release()
        lease = None
        try:
            lease = self.acquire()
            self._threads.add(who, lease, way_out)
            return lease
        except BaseException:
            if lease is not None:  # interrupted, so that the body does not run
                self._threads.undo(who, lease)
                lease.release()
            raise

    def _leave(self, way_out: WayOut | None, kind: type[BaseException] | None) -> None:
        if exiting():
            return  # a suspended generator is closed when the interpreter ends
        entry = (way_out and way_out.entry) or self._threads.leaving(this_thread())
        lease: Lease = entry.lease
        try:
            over = lease.hold.ended == "released"  # the body gave it up, and was told the outcome
            outcome = "released" if over else lease.release()
        except BaseException:
            lease.abandon()
            raise
        finally:
            entry.over = True
            self._threads.forget(entry)
        lease._leave(outcome, body_failed=kind is not None)

    def __aenter__(self) -> Coroutine[Any, Any, Lease]:
        return self._aenter(way_out_of(self))

    async def _aenter(self, way_out: WayOut | None) -> Lease:
        task, who = asyncio.current_task(), this_task()
        self._refuse_nesting(who, self._tasks)
        for left in self._tasks.dropped(who):
            await left.arelease()
        lease = None
        try:
            lease = await self.aacquire()
            interruption = Interruption(task) if task and self._cancel_on_lost else None
            self._tasks.add(who, lease, way_out, interruption)
            if interruption:
                lease.on_lost(interruption)
            return lease
        except BaseException:
            if lease is not None:
                self._tasks.undo(who, lease)
                lease.abandon()
            raise

    async def _aleave(self, way_out: WayOut | None, kind: type[BaseException] | None) -> None:
        if exiting():
            return
        entry = (way_out and way_out.entry) or self._tasks.leaving(this_task())
        lease: Lease = entry.lease
        try:
            interruption: Interruption | None = entry.about
            interrupted = interruption is not None and interruption.end(kind)  # first: it may strike no longer
            over = lease.hold.ended == "released"
            outcome = "released" if over else await lease.arelease()
        except BaseException:
            lease.abandon()
            raise
        finally:
            entry.over = True
            self._tasks.forget(entry)
        lease._leave(outcome, body_failed=kind is not None and not interrupted)

    if TYPE_CHECKING:

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None: ...

    else:
        __exit__, __aexit__ = Exit(_leave), Exit(_aleave)

    def __call__(self, function: Function) -> Function:
        """
        Return *function* so that every call of it runs under this lock.

        Raises:
            TypeError: It makes a generator, whose body would run after the call, without the lock.
        """
        return decorated(self, function)

    def _refuse_nesting(self, who: object, entries: Entries) -> None:
        if who in entries and not self._reentrant:
            raise RuntimeError(
                f"Lock {self.name!r} is already entered here; it would wait for itself. Pass the lease on instead, or "
                "write lock(..., reentrant=True)."
            )

    def _entered_before(self, who: object) -> Lease | None:
        """Return the lease that the calling thread or task has of a reentrant lock, entered once more."""
        if not self._reentrant:
            return None
        names, limit, shared = self._wanted.names, self._wanted.limit, self._wanted.shared
        if (other := self._manager.entered.get((names, limit, not shared, who))) and other.entered:
            raise RuntimeError(
                f"Lock {self.name!r} is held here, {'exclusively' if shared else 'shared'}; it cannot be had the other "
                "way as well, and would wait for itself."
            )
        lease = self._manager.entered.get((names, limit, shared, who))
        if lease is None or not lease.enter_again():
            return None  # one that was given back is over, however it ended
        return lease

    def _remember(self, who: object, lease: Lease) -> None:
        if self._reentrant:
            self._manager.entered[self._wanted.names, self._wanted.limit, self._wanted.shared, who] = lease
