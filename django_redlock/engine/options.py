"""
The options of a lock, in one place for ``lock()`` and ``locks[alias].lock()`` (internal).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache, wraps
from inspect import Parameter, getattr_static, signature
from math import inf
from typing import Any, Literal, NoReturn, ParamSpec, TypedDict, TypeVar, Unpack

from ..core.names import check_names, named
from ..core.rules import UNSET, ReleaseMode, Wait, check_label, check_limit, check_release, check_wait, optional_seconds

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
    "cancel_on_lost": False,
    "on_commit": False,
    "if_taken": "raise",
    "release": None,
}


SWITCHES = frozenset({"renew", "shared", "reentrant", "barge", "cancel_on_lost", "on_commit"})
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
        given = next(each for each in options if each not in DEFAULTS)
        value: object = options[given]  # type: ignore[literal-required]
        raise TypeError(f"lock() has no argument {given!r}; {_advice(given, value, ('using', *DEFAULTS))}")
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
    skips = chosen["if_taken"] == "skip"
    return Plan(names, chosen, skips, skips or chosen["cancel_on_lost"] or chosen["on_commit"])


# Typed, because 1 and True are equal, and only one of them is a number of seconds.
_plan_of_one = lru_cache(maxsize=1024, typed=True)(_plan)


def check_switch(what: str, value: object) -> None:
    """
    Make sure that a switch is a bool: ``"no"`` would mean True.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {repr(value)[:40]}.")


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

ARGUMENTS: dict[str, Callable[[object], str]] = {
    "timeout": lambda value: f"write ttl={value!r}",
    "expire": lambda value: f"write ttl={value!r}",
    "lease": lambda value: f"write ttl={value!r}",
    "nowait": lambda value: "write wait=0" if value else "write wait=None",
    "blocking_timeout": lambda value: f"write wait={value!r}",
    "blocking": lambda value: "write wait=None" if value else "write wait=0",
    "auto_renewal": lambda value: f"write renew={value!r}",
    "sleep": lambda value: "leave it out: waiters are notified of their turn",
    "thread_local": lambda value: "leave it out: every acquisition has a lease of its own",
    "id": lambda value: "leave it out: every acquisition has a secret of its own",
}

ATTRIBUTES = {
    "locked": "to look at a lock without taking it, write django_redlock.inventory.find_lock({name!r})",
    **dict.fromkeys(
        ("release", "extend", "reacquire", "owned", "remaining", "ensure", "valid", "fencing_token", "on_lost", "lost"),
        "a lease has it: write 'lease = lock({name!r}).acquire()' or 'with lock({name!r}) as lease:' first",
    ),
    "reset": "to end the hold of another process, use manage.py redlock_release",
}

LEASE_ATTRIBUTES = {
    **dict.fromkeys(("locked", "owned"), "write lease.valid() or lease.ensure()"),
    "reacquire": "write lease.extend()",
    "token": "write lease.fencing_token",
    "acquire": "a lease is held once; write lock({name!r}).acquire() to take the lock again",
}


def lists_options(function: Callable[P, T]) -> Callable[P, T]:
    """Give a function that takes the options of a lock as ``**options`` a signature that lists them."""
    own = [each for each in signature(function).parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    options = [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in DEFAULTS.items()]
    function.__signature__ = signature(function).replace(parameters=[*own, *options])  # type: ignore[attr-defined]
    return function


def explained(function: Callable[P, T]) -> Callable[P, T]:
    """Make calls with an unknown argument raise a TypeError that says what to write instead."""
    own = signature(function).parameters.values()
    known = dict.fromkeys(each.name for each in own if each.name != "self").keys()
    positions = [each.name for each in own if each.kind is Parameter.POSITIONAL_OR_KEYWORD]

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if not kwargs.keys() <= known:
            given = next(each for each in kwargs if each not in known)
            raise TypeError(f"{function.__name__}() has no argument {given!r}; {_advice(given, kwargs[given], known)}")
        if len(args) > len(positions):
            first = ", ".join(name for name in positions if name != "self")
            others = ", ".join(f"{name}=" for name in known if name not in positions)
            raise TypeError(
                f"{function.__name__}() takes only {first} without a keyword; write the others as {others}."
            )
        return function(*args, **kwargs)

    return checked


def _advice(given: str, value: object, known: Collection[str]) -> str:
    """Return what to write instead of an unknown argument."""
    advice = ARGUMENTS[given](value) if given in ARGUMENTS else ""
    option, assigns, _ = advice.removeprefix("write ").partition("=")
    if advice and (option in known or not assigns):
        return f"{advice}."
    close = get_close_matches(given, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}."


def without_arguments(method: Callable[..., T]) -> Callable[[Any], T]:
    """Give a method of a lock, which refuses all arguments by itself, the signature of one that has none."""
    before = signature(method)
    method.__signature__ = before.replace(parameters=[before.parameters["self"]])  # type: ignore[attr-defined]
    return method


def refuse_arguments(method: str, args: Sequence[object], options: Mapping[str, object]) -> None:
    """
    Refuse the arguments of a method of a lock, which belong to the lock itself.

    Raises:
        TypeError: There are some.
    """
    if args or options:
        given = next(iter(options), "")
        option = f"{given}={options[given]!r}" if given in DEFAULTS else "wait=..."
        if given in ARGUMENTS:
            option = ARGUMENTS[given](options[given]).removeprefix("write ")
        advice = option if option.startswith("leave it out") else f"write lock(name, {option}).{method}()"
        raise TypeError(f"{method}() takes no arguments; {advice}.")


class Absent:
    """
    An attribute that a class does not have, for which the error says what to write instead.

    Not ``__getattr__``: Python would then look up each attribute that the class has in a slow way.
    """

    def __init__(self, advice: str) -> None:
        self._advice = advice

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: Any, owner: type | None = None) -> NoReturn:
        kind = getattr(owner, "__name__", "")
        advice = self._advice.format(name=getattr(instance, "name", "..."))
        raise AttributeError(f"{kind!r} object has no {self._name!r}; {advice}.", name=self._name, obj=instance)


class Explained:
    """An object with a name, which lacks some attributes that users expect; the errors say what to write instead."""

    def __init_subclass__(cls, advice: Mapping[str, str] | None = None) -> None:
        super().__init_subclass__()
        for attribute, text in (advice or {}).items():
            absent = Absent(text)
            absent.__set_name__(cls, attribute)
            setattr(cls, attribute, absent)

    def __dir__(self) -> list[str]:
        return [name for name in super().__dir__() if not isinstance(getattr_static(self, name, None), Absent)]
