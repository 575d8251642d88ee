"""
Nodes of records in virtual time: the production tables over a simulated etcd cluster.

A table waits for each reply, so it runs in a greenlet, which its process resumes. Whatever stops the process also stops
the table, between its reading and its writing, too.
"""

import json
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

from django_redlock.core.admission import Greeting
from django_redlock.core.names import secret_of
from django_redlock.core.protocol import SHARED, Acquire, Kind, Release, Reply, Request
from django_redlock.nodes.base import LinkError
from django_redlock.nodes.etcd.node import EtcdTable
from django_redlock.nodes.records.record import Decision
from django_redlock.nodes.records.replicated import Place as Addresses
from django_redlock.nodes.records.table import PAUSE, UntouchedError

from .etcd import Cluster, Member
from .network import Faults, describe
from .profiles import Profile
from .world import EPOCH, Clock, Place, World

if TYPE_CHECKING:
    from .driver import Process
    from .oracles import Oracles

AT_ONCE = 50  # requests that are decided and written together, at most
PREFIX = "r:"


class Store(Place):
    """A replicated store as one node."""

    up, boot, booted = True, 0, -1e9
    wrong, stepped = False, -1e9

    def __init__(self, world: World, number: int, oracles: "Oracles", profile: Profile) -> None:
        super().__init__(world)
        self.number = number
        self.name = f"store {number}"
        self.clock = Clock(world, EPOCH)  # it has no clock that anybody compares
        self.at_end: list[Callable[[], None]] = []
        self.cluster = Cluster(world, self.name, profile)
        self.oracles = oracles
        self._released: set[str] = set()

    def greeting(self) -> Greeting:
        return Greeting(run_id=self.name, age=float("inf"))

    def link(self, client: "Process", profile: Profile, faults: Faults) -> "RecordLink":
        return RecordLink(client, self, profile, faults)

    def start(self) -> None:
        """Do nothing: members start again by themselves."""

    def stop(self, seconds: float) -> None:
        self.cluster.stop(self.world.random.choice(self.cluster.members), seconds)

    def listen(self, process: str, notification: Callable[[str], object]) -> None:
        def changed(value: str) -> None:
            for waiter in json.loads(b64decode(value)).get("to", ()):
                notification(waiter)

        self.cluster.watchers[coded(f"{PREFIX}w/{process}")] = changed

    def record(self, slug: str) -> dict[str, Any]:
        _, value = self.cluster.values.get(coded(f"{PREFIX}h/{slug}"), (0, ""))
        record: dict[str, Any] = json.loads(b64decode(value)) if value else {}
        return record

    def has(self, slug: str, secret: str, shared: bool) -> bool:
        """
        Return whether the store names the holder with this secret, alone or beside other shared ones.

        A hold that was released in the transaction that wrote it does not show in the record.
        """
        if secret in self._released:
            return True
        record = self.record(slug)
        holder = secret_of(record["holder"][0]) if "holder" in record else None
        return holder == SHARED and secret in record.get("sharers", ()) if shared else holder == secret

    def endless(self) -> list[str]:
        records = [json.loads(b64decode(value)) for _, value in self.cluster.values.values()]
        return [record["slug"] for record in records if record.get("holder", ("", 0.0))[1] is None]

    def wrote(self, found: Sequence[tuple[Request, Reply, Any]]) -> None:
        """Notify the oracles of requests that one transaction carried out."""
        self._released = {request.secret for request, _, _ in found if isinstance(request, Release)}
        granted: set[str] = set()  # by an earlier request of the same transaction
        for request, reply, missing in found:
            self.world.log(self.name, describe(request), "->", reply.kind.name)
            lost = {(slug, secret) for slug, secret in missing if secret not in granted}
            self.oracles.executed(self, request, reply, lost, False)
            if isinstance(request, Acquire) and reply.kind in (Kind.ACCEPTED, Kind.GRANTED):
                granted.add(request.secret)
        self._released = set()


def coded(key: str) -> str:
    return b64encode(key.encode()).decode()


class RecordLink:
    """One link of a process; all links to one store share a worker."""

    deaf = mute = doomed = False
    boot = 0

    def __init__(self, client: "Process", machine: Store, profile: Profile, faults: Faults) -> None:
        self.client = client
        self.machine = machine
        self.broken = False
        self.on_reply: Callable[[Reply], object] = lambda reply: None
        self.on_end: Callable[[], object] = lambda: None
        worker = client.workers.get(machine.number)
        if worker is None or worker.ended:
            worker = client.workers[machine.number] = Worker(client, machine, profile, faults)
        self._worker = worker
        worker.links.append(self)

    def send(self, request: Request) -> None:
        if self._worker.ended:
            self.client.after(0.0, self.end)
        else:
            self._worker.submit(request, lambda reply: self.client.arrive(self.client.world.now, self._deliver, reply))

    def _deliver(self, reply: Reply) -> None:
        if not self.broken:
            self.on_reply(reply)

    def end(self) -> None:
        """Report that there will be no more replies."""
        if not self.broken:
            self.broken = True
            self.on_end()


