"""
The third driver of the core, beside the blocking and the asyncio one.

Everything that knows the production classes is here: this carries out ballots as :mod:`django_redlock.engine.rounds`
does (one ordered connection per node, the round over as soon as it is decided, silence noted when its time is
over, replies owed until the connection is used again, a release sent to silent nodes too), and acquisitions,
extensions and releases as :mod:`django_redlock.engine.manager` does. A process either gives every round under way
links of its own, as threads have them, or shares one set among all, as the tasks of an event loop do. Waiters are those
of :mod:`django_redlock.engine.notifications`, told by messages that can be late or lost.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from django_redlock.core import hold as tenures
from django_redlock.core.acquisition import Acquisition, GaveUp
from django_redlock.core.admission import Admission, Greeting
from django_redlock.core.attempt import Granted
from django_redlock.core.backoff import Pause
from django_redlock.core.failure import Failure
from django_redlock.core.owner import Owner
from django_redlock.core.replies import Kind, Reply, failed
from django_redlock.core.requests import Acquire, Instant, Request
from django_redlock.core.round import Ballot
from django_redlock.core.rules import Rules
from django_redlock.core.tokens import Floor
from django_redlock.core.waiter import Waiter
from django_redlock.core.wanted import Wanted
from django_redlock.engine.notifications import RETRY
from django_redlock.engine.redelivery import FIRST_PAUSE, LONGEST_PAUSE
from django_redlock.engine.rounds import CONNECT_TIMEOUT, GRACE, IDLE, MAX_OWED, Breakers
from django_redlock.engine.waiters import Waiters

from .network import Faults, Machine, Wire
from .oracles import Oracles
from .profiles import TTL, Profile
from .world import AT_ONCE, Cancelled, Computer, Routine, Sleep, Task, Wait, World


@dataclass(slots=True)
class Owed:
    """A request whose reply has not been read."""

    ballot: Ballot
    sent: float


@dataclass(eq=False, slots=True)
class Seat:
    """One node's place in a bundle: the connection, what it owes, and the replies that nobody has read yet."""

    node: int
    wire: Wire
    owed: deque[Owed] = field(default_factory=deque)
    inbox: deque[Reply] = field(default_factory=deque)


@dataclass(eq=False, slots=True)
class Bundle:
    """One connection per node, and the tasks whose rounds are under way on them."""

    seats: dict[int, Seat] = field(default_factory=dict)
    connecting: dict[int, list[Ballot]] = field(default_factory=dict)
    arrived: deque[tuple[int, Wire | None, Greeting | str]] = field(default_factory=deque)
    waiting: list[Task] = field(default_factory=list)
    used: float = 0.0


@dataclass(eq=False, slots=True)
class Bell:
    """The event that calls a waiter."""

    rung: bool = False
    task: Task | None = None

    def set(self) -> None:
        self.rung = True
        if self.task:
            self.task.wake()

    def clear(self) -> None:
        self.rung = False


@dataclass(eq=False, slots=True)
class Lease:
    """A held lock as its holder sees it."""

    process: "Process"
    tenure: tenures.Tenure
    slugs: tuple[str, ...]
    limit: int = 1
    shared: bool = False

    def believed(self) -> bool:
        """Return whether the holder, asked now, would say that it holds the lock; changes nothing."""
        return not self.process.dead and self.tenure.remaining(self.process.clock()) > 0

    def ensure(self) -> bool:
        """Ask as :meth:`django_redlock.engine.lease.Lease.ensure` does."""
        return self.tenure.check(self.process.clock())


