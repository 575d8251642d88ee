"""
The world of a schedule: virtual time, lock nodes, and machines that take turns.

Each machine is a greenlet with a process of its own, and so with locks of its own. A machine may lose its turn before
every request that reaches a lock node, a broker or a result backend; which machine is next comes from the seed. Time
passes only while no machine can go on.
"""

import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

from greenlet import getcurrent, greenlet

from django_redlock import locks
from django_redlock.core.acquisition import Waiter
from django_redlock.testing.simulation import Process, Simulation, VirtualNotifications

SWITCH = 0.4  # how often a machine loses its turn before a request


class Dead(BaseException):
    """The machine was killed; nothing of it reaches anybody any more."""


class Machine:
    """
    One process.

    Args:
        world: Where it runs.
        name: What to call it.
        work: What it does; the machine ends when this returns.
    """

    def __init__(self, world: "World", name: str, work: Callable[["Machine"], None]) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.wakes = 0.0
        self.called: threading.Event | None = None
        self.process: Process = world.sim.rival(name)
        self.process.manager.acquirer._sleep = world.sleep
        self.process.manager.driver.notifications = TurnNotifications(world, self.process.manager)  # type: ignore[assignment]
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
        self.greenlet.throw(Dead)


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
        self.traceback, self.internal = "", False


class World:
    """
    Virtual time, lock nodes and machines.

    Args:
        seed: Decides everything.
        traced: Whether to keep what happens, in words.
    """

    def __init__(self, seed: int, *, traced: bool = False) -> None:
        self.random = random.Random(seed)
        self.trace: list[str] = []
        self.sim = Simulation(nodes=3, check=False)
        self.hub = getcurrent()
        self.machines: list[Machine] = []
        self._traced = traced

    @contextmanager
    def running(self) -> Iterator[None]:
        """Replace clocks, randomness and locks."""
        random.seed(self.random.random())
        draw = lambda size: self.random.randbytes(size)  # noqa: E731
        log = logging.getLogger("django_redlock")
        quiet = patch.object(log, "disabled", True), patch("celery.app.trace.ExceptionInfo", PlainInfo)
        silence = patch("celery.app.trace.TraceInfo._log_error", lambda *about: None)
        with self.sim, patch.object(os, "urandom", draw), quiet[0], quiet[1], silence:
            main = locks._managers["default"]
            for node in self.sim.nodes:
                node.execute = partial(self._executed, node.execute)  # type: ignore[method-assign]
            with patch.object(locks, "_managers", Managers(self, main)):
                yield

    @property
    def now(self) -> float:
        """The time, in seconds."""
        return self.sim.clock()

    @property
    def machine(self) -> Machine | None:
        """The machine whose turn it is; None outside all of them."""
        current = getcurrent()
        return next((machine for machine in self.machines if machine.greenlet is current), None)

    def add(self, name: str, work: Callable[[Machine], None]) -> Machine:
        """Start a machine."""
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
        self.hub.switch()
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
            self.sim.advance(max(1e-6, min(min(waking), until) - self.now))

    def _executed(self, execute: Callable[[Any], Any], request: Any) -> Any:
        self.reach()
        return execute(request)
