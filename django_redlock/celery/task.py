"""
:func:`singleton_task` and the task class, which takes the slot when a call is sent and again when it runs (internal).

Every call passes through ``apply_async`` and ``__call__``. ``delay``, ``retry``, signatures and ``delay_on_commit`` all
call the first. The second surrounds the body so closely that the slot is free before the result can be seen. Celery's
handlers and signals offer neither.

The task class is built when an app is finalized, from the mixin and the project's own task class. A ``base=`` of our
own, as in other packages, would drop ``delay_on_commit`` and everything else that the project's class adds.
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ContextDecorator
from dataclasses import replace
from functools import cache, cached_property, partial, wraps
from inspect import BoundArguments
from types import GenericAlias, MappingProxyType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, Self, TypeVar, cast, overload

from celery import Celery, Task, _state, signals, states
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.local import Proxy
from celery.result import EagerResult
from celery.utils import uuid

from ..core.rules import Rules
from ..engine.functions import makes_coroutine, makes_generator
from ..engine.manager import fresh_secret
from ..exceptions import printable
from ..handler import locks
from ..keys.task import TaskKey, signature_of
from ..singleton.arrival import Answer, interrupted
from ..singleton.declaring import check_function, check_others, worked
from ..singleton.ending import Execution, end, note_done
from ..singleton.handle import P
from ..singleton.options import (
    OPTIONS,
    CallKey,
    OnDuplicate,
    OnOverlap,
    OnUnavailable,
    Redelivery,
    Scope,
    SingletonOptions,
)
from ..singleton.questions import Send
from ..singleton.slot import DuplicateTask
from ..singleton.ticket import Ticket
from .dispatch import HEADER, R, Sender, SingletonResult, answer_of, mixed_result
from .handle import Singleton
from .worker import (
    DIRECT,
    EXECUTION,
    EagerlySkipped,
    arrival,
    end_run,
    is_stop,
    result_ignored,
    ticket_of,
    under_direct_call,
)

# Options of Celery's decorator that are not attributes of its task class.
CELERY_ONLY = {
    *("autoretry_for", "base", "bind", "dont_autoretry_for", "filter", "retry_backoff", "retry_backoff_max"),
    *("pydantic", "pydantic_context", "pydantic_dump_kwargs", "pydantic_strict", "retry_jitter", "retry_kwargs"),
    # Options of a message that may be set on its task.
    *("compression", "delivery_mode", "exchange", "immediate", "mandatory", "queue", "routing_key"),
}
NO_CHOICE: Mapping[str, Any] = MappingProxyType({})
# Our options that have no effect as attributes of a class. The other two are names that a project may use.
LOST_OPTIONS = frozenset(OPTIONS) - {"group", "version"}


@overload
def singleton_task(function: Callable[P, R], /) -> "SingletonTask[P, R]": ...


@overload
def singleton_task(
    *,
    bind: Literal[True],
    key: CallKey = ...,
    scope: Scope = ...,
    on_duplicate: OnDuplicate = ...,
    on_overlap: OnOverlap = ...,
    wait_for: float | None = ...,
    hold_for: float | Callable[[BoundArguments], float] = ...,
    limit: int | Callable[[BoundArguments], int] = ...,
    lease: float = ...,
    max_hold: float | None = ...,
    queue_ttl: float = ...,
    using: str = ...,
    group: str | None = ...,
    version: int = ...,
    on_unavailable: OnUnavailable = ...,
    redelivery: Redelivery = ...,
    lock_direct_calls: bool = ...,
    **celery_options: Any,
) -> "Callable[[Callable[Concatenate[Any, P], R]], SingletonTask[P, R]]": ...


@overload
def singleton_task(
    *,
    key: CallKey = ...,
    scope: Scope = ...,
    on_duplicate: OnDuplicate = ...,
    on_overlap: OnOverlap = ...,
    wait_for: float | None = ...,
    hold_for: float | Callable[[BoundArguments], float] = ...,
    limit: int | Callable[[BoundArguments], int] = ...,
    lease: float = ...,
    max_hold: float | None = ...,
    queue_ttl: float = ...,
    using: str = ...,
    group: str | None = ...,
    version: int = ...,
    on_unavailable: OnUnavailable = ...,
    redelivery: Redelivery = ...,
    lock_direct_calls: bool = ...,
    **celery_options: Any,
) -> "Callable[[Callable[P, R]], SingletonTask[P, R]]": ...


def singleton_task(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """
    Make a Celery task that waits or runs at most once at any time for the same arguments.

    Use it like ``shared_task``, with or without options; it takes all options of ``shared_task``. For those given here
    see :class:`~django_redlock.celery.SingletonOptions`; those that are not given are those of the task class. Settings
    are read when the task is first called.

    Raises:
        TypeError: An option does not exist or has the wrong type.
        ValueError: An option has a value that cannot work.
    """
    celery_options = {name: value for name, value in options.items() if name not in OPTIONS}
    check_others(celery_options, lambda name: hasattr(Task, name) or name in CELERY_ONLY)
    given = {name: value for name, value in options.items() if name in OPTIONS}
    chosen = _options_on(celery_options.get("base"), given)

    def decorate(function: Callable[..., Any]) -> Any:
        check_function(function, (Proxy, Task), " Derive it from SingletonTask.", coroutines=False)
        TaskKey(chosen.key, signature_of(function, bound=bool(celery_options.get("bind"))))  # raises
        return _shared(function, given, celery_options)

    return decorate if function is None else decorate(function)


def _options_on(base: Any, given: dict[str, Any]) -> SingletonOptions:
    """Return the options of a task: those of its class, but for those that were *given* to the decorator."""
    return replace(getattr(base, "singleton_options", SingletonTask.singleton_options), **given)


def _shared(function: Callable[..., Any], given: dict[str, Any], celery_options: dict[str, Any]) -> Any:
    """Register the task with every present and future app; return a proxy that finds it in the current app."""

    def register(app: Celery) -> Any:
        chosen: Any = celery_options.get("base") or app.Task
        base = mixed_with(chosen)
        own = {"base": base, "singleton_options": _options_on(base, given), "shared": False, "lazy": False}
        return app.task(**(celery_options | own))(function)

    _state.connect_on_app_finalize(register)
    for app in list(_state._get_active_apps()):  # type: ignore[attr-defined]
        if app.finalized:
            register(app)

    def find() -> Any:
        app = _state.get_current_app()
        name = celery_options.get("name")
        return app.tasks[name or app.gen_task_name(function.__name__, function.__module__)]

    return Proxy(find)


log = logging.getLogger("django_redlock")

if TYPE_CHECKING:
    from celery.contrib.django.task import DjangoTask

    class TypedTask(DjangoTask[P, R], Generic[P, R]):
        """Celery's task class, which is generic even for type checkers that have no types of Celery."""

    BaseTask = TypedTask
