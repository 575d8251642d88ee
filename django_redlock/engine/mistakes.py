"""
Errors for people who know other locks; they say what to write here (internal).

The lock of redis-py has other names for the same things: ``timeout`` is the ttl, ``blocking_timeout`` is how long to
wait.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from .options import DEFAULTS

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
