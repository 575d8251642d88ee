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
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from math import inf
from types import GenericAlias
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeVar

from django.core.exceptions import SuspiciousOperation
from django.db import connections, transaction
from django.tasks import Task, TaskResult, TaskResultStatus, task_backends
from django.tasks.base import TaskError
from django.tasks.exceptions import InvalidTaskBackend, TaskException
from django.utils import timezone

from ..engine.manager import fresh_secret
from ..exceptions import QuorumUnavailableError, printable
from ..handler import locks
from ..singleton.options import SingletonOptions
from ..singleton.slots import BOTH, CLAIM, WAITING, Claim, DuplicateTask, Holder, SlotState, once_confirmed, peek
from .run import SingleFunction, backport_signals

P = ParamSpec("P")
R = TypeVar("R")
ANSWER: dict[str, Any] = {"duplicate": False, "reason": "", "holder_id": None, "accepted": True}

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


class StoredRow(NamedTuple):
    """
    A row of this thread whose slot does not name it yet, because a transaction is open.

    Args:
        secret: The secret of the slot.
        task_id: The row's id.
        until: When the claim lapses, on the steady clock.
        ends: When the slot that names the row will end.
    """

    secret: str
    task_id: str
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


@dataclass
class RowCall:
    """
    One call on its way to the backend.

    Args:
        task: The task, as the caller has it.
        function: Its function.
        options: The options of the slot, with those of this call.
        args: The positional arguments.
        kwargs: The keyword arguments.
    """

    task: Any
    function: SingleFunction
    options: SingletonOptions
    args: Any
    kwargs: Any

    def __post_init__(self) -> None:
        self.options.check_lease(locks[self.options.using].rules, self.function.name)
        self.ticket = self.function.singleton_ticket("", self.args, self.kwargs, fresh_secret())
        self.row: Any = None  # the result of the row that has the slot
        after = self.task.run_after  # aware or not, whatever USE_TZ says
        delay = after.timestamp() - timezone.now().timestamp() if after else 0.0
        self.ttl = max(0.0, delay) + self.options.queue_ttl  # of the slot of the waiting row

    def send(self) -> Any:
        """
        Take the slot and store the row, or answer as a duplicate.

        Raises:
            DuplicateTask: Another call has the slot, and ``on_duplicate="raise"``.
            QuorumUnavailableError: Too few nodes answered, and ``on_unavailable={"enqueue": "raise"}``.
        """
        if not self.ticket.waiting:  # any number may wait
            return self._store()
        try:
            found = once_confirmed(self.ticket, self._look)
        except QuorumUnavailableError as error:
            if self.options.without_nodes("enqueue") == "raise":
                raise
            log.warning("task %s is enqueued without a slot: %s", printable(self.function.name), error)
        else:
            return self._store(found) if isinstance(found, Claim) else self._answer(found)
        return self._store()

    def _look(self) -> tuple[Claim | Holder, Holder | None]:
        """Claim the slot; return what was found, and the holder if its row is not known to be there."""
        found = self._claim()
        if isinstance(found, Holder) and self._is_over(found):
            seen = peek(self.ticket.using, self.ticket.waiting)
            found = self._claim(seen.secret if seen.holder.waits_as(found.task_id) else "")
        if isinstance(found, Holder) and found.state is SlotState.CLAIMED:
            found = self._stored_here(found)
        return found, found if isinstance(found, Holder) else None

    def _claim(self, adopt: str = "") -> Claim | Holder:
        """Claim the slot, also from the holder with the secret *adopt*; look for the row of a holder."""
        found = self.ticket.claim(self.ttl, self.function.name, adopt)
        if isinstance(found, Holder):
            self.row = self._row_of(found.task_id or "", found.state is SlotState.RUNNING)
        return found

    def _stored_here(self, holder: Holder) -> Claim | Holder:
        """Name the row of the holder if this same transaction stored it; take the slot over if it was rolled back."""
        using, name = self.ticket.using, self.ticket.waiting
        secret = peek(using, name).secret
        if not (stored := stored_here(using, name, secret)):
            return holder
        try:
            self.row = self._stored_row(stored.task_id)
        except NotImplementedError:  # nobody can tell
            return holder
        if self.row is None:
            return self._claim(secret)
        return replace(holder, task_id=stored.task_id, state=SlotState.QUEUED)

    def _store(self, claim: Claim | None = None) -> Any:
        """Have the backend store the row; its slot names the row once workers can see it."""
        try:
            result = self.task.get_backend().enqueue(self.task, self.args, self.kwargs)
        except BaseException:
            if claim:
                self.ticket.free()
            raise
        if claim and not result.is_finished:
            self._name_slot(claim, result)
        return answered(result)

    def _name_slot(self, claim: Claim, result: Any) -> None:
        """Have the slot name the row, after the commit of the transactions that it may be part of."""
        place, now = (self.ticket.using, self.ticket.waiting), locks[self.ticket.using].runtime.clock()
        stored = StoredRow(self.ticket.secret, str(result.id), now + CLAIM, now + self.ttl)
        _here.stored = {name: each for name, each in _here.stored.items() if each.until > now} | {place: stored}
        named = claim._replace(owner=claim.owner._replace(ref=stored.task_id))
        after_commit(partial(named.confirm, self.ttl), getattr(result, "db_result", None))

    # A duplicate

    def _answer(self, holder: Holder) -> Any:
        what = f"{printable(self.ticket.name)} is {holder}"
        about = {"event": "singleton_duplicate", "lock": self.ticket.name, "task": self.function.name}
        log.info("a call of a singleton task is a duplicate: %s", what, extra=about)
        if self.options.on_duplicate == "raise":
            raise holder.error(DuplicateTask, self.ticket.name)
        if self.options.on_duplicate == "join" and self.row:
            return answered(self.row, holder, accepted=False)
        path = f"{DuplicateTask.__module__}.{DuplicateTask.__qualname__}"
        error = TaskError(exception_class_path=path, traceback=f"Skipped: {what}.")
        return answered(self._result("", TaskResultStatus.FAILED, [error]), holder, accepted=False)

    def _row_of(self, task_id: str, running: bool) -> Any:
        """Return the result of the holder's row, from whichever backend has it; None if there is no row."""
        try:
            return self._stored_row(task_id)
        except NotImplementedError:  # the slot says all that is known
            return self._result(task_id, TaskResultStatus.RUNNING if running else TaskResultStatus.READY, [])

    def _stored_row(self, task_id: str) -> Any:
        """
        Return the result of a row, from whichever backend has it; None if there is no row.

        Raises:
            NotImplementedError: The backend of the task cannot tell, and no other one has the row.
        """
        silent: NotImplementedError | None = None
        for alias in dict.fromkeys((self.task.backend, *task_backends)) if task_id else ():
            try:
                return task_backends[alias].get_result(task_id)
            except no_row():
                continue
            except NotImplementedError as error:
                if alias == self.task.backend:
                    silent = error
        if silent:
            raise silent
        return None

    def _is_over(self, holder: Holder) -> bool:
        """Return whether a slot waits for a row that is gone, or that has left the queue without the slot."""
        if holder.state is not SlotState.QUEUED or not holder.task_id:
            return False
        left = self.ticket.scope in (WAITING, BOTH) and self.row and self.row.status != TaskResultStatus.READY
        return self.row is None or self.row.is_finished or bool(left)

    def _result(self, task_id: str, status: TaskResultStatus, errors: list[TaskError]) -> Any:
        """Return a result that no backend has stored."""
        moments = dict.fromkeys(("enqueued_at", "started_at", "finished_at", "last_attempted_at"))
        about: dict[str, Any] = {"id": task_id, "status": status, "errors": errors, "worker_ids": [], **moments}
        return TaskResult(
            task=self.task, args=list(self.args), kwargs=dict(self.kwargs), backend=self.task.backend, **about
        )


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
