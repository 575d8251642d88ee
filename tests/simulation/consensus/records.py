"""
Nodes of records in virtual time: the production tables over a simulated etcd cluster.

A table waits for each reply, so it runs in a thread of its process.
"""

import json
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from django_redlock.contrib.consensus.etcd.node import EtcdTable
from django_redlock.contrib.consensus.place import Place as Addresses
from django_redlock.core.admission import Greeting
from django_redlock.core.names import secret_of
from django_redlock.core.protocol import SHARED, Acquire, Kind, Release, Reply, Request
from django_redlock.nodes.base import LinkError
from django_redlock.nodes.records.record import Decision
from django_redlock.nodes.records.table import PAUSE, UntouchedError
from tests.machine.network import Link, describe
from tests.machine.process import Bell, Process
from tests.machine.world import Place, World

from ..profiles import Profile
from .etcd import Cluster, Member

if TYPE_CHECKING:
    from ..oracles import Oracles

AT_ONCE = 50  # requests that are decided and written together, at most
PREFIX = "r:"


class Store(Place):
    """A replicated store as one node."""

    up, boot, booted, is_replica, deaf, mute = True, 0, -1e9, False, False, False

    def __init__(self, world: World, number: int, oracles: "Oracles", profile: Profile) -> None:
        super().__init__(world, f"store {number}")
        self.number = number
        self.at_end: list[Callable[[], None]] = []
        self.cluster = Cluster(world, self.name, profile)
        self.oracles = oracles
        self.workers: dict[Process, Worker] = {}
        self._released: set[str] = set()

    def greeting(self) -> Greeting:
        return Greeting(run_id=self.name, age=float("inf"))

    def link(self, process: Process) -> "RecordLink":
        return RecordLink(process, self)

    def stop(self, seconds: float) -> None:
        self.cluster.stop(self.world.random.choice(self.cluster.members), seconds)

    def listen(self, process: str, notification: Callable[[str], object]) -> None:
        def changed(value: str) -> None:
            for waiter in json.loads(b64decode(value)).get("to", ()):
                notification(waiter)

        self.cluster.watchers[coded(f"{PREFIX}w/{process}")] = changed

    def ignore(self, process: str) -> None:
        self.cluster.watchers.pop(coded(f"{PREFIX}w/{process}"), None)

    def record(self, slug: str) -> dict[str, Any]:
        _, value = self.cluster.values.get(coded(f"{PREFIX}h/{slug}"), (0, ""))
        record: dict[str, Any] = json.loads(b64decode(value)) if value else {}
        return record

    def has(self, slug: str, secret: str, shared: bool) -> bool:
        """Return whether the store names the holder with this secret, alone or beside other shared ones."""
        if secret in self._released:  # by the transaction that wrote it: that does not show in the record
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


class RecordLink(Link):
    """One link of a process; all links to one store share a worker."""

    def __init__(self, process: Process, machine: Store) -> None:
        super().__init__(process, machine)
        worker = machine.workers.get(process)
        if worker is None or worker.ended:
            worker = machine.workers[process] = Worker(process, machine)
        self._worker = worker
        worker.links.append(self)

    def transmit(self, request: Request | None) -> None:
        process, deliver = self.process, self.deliver
        if self._worker.ended:
            process.after(0.0, self.end)
        else:
            self._worker.submit(request, lambda reply: process.arrive(process.world.now, deliver, reply))


