"""
The description of a lock, for ``with``, ``async with`` and decorators (internal).

A :class:`Lock` can be kept and used from any thread or task. Acquiring it gives a :class:`~.lease.Lease`, the proof of
holding it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import partial, wraps
from inspect import isasyncgenfunction, isawaitable, iscoroutine, iscoroutinefunction, isgeneratorfunction
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, cast
from weakref import WeakSet

from ..core.names import named
from ..core.protocol import EndReason, Outcome
from ..core.rules import Wanted
from ..exceptions import LockTakenError
from ..nodes.threads import exiting
from .lease import Lease, arelease_at_end, leave, release_at_end
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

if TYPE_CHECKING:
    from .manager import LockManager
Function = TypeVar("Function", bound=Callable[..., Any])


class Description(NamedTuple):
    """
    A lock under the present settings.

    Attributes:
        manager: The manager that takes it.
        wanted: The lock to take.
        renew: Whether to extend it while it is held.
        once: Whether the caller passed no ``wait``, so that ``try_acquire()`` makes one attempt.
    """

    manager: "LockManager"
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


def decorated(lock: Lock, function: Function) -> Function:
    """
    Return *function* with every call under *lock*; a call returns None if the lock is taken and ``lock.skips`` is set.

    Raises:
        TypeError: *function* makes a generator, or is not a function.
    """
    _refuse_other_objects(function)
    if makes_generator(function):
        raise TypeError(
            f"The generator function {_name(function)} cannot be decorated with a lock: its body runs after the call. "
            "Write 'with lock(...):' (or 'async with') inside it."
        )
    return cast(Function, (_awaited if makes_coroutine(function) else _called)(lock, function))


def _refuse_other_objects(function: object) -> None:
    """
    Refuse what is decorated with a lock by mistake and would run without it, or not at all.

    Raises:
        TypeError: It is not a function.
    """
    if isinstance(function, type):
        raise TypeError(
            f"The class {_name(function)} cannot be decorated with a lock, which would be held only while an object of "
            "it is made. Decorate its methods; for a view class, write @locked_view(key)."
        )
    if isinstance(function, (classmethod, staticmethod, property)):
        kind = type(function).__name__
        raise TypeError(f"A {kind} cannot be decorated with a lock. Write @{kind} above @lock(...).")
    if any(base.__module__.partition(".")[0] == "celery" for base in type(function).__mro__):
        raise TypeError(
            f"The Celery task {_name(function)} cannot be decorated with a lock, because it would lose delay() and "
            "apply_async(). Write @lock(...) below the decorator of the task, or use @singleton_task."
        )
    if not callable(function):
        raise TypeError(f"@lock(...) decorates a function, not {repr(function)[:40]}.")


def _awaited(lock: Lock, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def alocked(*args: Any, **kwargs: Any) -> Any:
        block = await lock.atry_acquire() if lock.skips else lock
        if block is None:
            return None
        async with block:
            return await function(*args, **kwargs)

    return alocked


def _called(lock: Lock, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        block = lock.try_acquire() if lock.skips else lock
        if block is None:
            return None
        with block:
            return _done(lock, function, function(*args, **kwargs))

    return locked


def _done(lock: Lock, function: Callable[..., Any], result: Any) -> Any:
    """Return the *result* of a function, unless its work is still to be done."""
    if not isawaitable(result):
        return result
    if iscoroutine(result):
        result.close()
    # Holding the lock over the await would seem to work, but waiting for the lock would have blocked the event loop.
    raise TypeError(
        f"{_name(function)} returned an awaitable, which would run without lock {lock.name!r}. Decorate a "
        "coroutine function ('async def'), or write 'async with lock(...):' inside it."
    )


def makes_generator(function: Callable[..., Any]) -> bool:
    """Return whether the body of *function* runs when its result is iterated over."""
    return _is(isgeneratorfunction, function) or _is(isasyncgenfunction, function)


def makes_coroutine(function: Callable[..., Any]) -> bool:
    """Return whether the body of *function* runs when its result is awaited."""
    return _is(iscoroutinefunction, function)


def _is(kind: Callable[[Any], bool], function: Any) -> bool:
    """Return whether a function, or the ``__call__`` of an object, is of *kind*."""
    while isinstance(function, partial):
        function = function.func
    return kind(function) or (not isinstance(function, type) and kind(getattr(function, "__call__", None)))  # noqa: B004


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or repr(function))


Result = TypeVar("Result", covariant=True)


class Block(ABC, Generic[Result]):
    """An object that is used for one ``with`` or ``async with`` block at a time."""

    remedy = ""
    """The advice in the error about entering it twice."""

    def __init__(self) -> None:
        self._entered: AbstractContextManager[Result] | None = None
        self._aentered: AbstractAsyncContextManager[Result] | None = None

    @abstractmethod
    def _hold(self) -> AbstractContextManager[Result]:
        """Return the context manager that the next ``with`` block enters and leaves."""

    @abstractmethod
    def _ahold(self) -> AbstractAsyncContextManager[Result]:
        """Return the context manager that the next ``async with`` block enters and leaves."""

    def __enter__(self) -> Result:
        self._refuse_nesting()
        entering = self._hold()
        result = entering.__enter__()
        self._entered = entering
        return result

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._entered is not None
        entered, self._entered = self._entered, None
        return entered.__exit__(kind, error, trace)

    async def __aenter__(self) -> Result:
        self._refuse_nesting()
        entering = self._ahold()
        result = await entering.__aenter__()
        self._aentered = entering
        return result

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        assert self._aentered is not None
        entered, self._aentered = self._aentered, None
        return await entered.__aexit__(kind, error, trace)

    @property
    def is_entered(self) -> bool:
        """Whether a ``with`` block of this object is open now."""
        return self._entered is not None

    def _refuse_nesting(self) -> None:
        if self._entered is not None or self._aentered is not None:
            raise RuntimeError(f"{self!r} is already entered; {self.remedy}")
