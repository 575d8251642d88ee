"""
Every situation of ``outcomes.py``, with a worker, a broker, a result backend and three nodes in memory.

Time is virtual, so a countdown of two hours costs nothing.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import pytest
from celery import _state, signals
from celery.worker.state import revoked as revoked_tasks
from kombu.exceptions import DecodeError

from django_redlock import locks
from django_redlock.testing import Simulation

from .outcomes import TABLE, Call, Message, Shown, parametrized, points
from .slots import HEADER, NAME, begin, end_child, names, ticket_in
from .stage import Stage

pytestmark = pytest.mark.filterwarnings("ignore:Exception raised outside body")
LONG_AGO = "2020-01-01T00:00:00+00:00"
ENDED = {"SUCCESS": "answered", "FAILURE": "fails", "REVOKED": "revoked"}


@pytest.fixture
def stage(worker: Any, make: Any, received: Any, monkeypatch: Any, case: Any) -> Iterator[Stage]:
    monkeypatch.setattr(_state, "_on_app_finalizers", set())  # Celery's own tasks, which take a sixth of the time
    with Simulation(nodes=3, check=False, node_timeout=0.1) as simulation:
        stage = Stage(simulation, worker, make, received, monkeypatch, case)
        begins = lambda sender, **about: stage.act(sender, "task_prerun")  # noqa: E731
        signals.task_prerun.connect(begins)
        yield stage
        signals.task_prerun.disconnect(begins)


def check(case: Any, outcome: dict[str, Any]) -> None:
    """Compare an outcome with that of the table, and check that no lock stays taken."""
    assert outcome.keys() & {"does", "answer"}, "the situation did not come about"
    different = {name: value for name, value in outcome.items() if value != getattr(case, name)}
    assert different == {}, f"the table has {[getattr(case, name) for name in different]}"
    left = {name for name in names() if not name.startswith("begun:")}
    assert left <= ({NAME, f"queued:{NAME}"} if "hold_for" in case.options else set())


# Messages


@pytest.mark.parametrize("case", parametrized(TABLE, Message))
def test_message(stage: Stage, case: Message) -> None:
    """What a worker makes of the message, the holder of the slot then, and the state that the caller sees at last."""
    outcome: dict[str, Any] = {}

    set_the_scene(stage, lambda: outcome.update(arrive(stage)))
    if case.lasts:
        about = min(1.5, case.lasts / 10)
        stage.simulation.advance(case.lasts - about)
        assert stage.holder()
        stage.simulation.advance(2 * about)
        assert not stage.holder()
    if case.event == "is terminated":  # its body goes on until it ends
        stage.lease.release()
    stage.settle()

    check(case, outcome | {"told": stage.state(), "runs": stage.worker.ids.count(stage.id)})


def set_the_scene(stage: Stage, then: Callable[[], Any]) -> None:
    """Send the message, let its slot be as the situation says, and call *then* in the midst of it."""

    def unslotted() -> None:
        send(stage, task_id="mine")
        then()

    match stage.case.slot.split(", "):
        case ["own"]:
            accepted(stage)
            then()
        case ["own run"]:
            accepted(stage)
            stage.meanwhile[stage.id] = lambda: (let_happen_during(stage), then())
            stage.run(stage.message)
        case ["own beside another run"]:
            stage.during_another_run(lambda: (accepted(stage), then()))
        case ["own", "then another run"]:
            accepted(stage)
            stage.during_another_run(then)
        case ["nobody"]:
            unslotted()
        case ["another run", *fails]:
            stage.during_another_run(lambda: (unslotted(), 1 / 0 if fails else None))
        case ["another claim"]:
            stage.during_another_claim(lambda: (unslotted(), stage.settle()))
        case ["another message", *lost]:
            stage.send("another")
            message = stage.worker.take()
            unslotted()
            if lost:
                stage.task.singleton.release(7)
            else:
                stage.aside.append(message)
        case ["held" | "left on a node"]:
            stage.send("another")
            (stage.run if stage.case.slot == "held" else stage.leave_on_a_node)(stage.worker.take())
            unslotted()
        case ["no task", *long]:
            with locks["default"].lock(NAME):
                unslotted()
                if long:
                    stage.settle()


def send(stage: Stage, **options: Any) -> None:
    """Send the message in question."""
    how = stage.send_unconfirmed if stage.case.before == "was never confirmed" else stage.send
    stage.id = how("mine", **options, **stage.case.sent).id
    stage.message = stage.worker.take()


def accepted(stage: Stage) -> None:
    """Send the message in question, which gets its slot, and let it have its earlier fate."""
    if stage.case.before == "replaced another":
        stage.send("older")
        stage.aside.append(stage.worker.take())
    send(stage)
    let_happen_before(stage)


def let_happen_during(stage: Stage) -> None:
    """Let something happen during the run of the message, before it comes again."""
    if stage.case.before == "came again":
        stage.run(stage.message, redelivered=True)
    if stage.case.before == "has run for 90 minutes":
        stage.simulation.advance(90 * 60.0)


def let_happen_before(stage: Stage) -> None:
    """Let the message have its earlier fate."""
    what, worker, message = stage.case.before, stage.worker, stage.message
    first, _, then = what.partition(", ")
    ends = {"has run": "returns", "was stopped": SystemExit(-9), "has retried": "retries", "has failed": ValueError()}
    if first in ends:
        stage.acts.append(ends[first])
        stage.run(message, kept=90.0 if then == "after a long wait" else 0.0)
        worker.returned.clear()
    match what:
        case "has run, stored nothing":
            stage.task.backend.forget(stage.id)
        case "has retried, and the retry too":
            worker.run()
        case "has retried, and lost its slot":
            stage.message = worker.take()
            stage.simulation.advance(4000.0)
        case "a copy has run":
            worker.run(message, redelivered=True)
        case "lost its header":
            message.headers[HEADER] = "garbled"
        case "was replaced":
            stage.send("newer")
        case "waited too long":
            stage.simulation.advance(4000.0)
        case "was killed":
            happen(stage, "worker dies")
            worker.returned.clear()
            stage.simulation.advance(31.0)


def arrive(stage: Stage) -> dict[str, Any]:
    """Let a worker have the message, and return the outcome."""
    case, worker = stage.case, stage.worker
    told, ran = stage.state(), worker.ids.count(stage.id)
    waiting, returned = len(worker.headers), len(worker.returned)
    stage.stored_with.clear()
    stage.acts.append(case.body)
    with stage.faults():
        if case.event:
            happen(stage, case.event)
        else:
            stage.run(stage.message, redelivered=case.comes == "again", kept=5.0 if case.comes == "late" else 0.0)
        for _ in range(case.times):
            assert len(worker.headers) == waiting + 1
            stage.run(worker.take())
    now, holder = stage.state(), stage.holder()
    if worker.ids.count(stage.id) > ran:
        does = "runs"
        assert set(stage.stored_with) <= {holder}  # whoever sees the outcome finds the slot as it is afterwards
    elif len(worker.returned) > returned:
        does = "returned"
    elif len(worker.headers) > waiting:
        does = "put back"
    else:
        does = "dropped" if now == told else ENDED[now]
    return {"does": does, "holder": holder, "other": stage.holder(8)}


def happen(stage: Stage, event: str) -> None:
    """Let something happen to the message in a worker's main process."""
    task, message = stage.task, stage.message
    if event == "expires":
        message.headers["expires"] = LONG_AGO
    if event == "cannot be read":
        message.body = "no JSON"
        with pytest.raises(DecodeError):
            stage.app.tasks[task.name].start_strategy(stage.app, MagicMock())(message, None, None, None, [])
        return
    request = stage.received(task, message)
    match event:
        case "is unknown":
            signals.task_unknown.send(sender=None, message=message, name="shop.gone", id=stage.id, exc=KeyError())
        case "is cancelled" | "is cancelled, and comes":
            assert task.singleton.cancel(7) == stage.id
            if event.endswith("comes"):  # to a worker that did not hear of it
                stage.run(message)
        case "is lost, and its slot released":
            assert task.singleton.release(7) == "released"
        case "is revoked":
            revoked_tasks.add(stage.id)
            assert request.revoked()
            revoked_tasks.discard(stage.id)
        case "expires":
            if not request.revoked():
                stage.run(message, redelivered=stage.case.comes == "again")
        case "is rejected" | "is rejected for later":
            request.reject(requeue=event.endswith("for later"))
        case "is lost":
            pass
        case _:
            end(stage, request, *event.split(" before "))


