"""
The run of a singleton task in a worker: take the slot over, run the body, and free the slot (internal).

Some workers call the function of a task past :meth:`Task.call`, and some pass no context. So the function itself is
wrapped, and learns the id of its row from the context or from the signal ``task_started``.

A row that waits has no state between READY and RUNNING, and no worker can put it back. So a row whose slot another run
has waits in its worker, and occupies it. It takes the slot of any row that only waits: two rows in one queue must not
wait for each other.
"""

import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import wraps
from inspect import iscoroutinefunction
from math import inf
from typing import Any
from weakref import ref

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.tasks.signals import task_started
from django.utils.json import normalize_json

from ..core.protocol import Outcome
from ..engine.lease import Lease, note_late_loss
from ..engine.lock import decorators
from ..exceptions import LockTakenError, QuorumUnavailableError, RedlockError, printable
from ..handler import lock, locks
from ..keys import TaskKey, signature_of
from ..singleton.options import SingletonOptions
from ..singleton.slots import FREE, Seen, Ticket, free, look

PATIENCE = 30.0  # seconds after which a run that waits for its slot looks who has it
PAUSE = 0.5  # seconds between two attempts while the nodes do not answer, on average

log = logging.getLogger("django_redlock")
_starting: ContextVar[Any] = ContextVar("django_redlock_starting", default=None)
_current: ContextVar["Run | None"] = ContextVar("django_redlock_run", default=None)


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
        signature = signature_of(body)
        if takes_context:
            signature = signature.replace(parameters=list(signature.parameters.values())[1:])
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
        name = self.singleton_key.lock_name(*json.loads(json.dumps(normalize_json([list(args), kwargs]))))
        options = self.singleton_options
        return Ticket(name, options.using, task_id, secret, scope=options.scope)

    def _wrapped(self, body: Callable[..., Any]) -> Any:
        """Return the body as it runs in a worker; a direct call runs without a slot."""

        @wraps(body)
        def run_in_slot(*args: Any, **kwargs: Any) -> Any:
            run = self._run_of(args, kwargs)
            if run is None:
                return body(*args, **kwargs)
            token = _current.set(run)
            try:
                run.begin()
                return body(*args, **kwargs)
            finally:
                _current.reset(token)
                run.end()

        @wraps(body)
        async def arun_in_slot(*args: Any, **kwargs: Any) -> Any:
            run = self._run_of(args, kwargs)
            if run is None:
                return await body(*args, **kwargs)
            token = _current.set(run)
            try:
                await sync_to_async(run.begin, thread_sensitive=False)()
                return await body(*args, **kwargs)
            finally:
                _current.reset(token)
                await sync_to_async(run.end, thread_sensitive=False)()  # to its end, even if this is cancelled

        return arun_in_slot if iscoroutinefunction(body) else run_in_slot

    def _run_of(self, args: Any, kwargs: Any) -> "Run | None":
        """Return the run that a worker is about to begin; None if the function was called directly."""
        if self._takes_context:
            row = getattr(args[0], "task_result", None) if args else None
            args = args[1:]
        else:
            row = _starting.get()
            row = row if row is not None and row.task.module_path == self.name else None
        if row is None:
            return None
        _starting.set(None)  # the body may call the function directly
        return Run(self, str(row.id), args, kwargs)


def running(function: SingleFunction) -> "Run | None":
    """Return the run of *function* that is under way in this thread or coroutine."""
    run = _current.get()
    return run if run and run.function is function else None


