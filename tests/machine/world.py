"""
Virtual time: an event heap, threads that are greenlets, and processes that can be stopped anywhere.

Nothing here sleeps, starts a thread or reads a real clock, and all randomness comes from one seeded generator, so one
seed is one schedule. A thread runs until it waits; what else is due by then comes in the order of time.
"""

import logging
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any

from greenlet import getcurrent, greenlet

LAG = 2e-5  # the longest time in seconds that the scheduler takes to run a ready thread
EPOCH = 1_795_000_000.0  # where wall clocks begin, in seconds: a number of microseconds with all its digits
LOG = logging.getLogger("django_redlock")
FOR_EVER = float("inf")
MANY = 20  # threads of a process after which to forget those that are over


class Cancelled(BaseException):
    """Raised in a thread at the point where it waits, as a signal handler does."""


class Dead(BaseException):
    """Raised in the threads of a process that was killed; nothing of it reaches anybody any more."""


class Place:
    """A place for events: a process, a node or a member of one, which may be paused."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.stopped_until = 0.0
        self._missed: list[tuple[bool, Callable[..., object], tuple[Any, ...]]] = []

    def at(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Run *call* here at *time*, or when this place continues."""
        world = self.world
        heappush(world.heap, (time, world.number(), self, False, call, args))

    def arrive(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Do the same for network events, which a process that wakes up reads before timers."""
        world = self.world
        heappush(world.heap, (time, world.number(), self, True, call, args))

    def stop(self, seconds: float) -> None:
        """Pause for the given time, in the middle of any action."""
        if self.world.now >= self.stopped_until:
            self.stopped_until = self.world.now + seconds
            self.world.log(self.name, "stops", f"for {seconds:.3f}")
            if seconds < FOR_EVER:
                self.world.at(self.stopped_until, self.go_on)

    def miss(self, network: bool, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Keep an event until this place continues."""
        self._missed.append((network, call, args))

    def go_on(self) -> None:
        """Continue after a pause."""
        self.stopped_until = min(self.stopped_until, self.world.now)
        missed, self._missed = self._missed, []
        for network, call, args in sorted(missed, key=lambda item: not item[0]):
            if self.world.now >= self.stopped_until:
                call(*args)
            else:  # one of them paused it again
                self.miss(network, call, args)


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
        self.hub = getcurrent()  # runs the events, and resumes the threads
        self.thread: Thread | None = None  # whose turn it is
        self.computers: list[Computer] = []
        self._error: BaseException | None = None

    def at(self, time: float, call: Callable[..., object], *args: Any) -> None:
        """Run *call* at *time*, at no particular place."""
        now = self.now
        heappush(self.heap, (time if time > now else now, self.number(), None, False, call, args))

    def run(self, until: float, over: Callable[[], bool] = bool) -> None:
        """Run all events that are due by *until*, or until it is *over*."""
        heap, pop = self.heap, heappop
        LOG.addFilter(self._look_at)
        try:
            while heap and heap[0][0] <= until:
                now, _, where, network, call, args = pop(heap)
                self.now = now
                if where is None or now >= where.stopped_until:
                    call(*args)
                    if self._error:
                        raise self._error
                    if over is not bool and over():
                        return
                else:
                    where.miss(network, call, args)
            self.now = max(self.now, until)
        finally:
            LOG.removeFilter(self._look_at)

    def _look_at(self, record: logging.LogRecord) -> bool:
        """Drop what production logs; an error that it did not expect is one of the simulation."""
        if record.exc_info and not isinstance(record.exc_info[1], OSError):
            self._error = record.exc_info[1]
        return False

    def sleep(self, seconds: float) -> None:
        """Have the thread whose turn it is wait."""
        assert self.thread
        self.thread.sleep(seconds)

    def log(self, who: str, what: str, *details: object) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now:9.6f} {who:<8} {what} {' '.join(map(str, details))}".rstrip())

    def close(self) -> None:
        """End all threads, which would keep the schedule in memory while they wait."""
        for computer in self.computers:
            computer.dead = True
            computer.close()


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


