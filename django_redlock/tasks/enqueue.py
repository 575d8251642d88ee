"""
Enqueue a call: take the slot and have the backend store the row, or answer as a duplicate (internal).

A row has no headers, and its id is known only when it is stored. So the slot is claimed without an id, which lapses
after ten seconds, and names the id once the row is there for workers: after the commit, inside a transaction. Until
then no call counts as a duplicate of this one: another call waits for a second, and then stores a row of its own.
"""

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache, partial
from math import inf
from types import GenericAlias
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from django.apps import apps
from django.core.exceptions import SuspiciousOperation, ValidationError
from django.db import connections, router, transaction
from django.tasks import Task, TaskResult, TaskResultStatus, task_backends
from django.tasks.base import TaskError
from django.tasks.exceptions import InvalidTaskBackend, TaskException, TaskResultDoesNotExist
from django.utils import timezone
from django.utils.module_loading import import_string

from ..core.protocol import without_secrets
from ..engine.manager import fresh_secret
from ..exceptions import printable
from ..handler import locks
from ..singleton import questions as ask
from ..singleton.call import Call, Joined, Refused, Sent, Skipped, store
from ..singleton.driver import Claimed, Nodes, free
from ..singleton.options import SingletonOptions
from ..singleton.questions import Result, ResultState
from ..singleton.slot import CLAIM, DuplicateTask, Holder, SlotState
from ..singleton.ticket import Ticket
from .run import SingleFunction, backport_signals

P = ParamSpec("P")
R = TypeVar("R")
ANSWER: dict[str, Any] = {"duplicate": False, "reason": "", "holder_id": None, "accepted": True}

DATABASE_BACKEND = "django_tasks_db.DatabaseBackend"

log = logging.getLogger("django_redlock")


class NotGeneric:
    """The base of classes that type checkers see as Django's, which are not generic when the code runs."""

    __slots__ = ()
    __class_getitem__: Any = classmethod(GenericAlias)


if TYPE_CHECKING:
    BaseResult = TaskResult
    BaseTask = Task
else:
    BaseResult = BaseTask = NotGeneric


class SingletonResult(BaseResult[P, R]):
    """
    A :class:`~django.tasks.TaskResult` that knows whether the call was a duplicate; mixed into the backend's own class.

    For a joined duplicate it is the result of the other call. A skipped duplicate has no row: its result has failed
    with ``DuplicateTask``, and its id is empty.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        duplicate: bool
        """Whether another call had the slot."""
        reason: str
        """The state of that call (``queued``, ``running``, or ``held`` if it is over); empty without a duplicate."""
        holder_id: str | None
        """The id of that call; None without a duplicate, or if it is not a task."""
        accepted: bool
        """Whether this call stored a row."""

    def __reduce__(self) -> Any:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return _rebuilt, (type(self).__bases__[1], values, {name: getattr(self, name) for name in ANSWER})


@cache
def _mixed(base: type) -> Any:
    """Return the result class of a backend with :class:`SingletonResult` mixed in."""
    own = {"__slots__": tuple(ANSWER), "__module__": __name__}
    return type(f"Singleton{base.__name__}", (SingletonResult, base), own)


def _rebuilt(base: type, values: Mapping[str, Any], answer: Mapping[str, Any]) -> Any:
    """Return a result with these fields and our attributes."""
    result = object.__new__(_mixed(base))
    for name, value in {**values, **answer}.items():
        object.__setattr__(result, name, value)  # it is frozen
    return result


def answered(result: Any, holder: Holder | None = None, *, accepted: bool = True) -> Any:
    """Return a backend's *result* with our attributes; with *holder*, it is that of a duplicate."""
    answer = dict(ANSWER, accepted=accepted)
    if holder:
        answer |= {"duplicate": True, "reason": str(holder.state), "holder_id": holder.task_id}
    return _rebuilt(type(result), {each.name: getattr(result, each.name) for each in fields(result)}, answer)


@without_secrets
class StoredRow(NamedTuple):
    """
    A row of this thread whose slot does not name it yet, because a transaction is open.

    Args:
        secret: The secret of the slot.
        task_id: The row's id.
        backend: The alias of its backend.
        until: When the claim lapses, on the steady clock.
        ends: When the slot that names the row will end.
    """

    secret: str
    task_id: str
    backend: str
    until: float
    ends: float


