"""One task of a shop, and all that is around it: lock nodes in virtual time, a broker, a result backend, a worker."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery import signals
from kombu.exceptions import OperationalError

from django_redlock import QuorumUnavailableError
from django_redlock.signals import lock_acquired, lock_taken

from .outcomes import Limit
from .slots import NAME, set_down

STATES = ("SUCCESS", "FAILURE", "REVOKED")


class Stage:
    """
    What a situation happens to.

    Args:
        simulation: The lock nodes, and the time.
        worker: The worker, and the queue before it.
        make: Makes the task.
        received: Makes what the worker's main process has of a message.
        patch: Breaks things.
        case: The situation.
    """

    def __init__(self, simulation: Any, worker: Any, make: Any, received: Any, patch: Any, case: Any) -> None:
        self.simulation, self.nodes, self.patch, self.case = simulation, simulation.nodes, patch, case
        self.worker, self.received, self.app = worker, received, worker.app
        self.id, self.message = "", None  # those in question
        self.acts: list[Any] = []  # what the runs of that message do, one after the other
        self.meanwhile: dict[Any, Callable[[], Any]] = {}  # what happens during the run with an id
        self.aside: list[Any] = []  # messages that another worker has fetched
        self.failing = ""  # what the result backend cannot do
        self.stored_with: list[str] = []  # who had the slot when an outcome of that message was stored
        own = {"before_start": lambda task, *about: self.act(task, "before_start")}
        patch.setattr(self.app.loader, "on_task_init", lambda task_id, task: self.act(task, "on_task_init"))
        self.task = make(self.body, **{"base": type("Own", (self.app.Task,), own), **case.options})
        backend = self.task.backend
        get, store = backend.get_task_meta, backend._store_result
        patch.setattr(backend, "get_task_meta", lambda *about: self.get(get, *about))
        patch.setattr(backend, "_store_result", lambda *about, **more: self.store(store, *about, **more))

    # The task

    def body(self, task: Any, shop_id: int) -> str:
        self.meanwhile.pop(task.request.id, lambda: None)()
        self.act(task, "body")
        return f"value of {task.request.id}"

    def act(self, task: Any, where: str, task_id: str = "") -> None:
        """Do what this run of the message in question does there."""
        if not self.acts or (task_id or task.request.id) != self.id:
            return
        place, what = self.acts[0] if isinstance(self.acts[0], tuple) else ("body", self.acts[0])
        if place != where:
            return
        self.acts.pop(0)
        if isinstance(what, BaseException):
            raise what
        if what == "retries":
            task.retry(countdown=100)
        if what == "retries with other arguments":
            task.retry(args=(8,), countdown=100)
        if what == "replaces itself":
            task.replace(task.si(7))
        if what == "sees that it is STARTED":
            assert self.state() == "STARTED"
        if what == "retries without its slot":
            self.task.singleton.release(7, force=True)
            self.send("another")
            task.retry(countdown=100)
        if what == "is overtaken by its retry":
            task.retry(countdown=0, throw=False)
            self.run(self.worker.take())
        if what == "dies before it sends a retry":
            with self.patch.context() as patch:
                patch.setattr(self.app.amqp, "send_task_message", self.die)
                task.retry(countdown=0)

    def die(self, *about: Any, **more: Any) -> None:
        """End the process: it frees nothing."""
        set_down(self.nodes)
        raise SystemExit(-9)

    def holder(self, shop: int = 7) -> str:
        """Return who has the slot."""
        found = self.task.singleton.holder(shop)
        return f"{'own' if found.id == self.id else 'another'} {found.state}" if found else ""

    # The result backend

    def state(self) -> str:
        return str(self.task.AsyncResult(self.id).state)

    def get(self, get: Any, task_id: str, *about: Any) -> Any:
        self.act(self.task, "result backend", task_id)
        if "reads" in self.failing:
            fail()
        return get(task_id, *about)

    def store(self, store: Any, task_id: str, result: Any, state: str, *about: Any, **more: Any) -> Any:
        if "writes" in self.failing:
            fail()
        if task_id == self.id and state in STATES:
            with suppress(QuorumUnavailableError):
                self.stored_with.append(self.holder())
        return store(task_id, result, state, *about, **more)

    # The broker and the workers

    def send(self, value: str, by: str = "", **options: Any) -> Any:
        if by == "name":
            return self.app.send_task(self.task.name, (7, value), **options)
        return self.task.apply_async((7, value), **options)

    def send_unconfirmed(self, value: str, **options: Any) -> Any:
        """Make a call whose claim is not confirmed once its message is sent, and lapses."""
        cut_off = lambda **about: set_down(self.nodes)  # noqa: E731
        signals.after_task_publish.connect(cut_off)
        result = self.send(value, **options)
        signals.after_task_publish.disconnect(cut_off)
        self.simulation.advance(11.0)
        set_down(self.nodes, False)
        return result

    def run(self, message: Any, **how: Any) -> None:
        """Have a child run a message. If the child is stopped, a message that is acknowledged late returns."""
        try:
            self.worker.run(message, **how)
        except (Limit, ConnectionError):  # the latter when a result cannot be stored
            pass
        except SystemExit as error:
            stopped = not isinstance(error.code, int) or error.code < 0
            self.worker.returned += [message] * bool(stopped and self.task.acks_late)

    def settle(self) -> None:
        """Let workers have every message that waits or is delivered again, as time passes, until there is none."""
        for _ in range(40):
            self.simulation.advance(11.0)
            again, waiting = self.worker.returned, [*self.aside, *iter(self.worker.take, None)]
            self.worker.returned, self.aside = [], []
            if not again + waiting:
                return
            for message in again:
                self.run(message, redelivered=True)
            for message in waiting:
                self.run(message)
        raise AssertionError("messages are put back for ever")

    # Others with the same key

    def during_another_run(self, then: Callable[[], Any]) -> None:
        self.meanwhile["another"] = then
        self.send("another", task_id="another")
        self.run(self.worker.take())

    def during_another_claim(self, then: Callable[[], Any]) -> None:
        """Call *then* after another caller has claimed the slot, and before it sends its message."""

        def sending(**about: Any) -> None:
            signals.before_task_publish.disconnect(sending)
            then()

        signals.before_task_publish.connect(sending)
        self.send("another")

    def leave_on_a_node(self, message: Any) -> None:
        """Run a message while one node is away, which then still has the slot of the waiting message."""
        self.nodes[0].down = True
        self.run(message)
        self.simulation.advance(300.0)
        self.nodes[0].down = False

    # What breaks

    @contextmanager
    def faults(self) -> Iterator[None]:
        """Break what the situation says, and mend it at the end."""
        how, nodes = self.case.nodes, self.nodes

        def after_the_answer(lease: Any = None, **about: Any) -> None:
            if lease is None or lease.name == NAME:
                self.simulation.pause(31.0) if how == "slow" else set_down(nodes)
                signal.disconnect(after_the_answer)

        signal = lock_taken if how == "taken, then down" else lock_acquired
        if how in ("silent", "slow", "taken, then down"):
            signal.connect(after_the_answer)
        set_down({"down": nodes, "one down": nodes[:1], "second down": nodes[1:2]}.get(how, ()))
        for node in nodes[:2] if how == "restarted" else ():
            node.restart()
        self.failing = getattr(self.case, "backend", "")
        with self.patch.context() as patch:
            if self.failing:
                patch.setattr(self.task.backend, "on_task_call", fail)  # Celery subscribes to results with it
            if self.case.broker == "refuses":
                patch.setattr(self.app.amqp, "send_task_message", refuse)
            yield
        signal.disconnect(after_the_answer)
        set_down(nodes, False)
        self.failing = ""
        if how != "up":  # the nodes vote again, and releases that they missed reach them
            self.simulation.advance(70.0 if how == "restarted" else 1.0)


def refuse(*about: Any, **more: Any) -> None:
    raise OperationalError("full")


def fail(*about: Any, **more: Any) -> None:
    raise ConnectionError("away")
