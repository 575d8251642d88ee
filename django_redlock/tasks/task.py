"""
:func:`singleton_task` for Django's own tasks, and the class of such a task (internal).

The task class is that of the backend, with ours mixed in: some workers insist on their own. Its function keeps the
options of the slot, so that a task can be copied with ``using()``, and pickled.
"""

from collections.abc import Callable
from dataclasses import field, fields, make_dataclass, replace
from datetime import datetime
from functools import cache, partial
from inspect import BoundArguments
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypedDict, TypeVar, Unpack, cast, overload

from asgiref.sync import sync_to_async
from django import tasks
from django.utils.module_loading import import_string

from ..core.protocol import Outcome
from ..engine.lease import Lease
from ..handler import locks
from ..singleton.arrival import cancel
from ..singleton.declaring import check_function, check_others
from ..singleton.handle import Slots
from ..singleton.options import OPTIONS, CallKey, OnUnavailable, Scope, SingletonOptions
from ..singleton.questions import Free, ResultState
from ..singleton.slot import Seen
from ..singleton.ticket import Ticket
from .enqueue import BaseTask, Enqueuing, SingletonResult, confirm_at_end, find_row, stored_here
from .run import SingleFunction, called_directly, follow, running

P = ParamSpec("P")
R = TypeVar("R")
OnDuplicate = Literal["join", "skip", "raise"]

# What Celery's singletons promise, and a framework without headers, retries and revocation cannot keep.
REFUSED = {
    "on_overlap": "a row whose slot another run has waits in its worker, because a row that was skipped has no state",
    "wait_for": "a row whose slot another run has waits in its worker until it has the slot",
    "redelivery": "no backend delivers a row twice; redlock_reap_tasks repeats the rows of dead workers, or fails them",
    "lock_direct_calls": "a direct call runs the body alone; write with lock(...) around it",
}
REFUSED_DUPLICATES = {
    "rerun": "a stored row cannot be put back; with scope='until_executing' one call waits while another runs",
    "replace": "the arguments of a stored row cannot be changed; enqueue an id, and read the newest values in the body",
}


class TaskOptions(TypedDict, total=False):
    """The options of :func:`singleton_task`, for type checkers and editors."""

    key: CallKey
    scope: Scope
    on_duplicate: OnDuplicate
    hold_for: float | Callable[[BoundArguments], float]
    limit: int | Callable[[BoundArguments], int]
    lease: float
    max_hold: float | None
    queue_ttl: float
    using: str
    group: str | None
    version: int
    on_unavailable: OnUnavailable
    priority: int
    queue_name: str
    backend: str


@overload
def singleton_task(function: Callable[P, R], /) -> "SingletonTask[P, R]": ...


@overload
def singleton_task(
    *, takes_context: Literal[True], **options: Unpack[TaskOptions]
) -> "Callable[[Callable[Concatenate[Any, P], R]], SingletonTask[P, R]]": ...


@overload
def singleton_task(
    *, takes_context: Literal[False] = ..., **options: Unpack[TaskOptions]
) -> "Callable[[Callable[P, R]], SingletonTask[P, R]]": ...


