"""Nodes that crash, stop and have clocks of their own, and connections to them that fail in every way."""

from collections import deque
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from math import exp
from typing import TYPE_CHECKING, Any

from django_redlock.core.admission import Greeting
from django_redlock.core.node_state import NodeState
from django_redlock.core.node_state.records import Records
from django_redlock.core.protocol import SHARED, Extend, Failure, Kind, Reply, Request, Survey, failed
from django_redlock.nodes.base import INCOMPLETE, LinkError, Packed
from django_redlock.nodes.memory import checked
from django_redlock.nodes.redis.errors import DEMOTED

from .world import EPOCH, Clock, Dead, Place, World

if TYPE_CHECKING:
    from .process import Process

MOMENT = 0.0004  # seconds that a message normally takes
LATE = 1.0  # seconds after which a request that is executed once more arrives again, on average


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazards:
    """What may happen in any simulation; chances are per message, rates per second."""

    cut: float = 0.0  # chance that a connection goes silent, in one direction, permanently
    reset: float = 0.0  # chance that a connection is reset
    spike: float = 0.0  # chance that a message, and all behind it, is late: up to several leases
    repeat: float = 0.0  # chance that a request is executed once more, later
    hush: float = 0.0  # chance that a notification is lost
    stall: float = 0.0  # chance that a process stops between two steps; up to three leases
    share: float = 1.0  # how many schedules it gets where all profiles run, beside the others' 1
    tolerated: frozenset[str] = frozenset()  # oracles that only count violations, where assumptions do not hold
    ways: tuple[float, ...] = (MOMENT,)  # seconds that a message takes; each process and node draw one of them


class Observer:
    """Is told of what nodes do; this one ignores it."""

    def forgot(self, machine: Any) -> None:
        """A node lost its data."""

    def before(self, machine: Any, request: Request) -> Any:
        """Return what to remember until a node has executed a request."""

    def executed(self, machine: Any, request: Request, reply: Reply, before: Any, repeated: bool) -> None:
        """A node executed a request."""


class Node(Place):
    """One node: the production node in memory on a machine that can fail."""

    def __init__(self, world: World, number: int, observer: Observer) -> None:
        super().__init__(world, f"node {number}")
        self.number = number
        self.clock = Clock(world, EPOCH)
        self.store = NodeState(self.clock)
        self.up = True
        self.boot = 0  # how often it started
        self.booted = -1e9  # when, in true time; nodes have been up for long when a schedule begins
        self.at_end: list[Callable[[], object]] = []  # connections that end with it
        self.wrong = False  # whether its clock has stepped away
        self.stepped = -1e9  # when its clock last stepped, in true time
        self.evicts = False  # whether its memory is full and its policy lets it drop keys
        self.deaf = self.mute = False  # whether it loses all requests, or all replies
        self.is_replica = False
        self._promoted = ""
        self._replica: Records | None = None
        self._observer = observer
        self.store.records.served = (self._run(), "", int((EPOCH - 1e6) * 1e6))

    def _run(self) -> str:
        return f"{self.number}/{self.boot}"

    def greeting(self) -> Greeting:
        """Return how the node introduces itself; its age counts on its wall clock."""
        age = self.store.serve(self._run(), self._promoted, was_replica=bool(self._promoted))
        return Greeting(self._run(), age, self.evicts, self._promoted, mark=self.store.mark)

    def link(self, process: "Process") -> "Wire":
        return Wire(process, self)

    def listen(self, process: str, notification: Callable[[str], object]) -> None:
        """Notify the waiters of a process until it ends."""
        self.store.listeners[process] = notification

    def ignore(self, process: str) -> None:
        """Notify the waiters of a process no longer."""
        self.store.listeners.pop(process, None)

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
            self._observer.forgot(self)

    def lose_memory(self) -> None:
        """Lose all data while running; no connection ends."""
        self.world.log(self.name, "loses its memory")
        self.store.reset()
        self.booted = self.world.now
        self._observer.forgot(self)

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

    def crash(self, forget: bool = False) -> None:
        """End at once; *forget* loses its data."""
        self.world.log(self.name, "crashes", "and forgets" if forget else "")
        self.up = False
        self._end()
        if forget:
            self.store.reset()
            self._observer.forgot(self)

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

    def set_clock(self, seconds: float) -> None:
        """Step its clock away, or back."""
        self.world.log(self.name, "clock steps", f"{seconds:+g}")
        self.wrong, self.stepped = not self.wrong, self.world.now
        self.clock.step(seconds)

    def execute(self, request: Request, repeated: bool, mark: str) -> Reply:
        before = self._observer.before(self, request)
        reply = failed(Failure.READONLY) if self.is_replica else self.store.execute(request, mark)
        if self.world.trace is not None:
            self.world.log(self.name, describe(request), "->", reply.failure or reply.kind.name)
        if not reply.failure:
            self._observer.executed(self, request, reply, before, repeated)
        return reply


