"""
The run of a singleton task in a worker: take the slot over, run the body, and free the slot (internal).

Some workers call the function of a task past :meth:`Task.call`, and some pass no context. So the function itself is
wrapped, and learns the id of its row from the context or from the signal ``task_started``.

A row that waits has no state between READY and RUNNING, and no worker can put it back. So a row whose slot another run
has waits in its worker, and occupies it. It takes the slot of any row that only waits: two rows in one queue must not
wait for each other.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial, wraps
from importlib import import_module
from inspect import iscoroutinefunction
from math import inf
from threading import Thread
from typing import Any

from asgiref.sync import sync_to_async
from django.tasks.signals import task_finished, task_started
from django.utils.json import normalize_json

from ..core.protocol import Outcome
from ..engine.lease import Lease
from ..engine.lock import decorators
from ..engine.manager import owner_here
from ..engine.watchdog import NEVER, TICK, Chore
from ..exceptions import LockTakenError, QuorumUnavailableError, RedlockError
from ..handler import lock
from ..keys.task import TaskKey, signature_of
from ..runtime.threads import start_made
from ..singleton import questions as ask
from ..singleton.arrival import Fail, Revoke, Run, TaskRow, occupy
from ..singleton.declaring import worked
from ..singleton.driver import Nodes
from ..singleton.ending import end
from ..singleton.options import SingletonOptions
from ..singleton.ticket import Ticket

_starting: ContextVar[Any] = ContextVar("django_redlock_starting", default=None)
_current: ContextVar["RowRun | None"] = ContextVar("django_redlock_run", default=None)
_outside: ContextVar["RowRun | None"] = ContextVar("django_redlock_outside", default=None)  # of a direct call
_direct: ContextVar[frozenset[Any]] = ContextVar("django_redlock_direct", default=frozenset())
_ended: ContextVar["RowRun | None"] = ContextVar("django_redlock_ended", default=None)


class CancelledTask(RedlockError):
    """The row was cancelled with ``task.singleton.cancel()`` before it began; the body did not run."""


class SingleFunction:
    """
    The function of a singleton task: its name, its options, and the key of its calls.

    Args:
        body: The function.
        options: The options of the slot.
        takes_context: Whether the first parameter of the body is Django's context.

    Raises:
        TypeError: The key is neither names nor a template nor a function.
        ValueError: It names something that is not a parameter, or its template can give different calls the same key.
    """

    def __init__(self, body: Callable[..., Any], options: SingletonOptions, takes_context: bool) -> None:
        self.name = f"{body.__module__}.{body.__qualname__}"
        self.singleton_options = options
        signature = signature_of(body, bound=takes_context)
        self.singleton_key = TaskKey(options.key, signature, self.name, options.group, options.version)
        self.wrapped = self._wrapped(body)
        self._takes_context = takes_context
        self._checked = lock(f"task:{self.name}", using=options.using, ttl=options.lease)
        decorators.add(self._checked)  # for ``manage.py check``

    def singleton_ticket(self, task_id: str, args: Any, kwargs: Any, secret: str = "") -> Ticket:
        """
        Return the slot of a call.

        Raises:
            TypeError: The arguments do not fit the task, or one is nothing that JSON has.
        """
        # In the form that the worker gets, so that both have the same key. Every backend refuses what this refuses.
        args, kwargs = json.loads(json.dumps(normalize_json([list(args), kwargs])))
        options, key = self.singleton_options, self.singleton_key
        ticket = Ticket(key.lock_name(args, kwargs), options.using, task_id, secret, scope=options.scope)
        if options.depends:
            bound = partial(key.bound, args, kwargs)
            ticket.limit, ticket.own = options.limit_of(bound), options.own_of({}, bound)
        return ticket

    def _wrapped(self, body: Callable[..., Any]) -> Any:
        """Return the body as it runs in a worker; a direct call runs without a slot."""

        @wraps(body)
        def run_in_slot(*args: Any, **kwargs: Any) -> Any:
            run = self._run_of(args, kwargs)
            if run is None:
                with direct_call(self):
                    return body(*args, **kwargs)
            token = _current.set(run)
            try:
                run.begin()
                return worked(body, body(*args, **kwargs))
            finally:
                _current.reset(token)
                run.end()

        @wraps(body)
        async def arun_in_slot(*args: Any, **kwargs: Any) -> Any:
            run = self._run_of(args, kwargs)
            if run is None:
                with direct_call(self):
                    return await body(*args, **kwargs)
            token = _current.set(run)
            try:
                await in_own_thread(run.begin)
                return worked(body, await body(*args, **kwargs))
            finally:
                _current.reset(token)
                await in_own_thread(run.end, daemon=False)  # it takes a moment, for which a process that ends can wait

        return arun_in_slot if iscoroutinefunction(body) else run_in_slot

    def _run_of(self, args: Any, kwargs: Any) -> "RowRun | None":
        """Return the run that a worker is about to begin; None if the function was called directly."""
        row = _starting.get()
        if self._takes_context:
            row, args = getattr(args[0], "task_result", None) if args else None, args[1:]
        # A body may call a function directly, also with the context that it was given itself.
        path = getattr(getattr(row, "task", None), "module_path", "")
        if row is None or path != self.name or any(run.ticket.task_id == str(row.id) for run in under_way()):
            return None
        _starting.set(None)
        return RowRun(self, row, args, kwargs)


async def in_own_thread(function: Callable[[], None], *, daemon: bool = True) -> None:
    """Call a function in a thread that nothing else needs; it runs to its end, even if the caller is cancelled."""
    executor: Any = OwnThreads(daemon)
    await sync_to_async(function, thread_sensitive=False, executor=executor)()


class OwnThreads(Executor):
    """
    Starts a thread for each call.

    The threads that an event loop lends are few. If runs that wait for a slot had them all, the run that has the slot
    could not free it. And a call that waits for such a thread is dropped if its caller is cancelled.

    Args:
        daemon: Whether the process may end before the call does.
    """

    def __init__(self, daemon: bool) -> None:
        self._daemon = daemon

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Call *fn* in a thread of its own; nobody can cancel that."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()

        def call() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        start_made(Thread(target=call, name="django_redlock task", daemon=self._daemon))
        return future


def under_way() -> Iterator["RowRun"]:
    """Yield the run of this thread or coroutine, then those that enqueued it, on a backend that runs calls at once."""
    run = _current.get()
    while run:
        yield run
        run = run.outer


def running(function: SingleFunction) -> "RowRun | None":
    """Return the run of *function* that is under way in this thread or coroutine; None in a direct call within it."""
    run = _current.get()
    return run if run and run.function is function and run is not _outside.get() else None


@contextmanager
def direct_call(function: SingleFunction) -> Iterator[None]:
    """Mark the direct call of a function: it has no slot, so not that of a run around it, whose key may be another."""
    token, direct = _outside.set(running(function) or _outside.get()), _direct.set(_direct.get() | {function})
    try:
        yield
    finally:
        _direct.reset(direct)
        _outside.reset(token)


def called_directly(function: SingleFunction) -> bool:
    """Return whether this thread or coroutine is in a direct call of *function*."""
    return function in _direct.get()


class RowRun(Nodes, Chore):
    """
    One run of a row: answers the questions about its slot, and shows that its process lives.

    The watchdog looks at it every second, and shows the :mod:`.reaper` that a process has the row whenever the run has
    no slot: while it waits, after it has lost or freed its slot, and until the worker has written the outcome. The
    nodes may be away at any of these moments, so it tries again.

    Args:
        function: The function of its task.
        row: The result of its row.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
    """

    def __init__(self, function: SingleFunction, row: Any, args: Any, kwargs: Any) -> None:
        ticket = function.singleton_ticket(str(row.id), args, kwargs)
        options = function.singleton_options.of_message(ticket.own)
        super().__init__(ticket.using, function.name, options.times)
        self.function = function
        self.outer = _current.get()  # the run that made this call, on a backend that runs each call at once
        within = frozenset(run.row.slot.name for run in under_way() if run.row.slot)
        self.row: TaskRow = TaskRow(ticket, options, within)
        self._life: Lease | None = None
        self._waiter = ""
        self._execution = self.row.run()
        self._outcome = Outcome.EXPIRED  # of freeing the slot
        self._closed = False  # whether nobody can take the row for that of a dead process any more
        self._is_reaped = hasattr(row, "db_result")
        self._next = self.manager.runtime.clock() + TICK

    @property
    def ticket(self) -> Ticket:
        """The information about its slot."""
        return self.row.ticket

    def waiter_of(self, ticket: Ticket) -> str:
        """Return the name of the row in the queue of its slot: it waits in this process, which nodes notify."""
        self._waiter = self._waiter or self.manager.new_waiter(self.function.name)
        return self._waiter

    def begin(self) -> None:
        """
        Take the slot of the run; wait in this process while another run has it.

        Raises:
            CancelledTask: The row was cancelled.
            RuntimeError: It would wait for the run that made the call.
            QuorumUnavailableError: Too few nodes answered, and ``on_unavailable={"run": "fail"}``.
        """
        if self.ticket.running:
            self.manager.runtime.watchdog.watch(self)
        verdict = self.run(occupy(self.row))
        if self.row.over:  # a coroutine was cancelled, and this thread has gone on
            self.give_up()
        match verdict:
            case Run(execution):
                self._execution = execution
            case Revoke(reason):
                raise CancelledTask(reason)
            case Fail(error):
                raise error

    def due(self) -> float:
        """Return when the watchdog looks at this run next; see :class:`~django_redlock.engine.watchdog.Chore`."""
        return NEVER if self._closed else self._next

    def do(self) -> None:
        """Show that the process lives if the run has no slot; the watchdog calls this."""
        slot, self._next = self.row.slot, self.manager.runtime.clock() + TICK
        if not (slot and slot.valid()) and not self.manager.runtime.watchdog.apart(self.show_life):
            self.show_life()

    def show_life(self, question: ask.ShowLife | None = None) -> None:
        """Take a lock that shows the :mod:`.reaper` that a process has the row, while the row has no slot."""
        ticket, ttl = self.ticket, self.function.singleton_options.lease
        owner = owner_here("task", self.function.name, ticket.task_id)
        if not (self._life and self._life.valid()):
            with suppress(LockTakenError, QuorumUnavailableError):  # the watchdog tries again in a second
                # Some nodes may still have the sign that could not be extended: it keeps others out, not this process.
                earlier = self._life.hold.secret if self._life else ""
                life = self.manager.on_behalf(ticket.alive, owner, adopt=earlier, ttl=ttl, wait=0, max_hold=inf)
                self._life = life.acquire()
        if self._closed and self._life:
            self._life.release()

    def free_slot(self, question: ask.FreeSlot) -> Outcome:
        """Free the slot, and remember the outcome for a body that asks later."""
        self.row.slot, self._outcome = None, super().free_slot(question)
        return self._outcome

    answers = Nodes.answers | {ask.ShowLife: show_life, ask.FreeSlot: free_slot}

    def end(self) -> None:
        """Free the slot, or leave it taken for the rest of ``hold_for``."""
        self.row.over = True
        self._execution.slot = self.row.slot
        self.run(end(self._execution))
        self.row.slot = None
        _ended.set(self)  # the row says RUNNING until the worker has written the outcome, which may take long
        if not self._is_reaped:
            self.close()

    def give_up(self) -> str:
        """Free the slot though the body goes on; return the outcome."""
        self.run(end(self.row.run(), hold=False))
        return self._outcome

    def close(self) -> None:
        """Show no longer that a process has the row."""
        self._closed = True
        if self._life:
            self._life.release()


def _note_start(task_result: Any, **about: Any) -> None:
    _starting.set(task_result)


def _note_end(task_result: Any, **about: Any) -> None:
    if (run := _ended.get()) and run.ticket.task_id == str(task_result.id):
        _ended.set(None)
        run.close()


def follow() -> None:
    """Learn of each run that begins, also from a backend with the signals of the package before ``django.tasks``."""
    task_started.connect(_note_start, dispatch_uid="django_redlock.tasks")
    task_finished.connect(_note_end, dispatch_uid="django_redlock.tasks")
    if backport := backport_signals():
        backport.task_started.connect(_note_start, dispatch_uid="django_redlock.tasks")


def backport_signals() -> Any:
    """Return the signals of the package before ``django.tasks``; None if it is not installed."""
    with suppress(ImportError):  # imported now: a backend may do so only after the last task was declared
        return import_module("django_tasks.signals")
    return None