class Process(Computer):
    """
    A client: one process with the production state machines.

    Args:
        world: Where it runs.
        name: What the trace calls it.
        machines: The nodes.
        rules: The numbers to work with.
        profile: The hazards.
        faults: Whether they are on.
        oracles: Told of every acquisition, extension and release.
    """

    def __init__(
        self,
        world: World,
        name: str,
        machines: list[Machine],
        rules: Rules,
        profile: Profile,
        faults: Faults,
        oracles: Oracles,
    ) -> None:
        super().__init__(world, name)
        self.rules = rules
        self.shared = world.random.random() < 0.5
        self._owner = Owner(host=name)
        self.admission = Admission(rules, tuple(machine.name for machine in machines), self.clock, self.wall)
        self.floor = Floor()
        self.breakers = Breakers(len(machines))
        self._machines = machines
        self._profile = profile
        self._faults = faults
        self._oracles = oracles
        self._bundles: list[Bundle] = [Bundle()] if self.shared else []
        self._waiters: Waiters[Any] = Waiters(rules.needed, Bell)
        self._waiters.process = name
        self._listens = False
        self._renewed: list[Lease] = []
        self._watchdog: Task | None = None

    def clock(self) -> float:
        """Return the time on the clock that leases are measured with."""
        steady = self.steady
        return steady.base + self.world.now * steady.rate

    def instant(self) -> Instant:
        """Return one reading of both clocks."""
        return Instant(self.clock(), int(self.wall() * 1e6))

    def breathe(self) -> Sleep:
        """Go on a little later, or, where the profile says so, much later: a place where a process may stop."""
        if self._faults.on and self.random() < self._profile.stall:
            self.stop(self.world.random.choice((0.02, 0.1, 0.5, 1.0, 3.0)) * self.random() * TTL)
        return AT_ONCE

    # What django_redlock.engine.manager does

    def acquire(self, names: tuple[str, ...], wait: float | None, limit: int = 1, shared: bool = False) -> Routine:
        """
        Try to take a lock; returns the lease or, if there was none to be had, :class:`GaveUp`.

        When it is cancelled it takes back what it asked for: a thread waits for that, a task cannot.
        """
        wanted = Wanted(names, TTL, wait, self._owner, limit=limit, shared=shared)
        waiter = self._waiters.new_name() if wait != 0 else ""
        acquisition = Acquisition(wanted, self.rules, self.floor, self._fresh_nonce, self.world.random.random, waiter)
        began, steps = self.world.now, acquisition.steps(self.instant())
        step = next(steps)
        try:
            while True:
                if isinstance(step, Ballot):
                    yield self.breathe()
                    yield from self.ask(step)
                    yield self.breathe()
                elif waiter:
                    yield from self._wait_for_turn(acquisition.waiter, step)
                else:
                    yield Sleep(step.seconds)
                now = self.world.now
                step = steps.send(self.instant())
                if isinstance(step, Ballot) and isinstance(next(iter(step.requests.values()), None), Acquire):
                    began = now
        except StopIteration as stop:
            return self._held(wanted, stop.value, began)
        except Cancelled:
            self.world.log(self.name, "is cancelled", *names)
            yield from self.ask(acquisition.undo(0.0 if self.shared else self.rules.timeout(TTL)))
            raise
        finally:
            self._waiters.leave(acquisition.waiter)

    def renew(self, lease: Lease) -> None:
        """Have a lease extended whenever it is due, until it ends."""
        self._renewed.append(lease)
        if self._watchdog is None:
            self._watchdog = self.spawn(self._watch())
        else:
            self._watchdog.wake()

    def _watch(self) -> Routine:
        while True:
            self._renewed = [lease for lease in self._renewed if not lease.tenure.ended]
            now = self.clock()
            due = [lease for lease in self._renewed if lease.tenure.due(True) <= now]
            if due:
                yield self.breathe()
                yield from self.extend(due)
            else:
                yield Wait(min([lease.tenure.due(True) - now for lease in self._renewed], default=60.0))

    def extend(self, leases: Sequence[Lease]) -> Routine:
        """Ask for a whole lease from now, for several at once."""
        now = self.clock()
        asked = [(lease, term) for lease in leases if lease.ensure() and (term := lease.tenure.term(now))]
        if not asked:
            return
        soonest = min(lease.tenure.deadline for lease, _ in asked)
        ballot = tenures.renewal([term for _, term in asked], self.rules, self.rules.timeout(TTL), soonest - now)
        for lease, term in asked:
            lease.tenure.asked(ballot, term)
        start, when = self.clock(), self.world.now
        yield self.breathe()
        yield from self.ask(ballot)
        yield self.breathe()
        for number, (lease, _) in enumerate(asked):
            tenure = lease.tenure
            late = self.clock() >= tenure.deadline or tenure.ended is not None
            longer = tenure.extended(ballot, number, start, self.clock())
            self.world.log(self.name, "extended" if longer else "not extended", tenure.nonce[:4], tenure.ended or "")
            self._oracles.extended(lease, ballot, when, longer, late)

    def release(self, lease: Lease) -> Routine:
        """Give a lock up; returns what the nodes say of it."""
        lease.tenure.check(self.clock())
        lease.tenure.end("released", self.clock())
        self.world.log(self.name, "releases", lease.tenure.nonce[:4], lease.tenure.ended)
        ballot = lease.tenure.release(self.rules.timeout(TTL))
        yield from self.ask(ballot)
        return tenures.release_outcome(ballot, self.rules)

    def _held(self, wanted: Wanted, outcome: Granted | GaveUp, began: float) -> Lease | GaveUp:
        if isinstance(outcome, GaveUp):
            self.world.log(self.name, "gives up", *wanted.names)
            return outcome
        tenure = tenures.Tenure(wanted, outcome, self.rules, self.floor)
        lease = Lease(self, tenure, outcome.slugs, wanted.limit, wanted.shared)
        self.world.log(self.name, "GRANTED", *outcome.slugs, outcome.nonce[:4], f"#{outcome.token % 10**9}")
        self._oracles.granted(lease, outcome, began)
        return lease

    def _fresh_nonce(self) -> str:
        return f"{self.world.random.getrandbits(128):032x}"

    # What django_redlock.engine.notifications does

    def _wait_for_turn(self, waiter: Waiter, pause: Pause) -> Routine:
        bell = self._waiters.join(waiter)
        if not self._listens:
            self._listens = True
            for machine in self._machines:
                self._listen(machine)
        if not bell.rung:
            bell.task = self.current
            try:
                yield Wait(pause.told if self._waiters.told else pause.seconds)
            finally:
                bell.task = None

    def _listen(self, machine: Machine) -> None:
        """Have a node tell of turns, now and after every restart."""
        node, world = machine.number, self.world

        def hint(name: str) -> None:
            if not self._faults.loses_hint():
                world.log(machine.name, "calls", name)
                self.arrive(self._faults.passes(self, machine), self._waiters.hint, node, name)

        def subscribe() -> None:
            if machine.up:
                machine.store.listeners[self.name] = hint
                machine.at_end.append(lambda: self.after(0.001, end))
                self.arrive(self._faults.passes(self, machine), self._waiters.reached, node)
            else:
                self.after(RETRY, self._listen, machine)

        def end() -> None:
            self._waiters.listening.discard(node)
            self.after(RETRY, self._listen, machine)

        machine.at(self._faults.passes(self, machine), subscribe)

    # What django_redlock.engine.rounds does

    def ask(self, ballot: Ballot, apart: Bundle | None = None) -> Routine:
        """Carry out one round, on links *apart* from all others or not; have releases brought to who missed them."""
        if not ballot.requests:
            return
        bundle = apart or (self._bundles[0] if self.shared else self._bundles.pop() if self._bundles else Bundle())
        now = self.clock()
        deadline, fresh = now + ballot.timeout, not bundle.seats
        self._send_all(bundle, ballot, now)
        try:
            while ballot.timeout and not ballot.closed and now < deadline and self._expects(bundle, ballot):
                yield from self._wait(bundle, deadline - now)
                now = self.clock()
            if ballot.timeout and not ballot.closed:
                self._time_out(bundle, ballot)
            until = deadline if ballot.mending else min(deadline, now + GRACE)
            while (fresh or ballot.mending) and bundle.connecting and now < until:
                yield from self._wait(bundle, until - now)
                now = self.clock()
            until = now + ballot.patience
            while ballot.closed and ballot.unheard and now < until and self._expects(bundle, ballot):
                yield from self._wait(bundle, until - now)
                now = self.clock()
        except Cancelled:
            self._interrupted(bundle, ballot)
            raise
        self._end(bundle, ballot)
        bundle.used = now
        if not self.shared and not apart:
            self._bundles.append(bundle)
        if ballot.lasting:
            for node in ballot.missed():
                self.spawn(self._bring(node, ballot.requests[node], now + ballot.lasting))

    def _send_all(self, bundle: Bundle, ballot: Ballot, now: float) -> None:
        ballot.doubted = self.admission.doubted
        self._oracles.first_byte(ballot, now)
        self._settle(bundle, ballot.mending or now - bundle.used > IDLE)
        resting = set() if ballot.farewell else self.breakers.resting(ballot, now)
        for node in ballot.requests:
            self._start(bundle, ballot, node, now, resting)

    def _end(self, bundle: Bundle, ballot: Ballot) -> None:
        ballot.close()
        for waiting in bundle.connecting.values():
            if ballot in waiting:
                waiting.remove(ballot)

    def _interrupted(self, bundle: Bundle, ballot: Ballot) -> None:
        """End a round before it is over: a thread's links are in a state that nobody knows, those of a loop are not."""
        self._end(bundle, ballot)
        for seat in list(bundle.seats.values()) if not self.shared else ():
            self._unseat(bundle, seat, "closed")

    def _bring(self, node: int, request: Request, until: float) -> Routine:
        """Do what :class:`django_redlock.engine.redelivery.Courier` does."""
        pause = FIRST_PAUSE
        while self.clock() < until:
            parcel = Ballot({node: request}, lambda replies: False, CONNECT_TIMEOUT, farewell=True)
            yield from self.ask(parcel, apart=Bundle())
            if not parcel.missed():
                return
            yield Sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _wait(self, bundle: Bundle, left: float) -> Routine:
        task = self.current
        assert task is not None
        bundle.waiting.append(task)
        try:
            yield Wait(left)
        finally:
            bundle.waiting.remove(task)

    def _expects(self, bundle: Bundle, ballot: Ballot) -> bool:
        replies, seats, connecting = ballot.replies, bundle.seats, bundle.connecting
        for node in ballot.requests:
            if node not in replies and (node in connecting or ((seat := seats.get(node)) and seat.owed)):
                return True
        return False

    def _settle(self, bundle: Bundle, look: bool) -> None:
        """Bring a bundle up to date: links that arrived, replies it is owed, links that its nodes closed."""
        self._seat_arrivals(bundle)
        for seat in list(bundle.seats.values()):
            if seat.inbox:
                self._read(seat)
            ended = seat.wire.broken or seat.wire.boot != seat.wire.machine.boot
            if ended and (seat.owed or look):
                self._unseat(bundle, seat, "closed")

    def _start(self, bundle: Bundle, ballot: Ballot, node: int, now: float, resting: set[int]) -> None:
        """Send one node its request, or see to a link for it, or note why not."""
        seat = bundle.seats.get(node)
        if seat and not ballot.farewell and seat.owed and now - seat.owed[0].sent > max(ballot.timeout, 0.05):
            self._unseat(bundle, seat, "timeout")
            self.breakers[node].failed(now)
            seat = None
        if seat and not ballot.farewell and len(seat.owed) >= MAX_OWED:
            ballot.receive(node, failed(Failure.BACKLOG))
        elif seat:
            self._send(bundle, seat, ballot, now)
        elif node in resting:
            ballot.receive(node, failed(Failure.FAILED_LATELY))
        elif not ballot.timeout:
            ballot.receive(node, failed(Failure.NOT_CONNECTED))
        else:
            self._connect(bundle, node, ballot)

    def _send(self, bundle: Bundle, seat: Seat, ballot: Ballot, now: float) -> None:
        if seat.wire.broken:
            self._unseat(bundle, seat, "closed")
            self.breakers[seat.node].failed(now)
            ballot.receive(seat.node, failed(Failure.CLOSED, Kind.UNKNOWN))
            return
        seat.owed.append(Owed(ballot, now))
        seat.wire.send(ballot.requests[seat.node])

    def _replied(self, bundle: Bundle, seat: Seat, reply: Reply) -> None:
        seat.inbox.append(reply)
        if self.shared or bundle.waiting:  # as _happened() does
            self._read(seat)
            for task in bundle.waiting:
                task.wake()

    def _ended(self, bundle: Bundle, seat: Seat) -> None:
        self._happened(bundle, self._unseat_ended, bundle, seat)

    def _happened(self, bundle: Bundle, see_to_it: Callable[..., None], *args: Any) -> None:
        """Deal with what came if somebody waits; links of a thread that is busy are read at their next use."""
        if self.shared or bundle.waiting:
            see_to_it(*args)
            for task in bundle.waiting:
                task.wake()

    def _read(self, seat: Seat) -> None:
        while seat.inbox and seat.owed:
            owed, reply = seat.owed.popleft(), seat.inbox.popleft()
            self.breakers[seat.node].answered()
            owed.ballot.receive(seat.node, self.admission.judge(seat.node, reply, owed.sent))

    def _unseat_ended(self, bundle: Bundle, seat: Seat) -> None:
        self._read(seat)
        self._unseat(bundle, seat, "reset")
        self.breakers[seat.node].failed(self.clock())

    def _unseat(self, bundle: Bundle, seat: Seat, detail: str) -> None:
        if bundle.seats.get(seat.node) is seat:
            del bundle.seats[seat.node]
        seat.wire.broken = True
        while seat.owed:
            seat.owed.popleft().ballot.receive(seat.node, Reply(Kind.UNKNOWN, detail=detail))

    def _time_out(self, bundle: Bundle, ballot: Ballot) -> None:
        """Note the nodes that did not answer in time; their links stay, so that a release follows in order."""
        now = self.clock()
        for node in list(ballot.requests.keys() - ballot.replies.keys()):
            self.breakers[node].failed(now)
            kind = Kind.UNKNOWN if node in bundle.seats else Kind.FAILED
            ballot.receive(node, failed(Failure.TIMEOUT, kind))

    def _connect(self, bundle: Bundle, node: int, ballot: Ballot) -> None:
        if node in bundle.connecting:
            bundle.connecting[node].append(ballot)
            return
        bundle.connecting[node] = [ballot]
        machine, world = self._machines[node], self.world
        wire = Wire(self, machine, self._profile, self._faults)
        gives_up = world.now + max(ballot.timeout, CONNECT_TIMEOUT)
        arrives = self._faults.passes(self, machine)
        finished = False

        def finish(wire: Wire | None, greeting: Greeting | str) -> None:
            nonlocal finished
            if not finished:
                finished = True
                if wire is None:
                    self.breakers[node].failed(self.clock())
                bundle.arrived.append((node, wire, greeting))
                self._happened(bundle, self._seat_arrivals, bundle)

        def greet() -> None:
            back = self._faults.passes(self, machine)
            if machine.up:
                wire.boot = machine.boot
                self.arrive(back, finish, wire, machine.greeting())
            else:
                self.arrive(back, finish, None, "refused")

        machine.at(arrives, greet)
        self.arrive(gives_up, finish, None, "timeout")

    def _seat_arrivals(self, bundle: Bundle) -> None:
        """Give arrived links their seats, and the rounds that wait for them their chance."""
        now = self.clock()
        while bundle.arrived:
            node, wire, greeting = bundle.arrived.popleft()
            ballots = bundle.connecting.pop(node)
            if wire is not None and not isinstance(greeting, str):
                self.admission.greet(node, greeting)
                seat = bundle.seats[node] = Seat(node, wire)
                wire.on_reply, wire.on_end = partial(self._replied, bundle, seat), partial(self._ended, bundle, seat)
            for ballot in ballots:
                if node in ballot.replies:
                    continue
                if node in bundle.seats:
                    self._send(bundle, bundle.seats[node], ballot, now)
                else:
                    ballot.receive(node, Reply(Kind.FAILED, detail=str(greeting)))
