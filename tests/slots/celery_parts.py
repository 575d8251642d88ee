"""
Celery as far as slots can tell: a broker, a result backend, workers, and a task that records its runs.

The task class, the tracer and the messages' headers are those of Celery and of production.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from unittest.mock import patch

import celery.worker.request
from celery import Celery, Task, states
from celery.app.trace import build_tracer
from celery.backends.base import BaseBackend
from celery.exceptions import TimeLimitExceeded

from django_redlock.celery import SingletonOptions, SingletonTask, parent
from django_redlock.celery.dispatch import HEADER, RECEIVED_HEADER
from django_redlock.celery.worker import EXECUTION
from django_redlock.singleton.line import GRACE
from django_redlock.singleton.ticket import Ticket
from tests.machine.world import Dead

from .world import BEGIN, Machine, PlainInfo, World

if TYPE_CHECKING:
    from .schedule import Profile

IDLE = 0.3  # seconds after which a worker looks into an empty queue again
LONG_IDLE = 20.0  # the same when nobody calls any more
DEADLINE = "deadline"  # the header with the moment at which a message expires
SENDING = 0.004  # seconds that it takes to send a retry, at most
REFUSAL = 1.0  # seconds after which a publish fails, at most
SLOW = 2.0  # seconds for which a slow result backend makes everybody wait, on average
PAST, FUTURE = "2000-01-01T00:00:00+00:00", "2999-01-01T00:00:00+00:00"


@dataclass(eq=False)  # two copies of a message are two messages
class Message:
    """A message, and when it is due, in seconds of virtual time."""

    id: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    headers: dict[str, Any]
    due: float
    delayed: bool = False
    retries: int = 0
    redelivered: bool = False

    def again(self) -> "Message":
        """Return the copy that the broker delivers when it believes the worker to be dead."""
        return replace(self, redelivered=True)

    @property
    def waited(self) -> float:
        """For how long it has been put back to wait for its slot, in seconds."""
        ticket = Ticket.unpack(self.headers.get(HEADER), self.id)
        return ticket.waited if ticket else 0.0

    def __str__(self) -> str:
        return f"{self.id[:4]} {self.args} due {self.due:.3f}"


class Visit(NamedTuple):
    """
    A moment at which a worker gets or puts back a message that has a place in the queue of its slot.

    Args:
        at: When.
        pause: For how long it is put back, in seconds; 0.0 if a worker has it.
    """

    at: float
    pause: float = 0.0

    @property
    def until(self) -> float:
        """Until when its place is kept, unless a worker gets it or puts it back before."""
        return self.at + self.pause + GRACE


class Broker:
    """A queue that delivers at least once, in any order if configured so."""

    def __init__(self, world: World, *, reorder: float) -> None:
        self._world = world
        self._reorder = reorder
        self.queue: list[Message] = []
        self.unacked: list[Message] = []  # with workers that acknowledge late
        self.lost: set[str] = set()  # ids of messages that nobody will ever get
        self.discarded: list[tuple[str, int, int]] = []  # ids and numbers of revoked messages, and when
        self.fails: dict[str, int] = {}  # for a machine's name: how many messages it cannot send
        self.busy = True  # whether anybody calls
        self.by_sender: dict[str, int] = {}  # how many messages each machine has published
        self.sent: set[str] = set()  # ids of the messages that have reached the broker
        self.dying: set[str] = set()  # machines that are killed when they publish, before the broker has it or after
        self.ends: dict[str, str] = {}  # for the id of a message that did not run: how a worker ended it
        self.got: dict[str, list[float]] = {}  # for the id of a message: when workers got it
        self.cut: dict[str, float] = {}  # for the id of a message: when a worker that had it first died
        self.visits: dict[str, list[Visit]] = {}  # of the messages that have a place, since they were put back first
        self._waited: dict[str, float] = {}

    def publish(self, message: Message) -> None:
        self._world.reach()
        machine = self._world.machine
        name = machine.name if machine else ""
        dies = name in self.dying and self._world.random.choice(["before", "after"])
        if machine and dies == "before":
            self._world.note(f"is killed, and {message} was never sent")
            machine.kill()
        if self.fails.get(name, 0):
            self.fails[name] -= 1
            self._world.sleep(self._world.random.choice([0.0, self._world.random.uniform(0.0, REFUSAL)]))
            raise OSError("the broker is away")
        self.queue.append(message)
        self.sent.add(message.id)
        self.by_sender[name] = self.by_sender.get(name, 0) + 1
        if message.waited > self._waited.get(message.id, 0.0):
            self._waited[message.id] = message.waited
            self.visits.setdefault(message.id, []).append(Visit(self._world.now, message.due - self._world.now))
        self._world.note(f"publishes {message}")
        if machine and dies:
            self._world.note("is killed")
            machine.kill()
        self._world.reach()

    def take(self) -> Message | None:
        due = [message for message in self.queue if message.due <= self._world.now]
        if not due:
            return None
        chance = self._world.random
        message = chance.choice(due) if chance.random() < self._reorder else due[0]
        self.queue.remove(message)
        return message

    def pause(self) -> float:
        """Return for how long a worker that got nothing waits."""
        due = min((message.due for message in self.queue), default=self._world.now + LONG_IDLE)
        return max(0.001, min(IDLE if self.busy or self.unacked else LONG_IDLE, due - self._world.now))

    def purge(self) -> None:
        """Drop what waits."""
        self.lost |= {message.id for message in self.queue}
        self._world.note(f"the queue is purged: {[str(message) for message in self.queue]}")
        self.queue.clear()


class Results(BaseBackend):  # type: ignore[type-arg]
    """A result backend in memory; whoever asks may lose a turn before it answers."""

    def __init__(self, app: Celery) -> None:
        super().__init__(app)
        self.world: World | None = None
        self.begin()

    def begin(self, world: World | None = None) -> None:
        """Forget everything, for the next schedule."""
        self.world = world
        self._cache.clear()
        self.kept: dict[str, dict[str, Any]] = {}
        self.revoked: dict[str, int] = {}  # for an id: the step in which it was stored as revoked
        self.stored: dict[str, tuple[int, str]] = {}  # the step of the last outcome, and the machine that stored it
        self.ended: dict[str, float] = {}  # when the last outcome was stored
        self.trouble: Literal["", "away", "slow", "full"] = ""  # full: it stores nothing

    def _store_result(self, task_id: str, result: Any, state: str, traceback: Any = None, **about: Any) -> Any:
        world = self._reach(("away", "full"))
        machine, step = world.machine, next(RecordingTask.recorder.steps)
        self.kept[task_id] = {"status": state, "result": result, "traceback": None, "children": []}
        world.note(f"result of {task_id[:4]}: {state} {result!r:.80}")
        if state == states.REVOKED:
            self.revoked.setdefault(task_id, step)
        if state in states.READY_STATES:
            self.stored[task_id] = step, machine.name if machine else ""
            self.ended[task_id] = world.now
        return result

    def _get_task_meta_for(self, task_id: str) -> Any:
        self._reach(("away",))
        return self.kept.get(task_id, {"status": states.PENDING, "result": None})

    def _reach(self, refuses: tuple[str, ...]) -> World:
        assert self.world
        self.world.reach()
        if self.trouble == "slow":
            self.world.sleep(self.world.random.uniform(0.0, 2 * SLOW))
        if self.trouble in refuses:
            self.world.note(f"the result backend is {self.trouble}")
            raise OSError(f"the result backend is {self.trouble}")
        return self.world

    def _forget(self, task_id: str) -> None:
        self.kept.pop(task_id, None)

    def state(self, task_id: str) -> str:
        """Return the state of a task, without a turn."""
        return str(self.kept.get(task_id, {"status": states.PENDING})["status"])


@dataclass(slots=True)
class Run:
    """One run of the body."""

    id: str
    value: Any
    start: float
    number: int
    end: float | None = None  # stays None if its worker died
    ended: int = 0  # the step in which the body ended
    message: int = 0  # the number of a pending call's message
    over: int = 0  # the step in which its slot was free and its result stored, or lost
    took: float = 0.0  # when it began to take its slot
    attempt: int = 0
    done: bool = False  # whether it returned, or sent a retry

    @property
    def until(self) -> float:
        """When its body ended, or, if its worker died, when it began."""
        return self.start if self.end is None else self.end


class Recorder:
    """The part of a schedule that a task records in."""

    world: World
    broker: Broker
    runs: list[Run]
    length: float
    lengths: tuple[float, float]
    fail: float
    steps: "itertools.count[int]"


class RecordingTask(Task):  # type: ignore[type-arg]
    """Sends its messages to the broker of the schedule."""

    abstract = True
    recorder = Recorder()

    def apply_async(self, args: Any = None, kwargs: Any = None, task_id: Any = None, **options: Any) -> Any:
        now = self.recorder.world.now
        countdown = options.get("countdown") or 0.0
        headers = dict(options.get("headers") or {})
        if DEADLINE not in headers and options.get("expires"):
            headers[DEADLINE] = now + options["expires"]
        message = Message(
            str(task_id),
            tuple(args or ()),
            dict(kwargs or {}),
            headers,
            now + countdown,
            bool(countdown),
            options.get("retries") or 0,
        )
        if message.retries:
            self.recorder.world.sleep(self.recorder.world.random.uniform(0.0, SENDING))
        self.recorder.broker.publish(message)
        return self.AsyncResult(message.id)

    def run(self, key: int, value: Any) -> Any:
        here = self.recorder
        ticket = Ticket.unpack(self.request.get(HEADER), self.request.id)
        run = Run(str(self.request.id), value, here.world.now, next(here.steps), message=ticket.number if ticket else 0)
        run.attempt = self.request.retries
        execution = getattr(self.request, EXECUTION)
        if execution.slot:
            run.took = execution.slot.hold.since - BEGIN
        here.runs.append(run)
        here.world.note(f"begins {run.id[:4]} with {value}")
        here.world.sleep(here.world.random.uniform(*here.lengths) * here.length)
        run.end, run.ended = here.world.now, next(here.steps)
        here.world.note(f"ends {run.id[:4]}")
        if here.world.random.random() < here.fail:
            if self.request.retries < 1 and here.world.random.random() < 0.5:
                run.done = True
                raise self.retry(countdown=1.0, max_retries=1)
            raise ValueError("failed")
        run.done = True
        return value


app = Celery("slots", broker="memory://", set_as_current=False)
results = Results(app)


def make(name: str, options: SingletonOptions, *, acks_late: bool, ignore_result: bool) -> Any:
    """Return the task of a profile, with the options that its schedule has drawn."""
    task = app.tasks.get(f"slots.{name}")
    if task is None:
        body = {"name": f"slots.{name}", "run": RecordingTask.run, "__module__": __name__}
        task = app.register_task(type("Sync", (SingletonTask, RecordingTask), body)())
        task.backend = results
        task.trace = build_tracer(task.name, task, app=app)
    task.singleton_options, task.acks_late, task.ignore_result = options, acks_late, ignore_result
    return task


class Revoked:
    """The ids that each worker knows to be revoked, as Celery's workers remember them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._known: dict[str, set[str]] = {}

    @property
    def _here(self) -> set[str]:
        machine = self._world.machine
        return self._known.setdefault(machine.name if machine else "", set())

    def __contains__(self, task_id: str) -> bool:
        return task_id in self._here

    def add(self, task_id: str) -> None:
        self._here.add(task_id)

    def discard(self, task_id: str) -> None:
        self._here.discard(task_id)

    def tell(self, workers: list[Machine], task_id: str) -> None:
        """Have all workers that are alive remember an id."""
        for worker in workers:
            if not worker.over:
                self._known.setdefault(worker.name, set()).add(task_id)

    @contextmanager
    def known(self) -> Iterator["Revoked"]:
        """Let Celery and production use this."""
        with patch.object(celery.worker.request, "revoked_tasks", self), patch.object(parent, "revoked_tasks", self):
            yield self