SHOWN = ("slugs", "number", "waiter", "shared", "tombstone", "leaving")


def describe(request: Request) -> str:
    if isinstance(request, Extend):
        return "Extend " + ", ".join(f"{term.secret[:4]} #{term.fencing_token % 10**9}" for term in request.terms)
    about = ", ".join(f"{key} {value}" for key, value in request._asdict().items() if value and key in SHOWN)
    return f"{type(request).__name__} {getattr(request, 'secret', '')[:4]} {about}"


class Link:
    """One connection of a process to a node, and the replies that nobody has read yet."""

    def __init__(self, process: "Process", machine: Any) -> None:
        self.process = process
        self.machine = machine
        self.broken = False
        self.boot = machine.boot
        self.greeting = Greeting()
        self.inbox: deque[Greeting | Reply] = deque()
        self.on_news: Callable[[], object] = bool  # called when there is something to read

    def transmit(self, request: Request | None) -> None:
        """Send a request, or ask the node to describe itself again."""
        raise NotImplementedError

    def deliver(self, answer: Greeting | Reply) -> None:
        if not self.broken:
            self.inbox.append(answer)
            self.on_news()

    def end(self) -> None:
        """Report that there will be no more replies."""
        if not self.broken:
            self.broken = True
            self.on_news()

    # A link of production

    def fileno(self) -> int:
        return 0

    def greet(self) -> None:
        self._send(None)

    def send(self, request: Request, packed: Packed, *, in_full: bool = False) -> None:
        self._send(request)

    def receive_greeting(self) -> Greeting | None:
        answer = self._take()
        if isinstance(answer, Reply):
            raise LinkError(answer.failure or Failure.FORGOT)
        return answer and checked(answer, self.greeting.mark)

    def receive(self, request: Request) -> Reply | None:
        answer = self._take()
        assert not isinstance(answer, Greeting)
        if answer and (answer.failure in DEMOTED or answer.failure is Failure.FORGOT):
            raise LinkError(answer.failure)
        return answer or INCOMPLETE

    def readable(self) -> bool:
        return self.broken or bool(self.inbox)

    def close(self) -> None:
        self.broken, self.on_news = True, bool

    def _send(self, request: Request | None) -> None:
        self.process.transmits()
        if self.process.dead:
            raise Dead
        if self.broken:
            raise LinkError(Failure.RESET)
        self.transmit(request)

    def _take(self) -> Greeting | Reply | None:
        if self.inbox:
            return self.inbox.popleft()
        if self.broken:
            raise LinkError(Failure.RESET)
        return None