def singleton_task(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """
    Declare a task of Django's that waits or runs at most once at any time for the same arguments.

    It takes the place of Django's ``@task``, on functions and coroutine functions, for any backend.

    Args:
        function: The body.
        **options: Those of Django's ``@task``, and of these of
            :class:`~django_redlock.singleton.options.SingletonOptions`: ``key``, ``scope``, ``on_duplicate`` (``join``,
            ``skip`` or ``raise``), ``hold_for``, ``limit``, ``lease``, ``max_hold``, ``queue_ttl``, ``using``,
            ``group``, ``version``, ``on_unavailable``. With ``{"run": "retry"}``, the first choice, a run waits in its
            worker.

    Raises:
        TypeError: An option does not exist for Django's tasks, or has the wrong type.
        ValueError: A value cannot work.
        InvalidTask: The backend does not allow such a task.
    """
    ours = {name: value for name, value in options.items() if name in OPTIONS}
    theirs = {name: value for name, value in options.items() if name not in OPTIONS}
    check_others(theirs, partial(hasattr, tasks.Task))
    if "run_after" in theirs:
        raise TypeError("run_after belongs to one call: write task.using(run_after=...).enqueue(...).")
    for name in ours:
        if why := REFUSED.get(name):
            raise TypeError(f"singleton_task() for Django's tasks has no option {name!r}: {why}.")
    _check_duplicates(ours.get("on_duplicate"))
    chosen = SingletonOptions(**ours)

    def decorate(function: Callable[..., Any]) -> Any:
        check_function(function, (tasks.Task,))
        single = SingleFunction(function, chosen, theirs.get("takes_context", False))
        follow()
        confirm_at_end()
        single.wrapped.singleton_function = single
        task: Any = tasks.task(**theirs)(single.wrapped)
        return _mixed(task.__class__)(**{each.name: getattr(task, each.name) for each in fields(task)})

    return decorate if function is None else decorate(function)


def _check_duplicates(how: object) -> None:
    if why := REFUSED_DUPLICATES.get(str(how)):
        raise ValueError(f"on_duplicate={how!r} is not possible with Django's tasks: {why}.")


class SingletonTask(BaseTask[P, R]):
    """A task of Django's that waits or runs at most once at any time for the same arguments."""

    __slots__ = ()

    if TYPE_CHECKING:
        on_duplicate: str | None
        queue_ttl: float | None

    @property
    def singleton(self) -> "Singleton[P]":
        """The handle with which to inspect, free and cancel the slots of this task."""
        return Singleton(self._function)

    def using(
        self,
        *,
        priority: int | None = None,
        queue_name: str | None = None,
        run_after: datetime | None = None,
        backend: str | None = None,
        on_duplicate: OnDuplicate | None = None,
        queue_ttl: float | None = None,
    ) -> "SingletonTask[P, R]":
        """
        Return a copy with other options; takes all of Django's.

        Args:
            priority: As for Django's tasks.
            queue_name: As for Django's tasks.
            run_after: As for Django's tasks.
            backend: As for Django's tasks.
            on_duplicate: How a duplicate is answered: ``join``, ``skip`` or ``raise``.
            queue_ttl: How long the slot of a waiting row lasts, in seconds, beyond *run_after*.

        Raises:
            ValueError: A value cannot work.
        """
        _check_duplicates(on_duplicate)
        theirs: Any = {"priority": priority, "queue_name": queue_name, "run_after": run_after, "backend": backend}
        ours: Any = {"on_duplicate": on_duplicate, "queue_ttl": queue_ttl}
        chosen: Any = replace(super().using(**theirs), **{name: one for name, one in ours.items() if one is not None})
        chosen._options()  # tells what cannot work
        return cast("SingletonTask[P, R]", chosen)

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> SingletonResult[P, R]:
        """
        Store a row for the call, unless it is a duplicate of one that waits or runs.

        Inside a transaction, the slot names the row after the commit. If it is rolled back, the slot is free after ten
        seconds, and the next call is sent after one; in the same thread, at once.

        Raises:
            DuplicateTask: Another call has the slot, and ``on_duplicate="raise"``.
            QuorumUnavailableError: Too few nodes answered, and ``on_unavailable={"enqueue": "raise"}``.
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        return Enqueuing(self, self._function, self._options(), args, kwargs).call()  # type: ignore[no-any-return]

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> SingletonResult[P, R]:
        """Do what :meth:`enqueue` does without blocking."""
        return await sync_to_async(self.enqueue)(*args, **kwargs)

    def _options(self) -> SingletonOptions:
        """Return the options of the slot, with those that ``using()`` chose."""
        own = {"on_duplicate": self.on_duplicate, "queue_ttl": self.queue_ttl}
        return self._function.singleton_options.for_call({name: one for name, one in own.items() if one is not None})

    @property
    def _function(self) -> SingleFunction:
        return cast(Any, self.func).singleton_function  # type: ignore[no-any-return]

    def __reduce__(self) -> Any:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "func"}
        return _rebuilt, (self.module_path, values)


def _rebuilt(path: str, values: dict[str, Any]) -> Any:
    """Return a task that was pickled."""
    return replace(import_string(path), **values)


@cache
def _mixed(base: Any) -> Any:
    """Return the task class of a backend with :class:`SingletonTask` mixed in."""
    own = [("on_duplicate", str | None, field(default=None)), ("queue_ttl", float | None, field(default=None))]
    options: Any = {"bases": (SingletonTask, base), "frozen": True, "slots": True, "kw_only": True}
    return make_dataclass(f"Singleton{base.__name__}", own, namespace={"__module__": __name__}, **options)


class Singleton(Slots[P]):
    """
    The slots of one task; most methods take the arguments of the call whose slot they concern.

    Args:
        task: The function of the task.
    """

    send = "be stored"
    answers = {
        "join": "store nothing, and return the result of task {id}, if that row is still there",
        "skip": "store nothing, and return a result that has failed with DuplicateTask",
        "raise": "raise DuplicateTask",
    }

    _task: SingleFunction

    def _own_lease(self) -> Lease | None:
        run = running(self._task)
        return cast("Lease | None", run.row.slot) if run else None

    def _given_up(self) -> str:
        run = running(self._task)
        if run:
            return run.give_up()
        return Outcome.EXPIRED if called_directly(self._task) else ""  # it has no slot to give up

    def cancel(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """
        Have the row that waits with the slot of a call end as FAILED, with ``CancelledTask``, instead of running.

        The slot is free at once; the row ends when a worker gets it, within 30 days after the end of its slot. A row
        that runs continues.

        Returns:
            The id of the row; None if no waiting row has the slot.

        Raises:
            QuorumUnavailableError: Too few nodes answered and agreed to know that row, or the slot named none for a
                second, because a call is being made, perhaps in a transaction.
        """
        return self._cancelled(args, kwargs)

    def _cancel(self, ticket: Ticket, name: str, seen: Seen) -> bool:
        stored, left = stored_here(ticket.using, name, seen.secret), seen.left
        if stored:
            if find_row(ticket.task_id, stored.backend).state is ResultState.GONE:  # its transaction was rolled back
                self._nodes.free(Free(name, seen.secret))
                return False
            # The slot may still be the claim, which lapses soon.
            left = max(left, stored.ends - locks[ticket.using].runtime.clock())
        return self._nodes.run(cancel(ticket, name, seen, left))

    def _id_of(self, name: str, seen: Seen) -> str | None:
        stored = stored_here(self._task.singleton_options.using, name, seen.secret)
        return super()._id_of(name, seen) or (stored.task_id if stored else None)
