"""
The world of a schedule: machines of the simulation, on each of which one caller or worker runs.

A machine may lose its turn before every request that reaches a lock node, a broker or a result backend. Each machine
has its own way to each node, which may take time. A request is executed when it arrives, even if its sender has given
up or was killed by then.
"""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

from django_redlock import locks
from django_redlock.celery import dispatch as result
from django_redlock.celery import parent
from django_redlock.celery import worker as message
from django_redlock.core.rules import Rules
from django_redlock.runtime.process import process
from tests.machine import world as machines
from tests.machine.network import Faults, Hazards, Node, Observer
from tests.machine.process import Bell, Process
from tests.machine.world import EPOCH, FOR_EVER, Clock, Dead

SWITCH = 0.4  # how often a machine loses its turn before a request
BEGIN = 1000.0  # what steady clocks show at the beginning

Away = Literal["down", "deaf", "mute", "paused"]
"""
How a node is away: it refuses connections, loses requests, executes them and loses its replies, or does everything once
it is back.
"""


class Machine(Process):
    """One process with one main thread."""

    world: "World"

    def __init__(self, world: "World", name: str, work: Callable[["Machine"], None]) -> None:
        super().__init__(world, name, world.nodes, world.rules, world.faults)
        self.steady.base = BEGIN
        self.busy = False  # whether it is a worker that has a message
        self.stopped = 0.0  # when it got the signal to end
        self._main = self.spawn(work, self)

    @property
    def over(self) -> bool:
        """Whether it has nothing more to do."""
        return self.dead or self._main.over

    def terminate(self) -> None:
        """End the run of its message as a signal does, whose handler raises: ``finally`` blocks still do their work."""
        self.stopped = self.world.now
        self._main.interrupt(SystemExit(-15))

    def transmits(self) -> None:
        self.world.reach()
        self.world.count_request()


class Managers(dict[str, Any]):
    """Gives each machine the locks of its own process."""

    def __init__(self, world: "World") -> None:
        super().__init__(default=None)
        self._world = world

    def __getitem__(self, alias: str) -> Any:
        machine = self._world.machine
        assert machine
        return machine.manager


class PlainInfo:
    """Stands in for billiard's copy of a traceback, which takes longer than all the rest of a schedule."""

    def __init__(self, *about: Any, **options: Any) -> None:
        self.type, self.exception, self.tb = sys.exc_info()
        self.traceback, self.internal, self.exc_info = "", False, None


class World(machines.World):
    """Virtual time, lock nodes and machines."""

    def __init__(self, seed: int, hazards: Hazards, *, node_timeout: float = 0.25, traced: bool = False) -> None:
        super().__init__(seed, traced)
        self.rules = Rules(3, node_timeout=node_timeout)
        self.faults = Faults(self, hazards)
        self.nodes = [Node(self, number, Observer()) for number in range(3)]
        self.machines: list[Machine] = []
        self._countdown = 0  # of requests, until *_then* is called
        self._then: Callable[[], object] = bool

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace clocks, randomness and locks."""
        random.seed(self.random.random())
        draw = lambda size: self.random.randbytes(size)  # noqa: E731
        steady = Clock(self, BEGIN)
        with ExitStack() as stack:
            for patched in (
                patch.object(os, "urandom", draw),
                patch.multiple(process, pid=1, name="process"),  # they are part of what nodes store
                patch.object(logging.getLogger("celery.worker.request"), "disabled", True),
                patch("celery.app.trace.ExceptionInfo", PlainInfo),
                patch("celery.worker.request.ExceptionInfo", PlainInfo, create=True),  # since Celery 5.6
                patch("celery.app.trace.report_internal_error", lambda task, error: PlainInfo()),
                patch("celery.app.trace.TraceInfo._log_error", lambda *about: None),
                patch.object(message, "steady", steady),
                patch.object(parent, "steady", steady),
                patch.object(result, "time", lambda: EPOCH + self.now),
                patch.object(locks, "_managers", Managers(self)),
            ):
                stack.enter_context(patched)  # type: ignore[arg-type]
            stack.callback(self.close)
            yield

    @property
    def machine(self) -> Machine | None:
        """The machine whose turn it is; None outside all of them."""
        return self.thread.process if self.thread else None

    def add(self, name: str, work: Callable[[Machine], None]) -> Machine:
        machine = Machine(self, name, work)
        self.machines.append(machine)
        return machine

    def note(self, text: str) -> None:
        """Keep a line about what happens."""
        self.log(self.machine.name if self.machine else "-", text)

    def reach(self) -> None:
        """
        Have the machine whose turn it is reach somebody else; it may lose its turn before that.

        Raises:
            Dead: It was killed.
        """
        machine = self.machine
        if machine and machine.dead:
            raise Dead
        if machine and self.random.random() < SWITCH:
            self.sleep(0.0)

    # Nodes that are away

    def until_request(self, number: int, then: Callable[[], None], seconds: float) -> None:
        """Have the machine wait until that many requests were sent; *then* is called before the last one arrives."""
        assert self.machine
        bell = Bell(self.machine)
        self._countdown, self._then = number, lambda: (then(), bell.ring())
        bell.wait(seconds)
        self._countdown = 0

    def count_request(self) -> None:
        if self._countdown:
            self._countdown -= 1
            if not self._countdown:
                self._then()

    def take_away(self, number: int, how: Away) -> None:
        node = self.nodes[number]
        self.note(f"{node.name} is {how}")
        node.up, node.deaf, node.mute = how != "down", how == "deaf", how == "mute"
        if how == "paused":
            node.stop(FOR_EVER)

    def bring_back(self, number: int) -> None:
        """Make a node reachable again; one that was paused executes what has arrived meanwhile."""
        node = self.nodes[number]
        self.note(f"{node.name} is back")
        node.up, node.deaf, node.mute = True, False, False
        self.at(self.now, node.go_on)
