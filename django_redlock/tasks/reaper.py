"""
Find the rows of dead workers, and put them back or fail them; for the backend of ``django-tasks-db`` (internal).

A worker that is killed leaves its row RUNNING for ever: the backend cannot know. The slot of the run can: it is renewed
as long as the process lives. So a row is abandoned if its slot has ended, and no lock ``alive:ID`` shows
that a process has it without a slot. It must be so in all looks of three seconds, and a row that began less than a
lease ago is left alone: a worker marks its row before it imports the task, and takes the slot only then.

Nodes that have just restarted answer, but have forgotten who lives. So the reaper takes that lock itself for a moment:
they do not grant it before whoever lives could show it again.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.db import Error, transaction
from django.tasks import TaskResultStatus, task_backends
from django.tasks.signals import task_finished
from django.utils import timezone

from ..engine.manager import fresh_secret
from ..exceptions import QuorumUnavailableError, RedlockError, printable
from ..handler import locks
from ..inventory import held_locks
from ..singleton.driver import Nodes
from ..singleton.ending import is_abandoned, requeue
from ..singleton.questions import Free
from ..singleton.ticket import Ticket
from .enqueue import rows_of
from .run import SingleFunction

REPEATS = 1  # how often a row is put back
LISTING = 60.0  # seconds that listing all locks may take
APART = 3.0  # seconds between two looks at least: once the nodes answer again, all that lives shows it by then


class WorkerDied(RedlockError):
    """The worker that ran the row died, and the row is not repeated."""


class Reaped(NamedTuple):
    """
    What happened to a row.

    Args:
        task: The name of its task.
        task_id: Its id.
        worker: The id of the worker that died.
        outcome: ``put back``, ``failed``, or why nothing was done.
    """

    task: str
    task_id: str
    worker: str
    outcome: str


class Reaper:
    """
    Looks for abandoned rows, time after time.

    Args:
        backend: Alias in ``TASKS``.
        fail: Whether to fail the rows instead of putting them back once.
        act: Whether to change them.

    Raises:
        ImproperlyConfigured: There is no such backend, or it is not that of ``django-tasks-db``.
    """

    def __init__(self, backend: str, *, fail: bool = False, act: bool = True) -> None:
        known = [alias for alias in task_backends if rows_of(task_backends[alias]) is not None]
        if backend not in known:
            it_has = ", ".join(map(repr, known)) or "none: install it, and add 'django_tasks_db' to INSTALLED_APPS"
            raise ImproperlyConfigured(
                f"TASKS has no {backend!r} with the backend of django-tasks-db, with which alone dead workers can be "
                f"found; it has {it_has}."
            )
        self._backend = backend
        self._fail = fail
        self._act = act
        self._abandoned: dict[Any, tuple[Any, float]] = {}  # when each such row had begun, and was first seen so

    def look(self) -> Iterator[Reaped]:
        """
        Look at all rows that run; act on those that have been abandoned in all looks of three seconds.

        Raises:
            QuorumUnavailableError: Too few nodes answered to know the slot of a row; the others have been dealt with.
            Error: The database refused to change a row; the others have been dealt with.
        """
        before, self._abandoned = self._abandoned, {}
        failed: Exception | None = None
        for row in rows_of(task_backends[self._backend]).running().filter(backend_name=self._backend):
            function, ticket = slot_of(row)
            if function is None or not ticket.running:
                continue
            try:
                if not self._is_abandoned(row, ticket, function):
                    continue
                began, seen = before.get(row.id, (None, 0.0))
                now = locks[ticket.using].runtime.clock()
                self._abandoned[row.id] = row.started_at, seen if began == row.started_at else now
                if now - self._abandoned[row.id][1] >= APART and not is_held(ticket):
                    yield Reaped(function.name, str(row.id), worker_of(row), self._reap(row, ticket, function))
            except QuorumUnavailableError as error:
                failed = error
            except Error as error:
                failed = error
                yield Reaped(function.name, str(row.id), worker_of(row), "left alone: the database has refused it")
        if failed:
            raise failed

    def _is_abandoned(self, row: Any, ticket: Ticket, function: SingleFunction) -> bool:
        lease = function.singleton_options.lease
        if row.started_at is None or timezone.now() - row.started_at < timedelta(seconds=lease):
            return False
        return Nodes(ticket.using, function.name).run(is_abandoned(ticket))

    def _reap(self, row: Any, ticket: Ticket, function: SingleFunction) -> str:
        fails = self._fail or len(row.worker_ids) > REPEATS
        if not self._act:
            return "would fail" if fails else "would be put back"
        return self._failed(row) if fails else self._put_back(row, ticket, function)

    def _put_back(self, row: Any, ticket: Ticket, function: SingleFunction) -> str:
        """Let the row run once more, under the same id; it has the slot from now on, unless another call has it."""
        slot = replace(ticket, secret=fresh_secret())
        nodes = Nodes(slot.using, function.name)
        nodes.run(requeue(slot, function.singleton_options))
        is_back = False
        try:
            is_back = bool(self._same(row).update(status=TaskResultStatus.READY, started_at=None))
        finally:
            if not is_back:
                nodes.free(Free(slot.waiting, slot.secret))
        return "put back" if is_back else "left alone: it has ended meanwhile"

    def _failed(self, row: Any) -> str:
        with transaction.atomic(using=row._state.db):
            same = self._same(row).select_for_update().first()
            if same is None:
                return "left alone: it has ended meanwhile"
            same.set_failed(WorkerDied(f"The worker {printable(worker_of(row))} died while it ran this task."))
        task_finished.send_robust(sender=type(row.task.get_backend()), task_result=same.task_result)
        return "failed"

    def _same(self, row: Any) -> Any:
        """Return the query for the row, if it is still in the run that was seen."""
        return (
            type(row)
            .objects.using(row._state.db)
            .filter(pk=row.pk, status=TaskResultStatus.RUNNING, started_at=row.started_at)
        )


def worker_of(row: Any) -> str:
    """Return the name of the worker that took a row last."""
    return str(row.worker_ids[-1]) if row.worker_ids else "unknown"


def slot_of(row: Any) -> tuple[SingleFunction | None, Ticket]:
    """Return the function of a row and its slot; no function if the task is none of ours, or has changed since."""
    try:
        function: SingleFunction = row.task.func.singleton_function
        locks[function.singleton_options.using]  # which the settings may lack
        return function, function.singleton_ticket(str(row.id), **row.args_kwargs)
    except Exception:  # of the project's module, or of its key
        return None, Ticket("", "", "")


def is_held(ticket: Ticket) -> bool:
    """
    Return whether a run of the row has a slot of any name: the key may have been another one before a deploy.

    Raises:
        QuorumUnavailableError: Too few nodes listed all of their locks in time.
    """
    listing = held_locks(ticket.using, limit=sys.maxsize, seconds=LISTING)
    owners = [lock.owner for lock in listing.locks]
    if any(owner and owner.ref == ticket.task_id and not owner.state for owner in owners):
        return True
    if not listing.has_quorum or not listing.complete:
        nodes = {node.name: node.detail or "did not list all of its locks in time" for node in listing.nodes}
        raise QuorumUnavailableError(ticket.name, nodes=nodes, needed=listing.rules.needed)
    return False