class LoopLink:
    """The link of an event loop, which hands each reply to the one who asked."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.greeting = link.greeting
        self._awaited: deque[tuple[Request | None, Callable[..., object]]] = deque()
        link.on_news = self._news

    @property
    def broken(self) -> bool:
        return self.link.broken

    def greet(self, on_greeting: Callable[[Greeting], object]) -> None:
        self.link.greet()
        self._awaited.append((None, on_greeting))

    def send(
        self, request: Request, packed: Packed, on_reply: Callable[[Reply | None], bool], *, in_full: bool = False
    ) -> None:
        self.link.send(request, packed)
        self._awaited.append((request, on_reply))

    def readable(self) -> bool:
        return bool(self.link.inbox)

    def close(self) -> None:
        self._end(LinkError(Failure.CLOSED))

    def _news(self) -> None:
        self.link.process.in_loop(self._read)

    def _read(self) -> None:
        try:
            while self._awaited:
                request, give = self._awaited[0]
                answer = self.link.receive(request) if request else self.link.receive_greeting()
                if answer is None or answer is INCOMPLETE:
                    return
                self._awaited.popleft()
                give(answer)
        except LinkError as error:
            self._end(error)

    def _end(self, error: LinkError) -> None:
        self.link.close()
        while self._awaited:
            request, give = self._awaited.popleft()
            if request:
                give(error.reply(Kind.UNKNOWN))


class Wire(Link):
    """A connection to one server: in order in both directions, until it fails."""

    def __init__(self, process: "Process", machine: Node) -> None:
        super().__init__(process, machine)
        self._world, self._faults = process.world, process.faults
        self._last_out = self._last_in = 0.0
        self.deaf = False  # whether requests no longer arrive
        self.mute = False  # whether replies no longer arrive
        self.doomed = False  # whether the next request, once executed, is answered by a reset

    def transmit(self, request: Request | None) -> None:
        faults, world = self._faults, self._world
        random, hazards = world.random.random, faults.hazards
        if faults.on:
            if random() < hazards.cut:
                self._go_silent()
            if random() < hazards.reset:
                self.process.arrive(world.now + world.random.uniform(0, 0.05), self.end)
        if self.deaf:
            return
        arrives = self._last_out = max(self._last_out, faults.passes(self.process, self.machine))
        self.machine.at(arrives, self._execute, request, False)
        if request and faults.on and random() < hazards.repeat:
            self.machine.at(arrives + world.random.expovariate(1 / LATE), self._execute, request, True)

    def _go_silent(self) -> None:
        """Drop all further traffic in one direction."""
        if self._world.random.random() < 0.5:
            self.deaf = True
        else:
            self.mute = True
        self._world.log(self.process.name, "cut off from", self.machine.name, "deaf" if self.deaf else "mute")

    def _execute(self, request: Request | None, repeated: bool) -> None:
        node, process = self.machine, self.process
        if not node.up or node.boot != self.boot:
            if not repeated:
                process.arrive(self._world.now + MOMENT, self.end)
            return
        self.mute |= node.deaf or node.mute  # for good: a later reply would be taken for the one that is missing
        if node.deaf:
            return
        answer: Greeting | Reply
        if request:
            answer = node.execute(request, repeated, self.greeting.mark)
        else:
            answer = failed(Failure.READONLY) if node.is_replica else node.greeting()
        if self.doomed:
            process.arrive(self._world.now + MOMENT, self.end)
        elif not (repeated or self.mute):
            arrives = self._last_in = max(self._last_in, self._faults.passes(process, node))
            process.arrive(arrives, self.deliver, answer)


class Faults:
    """How long messages take, and whether anything still fails."""

    def __init__(self, world: World, hazards: Hazards) -> None:
        self.on = True
        self.hazards = hazards
        self._world = world
        self._blocked: dict[tuple[str, str], float] = {}
        self._ways: dict[tuple[str, str], float] = {}

    def block(self, process: Place, machine: Place, seconds: float) -> None:
        """Hold all messages between a process and a node back for the given time."""
        self._world.log(process.name, "is blocked from", machine.name, f"for {seconds:.3f}")
        self._blocked[process.name, machine.name] = self._world.now + seconds

    def loses_notification(self) -> bool:
        return self.on and self._world.random.random() < self.hazards.hush

    def passes(self, process: Place, machine: Place) -> float:
        """Return when a message between a process and a node that is sent now arrives."""
        world, ways = self._world, self.hazards.ways
        random, now, way = world.random.random, world.now, ways[0]
        if len(ways) > 1:
            pair = process.name, machine.name
            if pair not in self._ways:
                self._ways[pair] = world.random.choice(ways)
            way = self._ways[pair]
        takes = way * (0.5 + random())
        if self.on and random() < self.hazards.spike:
            takes += 0.01 * exp(world.random.uniform(0, 5.7))  # up to three leases
        if self._blocked:
            now = max(now, self._blocked.get((process.name, machine.name), now))
        return now + takes