class Run:
    """
    One run of a row.

    Args:
        function: The function of its task.
        task_id: The row's id.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
    """

    def __init__(self, function: SingleFunction, task_id: str, args: Any, kwargs: Any) -> None:
        self.function = function
        self.ticket = function.singleton_ticket(task_id, args, kwargs)
        self.lease: Lease | None = None
        self._life: Lease | None = None
        self._over = False
        self._outer = _current.get()  # the run that made this call, on a backend that runs each call at once
        self._manager = locks[self.ticket.using]
        self._since = -inf  # until the body begins

    def begin(self) -> None:
        """
        Take the slot of the run; wait in this process while another run has it.

        Raises:
            CancelledTask: The row was cancelled.
            RuntimeError: It would wait for the run that made the call.
            QuorumUnavailableError: Too few nodes answered, and ``on_unavailable={"run": "fail"}``.
        """
        told = False
        while True:
            try:
                self._begin()
                self._since = self._manager.runtime.clock()
                return
            except QuorumUnavailableError as error:
                how, task = self.function.singleton_options.without_nodes("run"), printable(self.ticket.task_id)
                if how == "fail":
                    raise
                if how == "run":
                    log.warning("task %s runs without a slot: %s", task, error)
                    with suppress(QuorumUnavailableError):
                        self._show_life()
                    return
                if not told:
                    log.warning("task %s waits until the lock nodes answer: %s", task, error)
                told = True
            self._manager.runtime.sleep(PAUSE * (0.5 + self._manager.runtime.random()))

    def _begin(self) -> None:
        place = self._look()
        if not self.ticket.running:  # only what waits has a slot
            free(self.ticket.using, self.ticket.waiting, place.secret)
            return
        try:
            self.lease = self._take(place, 0.0)
        except LockTakenError:
            self.lease = self._wait()
        me = ref(self)  # a lease that refers to its run would be renewed after both were forgotten
        self.lease.on_lost(lambda lease: run._outlive() if (run := me()) else None)
        if self.ticket.waiting != self.ticket.running and self._is_own(place):
            free(self.ticket.using, self.ticket.waiting, place.secret)

    def _look(self) -> Seen:
        """
        Return the row that has the slot and waits; its own if a node has that, though no quorum may; free if none does.

        Raises:
            CancelledTask: The row was cancelled.
        """
        ticket = self.ticket
        cancelled, *places = look(ticket.using, *filter(None, (cancelled_name(ticket.task_id), ticket.waiting)))
        if cancelled.sightings:
            raise CancelledTask(f"Task {printable(ticket.task_id)} was cancelled before it began.")
        waiting = [seen for place in places for seen in place.sightings if seen.holder.waits]
        return min(waiting, key=lambda seen: seen.holder.task_id != ticket.task_id, default=FREE)

    def _is_own(self, place: Seen) -> bool:
        """Return whether a slot is that of this row; one that is only claimed may be."""
        return place.holder.waits and place.holder.task_id in (None, self.ticket.task_id)

    def _take(self, place: Seen, wait: float) -> Lease:
        """Take the slot, also from any row that waits: that row runs later, as one that has none."""
        ticket = replace(self.ticket, secret=place.secret)
        return ticket.take_running(self.function.singleton_options.times, self.function.name, "", wait=wait)

    def _wait(self) -> Lease:
        outer = self._outer
        while outer:
            if outer.lease and outer.lease.name == self.ticket.running:
                raise RuntimeError(f"{self.ticket.running!r} would wait for itself: the call was made in its own run.")
            outer = outer._outer
        while True:
            self._show_life()
            with suppress(LockTakenError):
                self.lease = self._take(self._look(), PATIENCE)
                with suppress(QuorumUnavailableError):
                    self._look()  # it may have been cancelled while it waited
                return self.lease

    def _show_life(self) -> None:
        """
        Take a lock that shows the :mod:`.reaper` that a process has the row, while the row has no slot.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        if self._life and self._life.valid():
            return
        ticket, ttl = self.ticket, self.function.singleton_options.lease
        about: Any = {"kind": "task", "label": self.function.name, "ref": ticket.task_id, "ttl": ttl, "wait": 0}
        with suppress(LockTakenError):
            self._life = self._manager.on_behalf(life_name(ticket.task_id), max_hold=inf, **about).acquire()

    def _outlive(self) -> None:
        """Show that the body goes on though its slot was lost, for example because it has reached ``max_hold``."""
        # The watchdog's helper calls this, as a rule; the body, if it notices the loss first, but no event loop.
        with suppress(QuorumUnavailableError, SynchronousOnlyOperation):
            self._show_life()
        if self._over and self._life:
            self._life.release()

    def give_up(self) -> str:
        """Free the slot though the body goes on; return the outcome."""
        with suppress(QuorumUnavailableError):
            self._show_life()
        return self._free()

    def end(self) -> None:
        """Free the slot, or leave it taken for the rest of ``hold_for``."""
        self._over, lease = True, self.lease
        left = self.function.singleton_options.hold_for - (self._manager.runtime.clock() - self._since)
        stays = left > 0 and lease is not None and lease.valid()
        if lease and stays and self.ticket.keep_held(lease, left, self.function.name, self.ticket.task_id):
            self.lease = None
        self._free()
        if self._life:
            self._life.release()

    def _free(self) -> str:
        lease, self.lease = self.lease, None
        if lease is None:
            return ""
        outcome = lease.release()  # not sent: whoever sees the result finds the slot free
        note_late_loss(lease, outcome)
        return outcome


def cancelled_name(task_id: str) -> str:
    """Return the name of the note that a row was cancelled."""
    return f"cancelled:{task_id}"


def life_name(task_id: str) -> str:
    """Return the name of the lock that shows that a process has a row which has no slot."""
    return f"alive:{task_id}"


def _note_start(task_result: Any, **about: Any) -> None:
    _starting.set(task_result)


def follow() -> None:
    """Learn of each run that begins, also from a backend with the signals of the package before ``django.tasks``."""
    task_started.connect(_note_start, dispatch_uid="django_redlock.tasks")
    if backport := sys.modules.get("django_tasks.signals"):
        backport.task_started.connect(_note_start, dispatch_uid="django_redlock.tasks")