def receive(task: Any, message: Message, now: float) -> Any:
    """Return the request of a message, as the main process of a worker makes it."""
    info = {"exchange": "", "routing_key": "celery", "redelivered": message.redelivered}
    headers = {
        **message.headers,
        "id": message.id,
        "task": task.name,
        "retries": message.retries,
        "eta": "2026-01-01T00:00:00+00:00" if message.delayed else None,
        "is_eager": False,
    }
    if DEADLINE in headers:
        headers["expires"] = PAST if headers[DEADLINE] <= now else FUTURE
    received = parent.SingletonRequest(
        SimpleNamespace(delivery_info=info, properties={}, content_type="application/json"),
        app=app,
        task=task,
        headers=headers,
        body=(message.args, message.kwargs, {}),
        decoded=True,
        hostname="slots",
    )
    received.request_dict[RECEIVED_HEADER] = now
    return received


def work(
    machine: Machine, task: Any, broker: Broker, profile: "Profile", over: list[bool], employ: Callable[[], Machine]
) -> None:
    """Do what a worker does, one message at a time, until the schedule is over."""
    world, chance = machine.world, machine.world.random
    while not over:
        message = broker.take()
        if message is None:
            world.sleep(broker.pause())
            continue
        world.note(f"gets {message}{' again' if message.redelivered else ''}")
        broker.unacked.append(message)
        broker.got.setdefault(message.id, []).append(world.now)
        machine.busy = True
        try:
            deal_with(machine, task, broker, profile, message)
        except (Dead, SystemExit) as error:
            broker.unacked.remove(message)
            broker.cut.setdefault(message.id, world.now)
            if message.id in broker.visits:
                # A worker that is stopped gives up the place of its message. One that is killed may have got the slot,
                # one of several, without knowing that, and the place ends with it.
                ends = machine.stopped if isinstance(error, SystemExit) else world.now
                broker.visits[message.id].append(Visit(ends, -GRACE))
            if profile.late:
                message.redelivered, message.due = True, world.now + chance.choice(profile.unseen)
                broker.queue.append(message)
            else:
                broker.lost.add(message.id)
            if not machine.dead:
                employ()
            machine.kill()
        broker.unacked.remove(message)
        machine.busy = False
        if not over and chance.random() < profile.recycled:
            world.note("is recycled")
            employ()
            machine.kill()