class Thread:
    """One thread of a process: a greenlet that runs until it waits."""

    __slots__ = ("_greenlet", "_process", "_ticket", "_waiting")

    def __init__(self, process: "Computer", work: Callable[[], object]) -> None:
        self._process = process
        self._greenlet = greenlet(partial(self._run, work), process.world.hub)
        self._ticket = 0
        self._waiting = False

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except (Cancelled, Dead):
            return

    @property
    def over(self) -> bool:
        return bool(self._greenlet.dead)

    @property
    def process(self) -> Any:
        return self._process

    def sleep(self, seconds: float) -> None:
        """Wait for the given seconds of the process's steady clock."""
        self.wait(seconds, alarm=False)

    def wait(self, seconds: float = FOR_EVER, *, alarm: bool = True) -> None:
        """Wait until something calls :meth:`wake`, or for the given seconds of the steady clock."""
        process, ticket, world = self._process, self._ticket, self._process.world
        self._waiting = alarm
        if seconds < FOR_EVER:  # as Computer.after() does; half of all events come from here
            delay = process.random() * LAG + seconds / process.steady.rate
            heappush(world.heap, (world.now + delay, world.number(), process, False, self.resume, (ticket,)))
        self._switch()

    def call(self, begin: Callable[[Callable[[Any], None]], None]) -> Any:
        """Send a request to a server: *begin* gets a function for the reply, which this returns."""
        ticket = self._ticket
        begin(lambda answer: self._process.after(0.0, self.resume, ticket, answer))
        return self._switch()

    def _switch(self) -> Any:
        if self._process.dead:
            raise Dead
        return self._process.world.hub.switch()

    def wake(self) -> None:
        """End its wait."""
        if self._waiting:
            self._waiting = False
            self._ticket += 1
            process = self._process
            process.after(process.random() * LAG, self.resume, self._ticket)

    def interrupt(self, error: BaseException) -> None:
        """Raise an error in the thread, in place of the event that it waits for."""
        self._waiting = False
        self._ticket += 1
        self._process.after(self._process.lag(), self.resume, self._ticket, error)

    def cancel(self) -> None:
        self.interrupt(Cancelled())

    def resume(self, ticket: int, value: Any = None) -> None:
        """Let it run until it waits."""
        thread, fails = self._greenlet, isinstance(value, BaseException)
        if ticket != self._ticket or thread.dead or (fails and not thread):  # it is over, or was never begun
            return
        self._ticket += 1
        self._waiting = False
        world = self._process.world
        world.thread = self
        if fails:
            thread.throw(value)
        elif thread:
            thread.switch(value)
        else:
            thread.switch()
        world.thread = None

    def end(self) -> None:
        """End it, because its process is dead."""
        self.resume(self._ticket, Dead())


class Computer(Place):
    """A process: its clocks, its threads, and the moments at which it does not run."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world, name)
        self.dead = False
        self.random = world.random.random
        self.steady = Clock(world, world.random.uniform(10, 10_000))
        self.wall = Clock(world, EPOCH)
        self._threads: list[Thread] = []
        world.computers.append(self)

    def clock(self) -> float:
        steady = self.steady
        return steady.base + self.world.now * steady.rate

    def lag(self) -> float:
        """Return how long the scheduler takes to run a ready thread."""
        return self.random() * LAG

    def spawn(self, work: Callable[..., object], *args: Any) -> Thread:
        """Start a thread."""
        thread = Thread(self, partial(work, *args))
        if len(self._threads) > MANY:
            self._threads = [each for each in self._threads if not each.over]
        self._threads.append(thread)
        self.after(0.0, thread.resume, 0)
        return thread

    def after(self, delay: float, call: Callable[..., object], *args: Any) -> None:
        """Run *call* in this process, a little later, when the process runs and has not died."""
        world = self.world
        heappush(world.heap, (world.now + delay, world.number(), self, False, call, args))

    def kill(self) -> None:
        """End permanently, as by SIGKILL: not even the ``finally`` blocks of its threads reach anybody."""
        self.dead = True
        self.stopped_until = FOR_EVER
        self._missed.clear()
        self.world.log(self.name, "dies")
        self.world.at(self.world.now, self.close)
        if self.world.thread in self._threads:
            raise Dead

    def close(self) -> None:
        """End its threads."""
        for thread in self._threads:
            thread.end()

    def miss(self, network: bool, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        """Keep the event until the process continues."""
        if not self.dead:
            super().miss(network, call, args)
