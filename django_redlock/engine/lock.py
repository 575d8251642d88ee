"""
The description of a lock, for ``with``, ``async with`` and decorators (internal).

A :class:`Lock` can be kept and used from any thread or task. Acquiring it gives a :class:`~.lease.Lease`, the proof of
holding it.
"""

import asyncio
from collections.abc import Callable, Coroutine, MutableMapping
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakSet

from ..core.names import named
from ..core.protocol import EndReason, Outcome
from ..core.rules import Rules, Wanted
from ..exceptions import LockTakenError
from ..nodes.threads import exiting
from .lease import Lease, arelease_at_end, leave, release_at_end
from .manager import Runtime, Surroundings
from .options import (
    ATTRIBUTES,
    Explained,
    LockOptions,
    check_block,
    check_not_skipped,
    refuse_arguments,
    without_arguments,
)
from .reentrancy import (
    Entries,
    Exit,
    Interruption,
    Keys,
    Waiting,
    WayOut,
    remember,
    this_task,
    this_thread,
    unsuspected,
    way_out_of,
)


class Acquirer(Protocol):
    """The part of an :class:`~.acquirer.Acquirer` that a lock uses."""

    @property
    def entered(self) -> MutableMapping[tuple[Any, ...], Lease]:
        """The leases of reentrant locks, by name and thread or task."""
        ...

    def take(
        self, wanted: Wanted, renew: bool, note: Callable[[Lease], object], waiting: Callable[[], object] = ...
    ) -> Lease:
        """Acquire the lock; call *note* with the lease before returning it, and *waiting* before each pause."""
        ...

    async def atake(
        self, wanted: Wanted, renew: bool, note: Callable[[Lease], object], waiting: Callable[[], object] = ...
    ) -> Lease:
        """Acquire the lock in the running event loop."""
        ...


class Manager(Protocol):
    """The part of a :class:`~.manager.LockManager` that a lock uses."""

    retired: bool
    rules: Rules
    runtime: Runtime
    surroundings: Surroundings

    @property
    def acquirer(self) -> Acquirer:
        """The object that takes the manager's locks."""
        ...


class Description(NamedTuple):
    """
    A lock under the present settings.

    Attributes:
        manager: The manager that takes it.
        wanted: The lock to take.
        renew: Whether to extend it while it is held.
        once: Whether the caller passed no ``wait``, so that ``try_acquire()`` makes one attempt.
    """

    manager: Manager
    wanted: Wanted
    renew: bool
    once: bool


