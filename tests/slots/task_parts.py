"""
Django's tasks as far as slots can tell: a backend, the transactions that its rows are part of, and workers.

The task, its function, the enqueueing and the reaper are those of production; transactions are those of Django, over a
database that is none. A worker does what that of ``django-tasks-db`` does.
"""

import copy
import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from django.db import transaction
from django.db.backends.base.features import BaseDatabaseFeatures
from django.db.backends.dummy.base import DatabaseWrapper
from django.tasks import Task, TaskResult, TaskResultStatus
from django.tasks.backends.base import BaseTaskBackend
from django.tasks.base import TaskError
from django.tasks.exceptions import TaskResultDoesNotExist
from django.tasks.signals import task_finished, task_started

from django_redlock.singleton.options import SingletonOptions
from django_redlock.tasks import enqueue, reaper, singleton_task
from django_redlock.tasks.run import running
from tests.machine.world import EPOCH, Dead

from .world import Machine, World

if TYPE_CHECKING:
    from .task_schedule import TaskProfile

ALIAS = "slots"  # of the backend
IDLE = 0.3  # seconds after which a worker looks into an empty queue again
IMPORT = 1.0  # seconds for which a worker imports the module of a task, at most
READY, RUNNING, FAILED, SUCCESSFUL = (TaskResultStatus[name] for name in ("READY", "RUNNING", "FAILED", "SUCCESSFUL"))


class Rows:
    """A query, as far as production makes one."""

    def __init__(self, *conditions: Callable[["Row"], bool]) -> None:
        self._conditions = conditions

    model = SimpleNamespace(DoesNotExist=TaskResultDoesNotExist)

    def using(self, alias: str) -> "Rows":
        return self

    def get(self, id: str) -> "Row":
        return queue.get(id)

    def running(self) -> "Rows":
        return self.filter(status=RUNNING)

    def filter(self, **values: Any) -> "Rows":
        return Rows(*self._conditions, lambda row: all(getattr(row, name) == value for name, value in values.items()))

    def select_for_update(self) -> "Rows":
        return self

    def first(self) -> "Row | None":
        return next(self._stored(), None)

    def update(self, **values: Any) -> int:
        queue.world.reach()
        found = list(self._stored())
        for row in found:
            if values.get("status") == READY:
                judge(row)
            for name, value in values.items():
                setattr(row, name, value)
            queue.world.note(f"updates {row.id}: {values}")
        return len(found)

    def __iter__(self) -> Iterator["Row"]:
        queue.world.reach()
        return iter([copy.copy(row) for row in self._stored()])

    def _stored(self) -> Iterator["Row"]:
        return (row for row in queue.visible() if all(holds(row) for holds in self._conditions))


