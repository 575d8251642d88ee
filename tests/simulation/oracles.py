"""
The oracles check what must hold in every schedule, by the requests that the nodes really executed and true time.

None of them asks the code under test whether it was right.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from django_redlock import Lease
from django_redlock.core.attempt import Granted
from django_redlock.core.protocol import Acquire, Extend, Kind, Raise, Release, Reply, Request, Term
from django_redlock.core.round import Round
from tests.machine.network import Observer
from tests.machine.world import World

from .profiles import TTL

if TYPE_CHECKING:
    from tests.machine.network import Node as Server

    from .consensus.records import Store
    from .database import Database

    Node = Server | Store

DRIFT = TTL * 0.01 + 0.002
GUARD = TTL + DRIFT
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Vote:
    """A number that a node accepted for a secret, and when that node last started."""

    number: int
    booted: float


def believed(lease: Lease) -> bool:
    """Return whether the holder, if it looked now, would consider the lock its own; changes nothing."""
    hold = lease.hold
    return not hold.keeper.client.dead and hold.remaining(hold.clock()) > 0


Missing = Set[tuple[str, str]]
"""Names, and the secrets of those who hold them no longer on a node."""


class Oracles(Observer):
    """Check one schedule, slug by slug: a lock with several permits has a slug for each of them."""

    def __init__(self, world: World, quorum: int, guarded: bool) -> None:
        self.figures: Counter[str] = Counter()
        self.violations: list[tuple[str, str]] = []
        self.commands = 0  # executed by nodes
        self._world = world
        self._quorum = quorum
        self.guarded = guarded
        self._held: dict[str, list[Lease]] = defaultdict(list)  # by name
        self._ended: list[Lease] = []
        # By slug; those that were not shared also by slug and "!".
        self._completed: dict[str, list[float]] = defaultdict(list)
        self._highest: dict[str, list[int]] = defaultdict(list)
        self._tokens: dict[str, set[int]] = defaultdict(set)
        self._accepted: dict[tuple[int, str], int] = {}
        self._votes: dict[tuple[int, str], list[Vote]] = defaultdict(list)
        self._released: dict[int, dict[str, float]] = defaultdict(dict)
        self._first_bytes: dict[Round, tuple[float, float]] = {}  # in true time, and by the client's clock
        self.holds: dict[tuple[str, ...], float] = {}  # the minimum holds, by the names of the lock
        self._grants: dict[str, dict[int, float]] = defaultdict(dict)  # by secret, when each node granted first
        self._kept: dict[str, list[tuple[float, Lease]]] = defaultdict(list)  # by slug, until when for whom

    def violated(self, oracle: str, what: str) -> None:
        self._world.log("ORACLE", f"{oracle}: {what}")
        self.violations.append((oracle, what))

    # Actions of the nodes

    def forgot(self, machine: "Node") -> None:
        """A node lost its data."""
        for node, slug in list(self._accepted):
            if node == machine.number:
                del self._accepted[node, slug]
        self._released.pop(machine.number, None)

    def before(self, machine: "Node", request: Request) -> Missing:
        """Return the holds that a request, if it is an extension, finds lost."""
        return {
            (slug, term.secret)
            for term in (request.terms if isinstance(request, Extend) else ())
            for slug in term.slugs
            if not machine.has(slug, term.secret, term.shared)
        }

    def executed(self, machine: "Node", request: Request, reply: Reply, missing: Missing, repeated: bool) -> None:
        """A node executed a request, which found *missing* to be lost."""
        self.commands += 1
        match request:
            case Acquire() | Raise():
                if reply.kind is Kind.ACCEPTED:
                    self._accepts(machine, request)
                if reply.kind in (Kind.ACCEPTED, Kind.GRANTED):
                    self._grants[request.secret].setdefault(machine.number, self._world.now)
                if reply.kind in (Kind.ACCEPTED, Kind.GRANTED) and isinstance(request, Acquire) and not repeated:
                    self._comes_back(machine, request.secret)
            case Extend():
                for term, result in zip(request.terms, reply.terms, strict=True):
                    if result.kind is Kind.HELD:
                        self._heals(machine, term, missing)
                    if result.kind is Kind.HELD and not repeated:
                        self._comes_back(machine, term.secret)
            case Release():
                self._released[machine.number][request.secret] = self._world.now

    def _accepts(self, machine: "Node", request: Acquire | Raise) -> None:
        """Numbers strictly increase, and only the holder has one accepted."""
        node = machine.number
        for slug in request.slugs:
            highest = self._accepted.get((node, slug), 0)
            if request.number <= highest:
                self.violated("node", f"node {node} accepted {request.number} for {slug} after a greater one")
            else:
                self._accepted[node, slug] = request.number
            if not machine.has(slug, request.secret, request.shared):
                self.violated("node", f"node {node} accepted a number of one who does not hold it")
        self._votes[node, request.secret].append(Vote(request.number, machine.booted))

    def _heals(self, machine: "Node", term: Term, missing: Missing) -> None:
        """A node that lost a holder takes it back only if it has accepted no greater number."""
        for slug in [slug for slug in term.slugs if (slug, term.secret) in missing]:
            highest = self._accepted.get((machine.number, slug), 0)
            if highest > term.fencing_token:
                self.violated("heal", f"node {machine.number} took {term.fencing_token} back after {highest}")
            self._accepted[machine.number, slug] = max(highest, term.fencing_token)

    def _comes_back(self, machine: "Node", secret: str) -> None:
        """For one ttl, a node does not grant a released lock to a late request of the same attempt."""
        if self._world.now < self._released[machine.number].get(secret, -TTL) + 0.98 * TTL:
            self.violated("ghost", f"node {machine.number} granted {secret[:4]} after its release")

    # Claims of the clients

    def first_byte(self, round: Round, now: float) -> None:
        """The first byte of a round is about to be sent, at *now* on the client's steady clock."""
        self._first_bytes[round] = self._world.now, now

    def granted(self, lease: Lease, outcome: Granted) -> None:
        """An attempt won."""
        self.figures["acquisitions"] += 1
        self.figures["one round"] += len(outcome.rounds) == 1
        # The rounds in which the nodes were asked for the lock. There is more than one only after split votes, in which
        # the silent nodes are not asked again, and after links that were cut. Each may be followed by a round that
        # raises the token.
        asked: list[Round] = []
        excused: list[bool] = []
        for round in outcome.rounds:
            if isinstance(next(iter(round.requests.values())), Acquire):
                asked.append(round)
                excused.append(any(reply.kind is Kind.BUSY for reply in round.replies.values()))
            excused[-1] |= bool(round.cut or round.terms)  # which keeps a minimum hold, and may end too late
        rounds = len(outcome.rounds) - sum(bool(round.terms) for round in outcome.rounds)
        # An attempt of which any round was cut is repeated once, whatever the last of its rounds found.
        repeated = excused[:-1].count(False) > any(round.cut for round in outcome.rounds)
        if repeated or len(asked[-1].requests) < self._quorum or rounds > 2 * len(asked):
            self.violated("cost", f"{rounds} rounds")
        self._check_votes(outcome)
        began, first_byte = self._first_bytes[asked[-1]]
        latest = first_byte + TTL - DRIFT
        if lease.hold.deadline > latest + ROUNDING:
            self.violated("validity", f"a lease ends {lease.hold.deadline - latest:.6f} s too late")
        if not believed(lease):
            self.violated("validity", "a lock was granted with no validity left")
        for slug in outcome.slugs:
            self._check_token(slug, outcome.fencing_token, began)
            self._completes(slug, outcome.fencing_token)
            if not lease.hold.shared:
                self._completes(slug + "!", outcome.fencing_token)
        for name in lease.hold.names:
            self._check_alone(name, lease)
        for slug in outcome.slugs:
            self._check_kept(slug, lease)

    def _check_votes(self, outcome: Granted) -> None:
        """One number, one attempt, a quorum of distinct nodes that may vote."""
        best = 0
        for round in outcome.rounds:
            replies = round.replies.items()
            voters = [
                node for node, reply in replies if reply.kind is Kind.ACCEPTED and reply.fence == outcome.fencing_token
            ]
            best = max(best, sum(self._voted(node, outcome) for node in voters))
        if best < self._quorum:
            self.violated("votes", f"{best} votes for {outcome.fencing_token} where {self._quorum} are needed")

    def _voted(self, node: int, outcome: Granted) -> bool:
        """Return whether a node accepted the token for this attempt, and had been up for long enough."""
        since = self._world.now - (0.98 * GUARD if self.guarded else 0.0)
        votes = self._votes.get((node, outcome.secret), ())
        return any(vote.number == outcome.fencing_token and vote.booted <= since for vote in votes)

    def _check_token(self, name: str, token: int, began: float) -> None:
        """Unique, and above every token that was complete when the attempt began."""
        if token in self._tokens[name]:
            self.violated("token", f"{token} was given twice for {name}")
        before = bisect_left(self._completed[name], began)
        if before and self._highest[name][before - 1] >= token:
            self.violated("token", f"{token} for {name} after {self._highest[name][before - 1]}")
        self._tokens[name].add(token)

    def _completes(self, key: str, token: int) -> None:
        highest = self._highest[key]
        self._completed[key].append(self._world.now)
        highest.append(max(token, highest[-1] if highest else 0))

    def _check_alone(self, name: str, lease: Lease) -> None:
        """No other holder counts the lock as its own, unless both share it or have permits of the same limit."""
        others = self._held[name]
        for other in list(others):
            if not believed(other):
                others.remove(other)
                self._ended.append(other)
            elif not self._together(lease, other):
                both = " and ".join(each.hold.keeper.client.name for each in (lease, other))
                self.violated("overlap", f"{both} both hold {name}")
        if len(others) >= lease.hold.limit > 1:
            self.violated("overlap", f"{len(others) + 1} hold {name} where {lease.hold.limit} may")
        others.append(lease)

    def _check_kept(self, slug: str, lease: Lease) -> None:
        """
        Nobody else gets a lock before its minimum hold has passed, whatever has become of its holder.

        It counts from the moment at which a quorum had granted the lock, by clocks that are within the drift.
        """
        now = self._world.now
        for until, other in self._kept[slug]:
            if now < until and not (lease.hold.shared and other.hold.shared):
                who, before = (each.hold.keeper.client.name for each in (lease, other))
                self.violated("coverage", f"{who} holds {slug}, which {before} had taken for {until - now:.3f} s more")
        if hold_for := self.holds.get(lease.hold.names, 0.0):
            acquired = sorted(self._grants[lease.hold.secret].values())[self._quorum - 1]
            self._kept[slug].append((acquired + 0.99 * hold_for - ROUNDING, lease))

    def freed(self, lease: Lease) -> None:
        """The minimum hold of a lease ends with its work."""
        for slug in lease.hold._slugs:
            self._kept[slug] = [(until, other) for until, other in self._kept[slug] if other is not lease]

    @staticmethod
    def _together(lease: Lease, other: Lease) -> bool:
        """Return whether two leases of one name may hold it together."""
        one, two = lease.hold, other.hold
        permits = one.limit == two.limit and set(one._slugs).isdisjoint(two._slugs)
        return permits or (one.shared and two.shared)

    def extended(self, lease: Lease, round: Round, late: bool) -> None:
        """A round extended a lease; *late* is after the deadline."""
        hold = lease.hold
        asked, first_byte = self._first_bytes[round]
        if late:
            self.violated("validity", "an extension counted after the deadline")
        if hold.deadline > first_byte + TTL - DRIFT + ROUNDING:
            self.violated("validity", "an extension lasts longer than from before its first byte")
        for slug in hold._slugs:
            key = slug + "!" if hold.shared else slug  # a later holder that shares the lock does not supersede
            before = bisect_left(self._completed[key], asked)
            if before and self._highest[key][before - 1] > hold.fencing_token:
                self.violated("heal", f"{hold.fencing_token} of {slug} was extended after a later token was complete")

    # At the end

    def finish(self, machines: Sequence["Node"], database: "Database") -> None:
        """Check the state when the schedule has ended."""
        if any(believed(lease) for lease in self._ended):
            self.violated("validity", "a lease that had ended became valid again")
        for machine in machines:
            for slug in machine.endless():
                self.violated("expiry", f"{slug} on node {machine.number} has no expiry")
        for name, row in database.rows.items():
            for guard, number in row.committed.items():
                self.figures[f"committed, {guard}"] += number
                self.figures[f"lost, {guard}"] += row.lost(guard)
            self._check_history(name, row.history)
            if row.lost("claimed before reading"):
                self.violated("update", f"{row.lost('claimed before reading')} increments of {name} were lost")

    def _check_history(self, name: str, history: list[tuple[int, str]]) -> None:
        """The commits of one token and owner are contiguous, and tokens only grow."""
        blocks = [pair for place, pair in enumerate(history) if place == 0 or history[place - 1] != pair]
        if len(set(blocks)) < len(blocks):
            self.violated("update", f"commits of one holder of {name} are not contiguous")
        tokens = [token for token, _ in blocks]
        if any(later <= earlier for earlier, later in pairwise(tokens)):
            self.violated("update", f"tokens of {name} do not increase from holder to holder")
