"""Nodes that crash, stop and have clocks of their own, and connections to them that fail in every way."""

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from math import exp
from typing import TYPE_CHECKING

from django_redlock.core.admission import Greeting
from django_redlock.core.node_state import NodeState
from django_redlock.core.node_state.records import Records
from django_redlock.core.protocol import SHARED, Extend, Failure, Reply, Request, Survey, failed
from django_redlock.core.round import Round

from .profiles import TTL, Profile
from .world import EPOCH, Clock, Computer, Place, World

if TYPE_CHECKING:
    from .driver import Process
    from .oracles import Node, Oracles

MOMENT = 0.0004  # seconds that a message normally takes


class Machine(Place):
    """One node: the production node in memory on a machine that can fail."""

    def __init__(self, world: World, number: int, oracles: "Oracles") -> None:
        super().__init__(world)
        self.number = number
        self.name = f"node {number}"
        self.clock = Clock(world, EPOCH)
        self.store = NodeState(self.clock)
        self.up = True
        self.boot = 0  # how often it started
        self.booted = -1e9  # when, in true time; nodes have been up for long when a schedule begins
        self.at_end: list[Callable[[], None]] = []  # connections that end with it
        self.wrong = False  # whether its clock has stepped away
        self.stepped = -1e9  # when its clock last stepped, in true time
        self.evicts = False  # whether its memory is full and its policy lets it drop keys
        self.is_replica = False
        self._promoted = ""
        self._replica: Records | None = None
        self._oracles = oracles
        self.store.records.served = (self._run(), "", int((EPOCH - 1e6) * 1e6))

    def _run(self) -> str:
        return f"{self.number}/{self.boot}"

    def greeting(self) -> Greeting:
        """Return how the node introduces itself; its age counts on its wall clock."""
        age = self.store.serve(self._run(), self._promoted, was_replica=bool(self._promoted))
        return Greeting(self._run(), age, self.evicts, self._promoted, mark=self.store.mark)

    def link(self, client: "Process") -> "Wire":
        return Wire(client, self)

    def listen(self, process: str, notification: Callable[[str], object]) -> None:
        """Notify the waiters of a process until it ends."""
        self.store.listeners[process] = notification

    def has(self, slug: str, secret: str, shared: bool) -> bool:
        """Return whether it knows the holder with this secret, alone or beside other shared ones."""
        holder = self.store.records.owner(slug, self.store.now())
        return holder == SHARED and secret in self.store.records.shared.get(slug, ()) if shared else holder == secret

    def endless(self) -> list[str]:
        rows = self.store.execute(Survey(size=100)).rows
        return [row.slug for row in rows if row.value and row.left is None]

    def copy(self) -> None:
        """Start a replica that gets no data from now on."""
        self._replica = deepcopy(self.store.records)

    def fail_over(self) -> None:
        """Let the replica take its place: another server, which has been running for long and lacks the last writes."""
        if self.up and self._replica is not None:
            self.world.log(self.name, "fails over")
            self._end()
            self._promoted = self._run()
            self.booted = self.world.now
            self.store.records, self._replica = self._replica, None
            self._oracles.forgot(self)

    def lose_memory(self) -> None:
        """Lose all data while running; no connection ends."""
        self.world.log(self.name, "loses its memory")
        self.store.reset()
        self.booted = self.world.now
        self._oracles.forgot(self)

    def demote(self) -> None:
        """Become a replica, which takes no writes; no connection ends."""
        self.world.log(self.name, "is demoted")
        self.is_replica = True

    def promote(self) -> None:
        """Become a master again, after the synchronization with another server has emptied it."""
        if self.is_replica:
            self.is_replica, self._promoted = False, f"{self._run()} {self.world.now}"
            self.lose_memory()

    def evict(self) -> None:
        """Drop all keys of holders, as a full server with another policy than ``noeviction`` may."""
        if self.evicts:
            self.world.log(self.name, "evicts")
            self.store.records.holders.clear()

    def crash(self, forget: bool) -> None:
        """End at once; *forget* loses its data."""
        self.world.log(self.name, "crashes", "and forgets" if forget else "")
        self.up = False
        self._end()
        if forget:
            self.store.reset()
            self._oracles.forgot(self)

    def _end(self) -> None:
        self.boot += 1
        self.store.listeners.clear()
        while self.at_end:
            self.at_end.pop()()

    def start(self) -> None:
        if not self.up:
            self.world.log(self.name, "starts")
            self.up = True
            self.booted = self.world.now

    def stop(self, seconds: float) -> None:
        self.world.log(self.name, "stops", f"for {seconds:.3f}")
        self.stopped_until = self.world.now + seconds

    def set_clock(self, seconds: float) -> None:
        """Step its clock away, or back."""
        self.world.log(self.name, "clock steps", f"{seconds:+g}")
        self.wrong, self.stepped = not self.wrong, self.world.now
        self.clock.step(seconds)

    def execute(self, request: Request, repeated: bool, mark: str) -> Reply:
        missing = self._oracles.missing(self, request)
        reply = failed(Failure.READONLY) if self.is_replica else self.store.execute(request, mark)
        if self.world.trace is not None:
            self.world.log(self.name, describe(request), "->", reply.failure or reply.kind.name)
        if not reply.failure:
            self._oracles.executed(self, request, reply, missing, repeated)
        return reply