class Worker:
    """The thread of a process that uses one store; see :class:`django_redlock.nodes.records.worker.Worker`."""

    def __init__(self, process: Process, store: Store) -> None:
        self.process = process
        self.store = store
        self.links: list[RecordLink] = []
        self.ended = False
        self._jobs: deque[tuple[Request | None, Callable[[Any], None]]] = deque()  # without a request: a greeting
        self._table = SimulatedTable(self)
        self._bell = Bell(process)
        process.spawn(self._run)

    def submit(self, request: Request | None, deliver: Callable[[Any], None]) -> None:
        """Have a request carried out after those that came before."""
        self._jobs.append((request, deliver))
        self._bell.ring()

    def _run(self) -> None:
        try:
            while True:
                if not self._jobs:
                    self._bell.wait()
                jobs = [self._jobs.popleft() for _ in range(min(AT_ONCE, len(self._jobs)))]
                self._execute([(request, deliver) for request, deliver in jobs if request])
                for deliver in [deliver for request, deliver in jobs if request is None]:
                    deliver(self.store.greeting())
        except LinkError:
            self.ended = True
            for link in self.links:
                self.process.after(0.0, link.end)

    def _execute(self, jobs: Sequence[tuple[Request, Callable[[Reply], None]]]) -> None:
        if not jobs:
            return
        try:
            replies = self._table.execute([request for request, _ in jobs])
        except UntouchedError as error:
            for _, deliver in jobs:
                deliver(error.reply())
            raise
        for (_, deliver), reply in zip(jobs, replies, strict=True):
            deliver(reply)


class MemberLink:
    """A connection to one member, in place of :class:`django_redlock.contrib.consensus.etcd.client.EtcdClient`."""

    ended = False

    def __init__(self, worker: Worker, member: Member, timeout: float) -> None:
        self._worker = worker
        self._member = member
        self._timeout = timeout
        self._boot = member.boot
        self.note: Callable[[], object] = lambda: None

    def open(self) -> None: ...

    def close(self) -> None: ...

    def wait(self, timeout: float) -> None:
        self._timeout = timeout

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the member and return its reply, both of which can be late or lost."""
        if self._boot != self._member.boot:
            raise ConnectionResetError
        process, store, member = self._worker.process, self._worker.store, self._member
        faults, random = process.faults, process.random
        lost = random() if faults.on and random() < faults.hazards.cut else 1.0
        reset = faults.on and random() < faults.hazards.reset

        def begin(resume: Callable[[Any], None]) -> None:
            def send() -> None:
                if lost > 0.5:
                    arrives = faults.passes(process, store)
                    member.at(arrives, store.cluster.handle, member, path, body, self.note, answer)

            def answer(reply: Any) -> None:
                if lost == 1.0:
                    arrives = faults.passes(process, store)
                    process.arrive(arrives, resume, ConnectionResetError() if reset else reply)

            process.after(process.lag(), send)
            process.after(self._timeout, resume, TimeoutError())

        process.breathe()
        return process.thread.call(begin)  # type: ignore[no-any-return]


class SimulatedTable(EtcdTable):
    """The production table with virtual time, over a simulated cluster."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        patience = worker.process.rules.timeout(1.0)
        super().__init__(Addresses(tuple(("member", number) for number in range(3))), PREFIX, patience)
        self._at = worker.process.world.random.randrange(3)

    def now(self) -> float:
        return self._worker.process.clock()

    def wall(self) -> float:
        return self._worker.process.wall()

    def pause(self, longest: float = PAUSE) -> None:
        world = self._worker.process.world
        world.sleep(world.random.uniform(0, longest))

    def dial(self, number: int, timeout: float) -> Any:
        return MemberLink(self._worker, self._worker.store.cluster.members[number], timeout)

    def _decide(self, requests: Sequence[Request]) -> Decision:
        decision = super()._decide(requests)
        store = self._worker.store
        # The records that a request reads are compared when it writes, so they are the same then.
        self._found = [
            (request, reply, store.oracles.before(store, request))
            for request, reply in zip(requests, decision.replies, strict=False)
        ]
        return decision

    def write(self, decision: Decision) -> bool | None:
        """Write, and notify the oracles at the moment at which the cluster has carried it out."""
        link, found = self.connection, self._found
        link.note = lambda: self._worker.store.wrote(found)
        try:
            return super().write(decision)
        finally:
            link.note = lambda: None
