"""
Errors for people who know other locks; they say what to write here (internal).

The lock of redis-py has other names for the same things: ``timeout`` is the ttl, ``blocking_timeout`` is how long to
wait.
"""

from collections.abc import Callable
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

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
        ("release", "extend", "reacquire", "owned", "remaining", "ensure", "valid"),
        "a lease has it: write 'lease = lock({name!r}).acquire()' or 'with lock({name!r}) as lease:' first",
    ),
    "reset": "to end the hold of another process, use manage.py redlock_release",
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

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if not kwargs.keys() <= known:
            given = next(each for each in kwargs if each not in known)
            close = get_close_matches(given, known, n=1)
            near = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(known)}"
            advice = ARGUMENTS[given](kwargs[given]) if given in ARGUMENTS else near
            raise TypeError(f"{function.__name__}() has no argument {given!r}; {advice}.")
        return function(*args, **kwargs)

    checked.__signature__ = signature(function).replace(parameters=own)  # type: ignore[attr-defined]
    return checked


def no_attribute(kind: str, name: str, attribute: str) -> AttributeError:
    """Return the error for an *attribute* that a lock does not have, with what to write instead if that is known."""
    advice = ATTRIBUTES.get(attribute, "").format(name=name)
    return AttributeError(f"{kind!r} object has no {attribute!r}{f'; {advice}' if advice else ''}.")
