"""
The world of a schedule: virtual time, lock nodes, and machines that take turns.

Each machine is a greenlet with a process of its own, and so with locks of its own. A machine may lose its turn before
every request that reaches a lock node, a broker or a result backend; which machine is next comes from the seed. Time
passes only while no machine can go on.

Each machine has its own way to each node, which may take time. A request is executed when it arrives, even if its
sender has given up or was killed by then. Requests on one connection arrive in order; those of two machines, or of two
connections of one machine, need not.
"""

import logging
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

from greenlet import getcurrent, greenlet

from django_redlock import locks
from django_redlock.celery import dispatch as result
from django_redlock.celery import request as received
from django_redlock.celery import worker as message
from django_redlock.core.acquisition import Waiter
from django_redlock.core.admission import Greeting
from django_redlock.core.protocol import Failure, Kind, Reply, Request
from django_redlock.engine.connections import Connection, ConnectionSet, IdleConnections
from django_redlock.nodes.base import INCOMPLETE, LinkError, Packed
from django_redlock.nodes.memory import checked, known
from django_redlock.runtime.process import process
from django_redlock.testing.simulation import EPOCH, RETRY, SimulatedProcess, Simulation, VirtualNotifications

SWITCH = 0.4  # how often a machine loses its turn before a request
LONGEST_RETRY = 30.0  # seconds between two tries to redeliver a release to a node that stays away
SHORTEST = 0.001  # seconds for which a machine waits for a reply at least, as with a poll

Away = Literal["down", "deaf", "mute", "paused"]
"""
How a node is away: it refuses connections, loses requests, executes them and loses its replies, or does everything once
it is back.
"""


class Dead(BaseException):
    """The machine was killed; nothing of it reaches anybody any more."""


class Machine:
    """One process."""

    def __init__(self, world: "World", name: str, work: Callable[["Machine"], None]) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.busy = False  # whether it is a worker that has a message
        self.wakes = 0.0
        self.called: threading.Event | None = None
        self.bell = threading.Event()  # rung when a reply has come
        self.process: SimulatedProcess = world.sim.rival(name)
        driver = self.process.manager.driver
        driver.gather.idle = TurnConnections(world)
        driver.redelivery = TurnRedelivery(world, self)  # type: ignore[assignment]
        driver.notifications = TurnNotifications(world, self.process.manager)  # type: ignore[assignment]
        self.greenlet = greenlet(partial(self._run, work), parent=world.hub)

    def _run(self, work: Callable[["Machine"], None]) -> None:
        with suppress(Dead):
            work(self)

    @property
    def over(self) -> bool:
        """Whether it has nothing more to do."""
        return self.dead or self.greenlet.dead

    def can_go_on(self, now: float) -> bool:
        """Return whether it waits for nothing."""
        return not self.over and (self.wakes <= now or (self.called is not None and self.called.is_set()))

    def kill(self) -> None:
        """End it as SIGKILL does: not even its ``finally`` blocks reach anybody."""
        self.dead = True
        self.process.kill()
        if self.greenlet is getcurrent():
            raise Dead
        self.greenlet.throw(Dead)

    def stop(self) -> None:
        """End the run of its message as a signal does, whose handler raises: ``finally`` blocks still do their work."""
        self.greenlet.throw(SystemExit(-15))


