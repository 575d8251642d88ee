"""
Deliberately wrong protocols. An oracle that never fails proves nothing, so each of these has to be caught.

A mutant replaces one function of the production core, of the node in memory, or of the fenced transaction, for as long
as its context lasts. The hunt runs schedules of the mutant's profiles until an oracle objects.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from django_redlock.core.acquisition import Acquisition
from django_redlock.core.admission import Admission
from django_redlock.core.attempt import GRANTS, Attempt, Verdict
from django_redlock.core.hold import Hold
from django_redlock.core.names import permit_slug, secret_of
from django_redlock.core.node_state import NodeState
from django_redlock.core.node_state.records import Records
from django_redlock.core.protocol import SHARED, Kind, Reply
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules, majority
from django_redlock.nodes.etcd import node as etcd_table
from django_redlock.nodes.etcd.node import EtcdTable
from django_redlock.nodes.records import record as records
from django_redlock.nodes.records.clock import EraClock, Moment

from . import database, schedule
from .driver import Process
from .profiles import PROFILES
from .scenarios import SCENARIOS

ENOUGH = 600  # schedules after which a mutant counts as alive


@dataclass(frozen=True, slots=True)
class Mutant:
    """
    One wrong protocol.

    Args:
        name: Its fault.
        change: Makes the protocol wrong for as long as its context lasts.
        haunts: Profiles and scenarios in which the fault must show.
    """

    name: str
    change: Callable[[], Any]
    haunts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kill:
    """How a mutant was caught: by which oracle, after how many schedules; None if it was not."""

    mutant: Mutant
    oracle: str | None
    schedules: int


MUTANTS: list[Mutant] = []


def mutant(*haunts: str) -> Callable[[Callable[[], Iterator[None]]], Callable[[], Iterator[None]]]:
    """Register a mutant; its name is its docstring."""

    def register(change: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        MUTANTS.append(Mutant(str(change.__doc__).strip(), contextmanager(change), haunts))
        return change

    return register


def hunt(prey: Mutant) -> Kill:
    """Run schedules until an oracle objects to a mutant, or the limit is reached."""
    with prey.change():
        for seed in range(ENOUGH):
            for haunt in prey.haunts:
                violations = (
                    schedule.Schedule(PROFILES[haunt], seed).run().failures
                    if haunt in PROFILES
                    else SCENARIOS[haunt](seed)
                )
                if violations:
                    return Kill(prey, violations[0][1], seed + 1)
    return Kill(prey, None, ENOUGH)


def score(kills: list[Kill]) -> str:
    """Return the text to print about a hunt."""
    lines = [f"{kill.schedules:4}  {kill.mutant.name}  <- {kill.oracle or 'ALIVE'}" for kill in kills]
    killed = sum(kill.oracle is not None for kill in kills)
    return "\n".join([*lines, f"killed {killed} of {len(kills)} mutants"])


# The node


def holder_of(node: NodeState, slug: str) -> str:
    """Return the secret under which a node holds a lock, or nothing."""
    return secret_of(node.records.holder(slug, node._now) or "")


@mutant("skew", "same microsecond")
def ties() -> Iterator[None]:
    """a node accepts a number that it has accepted before"""
    high = Records.highest_fence
    with patch.object(Records, "highest_fence", lambda *args: max(0, high(*args) - 1)):
        yield


@mutant("calm")
def overwriting() -> Iterator[None]:
    """a node grants a lock that somebody else holds"""
    acquire = NodeState._acquire

    def granted(self: NodeState, request: Any) -> Reply:
        return acquire(self, request._replace(adopt=holder_of(self, request.slugs[0])))

    with patch.object(NodeState, "_acquire", granted):
        yield


@mutant("calm", "net")
def release_of_anybody() -> Iterator[None]:
    """a release does not look at the owner"""
    release = NodeState._release

    def released(self: NodeState, request: Any) -> Reply:
        return release(self, request._replace(secret=holder_of(self, request.slugs[0]) or request.secret))

    with patch.object(NodeState, "_release", released):
        yield


@mutant("keeps data and clocks", "net", "pause")
def extension_of_anybody() -> Iterator[None]:
    """an extension does not look at the owner"""
    extend = NodeState._extend_one

    def extended(self: NodeState, term: Any, keep: float | None) -> Any:
        return extend(self, term._replace(secret=holder_of(self, term.slugs[0]) or term.secret), keep)

    with patch.object(NodeState, "_extend_one", extended):
        yield


@mutant("keeps data and clocks", "net", "pause")
def healing_past_a_newer_token() -> Iterator[None]:
    """a node restores a holder although it has accepted a later token"""
    extend = NodeState._extend_one

    def extended(self: NodeState, term: Any, keep: float | None) -> Any:
        with patch.object(Records, "fence", lambda *args: 0):
            return extend(self, term, keep)

    with patch.object(NodeState, "_extend_one", extended):
        yield


@mutant("late raises")
def raising_without_holding() -> Iterator[None]:
    """a node raises the token of a client that does not hold the lock"""
    raise_ = NodeState._raise_token

    def raised(self: NodeState, request: Any) -> Reply:
        return raise_(self, request._replace(secret=holder_of(self, request.slugs[0])))

    with patch.object(NodeState, "_raise_token", raised):
        yield


@mutant("net")
def no_tombstone() -> Iterator[None]:
    """a release leaves no tombstone against late requests"""
    release = NodeState._release

    def released(self: NodeState, request: Any) -> Reply:
        return release(self, request._replace(tombstone=0.0))

    with patch.object(NodeState, "_release", released):
        yield


@mutant("calm")
def no_expiry() -> Iterator[None]:
    """a node writes keys without expiry"""

    def write(self: Records, slug: str, value: str, ttl: float, now: float) -> None:
        self.holders[slug] = (value, None)
        self.index[slug] = now

    with patch.object(Records, "write", write):
        yield


@mutant("calm")
def sharing_with_everybody() -> Iterator[None]:
    """a node lets a shared holder in beside an exclusive one"""
    in_the_way = NodeState._in_the_way

    def judged(self: NodeState, request: Any, *more: Any) -> bool:
        return not request.shared and in_the_way(self, request, *more)

    with patch.object(NodeState, "_in_the_way", judged):
        yield


@mutant("calm")
def overwriting_the_shared() -> Iterator[None]:
    """a node lets an exclusive holder in beside shared ones"""
    in_the_way = NodeState._in_the_way

    def judged(self: NodeState, request: Any, slug: str, ours: set[str]) -> bool:
        return in_the_way(self, request, slug, ours | {SHARED})

    with patch.object(NodeState, "_in_the_way", judged):
        yield


@mutant("net", "pause")
def no_place_for_who_was_here_before() -> Iterator[None]:
    """a waiter that left the queue by a useless grant queues behind later ones"""
    with patch.object(NodeState, "_came_before", lambda *args: False):
        yield


# The rounds


@mutant("calm")
def one_place_too_many() -> Iterator[None]:
    """a lock for two has three places"""
    permits = Acquisition._permits

    def more(self: Acquisition) -> list[tuple[str, ...]]:
        found = permits(self)
        return found if len(found) == 1 else [*found, (permit_slug(self._queue, len(found) + 1),)]

    with patch.object(Acquisition, "_permits", more):
        yield


@mutant("cancelled")
def no_undo() -> Iterator[None]:
    """a cancelled acquisition releases nothing"""
    undo = Acquisition.undo

    def undone(self: Acquisition, timeout: float = 0.0) -> Round:
        round = undo(self, timeout)
        round.requests = {}
        return round

    with patch.object(Acquisition, "undo", undone):
        yield


@mutant("sent releases")
def no_redelivery_of_sent_releases() -> Iterator[None]:
    """a missing reply to a release that nobody waits for is dropped"""
    missed = Round.missed

    with patch.object(Round, "missed", lambda self: set() if self.unattended else missed(self)):
        yield


@mutant("sent releases")
def nobody_attends() -> Iterator[None]:
    """nobody reads the replies to a release that nobody waits for"""
    with patch.object(Process, "_attend", lambda *args: (_ for _ in ())):
        yield


@mutant("calm", "net")
def minority() -> Iterator[None]:
    """one vote fewer than a majority is enough"""
    with patch.object(Rules, "needed", property(lambda self: max(1, majority(self.nodes) - 1))):
        yield


@mutant("skew")
def grants_counted_as_accepts() -> Iterator[None]:
    """votes for the lock count as votes for its token"""
    with patch.object(Verdict, "accepted", Verdict.granted_lock):
        yield


@mutant("skew", "everything")
def mixed_rounds() -> Iterator[None]:
    """accepts of the first number count for the second"""
    second_round = Attempt._second_round

    def mixed(self: Attempt, first: Round, number: int) -> Round:
        second = second_round(self, first, number)
        second.replies.update({node: reply for node, reply in first.replies.items() if reply.kind is Kind.ACCEPTED})
        return second

    with patch.object(Attempt, "_second_round", mixed):
        yield


@mutant("net", "loses data")
def one_secret() -> Iterator[None]:
    """all attempts of an acquisition share a secret"""
    init = Acquisition.__init__

    def remembering(self: Acquisition, wanted: Any, rules: Any, highest: Any, fresh_secret: Any, *more: Any) -> None:
        secret = fresh_secret()
        init(self, wanted, rules, highest, lambda: secret, *more)

    with patch.object(Acquisition, "__init__", remembering):
        yield


@mutant("pause")
def late_quorum() -> Iterator[None]:
    """a quorum after its deadline is a lock"""
    with patch.object(Rules, "least_validity", lambda *args: -1e9):
        yield


@mutant("lost replies")
def release_to_yes_voters() -> Iterator[None]:
    """a failed attempt is released only where it was granted"""
    withdrawal = Acquisition._withdrawal

    def withdrawn(self: Acquisition, **options: Any) -> Round:
        round = withdrawal(self, **options)
        rounds = [] if self._attempt.given_back else self._attempt.rounds
        yes = {node for old in rounds for node, reply in old.replies.items() if reply.kind in GRANTS}
        round.requests = {node: request for node, request in round.requests.items() if node in yes}
        return round

    with patch.object(Acquisition, "_withdrawal", withdrawn):
        yield


@mutant("lost replies", "net")
def no_release_of_failures() -> Iterator[None]:
    """a failed attempt is not released at all"""
    withdrawal = Acquisition._withdrawal

    def withdrawn(self: Acquisition, **options: Any) -> Round:
        round = withdrawal(self, **options)
        round.requests = {}
        return round

    with patch.object(Acquisition, "_withdrawal", withdrawn):
        yield


# Time


@mutant("pause")
def validity_from_the_reply() -> Iterator[None]:
    """validity counts from the last reply"""
    attempt = Attempt.steps

    def later(self: Attempt, *start: Any) -> Generator[Any, Any, Any]:
        granted = yield from attempt(self, *start)
        return granted and granted._replace(deadline=self._rules.deadline(self.at.now, self._wanted.ttl))

    with patch.object(Attempt, "steps", later):
        yield


@mutant("skew")
def no_drift() -> Iterator[None]:
    """clocks are trusted to the last microsecond"""
    with patch.object(Rules, "drift", lambda *args: 0.0):
        yield


@mutant("clock steps")
def wall_clock() -> Iterator[None]:
    """leases are measured with the wall clock"""
    with patch.object(Process, "clock", lambda self: self.wall()):
        yield


@mutant("pause", "net")
def extension_from_the_reply() -> Iterator[None]:
    """an extension counts from its last reply"""
    extended = Hold.extended

    def later(self: Hold, round: Round, number: int, start: float, now: float) -> bool:
        return extended(self, round, number, now, now)

    with patch.object(Hold, "extended", later):
        yield


@mutant("pause", "net")
def extension_after_the_deadline() -> Iterator[None]:
    """an extension that completes after the deadline counts"""
    with patch.object(Hold, "check", lambda self, now: not self.ended):
        yield


# Admission


@mutant("crash without data", "loses data")
def no_restart_guard() -> Iterator[None]:
    """a node that has just restarted votes"""
    with patch.object(Rules, "guards_restarts", False):
        yield


@mutant("failover", "moving endpoint")
def served_key_ignored() -> Iterator[None]:
    """a promoted replica counts its uptime, not the time for which it has served the locks"""
    with patch.object(NodeState, "serve", lambda *args, **options: 1e6):
        yield


@mutant("crash without data", "loses data")
def everybody_votes() -> Iterator[None]:
    """objections to a node are ignored"""
    with patch.object(Admission, "judge", lambda self, node, reply, *args: reply):
        yield


@mutant("stepping node")
def no_clock_guard() -> Iterator[None]:
    """a node whose clock ran forward votes for clients that know it"""
    with patch.object(Rules, "guards_clocks", False), patch.object(Rules, "compares_clocks", False):
        yield


@mutant("stepping node")
def no_comparison_of_clocks() -> Iterator[None]:
    """a node whose clock is far from the others' votes for new clients"""
    with patch.object(Rules, "compares_clocks", False):
        yield


