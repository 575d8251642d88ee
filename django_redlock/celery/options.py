"""What a singleton task is told: its options, checked when the function is decorated."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from inspect import BoundArguments
from typing import Any

from celery import Task

from ..conf import DEFAULT_ALIAS
from ..core.rules import number, seconds
from .slots import LIFETIME, RUNNING, SCOPES, WAITING

Key = str | Sequence[str] | Callable[[BoundArguments], str] | None

ON_DUPLICATE = ("join", "skip", "raise", "rerun", "replace", "enqueue")
ON_OVERLAP = ("skip", "wait", "join", "succeed", "raise")
ON_REDIS_ERROR = {"enqueue": ("publish", "raise"), "run": ("retry", "run", "fail")}
ON_LOST = ("flag", "raise")
REDELIVERY = ("resume", "drop")

# What other parts of this package, or other packages, call one of our options.
OTHER_NAMES = {
    **dict.fromkeys(("ttl", "lock_ttl", "lock_timeout", "lease_time", "lease_ttl", "heartbeat", "renew"), "'lease'"),
    **dict.fromkeys(("lock_expiry", "expiry", "timeout", "ttl_queue"), "'queue_ttl'"),
    **dict.fromkeys(("unique_on", "unique_by", "unique_key", "lock_key", "once", "keys"), "'key'"),
    **dict.fromkeys(("wait", "wait_timeout", "blocking_timeout", "max_wait"), "'wait_for'"),
    **{"hold": "'hold_for'", "alias": "'using'", "on_dup": "'on_duplicate'"},
    **{"unlock_before_run": 'scope="queued"', "cooldown": "'hold_for'"},
    **{"graceful": 'on_duplicate="join"', "raise_on_duplicate": 'on_duplicate="raise"'},
}

# What one call may choose for itself. The rest is for the worker, which goes by the task.
PER_CALL = ("on_duplicate", "queue_ttl", "challenge")

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
        scope: Who excludes whom: ``lifetime`` (one waiting or running), ``running`` (one runs, any number waits),
            ``queued`` (one waits, any number runs) or ``queued+running`` (one waits and one runs).
        on_duplicate: What a caller gets while an equal task has the slot: ``join``, ``skip``, ``raise``, ``rerun``,
            ``replace`` or ``enqueue``.
        on_overlap: What a worker does with a message whose equal has the slot: ``skip``, ``wait``, ``join``,
            ``succeed`` or ``raise``; None is ``wait`` for the two scopes that end in ``running``, else ``skip``.
        overlap_value: What the task returns with ``on_overlap="succeed"``.
        wait_for: How long a message is put back with ``wait`` or ``join``, in seconds, before it is skipped; None is
            for ever.
        hold_for: How long the slot stays taken at least, in seconds from the start of the run.
        lease: How long the slot of a running task lasts without renewal, in seconds. It is renewed while the task
            runs, so this is how long a killed worker leaves the slot taken.
        queue_ttl: How long the slot of a waiting task lasts, in seconds, beyond its countdown or eta.
        using: Alias in ``REDLOCK``.
        group: Tasks of one group share slots; None is a slot of the task's own.
        version: Raise it when the meaning of the key changes.
        on_lost: What happens to a body whose slot was lost: ``flag`` tells it when it asks, ``raise`` interrupts it.
        on_redis_error: What to do when too few lock nodes answer: ``{"enqueue": "publish" or "raise", "run":
            "retry", "run" or "fail"}``; what is left out keeps its default, the first of each.
        redelivery: What becomes of a message that the broker delivers again though a run of it had begun: ``resume``
            runs it again if that run died, ``drop`` never runs it again.
        challenge: Whether a call that meets a waiting equal asks the result backend if that one is over.
        lock_direct_calls: Whether ``task(...)`` takes the slot too, and raises ``DuplicateTask`` if it is taken.

    Raises:
        ValueError: A value cannot work.
        TypeError: A value has the wrong type.
    """

    key: Key = None
    scope: str = LIFETIME
    on_duplicate: str = "join"
    on_overlap: str | None = None
    overlap_value: Any = None
    wait_for: float | None = None
    hold_for: float = 0.0
    lease: float = 30.0
    queue_ttl: float = 3600.0
    using: str = DEFAULT_ALIAS
    group: str | None = None
    version: int = 1
    on_lost: str = "flag"
    on_redis_error: Mapping[str, str] = field(default_factory=dict)
    redelivery: str = "resume"
    challenge: bool = False
    lock_direct_calls: bool = False

    def __post_init__(self) -> None:
        _choice("scope", self.scope, SCOPES)
        _choice("on_duplicate", self.on_duplicate, ON_DUPLICATE)
        _choice("on_overlap", self.overlap, ON_OVERLAP)
        _choice("on_lost", self.on_lost, ON_LOST)
        _choice("redelivery", self.redelivery, REDELIVERY)
        seconds("lease", self.lease)
        seconds("queue_ttl", self.queue_ttl)
        _from_zero("hold_for", self.hold_for)
        _flag("challenge", self.challenge)
        _flag("lock_direct_calls", self.lock_direct_calls)
        if self.wait_for is not None:
            _from_zero("wait_for", self.wait_for)
        self._check_names()
        self._check_on_redis_error()
        self._check_combinations()

    @property
    def overlap(self) -> str:
        """What a worker does with a message whose equal has the slot."""
        return self.on_overlap or ("skip" if self.scope in (LIFETIME, WAITING) and not self.trails else "wait")

    @property
    def trails(self) -> bool:
        """Whether a duplicate may wait to be the next that runs."""
        return self.on_duplicate in ("rerun", "replace")

    @property
    def pends(self) -> bool:
        """Whether a call that waits is pending, and later calls take it over, also if nothing runs."""
        return self.on_duplicate == "replace" or (self.on_duplicate == "rerun" and self.scope != LIFETIME)

    def without_nodes(self, stage: str) -> str:
        """Return what to do when too few nodes answer, at the stage ``enqueue`` or ``run``."""
        return self.on_redis_error.get(stage, ON_REDIS_ERROR[stage][0])

    def for_call(self, chosen: Mapping[str, Any]) -> "SingletonOptions":
        """
        Return the options of one call that chose some for itself.

        Raises:
            TypeError: It may not choose that.
            ValueError: A value cannot work.
        """
        if not isinstance(chosen, Mapping):
            raise TypeError(
                f"singleton= of a call is False or a dict such as {{'on_duplicate': 'raise'}}, not {chosen!r}."
            )
        for name in chosen:
            if name not in PER_CALL:
                known = ", ".join(map(repr, PER_CALL))
                raise TypeError(f"singleton={{...}} of a call may have {known}, not {name!r}{nearest(name, PER_CALL)}")
        if chosen.get("on_duplicate") == "replace" != self.on_duplicate:
            raise TypeError("on_duplicate='replace' is for the task as a whole: workers must know of it too.")
        return replace(self, **chosen)

    def _check_names(self) -> None:
        if not isinstance(self.using, str) or not self.using:
            raise TypeError(f"using must be the name of an alias in REDLOCK, not {self.using!r}.")
        if self.group is not None and (not isinstance(self.group, str) or not self.group):
            raise TypeError(f"group must be None or a name that several tasks share, not {self.group!r}.")
        if isinstance(self.version, bool) or not isinstance(self.version, int):
            raise TypeError(f"version must be a whole number, not {self.version!r}.")

    def _check_on_redis_error(self) -> None:
        if not isinstance(self.on_redis_error, Mapping):
            raise TypeError(f"on_redis_error must be a dict such as {{'run': 'fail'}}, not {self.on_redis_error!r}.")
        for stage, choice in self.on_redis_error.items():
            _choice("A stage of on_redis_error", stage, tuple(ON_REDIS_ERROR))
            _choice(f"on_redis_error[{stage!r}]", choice, ON_REDIS_ERROR[stage])

    def _check_combinations(self) -> None:
        if self.scope == RUNNING and (self.challenge or "enqueue" in self.on_redis_error):
            wrong = "challenge=True" if self.challenge else "on_redis_error={'enqueue': ...}"
            raise ValueError(f"{wrong} has no meaning with scope='running', whose calls are sent without a look.")
        if self.scope == RUNNING and self.on_duplicate != "join":
            raise ValueError(
                f"on_duplicate={self.on_duplicate!r} has no meaning with scope='running', which sends every call; "
                "choose on_overlap, or scope='queued+running'."
            )
        if self.wait_for is not None and self.overlap not in ("wait", "join"):
            raise ValueError(f"wait_for has no meaning with on_overlap={self.overlap!r}; write on_overlap='wait'.")
        if self.overlap_value is not None and self.overlap != "succeed":
            raise ValueError(f"overlap_value has no meaning with on_overlap={self.overlap!r}; write 'succeed'.")
        if self.on_lost == "raise" and self.scope == WAITING:
            raise ValueError("on_lost='raise' has no meaning with scope='queued': a run has no slot to lose.")


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
        if hasattr(Task, name) or name in CELERY_ONLY:
            continue
        near = [OTHER_NAMES[name]] if name in OTHER_NAMES else map(repr, get_close_matches(name, OPTIONS, 1, 0.7))
        for close in near:
            raise TypeError(f"singleton_task() has no option {name!r}; did you mean {close}?")


def nearest(word: object, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the end of a message, or nothing."""
    close = get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def _choice(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, known))}, not {value!r}{nearest(value, known)}")


def _flag(option: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{option} must be True or False, not {value!r}.")


def _from_zero(option: str, value: float) -> None:
    if number(option, value) < 0:
        raise ValueError(f"{option} must be at least 0 seconds, not {value!r}.")
