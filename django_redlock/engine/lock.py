"""
The description of a lock, for ``with``, ``async with`` and decorators (internal).

A :class:`Lock` can be kept and used from any thread or task. Acquiring it gives a :class:`~.lease.Lease`, the proof of
holding it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from functools import wraps
from inspect import isawaitable, iscoroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, ParamSpec, TypeVar, cast, overload
from weakref import WeakSet

from ..core.names import named
from ..core.protocol import LOST, EndReason, Outcome
from ..core.rules import Wanted
from ..exceptions import LockTakenError
from ..runtime.threads import exiting
from .functions import makes_coroutine, makes_generator, name_of, work_left
from .lease import Lease, entered_again, raise_loss
from .options import Plan, check_block
from .reentrancy import Exit, Interruption, OpenBlock, OpenBlocks, WaitCheck, entering, this_task, this_thread

if TYPE_CHECKING:
    from .manager import LockManager


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


Function = TypeVar("Function", bound=Callable[..., Any])
P = ParamSpec("P")
R = TypeVar("R")


class Lock:
    """
    The description of a lock. The object holds nothing itself: every acquisition gives a :class:`Lease` of its own.

    Use it as ``with`` or ``async with``, as a decorator of a function or coroutine function, or call :meth:`acquire` or
    :meth:`try_acquire`. Create one with :func:`django_redlock.lock` or ``locks[alias].lock()``.
    """

    def __init__(self, plan: Plan, describe: Callable[[Plan], Description]) -> None:
        self.names = plan.names
        self._plan = plan
        self._describe = describe
        self._described: Description | None = None
        self._threads = OpenBlocks()
        self._tasks = OpenBlocks()

    def __repr__(self) -> str:
        return f"<Lock {self.name!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("A Lock cannot be pickled or copied; pass its name, and write lock(name) where it is needed.")

    @property
    def name(self) -> str:
        """The lock's name; several names are joined by commas."""
        return named(self.names)

    @property
    def skips(self) -> bool:
        """Whether a decorated function is skipped when the lock is taken."""
        return self._plan.skips

    def description(self) -> Description:
        """
        Return this lock under the present settings; a decorator outlives the settings of its first call.

        Raises:
            InvalidRedlockError: The settings cannot be used.
            ValueError: The settings do not allow this lock.
        """
        described = self._described
        if described is None or described.manager.replaced:
            if exiting():  # modules that the settings need may be gone
                raise RuntimeError(f"Lock {self.name!r} cannot be taken: the interpreter is about to end.")
            described = self._described = self._describe(self._plan)
        return described

    def acquire(self) -> Lease:
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
        return self._acquire()

    async def aacquire(self) -> Lease:
        """Do what :meth:`acquire` does without blocking; a cancelled call leaves no key behind."""
        return await self._aacquire()

    def try_acquire(self) -> Lease | None:
        """
        Return a lease, or None if another owner has the lock.

        The call makes one attempt, or tries for ``wait`` seconds if the lock was described with ``wait``;
        ``OPTIONS["wait"]`` does not apply. The lease can be used in a ``with`` block, which releases it. The call
        raises what :meth:`acquire` raises, except LockTakenError.
        """
        with suppress(LockTakenError):
            return self._acquire(once=True)
        return None

    async def atry_acquire(self) -> Lease | None:
        """Do what :meth:`try_acquire` does without blocking; the lease can be used in an ``async with`` block."""
        with suppress(LockTakenError):
            return await self._aacquire(once=True)
        return None

    def _acquire(self, once: bool = False) -> Lease:
        if self._plan.particular:
            check_block(self._plan, "acquire")
        described = self.description()
        described.manager.surroundings.blocking()
        return self._take(self._chosen(described, once), this_thread())

    async def _aacquire(self, once: bool = False) -> Lease:
        if self._plan.particular:
            check_block(self._plan, "aacquire")
        return await self._atake(self._chosen(self.description(), once), this_task())

    def _chosen(self, described: Description, once: bool) -> Description:
        return described._replace(wanted=described.wanted._replace(wait=0)) if once and described.once else described

    def _take(self, described: Description, who: object) -> Lease:
        manager, wanted = described.manager, described.wanted
        if self._plan.options["reentrant"] and (lease := self._entered_before(described, who)):
            return lease
        waiting = None if wanted.is_brief else WaitCheck(manager, manager.runtime.clock, wanted, who)
        return manager.acquirer.take(wanted, described.renew, who, self._plan.options["reentrant"], waiting)

    async def _atake(self, described: Description, who: object) -> Lease:
        manager, wanted = described.manager, described.wanted
        if self._plan.options["reentrant"] and (lease := self._entered_before(described, who)):
            return lease
        waiting = None if wanted.is_brief else WaitCheck(manager, manager.runtime.clock, wanted, who)
        return await manager.acquirer.atake(wanted, described.renew, who, self._plan.options["reentrant"], waiting)

    def __enter__(self) -> Lease:
        block, by_hand = entering(self)
        block.who = who = this_thread()
        options = self._plan.options
        if self._plan.particular:
            check_block(self._plan, "with")
        described = self.description()
        manager, wanted = described.manager, described.wanted
        if wanted.owner.kind == "manual":
            manager.surroundings.entering(self.names, manager.rules, options["on_commit"])
        manager.surroundings.blocking()
        if who in self._threads:
            self._threads.tidy(who)
        lease = None
        try:
            lease = self._take(described, who)
            self._threads.enter(block, lease, by_hand)
            return lease
        except BaseException:
            block.over = True
            if lease is not None:  # interrupted: the body will not run
                lease.hold.never_began()
                lease.hold.abandon()
                self._threads.leave(block)
            raise

    def _leave(self, block: OpenBlock, kind: type[BaseException] | None) -> None:
        if exiting():
            return  # the interpreter, when it ends, closes suspended generators
        if block.lease is None:
            block = self._threads.leaving(this_thread(), self.name)
        block.over = True
        lease: Lease = block.lease
        lease.hold.by_hand += 1  # its entry is no longer that of a block
        if kind is not None:
            lease.hold.failed()
        try:
            if lease.hold.ended is EndReason.RELEASED:
                outcome = Outcome.RELEASED  # the body released the lock, and knows the outcome
            elif (
                self._plan.options["on_commit"]
                and lease.valid()
                and self.description().manager.surroundings.keep(lease)
            ):
                outcome = Outcome.RELEASED
            else:
                outcome = lease.release(wait=lease.hold.waits_at_end)
        except BaseException:
            lease.hold.abandon()
            raise
        finally:
            self._threads.leave(block)
        if outcome in LOST:
            raise_loss(lease, body_failed=kind is not None)

    def __aenter__(self) -> Coroutine[Any, Any, Lease]:
        return self._aenter(*entering(self))

    async def _aenter(self, block: OpenBlock, by_hand: bool) -> Lease:
        task = asyncio.current_task()
        block.who = who = this_task()
        if self._plan.particular:
            check_block(self._plan, "async with")
        if who in self._tasks:
            self._tasks.tidy(who)
        lease = None
        try:
            lease = await self._atake(self.description(), who)
            self._tasks.enter(block, lease, by_hand)
            if task and self._plan.options["cancel_on_lost"]:
                block.interruption = Interruption(task)
                lease.on_lost(block.interruption)
            return lease
        except BaseException:
            block.over = True
            if lease is not None:
                lease.hold.never_began()
                lease.hold.abandon()
                self._tasks.leave(block)
            raise

    async def _aleave(self, block: OpenBlock, kind: type[BaseException] | None) -> None:
        if exiting():
            return
        if block.lease is None:
            block = self._tasks.leaving(this_task(), self.name)
        block.over = True
        lease: Lease = block.lease
        lease.hold.by_hand += 1  # its entry is no longer that of a block
        if kind is not None:
            lease.hold.failed()
        try:
            interrupted = block.interruption is not None and block.interruption.end(kind)  # first: it must not strike
            if lease.hold.ended is EndReason.RELEASED:
                outcome = Outcome.RELEASED
            else:
                outcome = await lease.arelease(wait=lease.hold.waits_at_end)
        except BaseException:
            lease.hold.abandon()
            raise
        finally:
            self._tasks.leave(block)
        if outcome in LOST:
            raise_loss(lease, body_failed=kind is not None and not interrupted)

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

    def _entered_before(self, described: Description, who: object) -> Lease | None:
        """Return the lease that the thread or task has of a reentrant lock, entered once more; None if it has none."""
        entered, limit, shared = described.manager.acquirer.entered, described.wanted.limit, described.wanted.shared
        if (other := entered.get((self.names, limit, not shared, who))) and other.hold.entered:
            raise RuntimeError(
                f"Lock {self.name!r} is held here, {'exclusively' if shared else 'shared'}; it would wait "
                "for itself if it were taken the other way as well."
            )
        lease = entered.get((self.names, limit, shared, who))
        if lease is None or not lease.hold.entered:
            return None  # a released lease cannot be entered again, however it ended
        return entered_again(lease)