@dataclass(slots=True)
class Row:
    """A row of the backend."""

    id: str
    task: Any
    args_kwargs: dict[str, Any]
    due: float
    status: TaskResultStatus = READY
    started_at: datetime | None = None
    worker_ids: list[str] = field(default_factory=list)
    errors: list[TaskError] = field(default_factory=list)
    owner: Any = None  # the database connection whose transaction it is part of
    gone: bool = False  # whether that transaction was rolled back
    died: list[str] = field(default_factory=list)  # the workers that died with it

    backend_name = ALIAS
    objects = Rows()
    _state = SimpleNamespace(db="default")

    @property
    def pk(self) -> str:
        return self.id

    @property
    def is_over(self) -> bool:
        return self.status in (SUCCESSFUL, FAILED)

    @property
    def error(self) -> str:
        """The name of the class of its error; empty if it has none."""
        return self.errors[-1].exception_class_path.rpartition(".")[2] if self.errors else ""

    @property
    def task_result(self) -> Any:
        moments = dict.fromkeys(("enqueued_at", "finished_at", "last_attempted_at"))
        about: dict[str, Any] = {"id": self.id, "status": self.status, "started_at": self.started_at, **moments}
        about |= {"errors": list(self.errors), "worker_ids": list(self.worker_ids), **self.args_kwargs}
        return RowResult(task=self.task, backend=ALIAS, db_result=None if queue.at_once else self, **about)

    def set_successful(self, value: Any) -> None:
        self._end(SUCCESSFUL)

    def set_failed(self, error: BaseException) -> None:
        if isinstance(error, reaper.WorkerDied):
            judge(self)
        path = f"{type(error).__module__}.{type(error).__qualname__}"
        self.errors.append(TaskError(exception_class_path=path, traceback=str(error)))
        self._end(FAILED)

    def _end(self, status: TaskResultStatus) -> None:
        self.status = status
        queue.world.note(f"row {self.id}: {status} {self.error}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult(TaskResult):
    db_result: Any


class RowTask(Task):
    """A task of the backend below."""

    __slots__ = ()

    def get_backend(self) -> "Queue":
        return queue


def judge(row: Row) -> None:
    """Object if a row is taken from a process that lives."""
    name = row.worker_ids[-1]
    worker = next(machine for machine in queue.world.machines if machine.name == name)
    if not worker.over and recorder.rows[name].id == row.id:
        recorder.objections.append(f"{row.id} is taken from {name}, which lives")


class Queue(BaseTaskBackend):
    """A backend in memory; whoever asks may lose a turn before it answers."""

    task_class = RowTask
    supports_defer = True
    supports_get_result = True

    world: World
    rows: dict[str, Row]
    at_once: bool  # whether rows are no part of transactions
    tells: bool  # whether it can tell the result of a row
    dying: dict[str, str]  # for the name of a machine: at what it is killed next
    refuses: set[str]  # machines whose next row it refuses

    def begin(self, world: World, *, at_once: bool, tells: bool) -> None:
        """Forget everything, for the next schedule."""
        self.world, self.at_once, self.tells = world, at_once, tells
        self.rows, self.dying, self.refuses = {}, {}, set()

    def visible(self) -> list[Row]:
        return [row for row in self.rows.values() if row.owner is None and not row.gone]

    def knows(self, task_id: str | None) -> bool:
        """Return whether the machine whose turn it is can see a row."""
        row = self.rows.get(task_id or "")
        return row is not None and not row.gone and row.owner in (None, databases["default"])

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        self.world.reach()
        self.dies("before the row")
        name = self.world.machine.name if self.world.machine else ""
        if name in self.refuses:
            self.refuses.remove(name)
            raise OSError("the backend is away")
        due = task.run_after.timestamp() - EPOCH if task.run_after else self.world.now
        row = Row(f"row-{len(self.rows)}", task, {"args": list(args), "kwargs": dict(kwargs)}, due)
        self.rows[row.id] = row
        connection = databases["default"]
        if connection.in_atomic_block and not self.at_once:
            row.owner = connection
            connection.rows.append(row)
        self.world.note(f"stores {row.id} {args}{' in a transaction' if row.owner else ''}")
        self.dies("after the row")
        self.world.reach()
        return row.task_result

    def get_result(self, result_id: str) -> Any:
        return self.get(result_id).task_result

    def get(self, result_id: str) -> Row:
        if not self.tells:
            raise NotImplementedError
        self.world.reach()
        if not self.knows(result_id):
            raise TaskResultDoesNotExist(result_id)
        return self.rows[result_id]

    def take(self, worker: str, reorder: float) -> Row | None:
        """Return a row that is due, as that of a worker; None if there is none."""
        self.world.reach()
        chance, due = self.world.random, [row for row in self.visible() if row.status == READY]
        due = [row for row in due if row.due <= self.world.now]
        if not due:
            return None
        row = chance.choice(due) if chance.random() < reorder else due[0]
        row.status, row.started_at, row.worker_ids = RUNNING, moment(self.world), [*row.worker_ids, worker]
        return row

    def dies(self, when: str) -> None:
        """Kill the machine whose turn it is, if this is its moment."""
        machine = self.world.machine
        if machine and self.dying.get(machine.name) == when:
            self.world.note(f"is killed {when}")
            machine.kill()


queue = Queue(ALIAS, {})


class Database(DatabaseWrapper):
    """A connection whose transactions do nothing but show rows, or drop them."""

    features_class = BaseDatabaseFeatures

    def __init__(self) -> None:
        super().__init__({"AUTOCOMMIT": True, "CONN_HEALTH_CHECKS": False}, "default")
        self.autocommit = True
        self.rows: list[Row] = []  # of the transaction
        self._before: dict[str, int] = {}  # for the name of a savepoint: how many rows there were

    def ensure_connection(self) -> None:
        """Do nothing: there is no connection."""

    def _set_autocommit(self, autocommit: bool) -> None:
        """Do nothing: there is no connection."""

    def _commit(self) -> None:
        queue.world.reach()
        queue.dies("before the commit")
        self._show()
        queue.dies("after the commit")
        queue.world.reach()

    def _rollback(self) -> None:
        self._drop(0)

    def _savepoint(self, sid: str) -> None:
        self._before[sid] = len(self.rows)

    def _savepoint_commit(self, sid: str) -> None:
        """Do nothing: the rows are those of the outer transaction from now on."""

    def _savepoint_rollback(self, sid: str) -> None:
        self._drop(self._before[sid])

    def _show(self) -> None:
        for row in self.rows:
            row.owner = None
        if self.rows:
            queue.world.note(f"commits {[row.id for row in self.rows]}")
        self.rows = []

    def _drop(self, first: int) -> None:
        for row in self.rows[first:]:
            row.owner, row.gone = None, True
            queue.world.note(f"rolls {row.id} back")
        del self.rows[first:]


class Databases:
    """Gives each machine a connection of its own."""

    def __init__(self) -> None:
        self._opened: dict[str, Database] = {}

    def begin(self) -> None:
        self._opened = {}

    def __getitem__(self, alias: str) -> Database:
        machine = queue.world.machine
        return self._opened.setdefault(machine.name if machine else "", Database())

    def all(self, initialized_only: bool = False) -> list[Database]:
        return [self["default"]]


databases = Databases()


class Here:
    """Gives each machine what production keeps for a thread."""

    def __init__(self) -> None:
        self._stored: dict[str, Any] = {}

    @property
    def stored(self) -> Any:
        machine = queue.world.machine
        return self._stored.setdefault(machine.name if machine else "", {})

    @stored.setter
    def stored(self, value: Any) -> None:
        machine = queue.world.machine
        self._stored[machine.name if machine else ""] = value


@dataclass(slots=True)
class Body:
    """One run of the body."""

    id: str
    key: Any
    machine: Machine
    start: float
    lease: Any
    end: float | None = None  # stays None if its worker died, or was stopped

    def holds(self) -> bool:
        """Return whether it is under way and may believe that it has the slot."""
        alive = self.end is None and self.lease is not None and not self.machine.dead
        return alive and self.lease.hold.remaining(self.machine.clock()) > 0


class Recorder:
    """The part of a schedule that a task records in."""

    profile: "TaskProfile"
    task: Any
    bodies: list[Body]
    secrets: dict[str, str]  # for the name of a machine: the secret that it drew last
    rows: dict[str, Row]  # for the name of a machine: the row that it has
    objections: list[str]
    steps: "itertools.count[int]"


recorder = Recorder()


def sync(key: int, value: Any) -> Any:
    """Do what a body does."""
    here, world = recorder, queue.world
    machine = world.machine
    assert machine
    row, run = here.rows[machine.name], running(here.task.func.singleton_function)
    body = Body(row.id, key, machine, world.now, run.row.slot if run else None)
    world.note(f"begins {row.id} with {value}")
    if run is None or run.ticket.task_id != row.id:
        here.objections.append(f"{row.id} ran as {run and run.ticket.task_id}")
    if here.profile.options.scope != "until_executing":
        if not body.holds():
            here.objections.append(f"{row.id} began without its slot")
        others = [one for one in here.bodies if one.key == key and one.holds()]
        here.objections.extend(f"{row.id} began before {one.id} had ended" for one in others)
    here.bodies.append(body)
    try:
        world.sleep(world.random.uniform(0.2, 2.0) * here.profile.length)
    except SystemExit:
        body.end = world.now  # it is over, though cut short
        raise
    body.end = world.now
    world.note(f"ends {row.id}")
    if world.random.random() < here.profile.fail:
        raise ValueError("failed")
    return value


_made: dict[str, Any] = {}


def make(options: SingletonOptions) -> Any:
    """Return the task with these options."""
    about = {name: getattr(options, name) for name in ("key", "scope", "hold_for", "lease", "queue_ttl")}
    if options.on_duplicate != "join":
        about["on_duplicate"] = options.on_duplicate
    if repr(about) not in _made:
        with patch("django.tasks.task_backends", {ALIAS: queue}):
            _made[repr(about)] = singleton_task(backend=ALIAS, **about)(sync)
    return _made[repr(about)]


@contextmanager
def in_production(world: World) -> Iterator[None]:
    """Let production use what is simulated here."""
    now = SimpleNamespace(now=lambda: moment(world))
    databases.begin()
    models = SimpleNamespace(DBTaskResult=Row)
    with ExitStack() as stack:
        for patched in (
            patch.object(enqueue, "_here", Here()),
            patch.object(enqueue, "connections", databases),
            patch.object(transaction, "connections", databases),
            patch.object(enqueue, "fresh_secret", noted(enqueue.fresh_secret)),
            patch.object(enqueue, "timezone", now),
            patch.object(reaper, "timezone", now),
            patch.object(enqueue, "task_backends", {ALIAS: queue}),
            patch.object(reaper, "task_backends", {ALIAS: queue}),
            patch.object(enqueue, "import_string", lambda path: Queue),
            patch.object(enqueue, "router", SimpleNamespace(db_for_write=lambda model: "default")),
            patch.object(enqueue, "apps", SimpleNamespace(is_installed=lambda name: True)),
            patch.dict(
                sys.modules, {"django_tasks_db": SimpleNamespace(models=models), "django_tasks_db.models": models}
            ),
            patch.object(logging.getLogger("django.tasks"), "disabled", True),
        ):
            stack.enter_context(patched)
        yield


def noted(draw: Callable[[], str]) -> Callable[[], str]:
    """Wrap what draws the secret of a call, so that oracles know it."""

    def drawn() -> str:
        secret, machine = draw(), queue.world.machine
        recorder.secrets[machine.name if machine else ""] = secret
        return secret

    return drawn


def moment(world: World) -> datetime:
    """Return the time of day."""
    return datetime.fromtimestamp(EPOCH + world.now, UTC)


def work(
    machine: Machine, profile: "TaskProfile", over: list[bool], employ: Callable[[], Machine], reorder: float
) -> None:
    """Do what a worker does, one row at a time, until the schedule is over."""
    world = machine.world
    while not over:
        row = queue.take(machine.name, reorder)
        if row is None:
            world.sleep(IDLE)
            continue
        world.note(f"gets {row.id}")
        machine.busy = True
        stopped = False
        try:
            run_row(machine, row)
        except SystemExit:  # after the outcome was written
            stopped = True
        machine.busy = False
        if stopped or (row.error == "SystemExit" and row.worker_ids[-1] == machine.name):
            employ()
            return


def run_row(machine: Machine, row: Row) -> None:
    """Run a row, or let it end otherwise."""
    world, chance, mine = machine.world, machine.world.random, row.started_at
    recorder.rows[machine.name] = row
    try:
        world.sleep(chance.choice([0.0, chance.uniform(0.0, IMPORT)]))
        task_started.send(sender=Queue, task_result=row.task_result)
        value = row.task.call(*row.args_kwargs["args"], **row.args_kwargs["kwargs"])
        world.reach()
        row.set_successful(value)
    except Dead:
        if row.status == RUNNING and row.started_at == mine:
            row.died.append(machine.name)
        raise
    except BaseException as error:  # a signal as well
        row.set_failed(error)
    task_finished.send(sender=Queue, task_result=row.task_result)


def reap(machine: Machine, over: list[bool]) -> None:
    """Do what ``redlock_reap_tasks --every`` does, until the schedule is over."""
    world = machine.world
    found = reaper.Reaper(ALIAS)
    pause = world.random.choice([1.0, 3.0])
    while not over:
        try:
            for reaped in found.look():
                world.note(f"reaps {reaped.task_id}: {reaped.outcome}")
        except reaper.QuorumUnavailableError:
            world.note("cannot reap")
        world.sleep(pause)
