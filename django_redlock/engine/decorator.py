"""
Use a lock as a decorator (internal).

A decorated function must do its work during the call, or while its result is awaited. The body of a generator runs at
neither time, so a generator function cannot be decorated.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial, wraps
from inspect import isasyncgenfunction, isawaitable, iscoroutine, iscoroutinefunction, isgeneratorfunction
from typing import Any, Protocol, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


class Locked(AbstractContextManager[Any], AbstractAsyncContextManager[Any], Protocol):
    """The part of a :class:`~django_redlock.engine.lock.Lock` that a decorator uses."""

    @property
    def name(self) -> str:
        """The lock's name."""
        ...

    @property
    def skips(self) -> bool:
        """Whether the function is skipped when the lock is taken."""
        ...

    def try_acquire(self) -> AbstractContextManager[Any] | None:
        """Return a lease, or None if the lock is taken."""
        ...

    async def atry_acquire(self) -> AbstractAsyncContextManager[Any] | None:
        """Return a lease, or None if the lock is taken."""
        ...


def decorated(lock: Locked, function: Function) -> Function:
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


def _awaited(lock: Locked, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    async def alocked(*args: Any, **kwargs: Any) -> Any:
        block = await lock.atry_acquire() if lock.skips else lock
        if block is None:
            return None
        async with block:
            return await function(*args, **kwargs)

    return alocked


def _called(lock: Locked, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        block = lock.try_acquire() if lock.skips else lock
        if block is None:
            return None
        with block:
            return _done(lock, function, function(*args, **kwargs))

    return locked


def _done(lock: Locked, function: Callable[..., Any], result: Any) -> Any:
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