if TYPE_CHECKING:

    class SkippingLock(Lock):
        """What a lock with ``if_taken="skip"`` is for type checkers: a function that it decorates may return None."""

        @overload  # type: ignore[override]
        def __call__(
            self, function: Callable[P, Coroutine[Any, Any, R]]
        ) -> Callable[P, Coroutine[Any, Any, R | None]]: ...

        @overload
        def __call__(self, function: Callable[P, R]) -> Callable[P, R | None]: ...

        def __call__(self, function: Any) -> Any:
            """Decorate a function."""


class OfLease:
    """
    An attribute of a lease, which a lock does not have: the error says where to find it.

    ``__getattr__`` would say the same, and slow down the look-up of each attribute that a lock has.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, lock: Any, owner: type) -> NoReturn:
        text = f"'Lock' object has no attribute {self._name!r}"
        if lock is not None:
            text += f"; a lease has it: write 'lease = lock({lock.name!r}).acquire()' first"
        raise AttributeError(text, name=self._name, obj=lock)


for _attribute in dir(Lease):
    if not (_attribute.startswith("_") or hasattr(Lock, _attribute)):
        setattr(Lock, _attribute, OfLease(_attribute))


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
            f"The generator function {name_of(function)} cannot be decorated with a lock: its body runs after the "
            "call. Write 'with lock(...):' (or 'async with') inside it."
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
            f"The class {name_of(function)} cannot be decorated with a lock, which would be held only while an object "
            "of it is made. Decorate its methods; for a view class, write @locked_view(key)."
        )
    if isinstance(function, (classmethod, staticmethod, property)):
        kind = type(function).__name__
        raise TypeError(f"A {kind} cannot be decorated with a lock. Write @{kind} above @lock(...).")
    if any(base.__module__.partition(".")[0] == "celery" for base in type(function).__mro__):
        raise TypeError(
            f"The Celery task {name_of(function)} cannot be decorated with a lock, because it would lose delay() and "
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
            result = await function(*args, **kwargs)
            # Its work is done: a task or a client that can be awaited may be what it was called for.
            return result if isawaitable(result) and not iscoroutine(result) else _done(lock, function, result)

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
    if not (left := work_left(result)):
        return result
    # Holding the lock over the await would seem to work, but waiting for the lock would have blocked the event loop.
    raise TypeError(
        f"{name_of(function)} returned {left}, which would run without lock {lock.name!r}. Decorate the function, or "
        "coroutine function ('async def'), that does the work, or write 'with lock(...):' (or 'async with') inside it."
    )


Result = TypeVar("Result", covariant=True)


class Block(ABC, Generic[Result]):
    """An object that is used for one ``with`` or ``async with`` block at a time."""

    remedy = ""
    """The advice in the error about entering it twice."""

    _entered: AbstractContextManager[Result] | None = None
    _aentered: AbstractAsyncContextManager[Result] | None = None

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
