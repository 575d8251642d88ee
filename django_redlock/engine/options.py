"""
The options of a lock, in one place for ``lock()`` and ``locks[alias].lock()`` (internal).
"""

from collections.abc import Callable
from typing import Literal, TypedDict

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
