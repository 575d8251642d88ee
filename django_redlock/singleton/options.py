"""The options of a singleton task, checked when they are given (internal)."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from inspect import BoundArguments
from typing import Any, Literal, TypedDict, get_args

from ..core.rules import DEFAULT_ALIAS, Rules, check_limit, check_switch, from_zero, nearest, optional_seconds, seconds
from .ticket import LIFETIME, PER_MESSAGE, RUNNING, SCOPES, WAITING

CallKey = str | Sequence[str] | Callable[[BoundArguments], str] | None
"""What distinguishes the calls of a task, as its option ``key`` says."""

Scope = Literal["until_executed", "until_executing", "while_executing", "until_and_while_executing"]
OnDuplicate = Literal["join", "skip", "raise", "rerun", "replace"]
Redelivery = Literal["resume", "drop"]


EnqueueChoice = Literal["publish", "raise"]
RunChoice = Literal["retry", "run", "fail"]


class OnUnavailable(TypedDict, total=False):
    """What to do when too few lock nodes answer, at each stage; a missing stage has its first choice."""

    enqueue: EnqueueChoice
    run: RunChoice


@dataclass(frozen=True, slots=True)
class Return:
    """
    For ``on_overlap``: end the message with *value*, as if it had run.

    Args:
        value: What the task returns.
    """

    value: Any = None

    def __str__(self) -> str:
        return "return"


Overlap = Literal["wait", "drop", "follow", "fail"]
OnOverlap = Overlap | Return | None

ON_UNAVAILABLE = {"enqueue": get_args(EnqueueChoice), "run": get_args(RunChoice)}

# Options that a single call may set. For all others, the worker uses the options of the task.
PER_CALL = ("on_duplicate", "queue_ttl", *PER_MESSAGE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SingletonOptions:
    """
    The options of ``singleton_task``, for Celery or for Django's own tasks, that concern its slots.

    Args:
        key: What distinguishes calls: parameter names, a template such as ``"shop:{shop_id}"``, or a function of the
            :class:`inspect.BoundArguments` that returns a str; None means all parameters.
        scope: Which calls exclude each other: ``until_executed`` (one waiting or running), ``until_executing``
            (one waits, any number run), ``while_executing`` (one runs, any number wait) or
            ``until_and_while_executing`` (one waits and one runs).
        on_duplicate: How a call is answered while the slot is taken, unless it has an id of its own: ``join`` (the
            result of the other call), ``skip`` (a revoked result), ``raise`` (``DuplicateTask``), ``rerun`` (one more
            run, with the newest arguments) or ``replace`` (a waiting call takes the newest arguments and time).
        on_overlap: How a worker treats a message that finds the slot taken: ``wait`` for it, ``drop`` the message
            as revoked, ``follow`` (end with the result of the other run), ``fail`` with ``DuplicateTask``, or
            ``Return(value)``. None is ``wait`` for the scopes with *while* and for ``rerun`` and ``replace``, else
            ``drop``. A message whose run may have begun and not ended always waits.
        wait_for: How long a message is put back with ``wait`` or ``follow``, in seconds, before it is dropped; None is
            for ever. A message whose run may have begun and not ended waits for ever.
        hold_for: The least time for which the slot stays taken, in seconds from the start of the run; or a function of
            the :class:`inspect.BoundArguments` that returns it.
        lease: How long the slot of a running task lasts without renewal, in seconds. It is renewed while the task
            runs, so after the death of its worker the slot is taken for at most this long.
        max_hold: The longest time for which the slot of a running task is renewed, in seconds; None is
            ``OPTIONS["max_hold"]``, an hour by default.
        limit: How many runs may have the slot at once, with ``while_executing``: a whole number, or a function of the
            :class:`inspect.BoundArguments` that returns one. Runs under different limits exclude each other.
        queue_ttl: How long the slot of a waiting task lasts, in seconds, beyond its countdown or eta.
        using: Alias in ``REDLOCK``.
        group: Tasks of one group share slots; None is a slot of the task's own.
        version: A number to increase when the meaning of the key changes.
        on_unavailable: What to do when too few lock nodes answer: ``{"enqueue": "publish" or "raise", "run":
            "retry", "run" or "fail"}``; a stage that is not given keeps the first choice.
        redelivery: How a worker treats a message that the broker delivers again after a run of it had begun:
            ``resume`` runs it again if that run died, ``drop`` never runs it again.
        lock_direct_calls: Whether ``task(...)`` takes the slot too, and raises ``DuplicateTask`` if it is taken.

    Raises:
        ValueError: A value cannot work.
        TypeError: A value has the wrong type.
    """

    key: CallKey = None
    scope: Scope = "until_executed"
    on_duplicate: OnDuplicate = "join"
    on_overlap: OnOverlap = None
    wait_for: float | None = None
    hold_for: float | Callable[[BoundArguments], float] = 0.0
    lease: float = 30.0
    max_hold: float | None = None
    limit: int | Callable[[BoundArguments], int] = 1
    queue_ttl: float = 3600.0
    using: str = DEFAULT_ALIAS
    group: str | None = None
    version: int = 1
    on_unavailable: OnUnavailable = field(default_factory=OnUnavailable)
    redelivery: Redelivery = "resume"
    lock_direct_calls: bool = False

    def __post_init__(self) -> None:
        _choice("scope", self.scope, SCOPES)
        _choice("on_duplicate", self.on_duplicate, get_args(OnDuplicate))
        if not isinstance(self.overlap, Return):
            _choice("on_overlap", self.overlap, get_args(Overlap))
        _choice("redelivery", self.redelivery, get_args(Redelivery))
        seconds("lease", self.lease)
        optional_seconds("max_hold", self.max_hold)
        seconds("queue_ttl", self.queue_ttl)
        if not callable(self.hold_for):
            from_zero("hold_for", self.hold_for)
        check_switch("lock_direct_calls", self.lock_direct_calls)
        if self.wait_for is not None:
            from_zero("wait_for", self.wait_for)
        if not callable(self.limit):
            check_limit(self.limit, (), shared=False)
        if not isinstance(self.using, str) or not self.using:
            raise TypeError(f"using must be the name of an alias in REDLOCK, not {self.using!r}.")
        if self.group is not None and (not isinstance(self.group, str) or not self.group):
            raise TypeError(f"group must be None or a name that several tasks share, not {self.group!r}.")
        if isinstance(self.version, bool) or not isinstance(self.version, int):
            raise TypeError(f"version must be a whole number, not {self.version!r}.")
        if not isinstance(self.on_unavailable, Mapping):
            raise TypeError(f"on_unavailable must be a dict such as {{'run': 'fail'}}, not {self.on_unavailable!r}.")
        for stage, choice in self.on_unavailable.items():
            _choice("A stage of on_unavailable", stage, tuple(ON_UNAVAILABLE))
            _choice(f"on_unavailable[{stage!r}]", choice, ON_UNAVAILABLE[stage])
        self._check_combinations()

    @property
    def overlap(self) -> Overlap | Return:
        """The strategy for a message whose slot is taken when a worker gets it."""
        return self.overlap_of(self.scope)

    def overlap_of(self, scope: str) -> Overlap | Return:
        """Return that strategy for a message that was sent with *scope*, before a deploy may have changed it."""
        return self.on_overlap or ("drop" if scope in (LIFETIME, WAITING) and not self.trails else "wait")

    @property
    def minimum(self) -> float:
        """The least time for which the slot stays taken, in seconds; what a function returns, its message carries."""
        return 0.0 if callable(self.hold_for) else self.hold_for

    @property
    def depends(self) -> bool:
        """Whether the slot of a call depends on its arguments by more than its key, or several runs may have it."""
        return self.limit != 1 or callable(self.hold_for)

    def own_of(self, chosen: Mapping[str, Any], bound: Callable[[], BoundArguments]) -> dict[str, Any] | None:
        """
        Return the options that the message of a call carries: those *chosen* for the call, and what a function returns.

        Raises:
            ValueError: The function did not return a number of seconds.
        """
        own = {name: value for name, value in chosen.items() if name in PER_MESSAGE}
        hold_for = own.get("hold_for", self.hold_for)
        if callable(hold_for):
            own["hold_for"] = from_zero("hold_for", hold_for(bound()))
        return own or None

    def of_message(self, own: Mapping[str, Any] | None) -> "SingletonOptions":
        """
        Return the options of a message that carries some of its own, which were checked at its call.

        A deploy may have changed the task since, so that one of them has no meaning now; nothing reads that one.
        """
        options = copy(self) if own else self
        for name, value in (own or {}).items():
            object.__setattr__(options, name, value)
        return options

    def limit_of(self, bound: Callable[[], BoundArguments]) -> int:
        """
        Return how many runs of a call's key may have the slot at once; *bound* returns the arguments of the call.

        Raises:
            ValueError: The task's function did not return a whole number from 1 to 1000.
        """
        if not callable(self.limit):
            return self.limit
        limit = self.limit(bound())
        check_limit(limit, (), shared=False)
        return limit

    @property
    def times(self) -> Mapping[str, Any]:
        """How long the slot of a run lasts without renewal, and with it."""
        return {"ttl": self.lease, "max_hold": self.max_hold}

    @property
    def trails(self) -> bool:
        """Whether a duplicate may wait for the next run."""
        return self.on_duplicate in ("rerun", "replace")

    @property
    def pends(self) -> bool:
        """Whether a waiting call is a pending call, which later calls take over, even if nothing runs."""
        return self.on_duplicate == "replace" or (self.on_duplicate == "rerun" and self.scope != LIFETIME)

    def check_lease(self, rules: Rules, task: str) -> None:
        """
        Check the lease of a *task* against the settings.

        Raises:
            ValueError: They do not allow it.
        """
        try:
            rules.check_ttl(self.lease)
        except ValueError as error:
            raise ValueError(f"lease={self.lease!r} of the singleton {task}: {error}") from None

    def without_nodes(self, stage: str) -> str:
        """Return what to do when too few nodes answer, at the stage ``enqueue`` or ``run``."""
        chosen: Mapping[str, Any] = self.on_unavailable
        return str(chosen.get(stage, ON_UNAVAILABLE[stage][0]))

    def for_call(self, chosen: Mapping[str, Any]) -> "SingletonOptions":
        """
        Return the options of a call that sets some of them itself.

        Raises:
            TypeError: A call may not set that option.
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
        how = chosen.get("on_duplicate")
        if how in ("rerun", "replace") and how != self.on_duplicate:
            raise TypeError(f"on_duplicate={how!r} is for the task as a whole: workers must know of it too.")
        return replace(self, **chosen)

    def _check_combinations(self) -> None:
        if self.scope == RUNNING and "enqueue" in self.on_unavailable:
            raise ValueError(
                "on_unavailable={'enqueue': ...} has no meaning with scope='while_executing', "
                "whose calls are sent without a check."
            )
        if self.scope == RUNNING and self.on_duplicate != "join":
            raise ValueError(
                f"on_duplicate={self.on_duplicate!r} has no meaning with scope='while_executing', which sends every "
                "call; choose scope='until_and_while_executing', or, with Celery, on_overlap."
            )
        if self.limit != 1 and self.scope != RUNNING:
            raise ValueError(
                f"limit={self.limit!r} has no meaning with scope={self.scope!r}, where one call waits or runs; write "
                "scope='while_executing'."
            )
        if self.wait_for is not None and self.overlap not in ("wait", "follow"):
            raise ValueError(f"wait_for has no meaning with on_overlap={self.overlap!r}; write on_overlap='wait'.")
        if self.max_hold is not None and self.scope == WAITING:
            raise ValueError("max_hold has no meaning with scope='until_executing': a run has no slot to hold.")


OPTIONS = tuple(field.name for field in fields(SingletonOptions))


def _choice(option: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{option} must be one of {', '.join(map(repr, known))}, not {value!r}{nearest(value, known)}")