class StoredRows(threading.local):
    """The rows of this thread whose slots do not name them yet, by the alias and the name of the slot."""

    stored: Mapping[tuple[str, str], StoredRow] = {}


_here = StoredRows()


def stored_here(using: str, name: str, secret: str) -> StoredRow | None:
    """Return the row that this thread has stored, and that its slot with this *secret* may not name yet."""
    stored = _here.stored.get((using, name))
    return stored if stored and stored.secret == secret else None


def _confirm_now(**about: Any) -> None:
    for using in {using for using, _ in _here.stored}:
        locks[using].confirmations.send(inf)


def confirm_at_end() -> None:
    """Have slots name the rows that a task has stored, before django-tasks-rq ends its process with ``os._exit``."""
    if backport := backport_signals():
        backport.task_finished.connect(_confirm_now, dispatch_uid="django_redlock.tasks")


class Enqueuing(Nodes):
    """
    Answers the questions of a call on its way to the backend.

    Args:
        task: The task, as the caller has it.
        function: Its function.
        options: The options of the slot, with those of this call.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    def __init__(self, task: Any, function: SingleFunction, options: SingletonOptions, args: Any, kwargs: Any) -> None:
        super().__init__(options.using, function.name)
        options.check_lease(self.manager.rules, function.name)
        self.task = task
        self.args = args
        self.kwargs = kwargs
        ticket = function.singleton_ticket("", args, kwargs, fresh_secret())
        after = task.run_after  # aware or not, whatever USE_TZ says
        delay = after.timestamp() - timezone.now().timestamp() if after else 0.0
        self.decided = Call(function.name, ticket, options, max(0.0, delay) + options.queue_ttl)

    def call(self) -> Any:
        """
        Take the slot and store the row, or answer as a duplicate.

        Raises:
            DuplicateTask: Another call has the slot, and ``on_duplicate="raise"``.
            QuorumUnavailableError: Too few nodes answered, and ``on_unavailable={"enqueue": "raise"}``.
        """
        verdict, name = self.run(store(self.decided)), self.decided.ticket.name
        if verdict.holder:
            about = {"event": "singleton_duplicate", "lock": name, "task": self.label}
            what = f"{printable(name)} is {verdict.holder}"
            log.info("a call of a singleton task is a duplicate: %s", what, extra=about)
        match verdict:
            case Sent(result, _, _, unanswered):
                if unanswered:
                    log.warning("task %s is enqueued without a slot: %s", printable(self.label), unanswered)
                return answered(result)
            case Refused(holder):
                raise holder.error(DuplicateTask, name)
            case Joined(task_id, holder, _, Result(_, row)):
                # Of a backend that cannot tell, the slot says all that is known.
                status = TaskResultStatus.RUNNING if holder.state is SlotState.RUNNING else TaskResultStatus.READY
                return answered(row or self._result(task_id, status, []), holder, accepted=False)
            case Skipped(holder, reason):
                path = f"{DuplicateTask.__module__}.{DuplicateTask.__qualname__}"
                error = TaskError(exception_class_path=path, traceback=reason)
                return answered(self._result("", TaskResultStatus.FAILED, [error]), holder, accepted=False)
        raise AssertionError(f"a verdict of a call is not carried out: {verdict}")

    def send(self, question: ask.Send) -> Any:
        """Have the backend store the row; its slot names the row once workers can see it."""
        ticket = question.ticket
        try:
            result = self.task.get_backend().enqueue(self.task, self.args, self.kwargs)
        except BaseException:
            if question.claim:
                free(ticket.using, ticket.waiting, ticket.secret)
            raise
        if question.claim and not result.is_finished:
            self._name_slot(ticket, question.claim, result)
        elif question.claim:  # its run has taken that over, or ended without it
            free(ticket.using, ticket.waiting, ticket.secret)
        return result

    def _name_slot(self, ticket: Ticket, claim: Claimed, result: Any) -> None:
        """Have the slot name the row, after the commit of the transactions that it may be part of."""
        place, now, ttl = (ticket.using, ticket.waiting), self.manager.runtime.clock(), self.decided.ttl
        stored = StoredRow(ticket.secret, str(result.id), self.task.backend, now + CLAIM, now + ttl)
        _here.stored = {name: each for name, each in _here.stored.items() if each.until > now} | {place: stored}
        named = claim._replace(owner=claim.owner._replace(ref=stored.task_id))
        after_commit(partial(self.confirm, named, ttl), getattr(result, "db_result", None))

    def result_of(self, question: ask.ResultOf) -> Result:
        """Return the state of a row, from whichever backend has it."""
        return find_row(question.task_id, self.task.backend)

    def stored_here(self, question: ask.StoredHere) -> str:
        """Return the id of the row that this thread has stored, and that its slot may not name yet."""
        ticket = self.decided.ticket
        stored = stored_here(ticket.using, ticket.waiting, question.secret)
        return stored.task_id if stored else ""

    answers = Nodes.answers | {ask.Send: send, ask.ResultOf: result_of, ask.StoredHere: stored_here}

    def _result(self, task_id: str, status: TaskResultStatus, errors: list[TaskError]) -> Any:
        """Return a result that no backend has stored."""
        moments = dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at"))
        about: dict[str, Any] = {"id": task_id, "status": status, "errors": errors, "worker_ids": [], **moments}
        return TaskResult(
            task=self.task, args=list(self.args), kwargs=dict(self.kwargs), backend=self.task.backend, **about
        )


def find_row(task_id: str, backend: str) -> Result:
    """
    Return the state of a row, from whichever backend has it.

    If none has it, it is gone, unless *backend*, the alias of the one that should have it, cannot tell.
    """
    silent = False
    for alias in dict.fromkeys((backend, *task_backends)):
        try:
            row = stored_row(task_backends[alias], task_id)
        except no_row():
            continue
        except NotImplementedError:
            silent = silent or alias == backend
            continue
        if row.is_finished:
            failed = row.status == TaskResultStatus.FAILED
            return Result(ResultState.FAILURE if failed else ResultState.SUCCESS, row)
        ready = row.status == TaskResultStatus.READY
        return Result(ResultState.WAITS if ready else ResultState.UNDERWAY, row)
    return Result(ResultState.UNKNOWN if silent else ResultState.GONE)


def stored_row(backend: Any, task_id: str) -> Any:
    """Return the result of a row; that of ``django-tasks-db`` from the database to which it is written."""
    rows = rows_of(backend)
    if rows is None:
        return backend.get_result(task_id)
    try:
        return rows.get(id=task_id).task_result
    except (rows.model.DoesNotExist, ValidationError) as error:
        raise TaskResultDoesNotExist(task_id) from error


def rows_of(backend: Any) -> Any:
    """
    Return the rows of a backend of ``django-tasks-db``; None for any other.

    They are read from the database to which they are written. A router may send reads to a replica, which lags behind,
    and which the transaction of a caller is no part of.
    """
    if not apps.is_installed("django_tasks_db") or not isinstance(backend, import_string(DATABASE_BACKEND)):
        return None
    from django_tasks_db.models import DBTaskResult  # only here: it is a package of its own

    return DBTaskResult.objects.using(router.db_for_write(DBTaskResult))


def no_row() -> tuple[type[Exception], ...]:
    """
    Return the errors of a backend without such a row, or whose row no worker can run: its task is gone since a deploy.

    They are those of Django and, if it is used, of the package before ``django.tasks``.
    """
    backport = sys.modules.get("django_tasks.exceptions")
    errors = (TaskException, InvalidTaskBackend, ImportError, SuspiciousOperation)
    return (*errors, backport.TaskException) if backport else errors


def after_commit(action: Callable[[], None], row: Any) -> None:
    """
    Call *action* once a new row is there for workers.

    Args:
        action: What to do.
        row: The row, if it is a model instance. If it is None, the row may be in any database, or in none, so *action*
            waits for the commit of all transactions that are open in this thread.
    """
    opened = [row._state.db] if row else [each.alias for each in connections.all(initialized_only=True)]
    for alias in opened:
        if connections[alias].in_atomic_block:
            action = partial(transaction.on_commit, action, using=alias, robust=True)
    action()