class Worker:
    """The thread of a process that uses one store; see :class:`django_redlock.nodes.records.worker.Worker`."""

    def __init__(self, process: "Process", store: Store, profile: Profile, faults: Faults) -> None:
        self.process = process
        self.store = store
        self.links: list[RecordLink] = []
        self.ended = False
        self._profile = profile
        self._faults = faults
        self._jobs: deque[tuple[Request, Callable[[Reply], None]]] = deque()
        self._idle = False
        self._ticket = 0
        self._hub: Any = None
        self._greenlet = greenlet(self._run)
        self._table = SimulatedTable(self)
        process.after(process.lag(), self._resume, 0)

    def submit(self, request: Request, deliver: Callable[[Reply], None]) -> None:
        """Have a request carried out after those that came before."""
        self._jobs.append((request, deliver))
        if self._idle:
            self._idle = False
            self.process.after(self.process.lag(), self._resume, self._ticket)

    def close(self) -> None:
        """Drop the greenlet, which would keep the whole schedule in memory while it waits."""
        self._hub = getcurrent()
        self._greenlet.throw()

    def _resume(self, ticket: int, value: Any = None) -> None:
        if ticket == self._ticket:
            self._ticket += 1
            self._hub = getcurrent()
            self._greenlet.switch(value)

    def _run(self, _: object) -> None:
        try:
            while True:
                if not self._jobs:
                    self._idle = True
                    self._hub.switch()
                self._do([self._jobs.popleft() for _ in range(min(AT_ONCE, len(self._jobs)))])
        except LinkError:
            self.ended = True
            for link in self.links:
                self.process.after(0.0, link.end)

    def _do(self, jobs: Sequence[tuple[Request, Callable[[Reply], None]]]) -> None:
        try:
            replies = self._table.execute([request for request, _ in jobs])
        except UntouchedError as error:
            for _, deliver in jobs:
                deliver(error.reply())
            raise
        for (_, deliver), reply in zip(jobs, replies, strict=True):
            deliver(reply)

    # For the table, in the greenlet

    def sleep(self, seconds: float) -> None:
        self.process.after(seconds, self._resume, self._ticket)
        self._hub.switch()

    def ask(
        self, member: Member, path: str, body: Mapping[str, Any], timeout: float, note: Callable[[], object]
    ) -> dict[str, Any]:
        """Send a request to a member and return its reply, both of which can be late or lost."""
        process, store, faults, profile = self.process, self.store, self._faults, self._profile
        random, ticket = process.world.random.random, self._ticket
        lost = random() if faults.on and random() < profile.cut else 1.0
        reset = faults.on and random() < profile.reset

        def send() -> None:
            if lost > 0.5:
                arrives = faults.passes(process, store)
                process.world.at(arrives, store.cluster.handle, member, path, body, note, answer)

        def answer(reply: Any) -> None:
            if lost == 1.0:
                arrives = faults.passes(process, store)
                process.arrive(arrives, self._resume, ticket, ConnectionResetError() if reset else reply)

        process.breathe()
        process.after(process.lag(), send)
        process.after(timeout, self._resume, ticket, TimeoutError())
        reply = self._hub.switch()
        if isinstance(reply, Exception):
            raise reply
        return reply  # type: ignore[no-any-return]


class MemberLink:
    """A connection to one member, in place of :class:`django_redlock.nodes.etcd.client.EtcdClient`."""

    ended = False

    def __init__(self, worker: Worker, member: Member, timeout: float) -> None:
        self._worker = worker
        self._member = member
        self._timeout = timeout
        self._boot = member.boot
        self.note: Callable[[], object] = lambda: None

    def open(self) -> None:
        """Connect."""

    def wait(self, timeout: float) -> None:
        """Wait for that many seconds for each reply from now on."""
        self._timeout = timeout

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if self._boot != self._member.boot:
            raise ConnectionResetError
        return self._worker.ask(self._member, path, body, self._timeout, self.note)

    def close(self) -> None:
        """Close the connection."""

    def abort(self) -> None:
        """Do nothing: no other thread waits."""


class SimulatedTable(EtcdTable):
    """The production table with virtual time, over a simulated cluster."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._links: list[MemberLink] = []
        self._requests: Sequence[Request] = ()
        patience = worker.process.rules.timeout(1.0)
        super().__init__(Addresses(tuple(("member", number) for number in range(3))), PREFIX, patience)
        self._at = worker.process.world.random.randrange(3)

    def now(self) -> float:
        return self._worker.process.clock()

    def wall(self) -> float:
        return self._worker.process.wall()

    def pause(self, longest: float = PAUSE) -> None:
        """Wait a moment before a request is tried again."""
        self._worker.sleep(self._worker.process.world.random.uniform(0, longest))

    def dial(self, number: int, timeout: float) -> Any:
        self._links[:] = [MemberLink(self._worker, self._worker.store.cluster.members[number], timeout)]
        return self._links[0]

    def _decide(self, requests: Sequence[Request]) -> Decision:
        decision = super()._decide(requests)
        store = self._worker.store
        # The records that a request reads are compared when it writes, so they are the same then.
        self._found = [
            (request, reply, store.oracles.missing(store, request))
            for request, reply in zip(requests, decision.replies, strict=False)
        ]
        return decision

    def write(self, decision: Decision) -> bool | None:
        """Write, and notify the oracles at the moment at which the cluster has carried it out."""
        link, found = self._links[0], self._found
        link.note = lambda: self._worker.store.wrote(found)
        try:
            return super().write(decision)
        finally:
            link.note = lambda: None
