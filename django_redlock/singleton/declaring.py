"""What the decorators of singleton tasks refuse (internal)."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any

from ..engine.functions import makes_coroutine, makes_generator, name_of, work_left
from ..engine.options import DEFAULTS
from .options import OPTIONS

# Options of other packages for the same purposes. As attributes of a task they would have no effect.
ELSEWHERE = {
    *("lock", "lock_ttl", "lock_timeout", "lock_expiry", "lock_key", "lock_args", "lock_limit"),
    *("lease_time", "lease_ttl", "expiry", "timeout", "ttl_queue", "unique", "unique_on", "unique_by"),
    *("unique_key", "unique_args", "unique_id", "unique_for", "unique_until", "once", "keys"),
    *("concurrency_key", "concurrency", "concurrency_limit", "max_concurrency", "queueing_lock"),
    *("blocking", "blocking_timeout", "wait_timeout", "max_wait", "hold", "cooldown", "throttle"),
    *("period", "debounce", "deduplication", "graceful", "raise_on_duplicate", "unlock_before_run"),
    *("alias", "if_taken", "on_conflict", "on_client_conflict", "on_server_conflict", "on_busy", "on_dup"),
}


def check_others(options: Iterable[str], known: Callable[[str], bool]) -> None:
    """
    Refuse a name that resembles one of our options, or that ``lock()`` or another package has for one.

    Celery turns all options that it does not know into attributes of the task. That is useful, so all other names are
    allowed.

    Args:
        options: The names.
        known: Whether the framework has an option of this name.

    Raises:
        TypeError: An option is none of ours, and seems to be meant for us.
    """
    for name in options:
        if not known(name) and (name in DEFAULTS or name in ELSEWHERE or get_close_matches(name, OPTIONS, 1, 0.7)):
            raise TypeError(f"singleton_task() has no option {name!r}; its own are {', '.join(OPTIONS)}.")


def check_function(function: object, task: tuple[type, ...], instead: str = "", coroutines: bool = True) -> None:
    """
    Refuse what cannot be the body of a task.

    Args:
        function: What is decorated.
        task: The classes of what is a task already.
        instead: What to do with a class.
        coroutines: Whether it may be a coroutine function.

    Raises:
        TypeError: It is a task already, a class, cannot be called, or only begins its work when it is called.
    """
    if isinstance(function, task):
        raise TypeError("@singleton_task takes the function itself: remove the other task decorator below it.")
    if isinstance(function, type):
        raise TypeError(f"@singleton_task decorates a function, not the class {function.__name__}.{instead}")
    if not callable(function):
        raise TypeError(
            f"@singleton_task decorates a function, not {repr(function)[:40]}. Write its options by name, such as "
            "key=('shop_id',)."
        )
    if makes_generator(function) or (makes_coroutine(function) and not coroutines):
        raise TypeError(
            "@singleton_task decorates a function that does its work when it is called: the slot would be free before "
            f"the body of {name_of(function)} runs. Write a plain function, which may call async_to_sync()."
        )


def worked(function: object, value: Any) -> Any:
    """
    Return the *value* that the body of a task returned.

    Raises:
        TypeError: Its work is still to be done.
    """
    if left := work_left(value):
        raise TypeError(
            f"{name_of(function)} returned {left}, which would run when its slot is free. Write a function that does "
            "its work before it returns."
        )
    return value
