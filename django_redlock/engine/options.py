"""
The options of a lock, in one place for ``lock()`` and ``locks[alias].lock()`` (internal).
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache, wraps
from inspect import Parameter, signature
from math import inf
from typing import Literal, ParamSpec, TypedDict, TypeVar, Unpack

from ..core.names import check_names, named
from ..core.rules import (
    UNSET,
    ReleaseMode,
    Wait,
    check_label,
    check_limit,
    check_release,
    check_switch,
    check_wait,
    from_zero,
    optional_seconds,
)

IfTaken = Literal["raise", "skip"]


class SkippingOptions(TypedDict, total=False):
    """The options of :func:`django_redlock.lock` that go with ``if_taken="skip"``."""

    ttl: float | None
    wait: Wait
    renew: bool | None
    label: str
    limit: int
    shared: bool
    reentrant: bool
    barge: bool
    heartbeat: float | None
    max_hold: float | None
    hold_for: float
    hold_on_error: bool
    release: ReleaseMode | None


class BlockOptions(SkippingOptions, total=False):
    """The options that decide nothing about the type of a decorated function."""

    cancel_on_lost: bool
    on_commit: bool


class LockOptions(BlockOptions, total=False):
    """The options of :func:`django_redlock.lock`, which describes each; ``DEFAULTS`` has the default values."""

    if_taken: IfTaken


DEFAULTS: LockOptions = {
    "ttl": None,
    "wait": UNSET,
    "renew": None,
    "label": "",
    "limit": 1,
    "shared": False,
    "reentrant": False,
    "barge": False,
    "heartbeat": None,
    "max_hold": None,
    "hold_for": 0.0,
    "hold_on_error": True,
    "cancel_on_lost": False,
    "on_commit": False,
    "if_taken": "raise",
    "release": None,
}


SWITCHES = frozenset({"renew", "shared", "reentrant", "barge", "hold_on_error", "cancel_on_lost", "on_commit"})
"""The options that are True or False; ``renew`` may be None, too."""


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """
    What a caller writes to describe a lock, checked; nothing in it depends on an alias or its settings.

    Attributes:
        names: The names, sorted.
        options: All options.
        skips: Whether the lock has ``if_taken="skip"``.
        particular: Whether the lock does not work with every kind of block: see :func:`check_block`.
    """

    names: tuple[str, ...]
    options: LockOptions
    skips: bool
    particular: bool


def plan(name: str | Iterable[str], options: LockOptions) -> Plan:
    """
    Return the plan of a lock. A lock that is described again and again is checked once.

    Raises:
        TypeError: A name or the label is not a string, a switch is not a bool, or there is no such option.
        ValueError: A name or number cannot work, or two options cannot be combined; the message says what to write.
    """
    if isinstance(name, str):
        try:
            return _plan_of_one(name, **options)
        except TypeError:  # also if an option cannot be hashed; below, the error says what is wrong
            pass
    return _plan(name, **options)


def _plan(name: str | Iterable[str], **options: Unpack[LockOptions]) -> Plan:
    names = check_names(name)
    if not options.keys() <= DEFAULTS.keys():
        raise TypeError(no_argument("lock", options, ("name", "using", *DEFAULTS)))
    chosen: LockOptions = {**DEFAULTS, **options}
    check_label(chosen["label"])
    check_wait(chosen["wait"])
    check_release(chosen["release"])
    for what in sorted(SWITCHES):
        value = chosen[what]  # type: ignore[literal-required]
        if what != "renew" or value is not None:
            check_switch(what, value)
    check_limit(chosen["limit"], names, chosen["shared"])
    for what in ("ttl", "heartbeat", "max_hold"):
        if what != "max_hold" or chosen["max_hold"] != inf:  # for ever: for a scheduler that must exist once
            optional_seconds(what, chosen[what])  # type: ignore[literal-required]
    check_if_taken(chosen)
    from_zero("hold_for", chosen["hold_for"])
    skips = chosen["if_taken"] == "skip"
    return Plan(names, chosen, skips, skips or chosen["cancel_on_lost"] or chosen["on_commit"])


# Typed, because 1 and True are equal, and only one of them is a number of seconds.
_plan_of_one = lru_cache(maxsize=1024, typed=True)(_plan)


def check_if_taken(options: LockOptions) -> None:
    """
    Raise ValueError unless ``if_taken`` is ``raise`` or ``skip``, and fits the other options.

    Raises:
        ValueError: It is neither, or does not fit the other options.
    """
    if_taken = options["if_taken"]
    if if_taken not in ("raise", "skip"):
        raise ValueError(f"if_taken must be 'raise' or 'skip', not {if_taken!r}.")
    if if_taken == "skip" and (options["on_commit"] or options["cancel_on_lost"]):
        other = "on_commit" if options["on_commit"] else "cancel_on_lost"
        raise ValueError(f"if_taken='skip' and {other}=True cannot be combined; catch LockTakenError instead.")


def check_block(plan: Plan, block: str) -> None:
    """
    Check that the options work with the way in which the lock is taken.

    Args:
        plan: The lock.
        block: ``with`` or ``async with``, or ``acquire`` or ``aacquire`` for a method of the lock.

    Raises:
        TypeError: The lock has ``if_taken="skip"``, and a block cannot be skipped.
        RuntimeError: An option works only with another kind of block.
    """
    name, options = named(plan.names), plan.options
    if plan.skips and block.endswith("with"):
        method = "try_acquire" if block == "with" else "atry_acquire"
        raise TypeError(
            f"Lock {name!r} has if_taken='skip', which is for decorators: a block cannot be skipped. Write "
            f"'lease = lock({name!r}).{method}()', which gives None when the lock is taken."
        )
    if options["cancel_on_lost"] and block != "async with":
        raise RuntimeError(f"Lock {name!r} has cancel_on_lost, which works with 'async with' only.")
    if options["on_commit"] and block != "with":
        raise RuntimeError(f"Lock {name!r} has on_commit=True, which works with 'with' only.")


P = ParamSpec("P")
T = TypeVar("T")


def lists_options(function: Callable[P, T]) -> Callable[P, T]:
    """Give a function that takes the options of a lock as ``**options`` a signature that lists them."""
    own = [each for each in signature(function).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in DEFAULTS.items()]
    function.__signature__ = signature(function).replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def explained(function: Callable[P, T]) -> Callable[P, T]:
    """Make calls with an unknown argument raise a TypeError that names the known ones."""
    known = [name for name in signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if not kwargs.keys() <= {*known}:
            raise TypeError(no_argument(function.__name__, kwargs, known))
        return function(*args, **kwargs)

    return checked


def no_argument(function: str, given: Iterable[str], known: Collection[str]) -> str:
    """Return what is wrong with a call of a function that has only the *known* arguments."""
    wrong = next(each for each in given if each not in known)
    return f"{function}() has no argument {wrong!r}. It has {', '.join(known)}."
