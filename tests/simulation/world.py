"""
Virtual time: an event heap, tasks that are generators, and processes that can be stopped anywhere.

Nothing here sleeps, starts a thread or reads a real clock, and all randomness comes from one seeded generator, so one
seed is one schedule.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

LAG = 2e-5  # the longest time in seconds that the scheduler takes to run a ready task
EPOCH = 1_795_000_000.0  # where wall clocks begin, in seconds: a number of microseconds with all its digits


@dataclass(slots=True)
class Sleep:
    """Resume the task after the given seconds of its process's steady clock."""

    seconds: float


@dataclass(slots=True)
class Wait:
    """Resume the task when something calls :meth:`Task.wake`, or after the given seconds of the steady clock."""

    seconds: float


@dataclass(slots=True)
class Call:
    """Send a request to a server: *begin* runs there with a function for the reply; the task resumes with the reply."""

    begin: Callable[[Callable[[Any], None]], None]


AT_ONCE = Sleep(0.0)

Command = Sleep | Wait | Call
Routine = Generator[Command, Any, Any]


class Cancelled(Exception):
    """
    Raised in a task at the point where it waits, as asyncio does on cancellation, or a signal handler in a thread.
    """


class Place:
    """A place for events: a process, a node or a member of one, which may be paused."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.stopped_until = 0.0

    def at(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Run *call* here at *time*, or when this place continues."""
        world = self.world
        heappush(world.heap, (time, world.number(), self, False, call, args))

    def miss(self, network: bool, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Let an event happen when this place continues."""
        self.at(self.stopped_until, call, *args)


# Time, order among events at one time, place (None: anywhere), whether it comes from the network, and the call.
Event = tuple[float, int, Place | None, bool, Callable[..., object], tuple[Any, ...]]


class World:
    """All events of one schedule, in order of time."""

    def __init__(self, seed: int, traced: bool = False) -> None:
        self.random = Random(seed)
        self.now = 0.0
        self.trace: list[str] | None = [] if traced else None
        self.heap: list[Event] = []
        self.number = count(1).__next__  # of the next event

    def at(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Run *call* at *time*, at no particular place."""
        now = self.now
        heappush(self.heap, (time if time > now else now, self.number(), None, False, call, args))

    def run(self, until: float) -> None:
        """Run all events that are due by *until*."""
        heap, pop = self.heap, heappop
        while heap and heap[0][0] <= until:
            now, _, where, network, call, args = pop(heap)
            self.now = now
            if where is None or now >= where.stopped_until:
                call(*args)
            else:
                where.miss(network, call, args)
        self.now = max(self.now, until)

    def log(self, who: str, what: str, *details: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.6f} {who:<8} {what} {' '.join(map(str, details))}".rstrip())


class Clock:
    """A clock with a rate of its own, which can step."""

    def __init__(self, world: World, base: float, rate: float = 1.0) -> None:
        self._world = world
        self.base = base
        self.rate = rate

    def __call__(self) -> float:
        return self.base + self._world.now * self.rate

    def step(self, seconds: float) -> None:
        self.base += seconds


class Task:
    """One thread or asyncio task of a process: a generator that yields commands."""

    __slots__ = ("_process", "_routine", "_ticket", "waiting")

    def __init__(self, process: "Computer", routine: Routine) -> None:
        self._process = process
        self._routine = routine
        self._ticket = 0
        self.waiting = False

    def wake(self) -> None:
        if self.waiting:
            self.waiting = False
            self._ticket += 1
            process = self._process
            process.after(process.random() * LAG, self.resume, self._ticket)

    def cancel(self) -> None:
        """Raise :class:`Cancelled` in the task, instead of the event that it waits for."""
        self.waiting = False
        self._ticket += 1
        self._process.after(self._process.lag(), self.resume, self._ticket, Cancelled())

    def resume(self, ticket: int, value: Any = None) -> None:
        """Let it run to its next command."""
        if ticket != self._ticket:
            return
        self._ticket += 1
        self.waiting = False
        process = self._process
        process.current = self
        try:
            command = self._routine.throw(value) if value.__class__ is Cancelled else self._routine.send(value)
        except (StopIteration, Cancelled):
            return
        ticket, kind = self._ticket, command.__class__
        if kind is Call:
            command.begin(lambda answer: process.after(0.0, self.resume, ticket, answer))
            return
        self.waiting = kind is Wait
        world = process.world  # as Computer.after() does; half of all events come from here
        delay = process.random() * LAG + command.seconds / process.steady.rate
        heappush(world.heap, (world.now + delay, world.number(), process, False, self.resume, (ticket,)))


class Computer(Place):
    """A process: its clocks, its tasks, and the moments at which it does not run."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world)
        self.name = name
        self.dead = False
        self.random = world.random.random
        self.steady = Clock(world, world.random.uniform(10, 10_000))
        self.wall = Clock(world, EPOCH)
        self.current: Task | None = None
        self._missed: list[tuple[bool, Callable[..., object], tuple[Any, ...]]] = []

    def lag(self) -> float:
        """Return how long the scheduler takes to run a ready task."""
        return self.random() * LAG

    def spawn(self, routine: Routine) -> Task:
        task = Task(self, routine)
        self.after(0.0, task.resume, 0)
        return task

    def after(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        """Run *call* in this process, a little later, when the process runs and has not died."""
        world = self.world
        heappush(world.heap, (world.now + delay, world.number(), self, False, call, args))

    def arrive(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Do the same at *time* for network events, which a process that wakes up reads before timers."""
        world = self.world
        heappush(world.heap, (time, world.number(), self, True, call, args))

    def stop(self, seconds: float) -> None:
        """Pause for the given time, in the middle of any action."""
        if self.world.now >= self.stopped_until:
            self.stopped_until = self.world.now + seconds
            self.world.log(self.name, "stops", f"for {seconds:.3f}")
            self.world.at(self.stopped_until, self._go_on)

    def kill(self) -> None:
        """End permanently."""
        self.dead = True
        self.stopped_until = float("inf")
        self._missed.clear()
        self.world.log(self.name, "dies")

    def miss(self, network: bool, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Keep the event until the process continues."""
        if not self.dead:
            self._missed.append((network, call, args))

    def _go_on(self) -> None:
        missed, self._missed = self._missed, []
        for network, call, args in sorted(missed, key=lambda item: not item[0]):
            if self.world.now >= self.stopped_until:
                call(*args)
            else:  # one of them paused it again
                self.miss(network, call, args)
