"""
:func:`singleton_task`: make a singleton task from a function (internal).

The task class is built when an app is finalized, from the mixin and the project's own task class. A ``base=`` of our
own, as in other packages, would drop ``delay_on_commit`` and everything else that the project's class adds.
"""

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Literal, cast, overload

from celery import Celery, Task, _state
from celery.local import Proxy

from ..engine.decorator import makes_coroutine, makes_generator
from ..keys import check_key
from .dispatch import R
from .options import (
    OPTIONS,
    Key,
    OnDuplicate,
    OnLost,
    OnOverlap,
    OnUnavailable,
    Redelivery,
    Scope,
    SingletonOptions,
    check_celery_options,
)
from .task import P, SingletonTask, mixed_with


@overload
def singleton_task(function: Callable[P, R], /) -> SingletonTask[P, R]: ...


@overload
def singleton_task(
    *,
    bind: Literal[True],
    key: Key = ...,
    scope: Scope = ...,
    on_duplicate: OnDuplicate = ...,
    on_overlap: OnOverlap = ...,
    wait_for: float | None = ...,
    hold_for: float = ...,
    lease: float = ...,
    max_hold: float | None = ...,
    queue_ttl: float = ...,
    using: str = ...,
    group: str | None = ...,
    version: int = ...,
    on_lost: OnLost = ...,
    on_unavailable: OnUnavailable = ...,
    redelivery: Redelivery = ...,
    lock_direct_calls: bool = ...,
    **celery_options: Any,
) -> Callable[[Callable[Concatenate[Any, P], R]], SingletonTask[P, R]]: ...


@overload
def singleton_task(
    *,
    key: Key = ...,
    scope: Scope = ...,
    on_duplicate: OnDuplicate = ...,
    on_overlap: OnOverlap = ...,
    wait_for: float | None = ...,
    hold_for: float = ...,
    lease: float = ...,
    max_hold: float | None = ...,
    queue_ttl: float = ...,
    using: str = ...,
    group: str | None = ...,
    version: int = ...,
    on_lost: OnLost = ...,
    on_unavailable: OnUnavailable = ...,
    redelivery: Redelivery = ...,
    lock_direct_calls: bool = ...,
    **celery_options: Any,
) -> Callable[[Callable[P, R]], SingletonTask[P, R]]: ...


def singleton_task(
    function: Callable[..., Any] | None = None,
    /,
    **options: Any,
) -> Any:
    """
    Make a Celery task that waits or runs at most once at any time for the same arguments.

    Use it like ``shared_task``, with or without options; it takes all options of ``shared_task``. For those given here
    see :class:`~django_redlock.celery.SingletonOptions`. Settings are read when the task is first called.

    Raises:
        TypeError: An option does not exist or has the wrong type.
        ValueError: An option has a value that cannot work.
    """
    celery_options = {name: value for name, value in options.items() if name not in OPTIONS}
    check_celery_options(celery_options)
    chosen = SingletonOptions(**{name: value for name, value in options.items() if name in OPTIONS})

    def decorate(function: Callable[..., Any]) -> Any:
        check_function(function)
        check_key(chosen.key, _parameters(function, celery_options))
        return _shared(function, chosen, celery_options)

    return decorate if function is None else decorate(function)


def check_function(function: object) -> None:
    """
    Refuse a *function* that cannot become a task.

    Raises:
        TypeError: It is a task already, a class, a coroutine or generator function, or cannot be called.
    """
    if isinstance(function, (Proxy, Task)):
        raise TypeError("@singleton_task takes the function itself: remove the other task decorator below it.")
    if isinstance(function, type):
        name = function.__name__
        raise TypeError(f"@singleton_task decorates a function, not the class {name}. Derive it from SingletonTask.")
    if not callable(function):
        raise TypeError(f"@singleton_task decorates a function, not {repr(function)[:40]}.")
    if makes_coroutine(function) or makes_generator(function):
        raise TypeError(
            f"@singleton_task decorates a function that does its work when it is called: the slot would be free before "
            f"the body of {getattr(function, '__name__', function)} runs. Write a plain function, which may call "
            "async_to_sync()."
        )


def _parameters(function: Callable[..., Any], celery_options: dict[str, Any]) -> inspect.Signature:
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    return signature.replace(parameters=parameters[1:] if celery_options.get("bind") else parameters)


def _shared(function: Callable[..., Any], options: SingletonOptions, celery_options: dict[str, Any]) -> Any:
    """Register the task with every present and future app; return a proxy that finds it in the current app."""

    def register(app: Celery) -> Any:
        chosen: Any = celery_options.get("base") or app.Task
        base = mixed_with(chosen)
        own = {"base": base, "singleton_options": options, "shared": False, "lazy": False}
        return app.task(**(celery_options | own))(function)

    _state.connect_on_app_finalize(register)
    for app in list(_state._get_active_apps()):  # type: ignore[attr-defined]
        if app.finalized:
            register(app)

    def find() -> Any:
        app = _state.get_current_app()
        name = celery_options.get("name")
        return app.tasks[name or app.gen_task_name(function.__name__, function.__module__)]

    return cast(Any, Proxy(find))
