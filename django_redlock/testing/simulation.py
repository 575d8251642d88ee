"""
Lose a lock in your own tests: in-memory nodes that fail on command, in virtual time (internal).

    def test_report_is_not_sent_twice():
        with Simulation() as sim, sim.at(send_report, "mail.send(", lambda: sim.lose("report")):
            with pytest.raises(LockLostError):
                send_report()

In the ``with`` block the alias has new nodes, and time passes only in :meth:`Simulation.advance`, in
:meth:`Simulation.pause`, and while a caller waits for a lock. Leases are renewed meanwhile. Production code runs; only
the nodes, the clocks and the background threads are replaced. At the end the simulation checks that no two holders
ever held the same lock at the same time by their own clocks.

An event loop runs in virtual time, too, from its first lock on: ``await asyncio.sleep(60)`` and waiting for a lock make
time pass at once.
"""

import asyncio
import heapq
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Self

from django.conf import settings

from .. import signals
from ..conf import DEFAULT_ALIAS
from ..core.acquisition import Waiter
from ..core.names import slug
from ..core.protocol import EndReason, Kind, Request, Survey
from ..core.rules import Rules
from ..engine.driver import LoopSide
from ..engine.heartbeat import ProcessHeartbeat
from ..engine.lease import Lease
from ..engine.lock import Lock
from ..engine.manager import LockManager
from ..engine.per_loop import PerLoop
from ..engine.renewal import Agenda, Tended, by_keeper
from ..engine.runtime import Runtime
from ..engine.waiters import Waiters
from ..handler import DjangoSurroundings, locks
from ..nodes import LinkError

RETRY = 0.5  # seconds after which a release is redelivered to a node that missed it

Action = Callable[[], object]


class OverlapError(AssertionError):
    """Two holders considered the same lock theirs at the same time."""