else:

    class BaseTask(Task):
        """Celery's task class, which before Celery 5.7 is not generic when the code runs."""

        __class_getitem__ = classmethod(GenericAlias)


class SingletonTask(BaseTask[P, R]):
    """
    A task that waits or runs at most once at any time for the same arguments.

    :func:`~django_redlock.celery.singleton_task` mixes it into the project's own task class. A task that is written
    as a class can derive from it, and set ``singleton_options``.
    """

    abstract = True
    singleton_options: SingletonOptions = SingletonOptions()
    singleton_error: type[DuplicateTask] = DuplicateTask
    singleton_tracks_started: bool = False
    _allowed_by: Rules | None = None  # the settings with which the lease was checked

    if TYPE_CHECKING:

        def delay(self, *args: P.args, **kwargs: P.kwargs) -> SingletonResult[R]:
            """Send the call as :meth:`apply_async` does, with these arguments and without options."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in LOST_OPTIONS.intersection(vars(cls)):
            raise TypeError(
                f"{cls.__name__} has {name}={vars(cls)[name]!r}, which Celery ignores; write "
                f"singleton_options=SingletonOptions({name}=...), or use @singleton_task({name}=...)."
            )

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Take ``track_started`` over from Celery, which fails the task if it cannot store STARTED."""
        super().on_bound(app)
        if cls.track_started:
            cls.singleton_tracks_started, cls.track_started = True, False

    @property
    def singleton(self) -> Singleton[P]:
        """The handle with which to inspect and free the slots of this task."""
        return Singleton(self)

    @property
    def singleton_run(self) -> Execution | None:
        """The run in progress in this thread, if it is a run of this task."""
        return getattr(self.request, EXECUTION, None)

    @cached_property
    def singleton_key(self) -> TaskKey:
        """What distinguishes the calls of this task."""
        signature = signature_of(getattr(self, "_orig_run", self.run))  # without Celery's own wrapper, and without self
        options = self.singleton_options
        return TaskKey(options.key, signature, self.name, options.group, options.version)

    def singleton_ticket(
        self,
        task_id: str | None,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        secret: str = "",
        chosen: Mapping[str, Any] = NO_CHOICE,
    ) -> Ticket:
        """
        Return the ticket of a call: the information about the slot that its message carries.

        Args:
            task_id: The id of the task; None draws a fresh one.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            secret: The secret of the message.
            chosen: The options of the call itself.

        Raises:
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        options, run = self.singleton_options, self._continued(task_id)
        same = run if run and self._has_arguments_of_run(args, kwargs) else None
        name = same.name if same else self.singleton_key.lock_name(args, kwargs)
        ticket = Ticket(name, options.using, uuid() if task_id is None else task_id, secret, scope=options.scope)
        if run or options.depends or chosen:
            own = dict(run.own or {}) if run else {}
            if not same and callable(options.hold_for):
                own.pop("hold_for", None)  # which the function made of other arguments
            bound = partial(self.singleton_key.bound, args, kwargs)
            ticket.limit = same.limit if same else options.limit_of(bound)
            ticket.own = options.own_of({**own, **chosen}, bound)
        return ticket

    def _continued(self, task_id: str | None) -> Ticket | None:
        """Return the ticket of the run in progress, if a message with this id continues it."""
        run = self.singleton_run
        return run.ticket if run and task_id and task_id == self.request.id else None

    def _has_arguments_of_run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """
        Return whether these are the arguments of the run in progress.

        The body may have changed a list or a dict among them since. Its call is still the one that was made.
        """
        own_args, own_kwargs = self.request.args or (), self.request.kwargs or {}
        same = len(args) == len(own_args) and kwargs.keys() == own_kwargs.keys()
        same = same and all(given is own for given, own in zip(args, own_args, strict=True))
        return same and all(kwargs[name] is own_kwargs[name] for name in kwargs)

    def AsyncResult(self, task_id: str, **options: Any) -> SingletonResult[R]:
        """Return the result of one of this task's messages, of the class that the project's own task class has."""
        result: Any = super().AsyncResult(task_id, **options)
        # Not a second object: when the first one ends, Celery stops waiting for the result with this id.
        result.__class__ = mixed_result(result.__class__)
        return cast("SingletonResult[R]", result)

    def start_strategy(self, app: Any, consumer: Any, **options: Any) -> Any:
        """Mix our part into the request class of the task, whichever that is; workers call this."""
        from .parent import freeing_unreadable, mixed_request  # only here: it needs Celery's worker

        self.Request = mixed_request(self.Request)
        return freeing_unreadable(super().start_strategy(app, consumer, **options))

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        singleton: Mapping[str, Any] | Literal[False] | None = None,
        **options: Any,
    ) -> SingletonResult[R]:
        """
        Send the call, unless it is a duplicate of one that waits or runs; takes all options of Celery's.

        A call whose id is given is always sent, because a chain, a chord, a group or a caller waits for it; a worker
        decides. A retry is always sent, too.

        Args:
            singleton: False sends and runs this call without a slot, even if one is held. A dict has options for this
                call: ``on_duplicate``, ``queue_ttl``, ``hold_for``, ``wait_for``.

        Returns:
            A :class:`~django_redlock.celery.SingletonResult`.

        Raises:
            DuplicateTask: Another call has the slot, and ``on_duplicate="raise"``, or this call has links,
                which the other call would not follow.
            QuorumUnavailableError: Too few nodes answered, and ``on_unavailable={"enqueue": "raise"}``.
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
            ValueError: The settings do not allow such a lease, or an argument is a model instance not yet saved.
            InvalidRedlockError: The settings cannot be used.
        """
        options |= {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        rules = self.singleton_options.for_call(singleton) if singleton else self.singleton_options
        args, kwargs = args or (), kwargs or {}
        if singleton is False or _switched_off:
            ticket = Ticket("", rules.using, task_id or uuid())
            return Sender(self, args, kwargs, options, rules, rules.using).send(Send(ticket))
        if self.app.conf.task_always_eager:
            return self._call_eagerly(rules, args, kwargs, task_id, options, singleton or {})
        self._check_arguments(args, kwargs)
        ticket = self.singleton_ticket(task_id, args, kwargs, fresh_secret(), singleton or {})
        sender = Sender(self, args, kwargs, options, rules, rules.using)
        return cast("SingletonResult[R]", sender.call(ticket, owned=task_id is not None))

    def _call_eagerly(
        self,
        rules: SingletonOptions,
        args: Any,
        kwargs: Any,
        task_id: str | None,
        options: dict[str, Any],
        chosen: Mapping[str, Any],
    ) -> SingletonResult[R]:
        """
        Run the call at once, as Celery's eager mode does. Nothing can wait, so a duplicate is skipped.

        Raises:
            DuplicateTask: It is a duplicate, and ``on_duplicate="raise"``.
        """
        own = task_id or uuid()
        if chosen:  # a run finds them in the ticket of its message
            ticket = self.singleton_ticket(own, args, kwargs, chosen=chosen)
            options["headers"] = {**(options.get("headers") or {}), HEADER: ticket.pack()}
        done: Any = self.singleton_publish(args, kwargs, task_id=own, **options)
        skipped = done.result if isinstance(done, EagerResult) else None  # the project's own class may return another
        if not isinstance(skipped, EagerlySkipped):
            return answer_of(self, done, own)
        answer: Any = answer_of(self, EagerResult(done.id, None, done.state, name=self.name), own)
        holder = skipped.holder
        if holder and rules.on_duplicate == "raise" and task_id is None:
            raise holder.error(self.singleton_error, self.singleton.key(*args, **kwargs))
        if holder:
            answer.duplicate, answer.reason, answer.holder_id = True, str(holder.state), holder.task_id
        answer.accepted = False
        return cast("SingletonResult[R]", answer)

    def singleton_publish(self, args: Any, kwargs: Any, **options: Any) -> SingletonResult[R]:
        """Send a message as every task of Celery does."""
        return cast("SingletonResult[R]", super().apply_async(args, kwargs, **options))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the body, in a worker under the slot; a direct call takes a lock only with ``lock_direct_calls``."""
        request, run = self.request, self.singleton_run
        if run or request.called_directly:
            return self._call_directly(run, args, kwargs)
        if _switched_off:
            self._store_started()
            return super().__call__(*args, **kwargs)
        setattr(request, EXECUTION, None)  # from here on, the arrival frees what the message holds
        carried = ticket_of(request)
        if carried and carried.name and request.is_eager:
            # A retry with other arguments has the headers of the first call.
            carried = self.singleton_ticket(str(request.id), args, kwargs, chosen=carried.own or {})
        message = arrival(self, request, carried or self.singleton_ticket(str(request.id), args, kwargs), bool(carried))
        verdict = message.start()
        if isinstance(verdict, Answer):
            return cast(R, verdict.value)
        run = verdict.execution
        setattr(request, EXECUTION, run)
        try:
            self._store_started()
            value = cast(R, worked(self.run, super().__call__(*args, **kwargs)))
            message.run(note_done(run))
            return value
        except (Retry, Ignore):
            message.run(note_done(run, goes_on=True))
            raise
        finally:
            error = sys.exc_info()[1]
            # A retry, or the same message, comes next, and would wait for its own minimum hold.
            returns = isinstance(error, Reject) and cast(Any, error).requeue and self.acks_late and not request.is_eager
            again = isinstance(error, Retry) or returns
            message.run(end(run, hold=not again, stopped=is_stop(error)))

    def _call_directly(self, run: Execution | None, args: Any, kwargs: Any) -> R:
        """Run the body for a caller that waits for it: other code, or the body of a run of this task."""
        if self.singleton_options.lock_direct_calls and not _switched_off:
            name = self.singleton_key.lock_name(args, kwargs)
            around: Any = [getattr(request, EXECUTION, None) for request in self.request_stack.stack]
            if not any(outer and outer.ticket.name in (name, "") and not outer.over for outer in around):
                return self._call_under_lock(run, args, kwargs)
        if not run:
            return super().__call__(*args, **kwargs)
        stack: Any = self
        stack.push_request(**{DIRECT: True})  # otherwise this body would find the slot of the enclosing run
        try:
            return super().__call__(*args, **kwargs)
        finally:
            stack.pop_request()

    def _call_under_lock(self, run: Execution | None, args: Any, kwargs: Any) -> R:
        """Run the body under the slot of its own arguments, inside a *run* of this task or outside of any."""
        try:
            with under_direct_call(self, args, kwargs):
                return cast(R, worked(self.run, super().__call__(*args, **kwargs)))
        except Retry as error:
            if not run:
                raise
            # Celery has sent no message that would continue the run around this call.
            text = f"A direct call of {self.name} was to be tried again, which only a message can."
            raise RuntimeError(text) from error

    def on_replace(self, sig: Any) -> Any:
        """Free the slot first if the call is eager: what replaces it runs at once, inside this run."""
        if (run := self.singleton_run) and self.request.is_eager:
            end_run(self, run)
        return super().on_replace(sig)

    def _store_started(self) -> None:
        """Store STARTED, as Celery does with ``track_started``; the run does not need it."""
        request: Any = self.request
        if not self.singleton_tracks_started or request.is_eager or request.called_directly or result_ignored(self):
            return
        try:
            about = {"pid": os.getpid(), "hostname": request.hostname}
            self.backend.store_result(request.id, about, states.STARTED, request=request)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            log.warning("could not store that task %s has started: %r", printable(request.id), error)

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        """Run the project's own method, and free the slot if the task ends there, before the caller can see that."""
        try:
            super().before_start(task_id, args, kwargs)
        except BaseException as error:
            self.singleton_not_begun(error)
            raise

    def singleton_not_begun(self, error: BaseException | None) -> None:
        """Free the slot of the present message if it ends before its body could begin, unless it comes again."""
        request = self.request
        if EXECUTION in vars(request):
            return
        setattr(request, EXECUTION, None)
        if ticket := ticket_of(request):
            message = arrival(self, request, ticket)
            message.run(interrupted(message.message, is_stop(error)))

    def _check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check the lease, and let Celery check the arguments before a slot is taken; it would do so afterwards."""
        rules = locks[self.singleton_options.using].rules
        if rules is not self._allowed_by:  # neither can change, so once is enough
            self.singleton_options.check_lease(rules, self.name)
            self._allowed_by = rules
        check = getattr(self, "__header__", None)
        if self.typing and check:
            check(*args, **kwargs)


def _not_begun(task: Any, **about: Any) -> None:
    """
    Free the slot of a message that ends before its body could begin, as in a receiver of ``task_prerun``.

    Celery sends this signal at every end that the process survives, also for a limit or a greenlet that is killed.
    """
    if isinstance(task, SingletonTask):
        task.singleton_not_begun(sys.exc_info()[1])


signals.task_postrun.connect(_not_begun, dispatch_uid="django_redlock.postrun")


@cache
def mixed_with(base: Any) -> Any:
    """Return the task class *base* with :class:`SingletonTask` mixed in."""
    if issubclass(base, SingletonTask):
        return base
    return type(f"Singleton{base.__name__}", (SingletonTask, base), {"__module__": __name__, "abstract": True})


_switched_off: list[object] = []  # the blocks that have switched singletons off

Function = TypeVar("Function", bound=Callable[..., Any])


class override_singleton(ContextDecorator):
    """
    Treat singleton tasks as ordinary ones during a ``with`` block, a decorated function or a coroutine.

    This applies to the whole process, and to workers that receive a message sent meanwhile. To test the singletons
    themselves, use nodes in memory, ``REDLOCK = {"default": {"NODES": "memory://a"}}``.

    Args:
        enabled: Whether singletons are on. Inside a block that has switched them off, True has no effect.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled

    def __call__(self, function: Function) -> Function:
        """
        Return *function*, which may be a coroutine function, so that it runs inside this block.

        Raises:
            TypeError: It is a class or a generator function, whose body would run after the call.
        """
        if isinstance(function, type) or makes_generator(function):
            raise TypeError(
                f"override_singleton decorates functions and methods, not {function!r}; in a fixture or setUp write "
                "it as a with block, or self.enterContext(override_singleton(enabled=False))."
            )
        if not makes_coroutine(function):
            return super().__call__(function)

        @wraps(function)
        async def switched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return await function(*args, **kwargs)

        return switched  # type: ignore[return-value]

    def __enter__(self) -> Self:
        if not self._enabled:
            _switched_off.append(self)
        return self

    def __exit__(self, *error: Any) -> None:
        if not self._enabled:
            _switched_off.remove(self)