def deal_with(machine: Machine, task: Any, broker: Broker, profile: "Profile", message: Message) -> None:
    """Run a message, or let it end otherwise."""
    world, chance = machine.world, machine.world.random
    received = receive(task, message, world.now)
    if chance.random() < profile.prefetched:
        world.sleep(chance.uniform(0.0, 4.0))  # the child still has another message
    if received.revoked():
        ticket = Ticket.unpack(message.headers.get(HEADER), message.id)
        assert ticket
        broker.discarded.append((message.id, ticket.number, next(RecordingTask.recorder.steps)))
    elif chance.random() < profile.cut_short:
        if chance.random() < 0.5:
            world.note(f"{message.id[:4]} exceeds its time limit before its body begins")
            received.on_timeout(False, 1.0)
            fail(received, TimeLimitExceeded(1.0))
        else:  # as revoke(terminate=True) does under gevent, which then kills the greenlet
            world.note(f"{message.id[:4]} is terminated before its body begins")
            received.time_start = 1.0
            received.terminate(SimpleNamespace(terminate_job=lambda *about: None), "TERM")
    else:
        if message.id in broker.visits:
            broker.visits[message.id].append(Visit(world.now))
        try:
            ended = task.trace(message.id, message.args, message.kwargs, received.request_dict)
        except Exception as error:  # the backend does not store the result, nor that it did not
            world.note(f"{message.id[:4]} ends with {error!r}")
            with suppress(OSError):
                fail(received, error)
        else:
            broker.ends[message.id] = repr(getattr(ended.retval, "exception", None))
        for run in RecordingTask.recorder.runs:
            if run.id == message.id and run.end is not None and not run.over:
                run.over = next(RecordingTask.recorder.steps)


def fail(received: Any, error: Exception) -> None:
    """Let the main process of a worker learn of the failure of its child."""
    try:
        raise error
    except type(error):
        received.on_failure(PlainInfo())


@dataclass(slots=True)
class Answer:
    """The answer to one call, and when it was made."""

    caller: str
    value: Any
    start: int
    end: int
    began: float
    id: str = ""
    accepted: bool = True
    duplicate: bool = False
    reason: str = ""
    holder_id: str | None = None
    sent: int = 0
    error: str = ""  # the name of its class
    extra: dict[str, Any] = field(default_factory=dict)
