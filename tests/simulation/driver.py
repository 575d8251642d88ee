"""
The third driver of the core, beside the blocking and the asyncio one: a process in virtual time.

It carries out rounds, acquisitions, extensions and releases as :mod:`django_redlock.engine` does. A process either
gives every current round its own links, as threads have them, or shares one set among all rounds, as the tasks of an
event loop do.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from django_redlock.core.acquisition import Acquisition, GaveUp, Pause, Waiter
from django_redlock.core.admission import Admission, Greeting
from django_redlock.core.attempt import Granted, HighestToken
from django_redlock.core.hold import HoldState
from django_redlock.core.names import Owner
from django_redlock.core.protocol import Acquire, EndReason, Failure, Instant, Kind, Reply, Request, failed
from django_redlock.core.round import Round
from django_redlock.core.rules import Wanted
from django_redlock.core.votes import as_released, release_outcome
from django_redlock.engine.connections import CONNECT_TIMEOUT, MAX_IN_FLIGHT, Breakers
from django_redlock.engine.notifications import RETRY, Waiters
from django_redlock.engine.redelivery import FIRST_PAUSE, LONGEST_PAUSE
from django_redlock.engine.rounds import GRACE, IDLE
from django_redlock.engine.unattended import LOOK
from django_redlock.nodes.redis.errors import DEMOTED

from .network import Link, Machine
from .profiles import TTL
from .world import AT_ONCE, Cancelled, Computer, Routine, Sleep, Task, Wait

if TYPE_CHECKING:
    from .consensus.records import Store, Worker
    from .schedule import Schedule


@dataclass(eq=False, slots=True)
class ConnectionSet:
    """One connection per node, and the tasks whose rounds are under way on them."""

    by_node: dict[int, Link] = field(default_factory=dict)
    connecting: dict[int, list[Round]] = field(default_factory=dict)
    arrived: deque[tuple[int, Link | None, Greeting | str, float]] = field(default_factory=deque)
    waiting: list[Task] = field(default_factory=list)
    used: float = 0.0


@dataclass(eq=False, slots=True)
class Bell:
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
    hold: HoldState
    slugs: tuple[str, ...]
    limit: int = 1
    shared: bool = False
    hold_for: float = 0.0

    def believed(self) -> bool:
        """Return whether the holder, if asked now, would report that it holds the lock; changes nothing."""
        return not self.process.dead and self.hold.remaining(self.process.clock()) > 0

    def ensure(self) -> bool:
        """Check as :meth:`django_redlock.engine.lease.Lease.ensure` does."""
        return self.hold.check(self.process.clock())


class Process(Computer):
    """A client: one process with the production state machines."""

    def __init__(self, schedule: "Schedule", name: str) -> None:
        super().__init__(schedule.world, name)
        self.rules, self.profile, self.faults = schedule.rules, schedule.profile, schedule.faults
        self._machines, self._oracles = schedule.machines, schedule.oracles
        self.shared = self.random() < 0.5
        self._owner = Owner(host=name)
        self.admission = Admission(self.rules, tuple(machine.name for machine in self._machines), self.clock, self.wall)
        self.highest = HighestToken()
        self.workers: dict[int, Worker] = {}  # of the nodes of records
        self.breakers = Breakers(len(self._machines))
        self._connection_sets: list[ConnectionSet] = [ConnectionSet()] if self.shared else []
        self._waiters: Waiters[Any] = Waiters(self.rules.needed, Bell)
        self._waiters.process = name
        self._listens = False
        self._renewed: list[Lease] = []
        self._watchdog: Task | None = None

    def clock(self) -> float:
        steady = self.steady
        return steady.base + self.world.now * steady.rate

    def instant(self) -> Instant:
        return Instant(self.clock(), int(self.wall() * 1e6))

    def breathe(self) -> Sleep:
        """Continue a little later or, where the profile says so, much later: a point at which a process may stop."""
        if self.faults.on and self.random() < self.profile.stall:
            self.stop(self.world.random.choice((0.02, 0.1, 0.5, 1.0, 3.0)) * self.random() * TTL)
        return AT_ONCE

    # The part of django_redlock.engine.manager

    def acquire(
        self, names: tuple[str, ...], wait: float | None, limit: int = 1, shared: bool = False, hold_for: float = 0.0
    ) -> Routine:
        """
        Try to take a lock; return the lease or, if there was none, :class:`GaveUp`.

        A cancelled attempt releases what it requested: a thread waits for that, a task cannot.
        """
        wanted = Wanted(names, TTL, wait, self._owner, limit=limit, shared=shared, hold_for=hold_for)
        waiter = self._waiters.new_name() if wait != 0 else ""
        acquisition = Acquisition(
            wanted, self.rules, self.highest, self._fresh_secret, self.world.random.random, waiter
        )
        began, steps = self.world.now, acquisition.steps(self.instant())
        step = next(steps)
        try:
            while True:
                if isinstance(step, Round):
                    yield self.breathe()
                    yield from self.ask(step)
                    yield self.breathe()
                elif waiter:
                    yield from self._wait_for_turn(acquisition.waiter, step)
                else:
                    yield Sleep(step.seconds)
                now = self.world.now
                step = steps.send(self.instant())
                if isinstance(step, Round) and isinstance(next(iter(step.requests.values()), None), Acquire):
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
        """Extend a lease whenever it is due, until it ends."""
        self._renewed.append(lease)
        if self._watchdog is None:
            self._watchdog = self.spawn(self._watch())
        else:
            self._watchdog.wake()

    def _watch(self) -> Routine:
        while True:
            self._renewed = [lease for lease in self._renewed if not lease.hold.ended]
            now = self.clock()
            due = [lease for lease in self._renewed if lease.hold.next_event(True) <= now]
            if due:
                yield self.breathe()
                yield from self.extend(due)
            else:
                yield Wait(min([lease.hold.next_event(True) - now for lease in self._renewed], default=60.0))

    def extend(self, leases: Sequence[Lease]) -> Routine:
        """Ask for a whole lease from now, for several at once."""
        now = self.clock()
        asked = [(lease, term) for lease in leases if lease.ensure() and (term := lease.hold.term(now))]
        if not asked:
            return
        soonest = min(lease.hold.deadline for lease, _ in asked)
        round = Round.to_extend([term for _, term in asked], self.rules, self.rules.timeout(TTL), soonest - now)
        for lease, term in asked:
            lease.hold.asked(round, term)
        start, when = self.clock(), self.world.now
        yield self.breathe()
        yield from self.ask(round)
        yield self.breathe()
        for number, (lease, _) in enumerate(asked):
            hold = lease.hold
            late = self.clock() >= hold.deadline or hold.ended is not None
            longer = hold.extended(round, number, start, self.clock())
            self.world.log(self.name, "extended" if longer else "not extended", hold.secret[:4], hold.ended or "")
            self._oracles.extended(lease, round, when, longer, late)

    def release(self, lease: Lease, sends: bool | None = None) -> Routine:
        """
        Release a lock, or leave it taken for the rest of its minimum hold; return what the nodes report about it.

        If it *sends* the release, it does not wait for the replies, unless the lease is near its end. None leaves that
        to chance.
        """
        timeout = self.rules.timeout(TTL)
        chosen = self.world.random.random() < 0.5 if sends is None else sends
        unattended = chosen and lease.hold.remaining(self.clock()) > timeout
        hold, now = lease.hold, self.clock()
        hold.check(now)
        hold.end(EndReason.RELEASED, now)
        self.world.log(self.name, "sends" if unattended else "releases", hold.secret[:4], hold.ended)
        timeout = 0.0 if unattended else timeout
        kept = hold.keeps and hold.holds_on(now)
        round = hold.keep(now, timeout) if kept else hold.release(timeout)
        yield from self.ask(round)
        if kept and (late := hold.leave_queue()):
            yield from self.ask(late)
        return release_outcome(as_released(round.replies), self.rules)

    def _held(self, wanted: Wanted, outcome: Granted | GaveUp, began: float) -> Lease | GaveUp:
        if isinstance(outcome, GaveUp):
            self.world.log(self.name, "gives up", *wanted.names)
            return outcome
        hold = HoldState(wanted, outcome, self.rules, self.highest)
        lease = Lease(self, hold, outcome.slugs, wanted.limit, wanted.shared, wanted.hold_for)
        self.world.log(self.name, "GRANTED", *outcome.slugs, outcome.secret[:4], f"#{outcome.fencing_token % 10**9}")
        self._oracles.granted(lease, outcome, began)
        return lease

    def _fresh_secret(self) -> str:
        return f"{self.world.random.getrandbits(128):032x}"

    # The part of django_redlock.engine.notifications

    def _wait_for_turn(self, waiter: Waiter, pause: Pause) -> Routine:
        bell = self._waiters.join(waiter)
        if not self._listens:
            self._listens = True
            for machine in self._machines:
                self._listen(machine)
        if not bell.rung:
            bell.task = self.current
            try:
                yield Wait(pause.notified if self._waiters.notified else pause.seconds)
            finally:
                bell.task = None

    def _listen(self, machine: "Machine | Store") -> None:
        """Make a node send notifications, now and after every restart."""
        node, world = machine.number, self.world

        def notification(name: str) -> None:
            if not self.faults.loses_notification():
                world.log(machine.name, "calls", name)
                self.arrive(self.faults.passes(self, machine), self._waiters.notification, node, name)

        def subscribe() -> None:
            if machine.up:
                machine.listen(self.name, notification)
                machine.at_end.append(lambda: self.after(0.001, end))
                self.arrive(self.faults.passes(self, machine), self._waiters.reached, node)
            else:
                self.after(RETRY, self._listen, machine)

        def end() -> None:
            self._waiters.listening.discard(node)
            self.after(RETRY, self._listen, machine)

        machine.at(self.faults.passes(self, machine), subscribe)

    # The part of django_redlock.engine.rounds

    def ask(self, round: Round, apart: ConnectionSet | None = None) -> Routine:
        """Carry out one round, on links *apart* from all others or not; redeliver what must reach every node."""
        if not round.requests:
            return
        connections = apart or (
            self._connection_sets[0]
            if self.shared
            else self._connection_sets.pop()
            if self._connection_sets
            else ConnectionSet()
        )
        now = self.clock()
        deadline, fresh = now + round.timeout, not connections.by_node
        self._send_all(connections, round, now)
        expects = partial(self._expects, connections, round)
        try:
            if round.timeout:
                yield from self._wait(connections, deadline, lambda: not round.closed and expects())
                if not round.closed:
                    self._time_out(connections, round)
            if fresh or round.mending:
                until = deadline if round.mending else min(deadline, self.clock() + GRACE)
                yield from self._wait(connections, until, lambda: bool(connections.connecting))
            until = self.clock() + round.patience
            yield from self._wait(connections, until, lambda: round.closed and bool(round.unheard) and expects())
        except Cancelled:
            self._end(connections, round)
            for connection in list(connections.by_node.values()) if not self.shared else ():
                self._drop(connections, connection, Failure.CLOSED)  # a thread does not know the state of its links
            raise
        if not round.unattended:
            self._end(connections, round)
        connections.used = self.clock()
        if not self.shared and not apart:
            self._connection_sets.append(connections)
        if round.unattended:
            self.spawn(self._attend(connections, round))
        else:
            self._follow_up(round)

    # The part of django_redlock.engine.driver and django_redlock.engine.unattended

    def _follow_up(self, round: Round) -> None:
        if round.lasting:
            for node in round.missed():
                self.spawn(self._bring(node, round.requests[node], self.clock() + round.lasting))

    def _attend(self, connections: ConnectionSet, round: Round) -> Routine:
        """Read the replies to a release that nobody waits for, unless another round does that."""
        until = self.clock() + self.rules.timeout(TTL)
        while not round.closed:
            yield Sleep(LOOK)
            if self.shared or connections in self._connection_sets:
                self._settle(connections, look=True)
                if not round.closed and self.clock() >= until:
                    self._time_out(connections, round)
        self._follow_up(round)

    def _send_all(self, connections: ConnectionSet, round: Round, now: float) -> None:
        round.begin(self.admission)
        self._oracles.first_byte(round, now)
        self._settle(connections, round.mending or now - connections.used > IDLE)
        resting = set() if round.cleanup else self.breakers.resting(round, now)
        for node in round.requests:
            self._start(connections, round, node, now, resting)

    def _end(self, connections: ConnectionSet, round: Round) -> None:
        round.close()
        for waiting in connections.connecting.values():
            if round in waiting:
                waiting.remove(round)

    def _bring(self, node: int, request: Request, until: float) -> Routine:
        """Do what :class:`django_redlock.engine.redelivery.Redelivery` does."""
        pause = FIRST_PAUSE
        while self.clock() < until:
            undelivered = Round.to_tell({node: request}, CONNECT_TIMEOUT)
            yield from self.ask(undelivered, apart=ConnectionSet())
            if not undelivered.missed():
                return
            yield Sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)

    def _wait(self, connections: ConnectionSet, until: float, going: Callable[[], bool]) -> Routine:
        task = self.current
        assert task is not None
        while going() and (left := until - self.clock()) > 0:
            connections.waiting.append(task)
            try:
                yield Wait(left)
            finally:
                connections.waiting.remove(task)

    def _expects(self, connections: ConnectionSet, round: Round) -> bool:
        replies, by_node, connecting = round.replies, connections.by_node, connections.connecting
        for node in round.requests:
            if node not in replies and (
                node in connecting or ((connection := by_node.get(node)) and connection.in_flight)
            ):
                return True
        return False

    def _settle(self, connections: ConnectionSet, look: bool) -> None:
        """Update a connection set: links that arrived, replies in flight, links that their nodes closed."""
        self._take_arrivals(connections)
        for connection in list(connections.by_node.values()):
            if connection.inbox:
                self._read(connections, connection)
            ended = connection.broken or connection.boot != connection.machine.boot
            if ended and (connection.in_flight or look):
                self._drop(connections, connection, Failure.CLOSED)

    def _start(self, connections: ConnectionSet, round: Round, node: int, now: float, resting: set[int]) -> None:
        """Send a request to one node, or start a link to it, or note why not."""
        connection = connections.by_node.get(node)
        if connection and self.admission.disowns(node, connection.said.run_id, now):
            self._drop(connections, connection, Failure.CLOSED)
            connection = None
        if (
            connection
            and not round.cleanup
            and connection.in_flight
            and now - connection.in_flight[0][1] > max(round.timeout, 0.05)
        ):
            self._drop(connections, connection, Failure.TIMEOUT)
            self.breakers[node].failed(now)
            connection = None
        if connection and not round.cleanup and len(connection.in_flight) >= MAX_IN_FLIGHT:
            round.receive(node, failed(Failure.BACKLOG))
        elif connection:
            self._send(connections, connection, round, now)
        elif node in resting:
            round.receive(node, failed(Failure.FAILED_LATELY))
        elif not round.timeout:
            round.receive(node, failed(Failure.NOT_CONNECTED))
        else:
            self._connect(connections, node, round)

    def _send(self, connections: ConnectionSet, connection: Link, round: Round, now: float) -> None:
        if connection.broken:
            self._drop(connections, connection, Failure.CLOSED)
            self.breakers[connection.node].failed(now)
            round.receive(connection.node, failed(Failure.CLOSED, Kind.UNKNOWN))
            return
        greet = now > self.admission.due[connection.node]
        if greet:
            self.admission.asks(connection.node, now)
        connection.in_flight.append((round, now))
        connection.send(round.requests[connection.node], greet)

    def _happened(self, connections: ConnectionSet, see_to_it: Callable[..., None], *args: Any) -> None:
        """Handle the arrived replies if a round waits; the links of a busy thread are read at their next use."""
        if self.shared or connections.waiting:
            see_to_it(*args)
            for task in connections.waiting:
                task.wake()

    def _read(self, connections: ConnectionSet, connection: Link) -> None:
        node = connection.node
        while connection.inbox and connection.in_flight:
            said, reply = connection.inbox.popleft()
            forgot = said is not None and said.mark != connection.said.mark
            if forgot or reply.failure in DEMOTED:
                self._drop(connections, connection, Failure.FORGOT if forgot else reply.failure or Failure.FORGOT)
                return
            if said is not None:
                connection.said = said
                self.admission.greet(node, said)
            round, sent = connection.in_flight.popleft()
            self.breakers[node].answered()
            round.receive(node, self.admission.judge(node, reply, sent))

    def _drop_ended(self, connections: ConnectionSet, connection: Link) -> None:
        self._read(connections, connection)
        self._drop(connections, connection, Failure.RESET)
        self.breakers[connection.node].failed(self.clock())

    def _drop(self, connections: ConnectionSet, connection: Link, failure: Failure) -> None:
        if connections.by_node.get(connection.node) is connection:
            del connections.by_node[connection.node]
        connection.broken = True
        while connection.in_flight:
            round, _ = connection.in_flight.popleft()
            round.receive(connection.node, failed(failure, Kind.UNKNOWN))

    def _time_out(self, connections: ConnectionSet, round: Round) -> None:
        """Note the nodes that did not answer in time; their links stay, so that a release follows in order."""
        now = self.clock()
        for node in list(round.requests.keys() - round.replies.keys()):
            self.breakers[node].failed(now)
            kind = Kind.UNKNOWN if node in connections.by_node else Kind.FAILED
            round.receive(node, failed(Failure.TIMEOUT, kind))

    def _connect(self, connections: ConnectionSet, node: int, round: Round) -> None:
        if node in connections.connecting:
            connections.connecting[node].append(round)
            return
        connections.connecting[node] = [round]
        machine, world = self._machines[node], self.world
        link = machine.link(self)
        gives_up = world.now + max(round.timeout, CONNECT_TIMEOUT)
        arrives = self.faults.passes(self, machine)
        finished = False

        def finish(link: Link | None, greeting: Greeting | str) -> None:
            nonlocal finished
            if not finished:
                finished = True
                if link is None:
                    self.breakers[node].failed(self.clock())
                connections.arrived.append((node, link, greeting, self.clock()))
                self._happened(connections, self._take_arrivals, connections)

        def greet() -> None:
            back = self.faults.passes(self, machine)
            if machine.up and not machine.is_replica:
                link.boot, link.said = machine.boot, machine.greeting()
                self.arrive(back, finish, link, link.said)
            else:
                self.arrive(back, finish, None, "refused")

        machine.at(arrives, greet)
        self.arrive(gives_up, finish, None, "timeout")

    def _take_arrivals(self, connections: ConnectionSet) -> None:
        """Hand arrived links to their connections, and let the waiting rounds use them."""
        now = self.clock()
        while connections.arrived:
            node, link, greeting, when = connections.arrived.popleft()
            rounds = connections.connecting.pop(node)
            if link is not None and not isinstance(greeting, str):
                self.admission.greet(node, greeting, when)
                connections.by_node[node] = link
                link.on_reply = partial(self._happened, connections, self._read, connections, link)
                link.on_end = partial(self._happened, connections, self._drop_ended, connections, link)
            for round in rounds:
                if node in round.replies:
                    continue
                if node in connections.by_node:
                    self._send(connections, connections.by_node[node], round, now)
                else:
                    round.receive(node, Reply(Kind.FAILED, detail=str(greeting)))
