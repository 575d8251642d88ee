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
import inspect
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from types import CodeType, FrameType
from typing import Any, Self
from unittest.mock import patch

from django.conf import settings

from .. import signals
from ..conf import nodes_named
from ..core.acquisition import Waiter
from ..core.admission import Greeting
from ..core.names import slug
from ..core.node_state import NodeState
from ..core.protocol import Acquire, EndReason, Kind, Reply, Request, Survey
from ..core.rules import DEFAULT_ALIAS, Rules
from ..engine.connections import PerLoop
from ..engine.driver import LoopSide
from ..engine.lease import Lease
from ..engine.lock import Lock
from ..engine.manager import LockManager
from ..engine.notifications import Waiters
from ..engine.presence import Presence
from ..engine.watchdog import REAL, Agenda, Chore, Runtime, Tended, carry_out, work_in
from ..handler import DjangoSurroundings, locks
from ..nodes.base import LinkError
from ..nodes.memory import MemoryNode, remember_fences
from ..runtime.clock import steady

RETRY = 0.5  # seconds after which a release is redelivered to a node that missed it
# Seconds that one turn of an event loop takes. With zero, a timer that is early by a rounding error would be set and
# fire again for ever.
TURN = 1e-6
TOOL = 4  # one of the ids of sys.monitoring that any tool may use

Action = Callable[[], object]


class OverlapError(AssertionError):
    """Two holders considered the same lock theirs at the same time."""