@mutant("stepping node")
def clock_put_back_is_forgiven() -> Iterator[None]:
    """a node whose clock is set back votes at once for clients that saw it only while it was ahead"""
    with patch.object(Admission, "_look_at_clock", forgiving(Admission._look_at_clock)):
        yield


def forgiving(look: Any) -> Any:
    """Return a check of clocks that ignores steps back."""

    def look_at_clock(self: Any, node: int, *args: Any) -> None:
        before = self._quarantined.get(node)
        look(self, node, *args)
        if self._quarantined.get(node, ("", "", ""))[1].endswith("back to the others'"):
            if before:
                self._quarantined[node] = before
            else:
                del self._quarantined[node]

    return look_at_clock


# Records and the clock of a leader


@mutant("leaders apart", "leader dies with the holder")
def no_era_rule() -> Iterator[None]:
    """times of an earlier leader's clock are compared with the present leader's clock"""
    with patch.object(records, "in_present_era", lambda record, moment: record):
        yield


@mutant("leaders", "leaders apart")
def term_not_compared() -> Iterator[None]:
    """a new leader does not begin a new era"""
    with patch.object(etcd_table, "era_name", lambda header, source: f"{header.cluster:x}.{source}"):
        yield


@mutant("leaders", "leaders apart")
def low_and_high_swapped() -> Iterator[None]:
    """a hold ends at the least time that the clock may show, and is free after the greatest"""
    bounds = EraClock.bounds
    with patch.object(EraClock, "bounds", lambda self: bounds(self)[::-1]):
        yield