class Lock(Explained, advice=ATTRIBUTES):
    """
    The description of a lock. The object holds nothing itself: every acquisition gives a :class:`Lease` of its own.

    Use it as ``with`` or ``async with``, as a decorator of a function or coroutine function, or call :meth:`acquire` or
    :meth:`try_acquire`. Create one with :func:`django_redlock.lock` or ``locks[alias].lock()``.
    """

    def __init__(self, names: tuple[str, ...], describe: Callable[[], Description], options: LockOptions) -> None:
        self.names = names
        self.skips = options["if_taken"] == "skip"
        self._options = options
        self._describe = describe
        self._described: Description | None = None
        self._reentrant = options["reentrant"]
        self._on_commit = options["on_commit"]
        self._threads = Entries(names)
        self._tasks = Entries(names)

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("A Lock cannot be pickled or copied; pass its name, and write lock(name) where it is needed.")

    @property
    def name(self) -> str:
        """The lock's name; several names are joined by commas."""
        return named(self.names)

    def description(self) -> Description:
        """
        Return this lock under the present settings; a decorator outlives the settings of its first call.

        Raises:
            InvalidRedlockError: The settings cannot be used.
            ValueError: The settings do not allow this lock.
        """
        if self._described is None or self._described.manager.retired:
            if exiting():  # modules that the settings need may be gone
                raise RuntimeError(f"Lock {self.name!r} cannot be taken: the interpreter is about to end.")
            self._described = self._describe()
        return self._described

    @without_arguments
    def acquire(self, *args: object, **kwargs: object) -> Lease:
        """
        Take the lock, blocking for at most ``wait`` seconds and one node timeout.

        Raises:
            LockTakenError: Another owner kept the lock.
            QuorumUnavailableError: Too few nodes answered.
            InvalidRedlockError: The settings cannot be used.
            ValueError: The settings do not allow this lock.
            RuntimeError: The calling thread holds the lock in a ``with`` block, and would wait for itself.
            SynchronousOnlyOperation: The calling thread runs an event loop, unless DJANGO_ALLOW_ASYNC_UNSAFE is set.
        """
        refuse_arguments("acquire", args, kwargs)
        return self._acquire()

    @without_arguments
    async def aacquire(self, *args: object, **kwargs: object) -> Lease:
        """Do what :meth:`acquire` does without blocking; a cancelled call leaves no key behind."""
        refuse_arguments("aacquire", args, kwargs)
        return await self._aacquire()

    @without_arguments
    def try_acquire(self, *args: object, **kwargs: object) -> Lease | None:
        """
        Return a lease, or None if another owner has the lock.

        The call makes one attempt, or tries for ``wait`` seconds if the lock was described with ``wait``;
        ``OPTIONS["wait"]`` does not apply. The lease can be used in a ``with`` block, which releases it. The call
        raises what :meth:`acquire` raises, except LockTakenError.
        """
        refuse_arguments("try_acquire", args, kwargs)
        with suppress(LockTakenError):
            return self._acquire(once=True)
        return None

    @without_arguments
    async def atry_acquire(self, *args: object, **kwargs: object) -> Lease | None:
        """Do what :meth:`try_acquire` does without blocking; the lease can be used in an ``async with`` block."""
        refuse_arguments("atry_acquire", args, kwargs)
        with suppress(LockTakenError):
            return await self._aacquire(once=True)
        return None

    def _acquire(self, once: bool = False, inside: bool = False) -> Lease:
        check_block(self.names, self._options, "with" if inside else "")
        described, who = self._chosen(once), this_thread()
        described.manager.surroundings.blocking()
        lease = self._entered_before(described, who)
        if lease is None:
            note = partial(self._remember, described, who, inside)
            waiting = self._waiting(described, who)
            lease = described.manager.acquirer.take(described.wanted, described.renew, note, waiting)
        return lease

    async def _aacquire(self, once: bool = False, inside: bool = False) -> Lease:
        check_block(self.names, self._options, "async with")
        described, who = self._chosen(once), this_task()
        lease = self._entered_before(described, who)
        if lease is None:
            note = partial(self._remember, described, who, inside)
            waiting = self._waiting(described, who)
            lease = await described.manager.acquirer.atake(described.wanted, described.renew, note, waiting)
        return lease

    def _chosen(self, once: bool) -> Description:
        described = self.description()
        return described._replace(wanted=described.wanted._replace(wait=0)) if once and described.once else described

    def __enter__(self) -> Lease:
        way_out, who = way_out_of(self), this_thread()
        check_not_skipped(self.names, self._options, "try_acquire")
        described = self.description()
        if described.wanted.owner.kind == "manual":
            described.manager.surroundings.entering(self.name, described.manager.rules, self._on_commit)
        self._refuse_nesting(who, self._threads)
        for left in self._threads.dropped(who):
            left.release()
        lease = None
        try:
            lease = self._acquire(inside=True)
            self._threads.add(who, lease, way_out)
            return lease
        except BaseException:
            if lease is not None:  # interrupted: the body will not run
                self._threads.undo(who, lease)
                lease.release()
            raise

    def _leave(self, way_out: WayOut | None, kind: type[BaseException] | None) -> None:
        if exiting():
            return  # the interpreter, when it ends, closes suspended generators
        entry = (way_out and way_out.entry) or self._threads.leaving(this_thread())
        lease: Lease = entry.lease
        try:
            over = lease.hold.ended is EndReason.RELEASED  # the body released the lock, and knows the outcome
            kept = self._on_commit and lease.valid() and self.description().manager.surroundings.keep(lease)
            outcome = Outcome.RELEASED if over or kept else release_at_end(lease)
        except BaseException:
            lease.hold.abandon()
            raise
        finally:
            entry.over = True
            self._threads.forget(entry)
        leave(lease, outcome, body_failed=kind is not None)

    def __aenter__(self) -> Coroutine[Any, Any, Lease]:
        return self._aenter(way_out_of(self))

    async def _aenter(self, way_out: WayOut | None) -> Lease:
        task, who = asyncio.current_task(), this_task()
        check_not_skipped(self.names, self._options, "atry_acquire")
        self._refuse_nesting(who, self._tasks)
        for left in self._tasks.dropped(who):
            await left.arelease()
        lease = None
        try:
            lease = await self._aacquire(inside=True)
            interruption = Interruption(task) if task and self._options["cancel_on_lost"] else None
            self._tasks.add(who, lease, way_out, interruption)
            if interruption:
                lease.on_lost(interruption)
            return lease
        except BaseException:
            if lease is not None:
                self._tasks.undo(who, lease)
                lease.hold.abandon()
            raise

    async def _aleave(self, way_out: WayOut | None, kind: type[BaseException] | None) -> None:
        if exiting():
            return
        entry = (way_out and way_out.entry) or self._tasks.leaving(this_task())
        lease: Lease = entry.lease
        try:
            interruption: Interruption | None = entry.about
            interrupted = interruption is not None and interruption.end(kind)  # first: it must not strike later
            over = lease.hold.ended is EndReason.RELEASED
            outcome = Outcome.RELEASED if over else await arelease_at_end(lease)
        except BaseException:
            lease.hold.abandon()
            raise
        finally:
            entry.over = True
            self._tasks.forget(entry)
        leave(lease, outcome, body_failed=kind is not None and not interrupted)

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
            TypeError: It is a class, or makes a generator, whose body would run after the call, without the lock.
        """
        decorators.add(self)
        return decorated(self, function)

    def _refuse_nesting(self, who: object, entries: Entries) -> None:
        if who in entries and not self._reentrant:
            raise RuntimeError(
                f"Lock {self.name!r} is already entered here; it would wait for itself. Pass the lease on instead, or "
                "write lock(..., reentrant=True)."
            )

    def _waiting(self, described: Description, who: object) -> Callable[[], object]:
        wanted, clock = described.wanted, described.manager.runtime.clock
        return Waiting(self._keys(described), who, wanted.ttl, clock) if wanted.wait != 0 else unsuspected

    def _keys(self, described: Description) -> Keys:
        return described.manager, self.names, described.wanted.limit, described.wanted.shared

    def _entered_before(self, described: Description, who: object) -> Lease | None:
        """Return the lease that the thread or task has of a reentrant lock, entered once more; None if it has none."""
        if not self._reentrant:
            return None
        entered, limit, shared = described.manager.acquirer.entered, described.wanted.limit, described.wanted.shared
        if (other := entered.get((self.names, limit, not shared, who))) and other.hold.entered:
            raise RuntimeError(
                f"Lock {self.name!r} is held here, {'exclusively' if shared else 'shared'}; it would wait "
                "for itself if it were taken the other way as well."
            )
        lease = entered.get((self.names, limit, shared, who))
        if lease is None or not lease.hold.entered:
            return None  # a released lease cannot be entered again, however it ended
        lease.ensure()
        lease.hold.enter_again()
        return lease

    def _remember(self, described: Description, who: object, inside: bool, lease: Lease) -> None:
        if self._reentrant:
            described.manager.acquirer.entered[self.names, described.wanted.limit, described.wanted.shared, who] = lease
        remember(lease, self._keys(described), who, inside)


decorators: WeakSet[Lock] = WeakSet()
"""The locks that decorate a function, for the system checks."""