class Simulation:
    """
    An alias over in-memory nodes, in virtual time; to be used in a ``with`` block, by one thread.

    Args:
        nodes: The number of nodes; None means three, or as many as ``NODES`` has if its ``OPTIONS`` choose a quorum.
        using: The alias in ``REDLOCK``; its ``OPTIONS`` apply if it exists.
        check: Whether to raise :class:`OverlapError` at the end of the block if there was an overlap.
        options: More ``OPTIONS``, such as ``ttl=10``.

    Attributes:
        nodes: The nodes, which can crash, restart, be silenced, and have their clocks stepped.
        overlaps: The overlaps found until now, in words.
        runtime: The clocks and watchdogs of the simulated processes.
    """

    _latest = 0.0  # the time of day when the last simulation ended

    def __init__(
        self, *, nodes: int | None = None, using: str = DEFAULT_ALIAS, check: bool = True, **options: Any
    ) -> None:
        configured = getattr(settings, "REDLOCK", {}).get(using, {}).get("OPTIONS", {})
        if nodes is None:
            chosen = configured.get("quorum") is not None and "quorum" not in options
            nodes = len(nodes_named(using)) if chosen else 3
        self.rules = Rules(nodes, **{**configured, **options})
        self.nodes = [SimulatedNode(f"node {number}", self.clock, self._wall) for number in range(1, nodes + 1)]
        self.overlaps: list[str] = []
        self._using = using
        self._check = check
        self._now = 1000.0
        self._epoch = self._new_epoch()
        watchdog = VirtualWatchdog(self._process_of)
        self.runtime = Runtime(
            clock=self.clock,
            wall=self._wall,
            random=Random(0).random,  # so that a test runs the same each time
            sleep=self.advance,
            watchdog=watchdog,
            loop_watchdog=lambda: watchdog,
        )
        self._count = itertools.count()
        self._events: list[tuple[float, int, Action]] = []
        self._processes: list[SimulatedProcess] = []
        self._leases: list[Lease] = []
        self._passed_on: set[str] = set()  # the secrets of holders whose lock was taken over from them on purpose
        self._loops: set[asyncio.AbstractEventLoop] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._epoch = self._new_epoch()
        self._main = SimulatedProcess(self, "this process")
        self._main.manager.surroundings, self._main.manager.elsewhere = DjangoSurroundings(), False
        self._stack.enter_context(locks.substituted(self._using, self._main.manager))
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        for process in self._processes:
            process.manager.close()
        for lease in self._leases:
            lease.hold.end(EndReason.EXPIRED, self._now)  # a lease ends with the simulation
        self._stack.close()
        Simulation._latest = max(Simulation._latest, self._wall())
        remember_fences(self.nodes)
        if self._check and self.overlaps and kind is None:
            raise OverlapError("\n".join(self.overlaps))

    def clock(self) -> float:
        """Return the time of the simulation, in seconds since an arbitrary moment."""
        return self._now

    def _wall(self) -> float:
        """Return the time of day of the simulation, in seconds since the epoch."""
        return self._epoch + self._now

    def _new_epoch(self) -> float:
        """
        Return the time of day when the clock shows 0: it is now later than it has ever been, here or in a simulation.

        Fencing tokens are times of day, and rows of a database may have earlier ones. A whole number of seconds makes
        no difference to anything else.
        """
        return math.floor(max(REAL.wall(), Simulation._latest) - self._now) + 2.0

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
        """
        Make an event loop run in virtual time until the block ends; the loop's first lock does this by itself.

        A loop that is not written in Python keeps the real time.
        """
        selector = getattr(loop, "_selector", None)
        if selector is None or loop in self._loops:
            return
        self._loops.add(loop)
        virtual = VirtualLoop(loop, selector.select, self)
        self._stack.callback(virtual.end)
        self._stack.enter_context(patch.object(selector, "select", virtual.select))
        self._stack.enter_context(patch.object(loop, "time", virtual.time))
        for method in ("run_in_executor", "shutdown_default_executor"):
            self._stack.enter_context(patch.object(loop, method, virtual.at_work(getattr(loop, method))))

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
        plain = inspect.unwrap(function)
        lines, first = inspect.getsourcelines(plain)
        found = [number for number, text in enumerate(lines, first) if line in text]
        if len(found) != 1:
            raise ValueError(f"{plain.__qualname__} has {len(found)} lines with {line!r}; name one that it has once.")
        calls = [action]

        def reached() -> None:
            if calls:
                calls.pop()()

        with watch.line(plain.__code__, found[0], reached):
            yield
        if calls:
            raise AssertionError(f"{plain.__qualname__} did not reach the line with {line!r}.")

    # Others

    def rival(self, name: str = "", **options: Any) -> "SimulatedProcess":
        """Return another process, with locks over the same nodes; *options* are its own ``OPTIONS``."""
        return SimulatedProcess(self, name or f"rival {len(self._processes)}", replace(self.rules, **options))

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

    def _process_of(self, manager: object) -> "SimulatedProcess":
        """Return the process of a manager, or of what a manager does in the background."""
        return next(one for one in self._processes if manager in one.managers)

    def _granted(self, who: "SimulatedProcess", lease: Lease) -> None:
        """Record a new holder, and each overlap with one that considers the lock its own and has not passed it on."""
        taken = lease.hold.takeover.requests.values() if lease.hold.takeover else ()
        self._passed_on |= {request.adopt for request in taken if isinstance(request, Acquire)}
        self._passed_on.discard(lease.hold.secret)  # handed back
        for other in self._leases:
            if other.hold.secret in self._passed_on:
                continue
            one, two = lease.hold, other.hold
            together = (one.shared and two.shared) or (one.limit == two.limit and one.permit() != two.permit())
            if not (together or set(one.names).isdisjoint(two.names)) and two.remaining(self._now) > 0:
                holder = self._process_of(other.hold.keeper)
                self.overlaps.append(f"{lease.name!r} was granted to {who.name} while {holder.name} had it.")
        self._leases.append(lease)


class SimulatedProcess:
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
        self.manager.elsewhere = True
        self.manager.driver.notifications = VirtualNotifications(simulation, self.manager)  # type: ignore[assignment]
        self.manager.driver.redelivery = VirtualRedelivery(simulation)  # type: ignore[assignment]
        self.manager.driver.loops = PerLoop(self._new_loop_side)
        self._simulation = simulation
        simulation._processes.append(self)

    def __repr__(self) -> str:
        return f"<SimulatedProcess {self.name!r}>"

    def lock(self, name: str, **options: Any) -> Lock:
        """Describe a lock of this process, as :func:`django_redlock.lock` does."""
        described: Lock = self.manager.lock(name, **options)
        return described

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
        for who, some in work_in(due).items():
            carry_out(who, some)
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


