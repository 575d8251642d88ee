"""
The options of a lock, in one place for ``lock()`` and ``locks[alias].lock()`` (internal).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar

from ..core.names import named
from ..core.rules import UNSET, ReleaseMode, Wait, check_label, check_limit, check_release, check_wait, optional_seconds

IfTaken = Literal["raise", "skip"]


class LockOptions(TypedDict, total=False):
    """The options of :func:`django_redlock.lock`, which describes each; ``DEFAULTS`` has the default values."""

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
    cancel_on_lost: bool
    on_commit: bool
    if_taken: IfTaken
    release: ReleaseMode | None


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


def _check_switches(options: LockOptions) -> None:
    """
    Make sure that each switch that was passed is a bool.

    Raises:
        TypeError: One of them is something else.
    """
    for what in sorted(SWITCHES & options.keys()):
        value = options[what]  # type: ignore[literal-required]
        if what != "renew" or value is not None:
            check_switch(what, value)


def check_switch(what: str, value: object) -> None:
    """
    Make sure that a switch is a bool: ``"no"`` would mean True.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {repr(value)[:40]}.")


CHECKS: dict[str, Callable[[LockOptions, tuple[str, ...]], object]] = {
    "label": lambda chosen, names: check_label(chosen["label"]),
    "wait": lambda chosen, names: check_wait(chosen["wait"]),
    "release": lambda chosen, names: check_release(chosen["release"]),
    "limit": lambda chosen, names: check_limit(chosen["limit"], names, chosen["shared"]),
    "ttl": lambda chosen, names: optional_seconds("ttl", chosen["ttl"]),
    "heartbeat": lambda chosen, names: optional_seconds("heartbeat", chosen["heartbeat"]),
    "max_hold": lambda chosen, names: optional_seconds("max_hold", chosen["max_hold"]),
    "if_taken": lambda chosen, names: check_if_taken(chosen),
}
"""The check of each option that was passed; it gets all options and the names of the lock."""


def complete(names: tuple[str, ...], options: LockOptions) -> LockOptions:
    """
    Return *options* with the defaults of those that were not passed.

    Raises:
        TypeError: The label is not a string, or a switch is not a bool.
        ValueError: A number cannot work, or two options cannot be combined; the message says what to write.
    """
    chosen: LockOptions = {**DEFAULTS, **options}
    for what, check in CHECKS.items():  # the defaults need none
        if what in options:
            check(chosen, names)
    if not SWITCHES.isdisjoint(options):
        _check_switches(options)
    return chosen


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


def check_block(names: tuple[str, ...], options: LockOptions, block: str) -> None:
    """
    Check that the options work with the kind of block that is entered: ``with``, ``async with``, or empty for none.

    Raises:
        RuntimeError: An option works only with another kind of block.
    """
    if options["cancel_on_lost"] and block != "async with":
        raise RuntimeError(f"Lock {named(names)!r} has cancel_on_lost, which works with 'async with' only.")
    if options["on_commit"] and block != "with":
        raise RuntimeError(f"Lock {named(names)!r} has on_commit=True, which works with 'with' only.")


def check_not_skipped(names: tuple[str, ...], options: LockOptions, method: str) -> None:
    """
    Check that the lock does not have ``if_taken="skip"``; *method* is the one to call instead of entering it.

    Raises:
        TypeError: The lock has ``if_taken="skip"``.
    """
    if options["if_taken"] == "skip":
        name = named(names)
        raise TypeError(
            f"Lock {name!r} has if_taken='skip', which is for decorators: a block cannot be skipped. Write "
            f"'lease = lock({name!r}).{method}()', which gives None when the lock is taken."
        )


P = ParamSpec("P")
T = TypeVar("T")

ARGUMENTS: dict[str, Callable[[object], str]] = {
    "timeout": lambda value: f"write ttl={value!r}",
    "expire": lambda value: f"write ttl={value!r}",
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


def explained(function: Callable[P, T]) -> Callable[P, T]:
    """
    Make calls with an unknown argument raise a TypeError that says what to write instead.

    A function that takes the options of a lock as ``**options`` gets a signature that lists them.
    """
    own = list(signature(function).parameters.values())
    if own[-1].kind is Parameter.VAR_KEYWORD:
        del own[-1]
        options = {option: value for option, value in DEFAULTS.items() if option not in [each.name for each in own]}
        own += [Parameter(name, Parameter.KEYWORD_ONLY, default=value) for name, value in options.items()]
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

    checked.__signature__ = signature(function).replace(parameters=own)  # type: ignore[attr-defined]
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


class Explained:
    """An object with a name, whose missing attributes are errors that say what to write instead if that is known."""

    _advice: Mapping[str, str] = {}

    def __init_subclass__(cls, advice: Mapping[str, str] | None = None) -> None:
        super().__init_subclass__()
        cls._advice = cls._advice if advice is None else advice

    if not TYPE_CHECKING:

        def __getattr__(self, attribute: str) -> Any:
            advice = self._advice.get(attribute, "").format(name=self.name)
            message = f"{type(self).__name__!r} object has no {attribute!r}{f'; {advice}.' if advice else ''}"
            raise AttributeError(message, name=attribute, obj=self)  # so that Python suggests one that is similar