def end(stage: Stage, request: Any, event: str, early: str = "") -> None:
    """End a child or a worker that has the message, in which the body has begun or not."""
    process = stage.simulation.rival("the child")
    request.on_accepted(1, time.monotonic())
    if not early:
        with locks.substituted("default", process.manager):
            stage.lease = begin(request)
    if event != "is terminated":
        process.kill()
    if event == "worker dies":
        stage.worker.returned += [stage.message] * stage.task.acks_late
    else:
        end_child(request, event)


# Calls


@pytest.mark.parametrize("case", parametrized(TABLE, Call))
def test_call(stage: Stage, case: Call) -> None:
    """The answer to the caller, the slot of its message, and the runs in the end, in their order."""
    outcome: dict[str, Any] = {}

    with_holder(stage, lambda: outcome.update(call(stage)))
    stage.settle()

    told = stage.state() if stage.id else ""
    check(case, outcome | {"told": told, "ran": " ".join(stage.worker.values)})


def with_holder(stage: Stage, then: Callable[[], Any]) -> None:
    """Let another call have the slot as the situation says, and call *then* meanwhile."""
    task, worker, how = stage.task, stage.worker, stage.case.holder
    stage.first = stage.waiting = ""

    def first(**options: Any) -> Any:
        stage.first = stage.send("first", **options).id
        return worker.take()

    def during(then: Callable[[], Any]) -> None:
        message = first()
        stage.meanwhile[stage.first] = then
        stage.run(message)

    match how:
        case "nobody":
            then()
        case "claimed":
            stage.during_another_claim(lambda: (then(), stage.settle()))
        case "running":
            during(then)
        case "pending":
            during(lambda: (setattr(stage, "waiting", stage.send("pending").id), then()))
        case "held":
            stage.run(first())
            then()
        case "split":
            stage.leave_on_a_node(first())
            then()
        case "no task":
            with locks["default"].lock(NAME):
                then()
        case "direct":
            stage.meanwhile[None] = then
            task(7, "first")
        case "applied":
            stage.meanwhile["applied"] = then
            task.apply((7, "first"), task_id="applied")
        case "waiting" | "waits for its time":
            stage.aside = [first(countdown=7200 if "time" in how else None)]
            stage.waiting = stage.first
            then()
        case "waiting with a link":
            stage.aside = [first(link=task.si(8, "linked"))]
            then()
        case "waiting, without a result":
            stage.aside = [first(ignore_result=True)]
            then()
        case _:
            first(countdown=7200)
            task.backend.store_result(stage.first, None, how.removeprefix("waits, but is "))
            then()