SHOWN = ("slugs", "number", "waiter", "shared", "tombstone", "leaving")


def describe(request: Request) -> str:
    if isinstance(request, Extend):
        return "Extend " + ", ".join(f"{term.secret[:4]} #{term.fencing_token % 10**9}" for term in request.terms)
    about = ", ".join(f"{key} {value}" for key, value in request._asdict().items() if value and key in SHOWN)
    return f"{type(request).__name__} {request.secret[:4]} {about}"


class Link:
    """One connection from a client to a node, and the replies that nobody has read yet."""

    def __init__(self, client: "Process", machine: "Node") -> None:
        self.client = client
        self.machine = machine
        self.node = machine.number
        self.broken = False
        self.boot = machine.boot
        self.said = Greeting()  # how the node described itself last
        self.in_flight: deque[tuple[Round, float]] = deque()  # and when they were sent
        self.inbox: deque[tuple[Greeting | None, Reply]] = deque()
        self.on_reply: Callable[[], object] = lambda: None
        self.on_end: Callable[[], object] = lambda: None

    def send(self, request: Request, greet: bool) -> None:
        """Send a request; if the node is to *greet*, it describes itself again first."""
        raise NotImplementedError

    def deliver(self, said: Greeting | None, reply: Reply) -> None:
        if not self.broken:
            self.inbox.append((said, reply))
            self.on_reply()

    def end(self) -> None:
        """Report that there will be no more replies."""
        if not self.broken:
            self.broken = True
            self.on_end()


class Wire(Link):
    """A connection to one server: in order in both directions, until it fails."""

    def __init__(self, client: "Process", machine: Machine) -> None:
        super().__init__(client, machine)
        self._world, self._profile, self._faults = client.world, client.profile, client.faults
        self._last_out = self._last_in = 0.0
        self.deaf = False  # whether requests no longer arrive
        self.mute = False  # whether replies no longer arrive
        self.doomed = False  # whether the next request, once executed, is answered by a reset

    def send(self, request: Request, greet: bool) -> None:
        faults, world = self._faults, self._world
        random, profile = world.random.random, self._profile
        if faults.on:
            if random() < profile.cut:
                self._go_silent()
            if random() < profile.reset:
                self.client.arrive(world.now + world.random.uniform(0, 0.05), self.end)
        if self.deaf:
            return
        arrives = faults.passes(self.client, self.machine)
        if arrives < self._last_out:
            arrives = self._last_out
        self._last_out = arrives
        self.machine.at(arrives, self._execute, request, False, greet)
        if faults.on and random() < profile.repeat:
            late = arrives + world.random.expovariate(1 / TTL)
            self.machine.at(late, self._execute, request, True, False)

    def _go_silent(self) -> None:
        """Drop all further traffic in one direction."""
        if self._world.random.random() < 0.5:
            self.deaf = True
        else:
            self.mute = True
        self._world.log(self.client.name, "cut off from", self.machine.name, "deaf" if self.deaf else "mute")

    def _execute(self, request: Request, repeated: bool, greet: bool) -> None:
        machine, client = self.machine, self.client
        if not machine.up or machine.boot != self.boot:
            if not repeated:
                client.arrive(self._world.now + MOMENT, self.end)
            return
        said = machine.greeting() if greet and not machine.is_replica else None
        reply = machine.execute(request, repeated, self.said.mark)
        if self.doomed:
            client.arrive(self._world.now + MOMENT, self.end)
        elif not repeated and not self.mute:
            arrives = self._faults.passes(client, machine)
            if arrives < self._last_in:
                arrives = self._last_in
            self._last_in = arrives
            client.arrive(arrives, self.deliver, said, reply)


class Faults:
    """How long messages take, and whether anything still fails."""

    def __init__(self, world: World, profile: Profile) -> None:
        self.on = True
        self._world = world
        self._profile = profile
        self._blocked: dict[tuple[str, int], float] = {}

    def block(self, client: Computer, machine: Machine, seconds: float) -> None:
        """Hold all messages between a client and a node back for the given time."""
        self._world.log(client.name, "is blocked from", machine.name, f"for {seconds:.3f}")
        self._blocked[client.name, machine.number] = self._world.now + seconds

    def loses_notification(self) -> bool:
        return self.on and self._world.random.random() < self._profile.hush

    def passes(self, client: Computer, machine: Machine) -> float:
        """Return when a message between a client and a node that is sent now arrives."""
        world = self._world
        random, now = world.random.random, world.now
        takes = MOMENT * (0.5 + random())
        if self.on and random() < self._profile.spike:
            takes += 0.01 * exp(world.random.uniform(0, 5.7))  # up to three leases
        if self._blocked:
            now = max(now, self._blocked.get((client.name, machine.number), now))
        return now + takes
