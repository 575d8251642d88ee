"""What a singleton task is told: its options, checked when the function is decorated."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from inspect import BoundArguments

from celery import Task

from ..conf import DEFAULT_ALIAS
from ..core.rules import seconds

Key = str | Sequence[str] | Callable[[BoundArguments], str] | None

ON_DUPLICATE = ("join", "skip", "raise", "enqueue")
ON_OVERLAP = ("skip", "raise")

# What other parts of this package, or other packages, call one of our options.
OTHER_NAMES = {"ttl": "lease", "alias": "using", "unique_on": "key", "once": "key"}

# Names of ours for what is still to come: as attributes of a task they would do nothing, in silence.
NOT_YET = {"hold_for", "lock_direct_calls", "on_lost", "on_redis_error", "redelivery", "scope", "wait_for"}

# Options of Celery's decorator that are not attributes of its task class.
CELERY_ONLY = {
    *("autoretry_for", "base", "bind", "dont_autoretry_for", "filter", "retry_backoff", "retry_backoff_max"),
    *("pydantic", "pydantic_context", "pydantic_dump_kwargs", "pydantic_strict", "retry_jitter", "retry_kwargs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SingletonOptions:
    """
    The options of :func:`~django_redlock.celery.singleton_task` that are not Celery's.

    Args:
        key: What tells calls apart: parameter names, a template such as ``"shop:{shop_id}"``, or a function of the
            :class:`inspect.BoundArguments` that returns a str; None is all parameters.
        on_duplicate: What a caller gets while an equal task is waiting or running: ``join``, ``skip``, ``raise``
            or ``enqueue``.
        on_overlap: What a worker does with a message whose equal is waiting or running: ``skip`` or ``raise``.
        lease: How long the slot of a running task lasts without renewal, in seconds. It is renewed while the task
            runs, so this is how long a killed worker leaves the slot taken.
        queue_ttl: How long the slot of a waiting task lasts, in seconds, beyond its countdown or eta.
        using: Alias in ``REDLOCK``.
        group: Tasks of one group share slots; None is a slot of the task's own.
        version: Raise it when the meaning of the key changes.

    Raises:
        ValueError: A value cannot work.
        TypeError: A value has the wrong type.
    """

    key: Key = None
    on_duplicate: str = "join"
    on_overlap: str = "skip"
    lease: float = 30.0
    queue_ttl: float = 3600.0
    using: str = DEFAULT_ALIAS
    group: str | None = None
    version: int = 1

    def __post_init__(self) -> None:
        _choice("on_duplicate", self.on_duplicate, ON_DUPLICATE)
        _choice("on_overlap", self.on_overlap, ON_OVERLAP)
        seconds("lease", self.lease)
        seconds("queue_ttl", self.queue_ttl)
        if not isinstance(self.using, str) or not self.using:
            raise TypeError(f"using must be the name of an alias in REDLOCK, not {self.using!r}.")
        if self.group is not None and (not isinstance(self.group, str) or not self.group):
            raise TypeError(f"group must be None or a name that several tasks share, not {self.group!r}.")
        if isinstance(self.version, bool) or not isinstance(self.version, int):
            raise TypeError(f"version must be a whole number, not {self.version!r}.")


OPTIONS = tuple(field.name for field in fields(SingletonOptions))


def check_celery_options(options: Iterable[str]) -> None:
    """
    Refuse what looks like one of our options, and is none.

    Celery makes attributes of the task of all options that it does not know. That is useful, so only the names that
    are near one of ours are refused.

    Raises:
        TypeError: An option is a misspelling of one of ours.
    """
    for name in options:
        if name in NOT_YET:
            raise TypeError(f"singleton_task() has no option {name!r} yet.")
        if hasattr(Task, name) or name in CELERY_ONLY:
            continue
        close = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, OPTIONS, n=1, cutoff=0.7)
        if close:
            raise TypeError(f"singleton_task() has no option {name!r}; did you mean {close[0]!r}?")


def nearest(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the end of a message, or nothing."""
    close = get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def _choice(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, known))}, not {value!r}{nearest(value, known)}")