class TurnLink:
    """One connection of a machine to a node."""

    def __init__(self, world: "World", machine: Machine, number: int) -> None:
        self._world = world
        self._machine = machine
        self._number = number
        self._node = world.sim.nodes[number]
        self.greeting = self._node.describe()
        self._broken = False
        self._arrives = 0.0  # when the last request arrives
        self._requests: deque[Request] = deque()  # on their way
        self._returning: deque[Reply | None] = deque()
        self._replies: deque[Reply | None] = deque()

    def fileno(self) -> int:
        return 0

    def greet(self) -> None:
        """Ask the node to describe itself again; see :class:`~django_redlock.nodes.base.Link`."""

    def receive_greeting(self) -> Greeting | None:
        """Return how the node describes itself, which takes no time here."""
        return checked(self._node.describe(), self.greeting.mark)

    def send(self, request: Request, packed: Packed, *, in_full: bool = False) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.Link`."""
        self._world.reach()
        self._world.count_request()
        if self._broken:
            raise LinkError(Failure.RESET)
        self._requests.append(request)
        now, delay = self._world.now, self._world.delay(self._machine, self._number)
        self._arrives = max(self._arrives, now + delay)
        self._later(self._arrives - now, self._arrive, len(self._requests) == 1)

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        return self._broken or bool(self._replies and self._replies[0])

    def receive(self, request: Request) -> Reply | None:
        """Return the reply to the oldest request; see :class:`~django_redlock.nodes.base.Link`."""
        if self._broken:
            raise LinkError(Failure.RESET)
        return known(self._replies.popleft()) if self.readable() else INCOMPLETE

    def close(self) -> None:
        """Close the connection; what was sent still arrives."""
        self._broken = True

    def _later(self, seconds: float, step: Callable[[], None], alone: bool) -> None:
        if seconds > 0 or not alone:
            self._world.sim.after(seconds, step)
        else:
            step()

    def _arrive(self) -> None:
        if not self._world.holds_up(self._number, self._arrive):
            with suppress(LinkError):
                self._returning.append(self._node.execute(self._requests.popleft(), self.greeting.mark))
                way = self._world.delay(self._machine, self._number)
                self._later(way, self._return, len(self._returning) == 1)
                return
            self._broken = True
            self._machine.bell.set()

    def _return(self) -> None:
        self._replies.append(self._returning.popleft())
        self._machine.bell.set()


class TurnConnectionSet(ConnectionSet):
    """Has a machine that waits for replies lose its turn until one comes."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world

    def connection(self, connection: Connection) -> None:
        self.by_node[connection.node] = connection

    def drop(self, connection: Connection) -> None:
        del self.by_node[connection.node]

    def read(self, seconds: float) -> list[tuple[Connection, LinkError | None]]:
        """Wait until connections can be read, and read them."""
        machine, now = self._world.machine, self._world.now
        if seconds > 0 and not self._readable():
            if machine:
                machine.bell.clear()
            self._world.block(now + max(SHORTEST, seconds), machine and machine.bell)
        return [(connection, connection.read()) for connection in self._readable()]

    def _readable(self) -> list[Connection]:
        return [connection for connection in self.by_node.values() if connection.link.readable()]


class TurnConnections(IdleConnections):
    """Gives a machine connections of its own. What its process renews in the background is executed at once."""

    def __init__(self, world: "World") -> None:
        super().__init__()
        self._world = world

    def take(self, now: float) -> ConnectionSet:
        """Return the connections that were used last, or new ones."""
        if self._world.machine is None:
            return ConnectionSet()
        connections = super().take(now)
        return connections if isinstance(connections, TurnConnectionSet) else TurnConnectionSet(self._world)

    def give_back(self, connections: ConnectionSet) -> None:
        """Let the next round use these connections, if they are the machine's own."""
        if isinstance(connections, TurnConnectionSet):
            super().give_back(connections)


class TurnRedelivery:
    """Redelivers releases to nodes that missed them, for as long as its machine lives."""

    def __init__(self, world: "World", machine: Machine) -> None:
        self._world = world
        self._machine = machine

    def take(self, requests: Mapping[int, Request], until: float) -> None:
        """Deliver each request to its node, now or when the node can be reached again."""
        for number, request in requests.items():
            way = self._world.delay(self._machine, number)
            self._world.sim.after(way, partial(self._bring, number, request, until))

    def _bring(self, number: int, request: Request, until: float, pause: float = RETRY) -> None:
        if self._machine.dead:
            return
        reply = None
        with suppress(LinkError):
            reply = self._world.sim.nodes[number].execute(request)
        missed = reply is None or reply.kind in (Kind.UNKNOWN, Kind.FAILED)
        if missed and self._world.now + pause < until:
            self._world.sim.after(pause, partial(self._bring, number, request, until, min(LONGEST_RETRY, 2 * pause)))

    def close(self) -> None:
        """Do nothing: there is no thread to end."""


class TurnNotifications(VirtualNotifications):
    """Has a machine that waits for a lock lose its turn until it is called."""

    def __init__(self, world: "World", manager: Any) -> None:
        super().__init__(world.sim, manager)
        self._world = world

    def wait(self, waiter: Waiter, seconds: float, told: float) -> None:
        self._world.block(self._world.now + told, self.waiters.join(waiter))


class Managers(dict[str, Any]):
    """Gives each machine the locks of its own process."""

    def __init__(self, world: "World", others: Any) -> None:
        super().__init__(default=others)
        self._world = world

    def __getitem__(self, alias: str) -> Any:
        machine = self._world.machine
        return machine.process.manager if machine else super().__getitem__(alias)


class PlainInfo:
    """Stands in for billiard's copy of a traceback, which takes longer than all the rest of a schedule."""

    def __init__(self, *about: Any, **options: Any) -> None:
        self.type, self.exception, self.tb = sys.exc_info()
        self.traceback, self.internal, self.exc_info = "", False, None


class World:
    """Virtual time, lock nodes and machines."""

    def __init__(
        self, seed: int, *, ways: tuple[float, ...] = (0.0,), node_timeout: float = 0.25, traced: bool = False
    ) -> None:
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self.sim = Simulation(nodes=3, check=False, node_timeout=node_timeout)
        self.sim.runtime = replace(self.sim.runtime, sleep=self.sleep, random=self.random.random)
        self.hub = getcurrent()
        self.machines: list[Machine] = []
        self._ways = ways
        self._drawn: dict[tuple[str, int], float] = {}
        self._countdown = 0  # of requests, until *_then* is called
        self._then: Callable[[], object] = bool
        self._held_up: dict[int, list[Callable[[], None]]] = {}  # what has arrived at nodes that are paused
        self._traced = traced

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace clocks, randomness and locks."""
        random.seed(self.random.random())
        draw = lambda size: self.random.randbytes(size)  # noqa: E731
        with ExitStack() as stack:
            for patched in (
                patch.object(os, "urandom", draw),
                patch.multiple(process, pid=1, name="process"),  # they are part of what nodes store
                patch("django_redlock.engine.manager._managers", set()),  # those that are closed when Python ends
                patch.object(logging.getLogger("django_redlock"), "disabled", True),
                patch.object(logging.getLogger("celery.worker.request"), "disabled", True),
                patch("celery.app.trace.ExceptionInfo", PlainInfo),
                patch("celery.worker.request.ExceptionInfo", PlainInfo, create=True),  # since Celery 5.6
                patch("celery.app.trace.report_internal_error", lambda task, error: PlainInfo()),
                patch("celery.app.trace.TraceInfo._log_error", lambda *about: None),
                patch.object(message, "steady", self.sim.clock),
                patch.object(received, "steady", self.sim.clock),
                patch.object(result, "time", lambda: EPOCH + self.now),
                self.sim,
            ):
                stack.enter_context(patched)  # type: ignore[arg-type]
            stack.enter_context(patch.object(locks, "_managers", Managers(self, locks._managers["default"])))
            for number, node in enumerate(self.sim.nodes):
                node.connect = partial(self._connect, number, node.connect)  # type: ignore[method-assign]
            yield

    @property
    def now(self) -> float:
        return self.sim.clock()

    @property
    def machine(self) -> Machine | None:
        """The machine whose turn it is; None outside all of them."""
        current = getcurrent()
        return next((machine for machine in self.machines if machine.greenlet is current), None)

    def add(self, name: str, work: Callable[[Machine], None]) -> Machine:
        machine = Machine(self, name, work)
        self.machines.append(machine)
        return machine

    def note(self, text: str) -> None:
        """Keep a line about what happens."""
        if self._traced:
            machine = self.machine
            self.trace.append(f"{self.now - 1000:9.3f}  {machine.name if machine else '-':<10} {text}")

    # Turns

    def reach(self) -> None:
        """
        Have the machine whose turn it is reach somebody else; it may lose its turn before that.

        Raises:
            Dead: It was killed.
        """
        machine = self.machine
        if machine is None:
            return
        if not machine.dead and self.random.random() < SWITCH:
            self.hub.switch()
        if machine.dead:
            raise Dead

    def sleep(self, seconds: float) -> None:
        """Have the machine whose turn it is wait."""
        self.block(self.now + seconds)

    def block(self, until: float, called: threading.Event | None = None) -> None:
        """Have the machine whose turn it is wait until a moment, or until it is called."""
        machine = self.machine
        if machine is None:
            self.sim.advance(max(0.0, until - self.now))
            return
        machine.wakes, machine.called = until, called
        try:
            self.hub.switch()
        finally:  # a signal may end the wait
            machine.wakes, machine.called = 0.0, None
        if machine.dead:
            raise Dead

    def run(self, until: float, over: Callable[[], bool]) -> None:
        """Give turns until *over*, or a moment."""
        while self.now < until and not over():
            ready = [machine for machine in self.machines if machine.can_go_on(self.now)]
            if ready:
                self.random.choice(ready).greenlet.switch()
                continue
            waking = [machine.wakes for machine in self.machines if not machine.over]
            if not waking:
                return
            self.sim.idle(max(1e-6, min(min(waking), until) - self.now))

    # The network

    def delay(self, machine: Machine, number: int) -> float:
        """Return the seconds that the next request of a machine to a node, or the reply to it, travels."""
        if len(self._ways) == 1:
            return self._ways[0]
        way = self._drawn.get((machine.name, number))
        if way is None:
            way = self._drawn[machine.name, number] = self.random.choice(self._ways)
        return way and way * self.random.uniform(0.5, 1.5)

    def until_request(self, number: int, then: Callable[[], None], seconds: float) -> None:
        """Have the machine wait until that many requests were sent; *then* is called before the last one arrives."""
        called = threading.Event()
        self._countdown, self._then = number, lambda: (then(), called.set())
        self.block(self.now + seconds, called)
        self._countdown = 0

    def count_request(self) -> None:
        if self._countdown:
            self._countdown -= 1
            if not self._countdown:
                self._then()

    def take_away(self, number: int, how: Away) -> None:
        node = self.sim.nodes[number]
        self.note(f"{node.name} is {how}")
        node.down, node.deaf, node.silent = how == "down", how in ("deaf", "paused"), how == "mute"
        if how == "paused":
            self._held_up[number] = []

    def bring_back(self, number: int) -> None:
        """Make a node reachable again; one that was paused executes what has arrived meanwhile."""
        node = self.sim.nodes[number]
        self.note(f"{node.name} is back")
        node.down = node.deaf = node.silent = False
        for arrive in self._held_up.pop(number, []):
            arrive()

    def holds_up(self, number: int, arrive: Callable[[], None]) -> bool:
        """Return whether a node is paused; it then calls *arrive* once it is back."""
        if (held_up := self._held_up.get(number)) is not None:
            held_up.append(arrive)
        return held_up is not None

    def _connect(self, number: int, connect: Callable[[float], Any], timeout: float) -> Any:
        link, machine = connect(timeout), self.machine
        return TurnLink(self, machine, number) if machine else link