@mutant("leaders", "leaders apart")
def reading_outside_its_range() -> Iterator[None]:
    """a leader that does not count yet, or not any more, is believed when it says that a lease never ends"""
    # Records that were written later than that reading would give it away.
    with (
        patch.object(etcd_table, "plausible", lambda left, granted: True),
        patch.object(EraClock, "check", lambda self, moment, records: True),
    ):
        yield


@mutant("leaders", "leaders apart")
def versions_not_compared() -> Iterator[None]:
    """a record is written although another process has changed it since it was read"""
    txn = EtcdTable._txn
    with patch.object(
        EtcdTable,
        "_txn",
        lambda self, compared, values: txn(self, [one for one in compared if one[0] == self._clock_key], values),
    ):
        yield


@mutant("leaders", "leaders apart")
def no_margin() -> Iterator[None]:
    """a hold is not lengthened by the uncertainty about the leader's clock"""
    with patch.object(Moment, "margin", 0.0):
        yield


# The fenced transaction


@mutant("no lock")
def claim_of_equals() -> Iterator[None]:
    """a claim does not look at the owner of an equal token"""
    with patch.object(database, "holds", lambda row, token, owner: row.token <= token):
        yield


@mutant("no lock")
def claim_of_anybody() -> Iterator[None]:
    """a claim does not look at the token"""
    with patch.object(database, "holds", lambda *args: True):
        yield


@mutant("no lock", "pause")
def read_before_claim() -> Iterator[None]:
    """the value is read before the row is claimed"""

    def backwards(store: database.Database, client: Any, name: str, token: int, owner: str) -> Any:
        with database.transaction(client, name) as session:
            value = yield store.read(name, database.CLAIMED)
            yield client.breathe()
            if not (yield store.claim(session, name, token, owner)):
                return False
            return (yield store.commit(session, name, value + 1, token, owner))

    with patch.object(database, "increment_claimed", backwards):
        yield