class Simulation:
    """
    An alias over in-memory nodes, in virtual time; to be used in a ``with`` block, by one thread.

    Args:
        nodes: The number of nodes.
        using: The alias in ``REDLOCK``; its ``OPTIONS`` apply if it exists.
        check: Whether to raise :class:`OverlapError` at the end of the block if there was an overlap.
        options: More ``OPTIONS``, such as ``ttl=10``.

    Attributes:
        nodes: The nodes, which can crash, restart, be silenced, and have their clocks stepped.
        overlaps: The overlaps found until now, in words.
        runtime: The clocks and watchdogs of the simulated processes.
    """

    def __init__(self, *, nodes: int = 3, using: str = DEFAULT_ALIAS, check: bool = True, **options: Any) -> None:
        configured = getattr(settings, "REDLOCK", {}).get(using, {}).get("OPTIONS", {})
        self.rules = Rules(nodes, **{**configured, **options})
        self.nodes = [SimulatedNode(f"node {number}", self.clock) for number in range(1, nodes + 1)]
        self.overlaps: list[str] = []
        self._using = using
        self._check = check
        self._now = 1000.0
        watchdog = VirtualWatchdog(self._process_of)
        self.runtime = Runtime(
            clock=self.clock,
            wall=lambda: EPOCH + self._now,
            random=Random(0).random,  # so that a test runs the same each time
            sleep=self.advance,
            watchdog=watchdog,
            loop_watchdog=lambda: watchdog,
        )
        self._count = itertools.count()
        self._events: list[tuple[float, int, Action]] = []
        self._processes: list[Process] = []
        self._leases: list[Lease] = []
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._main = Process(self, "this process")
            self._main.manager.surroundings = DjangoSurroundings()
            stack.enter_context(locks.substituted(self._using, self._main.manager))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        for process in self._processes:
            process.manager.close()
        for lease in self._leases:
            lease.hold.end(EndReason.EXPIRED, self._now)  # a lease ends with the simulation
        self._stack.close()
        if self._check and self.overlaps and kind is None:
            raise OverlapError("\n".join(self.overlaps))

    def clock(self) -> float:
        """Return the time of the simulation, in seconds since an arbitrary moment."""
        return self._now

    # Time

    def advance(self, seconds: float) -> None:
        """Let time pass: leases are renewed, rivals act, and actions planned with :meth:`after` run."""
        until = self._now + seconds
        while self._step(until):
            pass

    def pause(self, seconds: float) -> None:
        """
        Pause this process, as in a long garbage collection or on a suspended machine.

        Time passes for nodes and rivals, but nothing is renewed here. Afterwards the code continues as if nothing had
        happened, until it checks its lease.
        """
        self._main.stopped = True
        try:
            self.advance(seconds)
        finally:
            self._main.stopped = False

    def after(self, seconds: float, action: Action) -> None:
        """Call *action* after the given time in seconds."""
        heapq.heappush(self._events, (self._now + seconds, next(self._count), action))

    def idle(self, seconds: float | None) -> bool:
        """
        Let time pass for an event loop that has nothing to do, until something happens.

        Args:
            seconds: How much time may pass at most; None means until the next action of :meth:`after`.

        Returns:
            Whether time could pass; False if nothing is planned and there is no limit.
        """
        if seconds is None and not self._events:
            return False
        self._step(self._events[0][0] if seconds is None else self._now + seconds)
        return True

    def adopt(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make an event loop run in virtual time until the block ends; the loop's first lock does this by itself."""
        if loop not in self._loops:
            self._loops.add(loop)
            self._stack.enter_context(virtual_time(loop, self))

    @contextmanager
    def at(self, function: Callable[..., Any], line: str, action: Action) -> Iterator[None]:
        """
        In the ``with`` block, call *action* the first time that *function* reaches a line.

        An exception of *action* is raised at that line. On Python 3.11, coverage is not measured in the block, and
        debuggers do not stop.

        Args:
            function: The function or method, decorated or not; the line must be its own, not that of a function that it
                calls.
            line: A part of the line that occurs nowhere else in the function; *action* runs before the line.
            action: The action, such as ``lambda: sim.pause(60)``.

        Raises:
            ValueError: The function has no such line, or several.
            AssertionError: The block ended before the line was reached.
        """
        with before_line(function, line, action):
            yield

    # Others

    def rival(self, name: str = "", **options: Any) -> "Process":
        """Return another process, with locks over the same nodes; *options* are its own ``OPTIONS``."""
        return Process(self, name or f"rival {len(self._processes)}", replace(self.rules, **options))

    def lose(self, name: str) -> Lease:
        """
        Pause this process until its lease has ended, and let a rival take the lock; return the rival's lease.

        Raises:
            LockTakenError: A rival already had the lock, and keeps it.
        """
        rows = [row for node in self.nodes for row in node.store.execute(Survey((slug(name),))).rows]
        self.pause(max(0.0, *(row.left or 0.0 for row in rows)) + 0.001)
        return self.rival().lock(name, wait=0.0).acquire()

    # Events

    def _step(self, until: float) -> bool:
        """Advance to the next event, no further than *until*; return whether there was one."""
        agendas = [process.agenda.next() for process in self._processes if not process.stopped]
        when = min([*agendas, *(event[0] for event in self._events[:1])], default=until)
        if when > until:
            self._now = until
            return False
        self._now = max(self._now, when)
        if self._events and self._events[0][0] <= self._now:
            heapq.heappop(self._events)[2]()
        for process in self._processes:
            process.tend(self._now)
        return self._now < until or bool(self._events and self._events[0][0] <= until)

    def _wait(self, until: float, called: threading.Event) -> None:
        while not called.is_set() and self._now < until:
            self._step(until)

    def _process_of(self, manager: object) -> "Process":
        """Return the process of a manager, or of what a manager does in the background."""
        return next(one for one in self._processes if manager in one.managers)

    def _granted(self, who: "Process", lease: Lease) -> None:
        """Record a new holder, and an overlap with every other holder that considers the lock its own."""
        for other in self._leases:
            same = set(lease.hold.slots()) & set(other.hold.slots()) and not (lease.hold.shared and other.hold.shared)
            if same and other.hold.remaining(self._now) > 0:
                holder = self._process_of(other.hold.keeper)
                self.overlaps.append(f"{lease.name!r} was granted to {who.name} while {holder.name} had it.")
        self._leases.append(lease)


class Process:
    """
    One process, with its own locks, memory and renewals.

    Args:
        simulation: The simulation to which the process belongs.
        name: The name of the process.
        rules: The rules of the process; None means those of the simulation.
    """

    def __init__(self, simulation: Simulation, name: str, rules: Rules | None = None) -> None:
        self.name = name
        self.stopped = False
        self.agenda = Agenda()
        rules = rules or simulation.rules
        self.manager = LockManager(
            simulation.nodes, rules, alias=simulation._using, notify=self._notify, runtime=simulation.runtime
        )
        self.manager.driver.notifications = VirtualNotifications(simulation, self.manager)  # type: ignore[assignment]
        self.manager.driver.redelivery = VirtualRedelivery(simulation)  # type: ignore[assignment]
        self.manager.driver.loops = PerLoop(self._new_loop_side)
        self._simulation = simulation
        simulation._processes.append(self)

    def __repr__(self) -> str:
        return f"<Process {self.name!r}>"

    def lock(self, name: str, **options: Any) -> Lock:
        """Describe a lock of this process, as :func:`django_redlock.lock` does."""
        return self.manager.lock(name, **options)

    @property
    def managers(self) -> tuple[object, ...]:
        """The manager, and what looks after its releases and claims."""
        return self.manager, self.manager.driver.unattended, self.manager.confirmations

    def kill(self) -> None:
        """End the process: nothing is renewed or released any more."""
        self.agenda = Agenda()
        for lease in [lease for lease in self._simulation._leases if lease.hold.keeper is self.manager]:
            lease.hold.end(EndReason.EXPIRED, self._simulation.clock())  # nobody is left to ask why

    def tend(self, now: float) -> None:
        """Renew the due leases, unless the process is paused."""
        due = [] if self.stopped else self.agenda.take(now)
        for keeper, some in by_keeper(due).items():
            keeper.extend(some)
        for lease in due:
            self.agenda.put_back(lease)

    def _new_loop_side(self) -> LoopSide:
        """Return the manager's parts for the running event loop, whose time is virtual from now on."""
        self._simulation.adopt(asyncio.get_running_loop())
        return self.manager.driver.new_loop_side()

    def _notify(self, event: str, **about: Any) -> None:
        if event == "lock_acquired":
            self._simulation._granted(self, about["lease"])
        signals.send(self.manager, event, **about)


class VirtualWatchdog:
    """Replace the thread that renews leases. The process sends no heartbeats, which are for operators."""

    def __init__(self, process_of: Callable[[object], Process]) -> None:
        self._process_of = process_of

    def watch(self, tended: Tended) -> None:
        """Put a lease on the agenda of its process."""
        if not isinstance(tended, ProcessHeartbeat):
            self._agenda(tended).add(tended)

    def forget(self, tended: Tended) -> None:
        """Take a lease off the agenda of its process."""
        if not isinstance(tended, ProcessHeartbeat):
            self._agenda(tended).drop(tended)

    def _agenda(self, tended: Any) -> Agenda:
        """Return the agenda of the process that has a lease, or the term of one."""
        return self._process_of(getattr(tended, "lease", tended).hold.keeper).agenda

    def tends(self, keeper: object) -> bool:
        """Return False; only heartbeats use this."""
        return False

    def apart(self, function: Callable[[], object]) -> bool:
        """Return False: callbacks of a lost lock are called at once, so that a test runs the same each time."""
        return False

    def rest(self) -> None:
        """Do nothing: there is no thread to end."""


class VirtualNotifications:
    """Replace the thread that listens for notifications: nodes call back at once, and waiting lets time pass."""

    def __init__(self, simulation: Simulation, manager: LockManager) -> None:
        self.waiters: Waiters[threading.Event] = Waiters(simulation.rules.needed, threading.Event)
        self._simulation = simulation
        for number, node in enumerate(simulation.nodes):
            node.store.listeners[self.waiters.process] = partial(self.waiters.notification, number)
            self.waiters.reached(number)

    def wait(self, waiter: Waiter, seconds: float, notified: float) -> None:
        """Let time pass until the waiter is notified, for at most *notified* seconds."""
        called = self.waiters.join(waiter)
        self._simulation._wait(self._simulation.clock() + notified, called)

    def close(self) -> None:
        """Do nothing: there is no connection to close."""


class VirtualRedelivery:
    """Replace the thread that redelivers a release to nodes that missed it."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def take(self, requests: Mapping[int, Request], until: float) -> None:
        """Deliver each request to its node, now or when the node can be reached again."""
        for node, request in requests.items():
            self._bring(self._simulation.nodes[node], request, until)

    def _bring(self, node: SimulatedNode, request: Request, until: float) -> None:
        try:
            reply = node.execute(request)
        except LinkError:
            reply = None
        missed = reply is None or reply.kind in (Kind.UNKNOWN, Kind.FAILED)
        if missed and self._simulation.clock() + RETRY < until:
            self._simulation.after(RETRY, lambda: self._bring(node, request, until))

    def close(self) -> None:
        """Do nothing: there is no thread to end."""