def call(stage: Stage) -> dict[str, Any]:
    """Make the call, and return what the caller gets."""
    case = stage.case
    with stage.faults():
        try:
            link = {"link": stage.task.si(8, "linked")} if "link" in case.sent else {}
            result = stage.task.apply_async(case.args, **case.sent | link)
        except Exception as error:
            return {"answer": type(error).__name__}
    stage.id = result.id
    ticket = ticket_in(stage.worker.headers[-1]) if result.accepted else None
    known = {stage.waiting: "joins the waiting", stage.first: "joins"}
    if not result.duplicate:
        answer = "sent"
    elif result.accepted:
        answer = "gives its arguments" if result.id == stage.waiting else "sent, to run after"
    else:
        answer = known.get(result.id, "skipped")
    return {"answer": answer, "reason": result.reason, "has_slot": bool(ticket and ticket.secret)}


# The pages


@pytest.mark.parametrize("place", TABLE, ids=" ".join)
def test_every_row_of_the_pages_has_situations(place: tuple[str, str]) -> None:
    """Each row of the pages is in the table, and the table has no row that they lack."""
    assert list(TABLE[place]) == points(*place)
    assert all(TABLE[place].values())


@pytest.mark.parametrize("case", parametrized(TABLE, Shown))
def test_what_shows_it_exists(case: Shown) -> None:
    """The tests that show what is not played here exist under these names."""
    assert case.exists()
