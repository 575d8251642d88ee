"""
An etcd cluster of three members, whose leaders change, as its JSON gateway shows it.

Whatever is written goes through one log, so there is one state. A member that has not yet heard of an election still
names the earlier term, and a leader that was deposed still counts the time of its leases, on a clock of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import floor
from typing import Any

from django_redlock.contrib.consensus.etcd.client import UNAVAILABLE, EtcdError
from django_redlock.contrib.consensus.etcd.node import GRANTED
from django_redlock.core.protocol import Failure
from tests.machine.world import Clock, Place, World

from ..profiles import TTL, Profile

CLUSTER = 0xE7CD  # its id
FOREVER = 9_223_372_036  # seconds that a member gives for each lease while it does not count them
MOMENT = 0.0004  # seconds in which the members agree on an entry
LATE = 0.02  # seconds after which a member counts leases, or no longer does, at most
ELECTION = 0.3  # seconds that an election takes, at most
FATES = ("dies", "stops", "is cut off", "hands over")

Answer = Callable[[Any], None]
Apply = Callable[[], dict[str, Any]]


class Member(Place):
    """One member: what it believes, and the clock by which it counts leases while it leads."""

    def __init__(self, world: World, name: str, number: int, rate: float) -> None:
        super().__init__(world, f"{name} {number}")
        self.number = number
        self.term = 2
        self.leader: int | None = 0
        self.counts = number == 0  # the time of leases, as a leader does soon after its election
        self.up = True
        self.boot = 0
        self.clock = Clock(world, 0.0, rate)
        self.began: dict[str, float] = {}  # by lease: when its count was zero, on the clock

    def promote(self, counted: Mapping[str, float]) -> None:
        """Begin to count leases whose given seconds have already passed."""
        self.counts = True
        self.began = {lease: self.clock() - seconds for lease, seconds in counted.items()}

    def counted(self, lease: str) -> float:
        """Return how many seconds it has counted of a lease."""
        return self.clock() - self.began.get(lease, self.clock())


@dataclass(eq=False, slots=True)
class Proposal:
    """Something that the members have not agreed on yet."""

    member: Member
    boot: int
    apply: Apply
    answer: Answer


class Cluster:
    """Three members with one state."""

    election = ELECTION

    def __init__(self, world: World, name: str, profile: Profile) -> None:
        self._world = world
        self._name = name
        self._profile = profile
        rate = profile.rate
        self.members = [Member(world, name, number, 1 + world.random.uniform(-rate, rate)) for number in range(3)]
        self.leader: Member | None = self.members[0]
        self.term = 2
        self.revision = 1
        self.values: dict[str, tuple[int, str]] = {}  # by key, as the gateway has them: the revision, and the value
        self.watchers: dict[str, Callable[[str], object]] = {}
        self._leases: dict[str, float] = {}  # by id: what had been counted when the last leader began
        self._pending: list[Proposal] = []

    # Requests

    def handle(
        self, member: Member, path: str, body: Mapping[str, Any], note: Callable[[], object], answer: Answer
    ) -> None:
        """Have a member carry out a request; *note* is called at the moment at which a transaction succeeds."""
        if not member.up:
            answer(ConnectionRefusedError())
        elif path == "/v3/maintenance/status":
            leader = 0 if member.leader is None else member.leader + 1
            self._reply(member, member.boot, {"leader": str(leader)}, answer)
        elif path == "/v3/lease/timetolive":
            self._look(member, member.boot, str(body["ID"]), answer)
        else:
            entries: dict[str, Apply] = {
                "/v3/kv/txn": partial(self._transact, body, note),
                "/v3/kv/range": partial(self._find, body),
                "/v3/lease/grant": self._grant,
                "/v3/lease/revoke": partial(self._revoke, body),
            }
            self._propose(Proposal(member, member.boot, entries[path], answer))

    def _reply(self, member: Member, boot: int, result: dict[str, Any], answer: Answer) -> None:
        """Answer from a member, which names the term that it knows at that moment."""
        member.at(self._world.now, self._answer, member, boot, result, answer)

    def _answer(self, member: Member, boot: int, result: dict[str, Any], answer: Answer) -> None:
        if member.boot != boot:
            answer(ConnectionResetError())
        else:
            ids = {"cluster_id": str(CLUSTER), "member_id": str(member.number + 1), "raft_term": str(member.term)}
            answer({"header": ids, **result})

    def _propose(self, proposal: Proposal) -> None:
        """Bring an entry to the leader that a member knows; to a deposed one, in vain."""
        member, world = proposal.member, self._world
        if self.leader is None or member.leader != self.leader.number or member.term != self.term:
            if world.random.random() < 0.5:
                proposal.answer(EtcdError(Failure.NO_LEADER, UNAVAILABLE))
            return
        self._pending.append(proposal)
        self.leader.at(world.now + MOMENT * (0.5 + world.random.random()), self._commit, proposal)

    def _commit(self, proposal: Proposal) -> None:
        if proposal not in self._pending or self.leader is None:
            return  # an election decides, or has decided
        self._pending.remove(proposal)
        self._reply(proposal.member, proposal.boot, proposal.apply(), proposal.answer)

    def _look(self, member: Member, boot: int, lease: str, answer: Answer) -> None:
        """Say what remains of a lease, by the clock of the leader that a member knows."""
        if member.leader is None:
            answer(EtcdError(Failure.NO_LEADER, UNAVAILABLE))
        else:
            leader = self.members[member.leader]
            leader.at(self._world.now, self._looked, leader, member, boot, lease, answer)

    def _looked(self, leader: Member, member: Member, boot: int, lease: str, answer: Answer) -> None:
        if not leader.up:
            answer(EtcdError(Failure.NO_LEADER, UNAVAILABLE))
            return
        left = floor(GRANTED - leader.counted(lease)) if leader.counts else FOREVER
        known = {"TTL": str(left), "grantedTTL": str(GRANTED)} if lease in self._leases else {"TTL": "-1"}
        member.at(self._world.now + MOMENT * self._world.random.random(), self._answer, member, boot, known, answer)

    # The state

    def _transact(self, body: Mapping[str, Any], note: Callable[[], object]) -> dict[str, Any]:
        compared = body.get("compare", ())
        if any(self.values.get(each["key"], (0, ""))[0] != each["mod_revision"] for each in compared):
            return {}
        responses: list[dict[str, Any]] = []
        for operation in body["success"]:
            if put := operation.get("request_put"):
                self.values[put["key"]] = (self.revision + 1, put["value"])
            elif read := operation.get("request_range"):
                responses.append({"response_range": self._find(read)})
        if any("request_put" in operation for operation in body["success"]):
            self.revision += 1
            note()
        for key in [operation["request_put"]["key"] for operation in body["success"] if "request_put" in operation]:
            if key in self.watchers:
                self.watchers[key](self.values[key][1])
        return {"succeeded": True, "responses": responses}

    def _find(self, read: Mapping[str, Any]) -> dict[str, Any]:
        revision, value = self.values.get(read["key"], (0, ""))
        return {"kvs": [{"key": read["key"], "value": value, "mod_revision": str(revision)}] if revision else []}

    def _grant(self) -> dict[str, Any]:
        lease = str(7_000 + self._world.number())
        self._leases[lease] = 0.0
        assert self.leader is not None
        self.leader.began[lease] = self.leader.clock()
        return {"ID": lease, "TTL": str(GRANTED)}

    def _revoke(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self._leases.pop(str(body["ID"]), None)
        return {}

    # Leaders

    def elect(self) -> None:
        """Depose the leader in one of the usual ways, and elect another one."""
        world, old = self._world, self.leader
        if old is None:
            return
        fate = world.random.choice(FATES)
        self.leader = None
        world.log(self._name, f"member {old.number}", fate)
        lasts = world.random.expovariate(2 / TTL)
        if fate == "dies":
            self.kill(old, lasts)
        elif fate == "stops":
            self.stop(old, lasts, world.random.choice((0.0, lasts)))
        world.at(world.now + world.random.uniform(0.0, ELECTION), self._elected, old)

    def _elected(self, old: Member) -> None:
        world, random = self._world, self._world.random
        able = [each for each in self.members if each is not old and each.up and world.now >= each.stopped_until]
        if not able:
            world.at(world.now + ELECTION * random.random(), self._elected, old)
            return
        new = self.leader = random.choice(able)
        self.term += random.choice((1, 1, 2))
        world.log(self._name, f"member {new.number} leads in term {self.term}")
        self._leases = {lease: self._begins(old.counted(lease)) for lease in self._leases}
        new.term = self.term
        new.leader = new.number
        new.counts = False  # it was no leader for a moment, even if it led before and has heard of nothing since
        new.at(world.now + LATE * random.random(), self._promote, new, self.term)
        # The members that elected it know of it at once. The others learn of it later.
        voter = next((member for member in able if member is not new), None)
        for member in self.members:
            if member is voter:
                self._learn(member, self.term)
            elif member is not new:
                member.at(world.now + random.expovariate(5 / TTL), self._learn, member, self.term)
        # Entries that the earlier leader had sent to the new one are carried out in the new term; the rest is lost.
        pending, self._pending = self._pending, []
        for proposal in pending[: random.randint(0, len(pending))]:
            self._reply_in_term(proposal, proposal.apply(), self.term)

    def _promote(self, member: Member, term: int) -> None:
        """Let a leader begin to count, after it has caught up with what was agreed on before."""
        if member is self.leader and self.term == term:
            member.promote(self._leases)

    def _begins(self, counted: float) -> float:
        """Return at what count a lease begins under a new leader."""
        random = self._world.random
        if apart := self._profile.apart:
            return max(0.0, counted + random.uniform(-apart, apart))
        # Anew, after the time of an election; or where a checkpoint of the lease was.
        return random.choice((-ELECTION * random.random(), -ELECTION * random.random(), max(0.0, counted - TTL)))

    def _reply_in_term(self, proposal: Proposal, result: dict[str, Any], term: int) -> None:
        """Answer when the member has heard of the term in which the entry was carried out."""
        if proposal.member.term < term and proposal.member.boot == proposal.boot:
            self._world.at(self._world.now + 0.01, self._reply_in_term, proposal, result, term)
        else:
            self._reply(proposal.member, proposal.boot, result, proposal.answer)

    def _learn(self, member: Member, term: int) -> None:
        """Let a member hear of an election. A leader no longer counts leases a moment before it names the new term."""
        world = self._world
        if member.up and member.term < term:
            late = LATE * world.random.random() if member.counts else 0.0
            member.counts = False
            world.at(world.now + late, self._know, member, term)

    def _know(self, member: Member, term: int) -> None:
        if self.leader and term == self.term and member is not self.leader:
            member.term, member.leader = term, self.leader.number
        elif term < self.term:
            return  # another election has followed, and it learns of that by itself
        elif self.leader is None:
            member.term, member.leader = max(member.term, term), None
            self._world.at(self._world.now + 0.05, self._know, member, term)

    # Hazards

    def stop(self, member: Member, seconds: float, still: float = 0.0) -> None:
        """Freeze a member; its clock may stand still for *still* seconds meanwhile, as that of a machine does."""
        member.stop(seconds)
        member.clock.step(-still)

    def kill(self, member: Member, seconds: float) -> None:
        """End a member at once, and start it again after some time."""
        member.up = member.counts = False
        member.leader = None
        member.boot += 1
        member.at(self._world.now + seconds, self._start, member)

    def _start(self, member: Member) -> None:
        """Start a member, which hears of the leader when there is one."""
        member.up = True
        if self.leader is None:
            member.at(self._world.now + 0.05, self._start, member)
        elif member is not self.leader:
            member.term, member.leader = self.term, self.leader.number
