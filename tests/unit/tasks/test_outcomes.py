"""Every situation of ``outcomes.py``, with a backend that keeps its rows, and three nodes in memory in virtual time."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from django.db import transaction
from django.tasks import task_backends

from django_redlock import LockTakenError, locks
from django_redlock.core.rules import QueuePlace
from django_redlock.tasks import singleton_task
from django_redlock.testing import Simulation
from tests.shop.helpers import in_thread
from tests.unit.celery.outcomes import SERIAL, Shown, parametrized, points
from tests.unit.celery.slots import set_down

from .outcomes import TABLE, Call, Row


class Stage:
    """A task, its rows, and a worker that has a row when the test says so."""

    def __init__(self, simulation: Simulation, case: Any) -> None:
        self.simulation, self.case = simulation, case
        self.rows: list[Any] = []  # what is stored
        self.ran: list[Any] = []
        self.meanwhile: Callable[[], Any] = lambda: None  # what happens during the next run
        self.body: Any = "returns"

        def job(shop_id, since=None):
            self.ran.append(since)
            during, self.meanwhile = self.meanwhile, lambda: None
            during()
            if isinstance(self.body, BaseException):
                raise self.body

        job.__qualname__ = "job"
        self.task = singleton_task(backend="kept", **{"key": ("shop_id",), **case.options})(job)
        globals()["job"] = self.task  # where results look for it
        self.name = self.task.singleton.key(7)

    def enqueue(self, since: Any) -> Any:
        """Make a call; each thread has a backend of its own."""
        before = len(task_backends["kept"].results)
        result = self.task.enqueue(7, since=since)
        self.rows += [since] * (len(task_backends["kept"].results) - before)
        return result

    def purge(self) -> None:
        task_backends["kept"].clear()
        self.rows.clear()

    def run(self, row: Any) -> None:
        """Have a worker run a row, which the backend keeps apart from the result of the call."""
        task_backends["default"]._execute_task(task_backends["kept"].get_result(row.id))

    def holder(self, row: Any) -> str:
        """Return who has the slot."""
        found = self.task.singleton.holder(7)
        return f"{'own' if found.id == row.id else 'another'} {found.state}" if found else ""

    def has(self, seconds: float) -> None:
        """Check that the slot is free after that time, in seconds, and not before."""
        self.simulation.advance(seconds - 1.5)
        assert self.task.singleton.is_locked(7)
        self.simulation.advance(3.0)
        assert not self.task.singleton.is_locked(7)


@pytest.fixture
def stage(case: Any) -> Iterator[Stage]:
    with Simulation(nodes=3, check=False, node_timeout=0.1) as simulation:
        yield Stage(simulation, case)
    task_backends["kept"].clear()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("case", parametrized(TABLE, Call))
def test_call(stage: Stage, case: Call) -> None:
    """The answer to the caller, the row that has the slot, and the rows that wait then."""
    outcome: dict[str, Any] = {}

    with_holder(stage, lambda: outcome.update(call(stage)))

    assert outcome, "the situation did not come about"
    outcome["rows"] = " ".join(map(str, stage.rows))
    assert outcome == {name: getattr(case, name) for name in outcome}


def with_holder(stage: Stage, then: Callable[[], Any]) -> None:
    """Let the slot be as the situation says, and call *then* meanwhile."""
    nodes, how = stage.simulation.nodes, stage.case.holder
    if how == "no task":
        with locks["default"].lock(stage.name):
            return then()
    if how == "nobody":
        return then()
    if how.startswith("rolled back"):
        with suppress(InterruptedError), transaction.atomic():
            stage.enqueue("first")
            stage.purge()
            raise InterruptedError
        if how == "rolled back":
            return then()
        stage.simulation.advance(11.0)
        return in_thread(then)
    with transaction.atomic() if "transaction" in how else nullcontext():
        first = stage.enqueue("first")
        match how:
            case "running":
                stage.meanwhile = then
                return stage.run(first)
            case "waiting in its worker":
                lease = stage.simulation.rival().lock(stage.name, ttl=60, wait=0).acquire()
                stage.simulation.after(5.0, then)
                stage.simulation.after(20.0, lease.release)
                return stage.run(first)
            case "held":
                stage.run(first)
            case "finished":
                set_down(nodes)
                stage.run(first)
                set_down(nodes, False)
            case "gone":
                stage.purge()
            case "cancelled":
                stage.task.singleton.cancel(7)
                stage.purge()
            case "another transaction":
                return in_thread(then)
            case "a long transaction":
                stage.simulation.advance(11.0)
                return in_thread(then)
        return then()


def call(stage: Stage) -> dict[str, Any]:
    """Make the call, and return what the caller gets."""
    set_down(stage.simulation.nodes, stage.case.nodes == "down")
    before = len(stage.rows)
    try:
        result = stage.enqueue(stage.case.since)
    except Exception as error:
        return {"answer": type(error).__name__}
    finally:
        set_down(stage.simulation.nodes, False)
    stored = len(stage.rows) > before
    assert result.accepted is stored
    answer = "stored" if stored else "joins" if result.id else "skipped"
    holder = stage.task.singleton.holder(7)
    has_slot = bool(stored and holder and holder.id == result.id)
    return {"answer": answer, "reason": result.reason, "has_slot": has_slot}


@pytest.mark.parametrize("case", parametrized(TABLE, Row))
def test_row(stage: Stage, case: Row) -> None:
    """What a worker makes of the row, how long that takes, and the holder of the slot meanwhile and afterwards."""
    row, nodes, seen = stage.enqueue("mine"), stage.simulation.nodes, []
    prepare(stage, row)
    stage.body, stage.meanwhile = case.body, lambda: seen.append(stage.holder(row))
    set_down(nodes, case.nodes in ("down", "away"))
    if case.nodes == "away":
        stage.simulation.after(20.0, lambda: set_down(nodes, False))
    if case.slot == "another process":
        lease = stage.simulation.rival().lock(stage.name, ttl=60, wait=0).acquire()
        stage.simulation.after(20.0, lease.release)
    began = stage.simulation.clock()
    if case.does:
        if case.nodes == "down":
            stage.meanwhile = lambda: (set_down(nodes, False), seen.append(stage.holder(row)))
        stage.run(row)
    set_down(nodes, False)
    stage.simulation.advance(1.0)

    errors = [
        error.exception_class_path.rpartition(".")[2] for error in task_backends["kept"].get_result(row.id).errors
    ]
    does = "runs" if stage.ran else (errors or [""])[0]
    assert does == case.does
    assert case.during is None or "".join(seen) == case.during
    assert stage.simulation.clock() - began >= case.waited
    assert stage.holder(row) == case.holder
    if case.lasts:
        stage.has(case.lasts)


def prepare(stage: Stage, row: Any) -> None:
    """Let the row have its earlier fate."""
    case, singleton = stage.case, stage.task.singleton
    if case.before == "was cancelled":
        assert singleton.cancel(7) == row.id
    if case.before == "waited too long":
        stage.simulation.advance(4000.0)
    if case.slot in ("nobody", "another row", "another process"):
        singleton.release(7)
    if case.slot == "another row":
        stage.enqueue("another")


@pytest.mark.parametrize("case", [Row(options=SERIAL)], ids=str)
def test_row_keeps_its_place_however_long_it_waits(stage: Stage) -> None:
    """A row that a worker took later comes after it, also if the slot becomes free only after minutes."""
    row, process, queued = stage.enqueue("mine"), stage.simulation.rival(), []
    lease = process.lock(stage.name, ttl=60, wait=0).acquire()

    def queue_later_row() -> None:
        place = QueuePlace("message|0|later", int(locks["default"].runtime.wall() * 1e6), away=600.0)
        with suppress(LockTakenError):
            process.manager.on_behalf(stage.name, place=place, wait=0).acquire()
        queued.append(place)

    stage.simulation.after(10.0, queue_later_row)
    stage.simulation.after(100.0, lease.release)
    began = stage.simulation.clock()
    stage.run(row)

    assert queued
    assert stage.simulation.clock() - began < 105


@pytest.mark.parametrize("place", TABLE, ids=" ".join)
def test_every_point_of_the_page_has_situations(place: tuple[str, str]) -> None:
    """Each point of the page is in the table, and the table has none that the page lacks."""
    assert list(TABLE[place]) == points(*place)
    assert all(TABLE[place].values())


@pytest.mark.parametrize("case", parametrized(TABLE, Shown))
def test_what_shows_it_exists(case: Shown) -> None:
    """The tests that show what is not played here exist under these names."""
    assert case.exists()