class SimulatedNode(MemoryNode):
    """
    One node of a :class:`~django_redlock.testing.Simulation`.

    Attributes set further faults. With ``down = True``, the node refuses every request; with ``silent``, it executes
    requests but never answers; with ``deaf``, it does neither.

    Args:
        name: The node's name.
        clock: Returns the time of the simulation, in seconds.
        wall: Returns its time of day, in seconds since the epoch.
    """

    def __init__(self, name: str, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        super().__init__(name, NodeState(wall))
        self._clock = clock
        self._dropping = 0
        self._since = float("-inf")

    def crash(self) -> None:
        """End the node; all connections break. :meth:`start` brings it back with its data."""
        self.down = True
        self.boot += 1

    def start(self, *, keep_data: bool = True) -> None:
        """
        Bring the node back.

        With three or more nodes, the node gives no vote for ``max_ttl``, 60 s by default, unless ``OPTIONS`` call it
        durable.

        Args:
            keep_data: Whether the node still has its earlier locks and tokens.
        """
        if not keep_data:
            self.store.reset()
        self.down, self._since = False, self._clock()

    def restart(self, *, keep_data: bool = False) -> None:
        """Crash and come back at once, by default empty."""
        self.crash()
        self.start(keep_data=keep_data)

    def drop_next_reply(self) -> None:
        """Execute the next request, but never answer it; that connection stays silent."""
        self._dropping += 1

    def step_clock(self, seconds: float) -> None:
        """Set the node's clock forward, or back by a negative number of seconds; keys expire by this clock."""
        self.store.skew += seconds

    def describe(self) -> Greeting:
        """Return how the node describes itself now."""
        self.greeting = Greeting(run_id=f"{self.name}/{self.boot}", age=self._clock() - self._since)
        return super().describe()

    def execute(self, request: Request, mark: str = "") -> Reply | None:
        """Execute a request; return None if the reply never comes."""
        reply = super().execute(request, mark)
        if reply is not None and self._dropping:
            self._dropping -= 1
            return None
        return reply


class VirtualWatchdog:
    """Replace the thread that renews leases. The process gives no signs of life, which are for operators."""

    def __init__(self, process_of: Callable[[object], SimulatedProcess]) -> None:
        self._process_of = process_of

    def watch(self, tended: Tended) -> None:
        """Put a lease on the agenda of its process."""
        if not isinstance(tended, Presence):
            self._agenda(tended).add(tended)

    def forget(self, tended: Tended) -> None:
        """Take a lease off the agenda of its process."""
        if not isinstance(tended, Presence):
            self._agenda(tended).drop(tended)

    def _agenda(self, tended: Any) -> Agenda:
        """Return the agenda of the process that has a lease, the term of one, or the run of a task."""
        lease = getattr(tended, "lease", None) if isinstance(tended, Chore) else tended
        return self._process_of(getattr(tended, "manager", None) or (lease.hold.keeper if lease else tended)).agenda

    def tends(self, keeper: object) -> bool:
        """Return False; only signs of life depend on this."""
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
        """Let time pass until the waiter is notified, for at most *notified* seconds if it can be, else *seconds*."""
        called = self.waiters.join(waiter)
        longest = notified if self.waiters.notifies(waiter) else seconds
        self._simulation._wait(self._simulation.clock() + longest, called)

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


class VirtualLoop:
    """
    Replace the clock of an event loop, and the selector with which the loop waits.

    Whenever the loop has nothing to do, it jumps to its next timer. While a thread that the loop started is at work,
    time passes at its real speed, because nobody knows how long that thread needs.

    Args:
        loop: The loop. Its clock continues from its present time, so the existing timers stay as they are; see
            :meth:`end`.
        select: The method of the loop's selector.
        simulated: The simulated time.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, select: Callable[[float | None], Any], simulated: Simulation
    ) -> None:
        self._loop = loop
        self._select = select
        self._simulated = simulated
        self._ahead = loop.time() - simulated.clock()
        self._threads = 0  # threads at work for the loop

    def time(self) -> float:
        """Return the time of the loop."""
        return self._simulated.clock() + self._ahead

    def end(self) -> None:
        """Have each timer wait in real time for what it had left in virtual time, once the loop has its clock back."""
        passed = self.time() - self._loop.time()
        for timer in getattr(self._loop, "_scheduled", ()):
            timer._when -= passed

    def select(self, timeout: float | None = None) -> Any:
        """Return the sockets that are ready; if there are none, let time pass instead of waiting."""
        ready = self._select(0)
        if ready or (timeout is not None and timeout <= 0):
            self._simulated.idle(TURN)
            return ready
        if not self._threads:
            passed = self._simulated.idle(None if timeout is None else timeout + TURN)
            return [] if passed else self._select(None)
        began = steady()
        ready = self._select(timeout)
        self._simulated.idle(steady() - began if ready or timeout is None else timeout)
        return ready

    def at_work(self, start: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap *start*, a method of the loop that starts a thread, so that time is real until the thread is done."""

        def started(*args: Any, **options: Any) -> asyncio.Future[Any]:
            future: asyncio.Future[Any] = asyncio.ensure_future(start(*args, **options), loop=self._loop)
            self._threads += 1
            future.add_done_callback(done)
            return future

        def done(future: asyncio.Future[Any]) -> None:
            self._threads -= 1

        return started


class Watch:
    """
    Calls functions before lines are executed, for all :meth:`Simulation.at` blocks that are open.

    From Python 3.12 on, debuggers and coverage work meanwhile; before that, no other tool can trace.
    """

    def __init__(self) -> None:
        self._lines: list[tuple[CodeType, int, Action]] = []
        self._before: Any = None  # the function that traced until then

    @contextmanager
    def line(self, code: CodeType, number: int, reached: Action) -> Iterator[None]:
        """In the ``with`` block, call *reached* before this line of *code* is executed."""
        line = (code, number, reached)
        if not self._lines:
            self._begin()
        self._lines.append(line)
        self._choose(code)
        try:
            yield
        finally:
            self._lines.remove(line)
            self._choose(code)
            if not self._lines:
                self._end()

    def _has(self, code: CodeType) -> bool:
        return any(each is code for each, _, _ in self._lines)

    def _reached(self, code: CodeType, number: int) -> None:
        for one, line, reached in [*self._lines]:
            if one is code and line == number:
                reached()

    if sys.version_info >= (3, 12):

        def _begin(self) -> None:
            sys.monitoring.use_tool_id(TOOL, "django_redlock")
            sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, self._reached)

        def _choose(self, code: CodeType) -> None:
            sys.monitoring.set_local_events(TOOL, code, sys.monitoring.events.LINE if self._has(code) else 0)

        def _end(self) -> None:
            sys.monitoring.register_callback(TOOL, sys.monitoring.events.LINE, None)
            sys.monitoring.free_tool_id(TOOL)

    else:

        def _begin(self) -> None:
            self._before = sys.gettrace()
            sys.settrace(self._on_call)

        def _choose(self, code: CodeType) -> None:
            """Do nothing: the frames of all code are seen."""

        def _end(self) -> None:
            sys.settrace(self._before)
            self._before = None

        def _on_call(self, frame: FrameType, event: str, arg: Any) -> Any:
            return self._on_line if self._has(frame.f_code) else None

        def _on_line(self, frame: FrameType, event: str, arg: Any) -> Any:
            if event == "line":
                self._reached(frame.f_code, frame.f_lineno)
            return self._on_line


watch = Watch()
