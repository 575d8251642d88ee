"""Wrong protocols of the lock: of the production core, of the node in memory, and of the fenced transaction."""

from collections.abc import Generator
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

from django_redlock.core.acquisition import Acquisition
from django_redlock.core.admission import INFINITY, Admission, Greeting
from django_redlock.core.attempt import Attempt
from django_redlock.core.hold import HoldState
from django_redlock.core.names import permit_slug, secret_of
from django_redlock.core.node_state import NodeState
from django_redlock.core.node_state.records import Records
from django_redlock.core.protocol import SHARED, Acquire, Kind
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules, majority
from django_redlock.core.votes import GRANTS, Verdict
from django_redlock.engine.unattended import UnattendedReleases
from tests import consensus
from tests.machine import mutation
from tests.machine.mutation import Kill, Mutant, always, returns
from tests.machine.process import Process

from . import database
from .profiles import PROFILES, TTL
from .scenarios import SCENARIOS
from .schedule import Schedule

if consensus.PRESENT:
    from .consensus.mutants import OF_STORES
else:
    OF_STORES = ()

ENOUGH = 600  # schedules of each haunt after which a mutant counts as alive


def hunt(mutant: Mutant) -> Kill:
    def objection(haunt: str, seed: int) -> str | None:
        violations = Schedule(PROFILES[haunt], seed).run().failures if haunt in PROFILES else SCENARIOS[haunt](seed)
        return violations[0][1] if violations else None

    return mutation.hunt(mutant, objection, ENOUGH)


def holder_of(node: NodeState, slug: str) -> str:
    """Return the secret under which a node holds a lock, or nothing."""
    return secret_of(node.records.holder(slug, node._now) or "")


def for_anybody(right: Any) -> Any:
    return lambda node, request, *more: right(
        node, request._replace(secret=holder_of(node, request.slugs[0]) or request.secret), *more
    )


def grants_to_anybody(right: Any) -> Any:
    return lambda node, request: right(node, request._replace(adopt=holder_of(node, request.slugs[0])))


def raises_for_anybody(right: Any) -> Any:
    return lambda node, request: right(node, request._replace(secret=holder_of(node, request.slugs[0])))


def knows_no_token(right: Any) -> Any:
    def extended(*args: Any) -> Any:
        with patch.object(Records, "fence", lambda *args: 0):
            return right(*args)

    return extended


def writes_without_end(right: Any) -> Any:
    def write(self: Records, slug: str, value: str, ttl: float, now: float) -> None:
        self.holders[slug] = (value, None)
        self.index[slug] = now

    return write


def one_more(right: Any) -> Any:
    def permits(self: Acquisition) -> list[tuple[str, ...]]:
        found = right(self)
        return found if len(found) == 1 else [*found, (permit_slug(self._queue, len(found) + 1),)]

    return permits


def trusts_new_sets(right: Any) -> Any:
    new: WeakKeyDictionary[Admission, set[int]] = WeakKeyDictionary()

    def greet(self: Admission, node: int, greeting: Greeting, when: float | None = None) -> None:
        right(self, node, greeting, when)
        if greeting.age is not None and greeting.age < TTL:
            new.setdefault(self, set()).add(node)
        if len(new.get(self, ())) == len(self._names):
            self._quarantined.clear()

    return greet


def greets_once(right: Any) -> Any:
    def greet(self: Admission, node: int, greeting: Greeting, when: float | None = None) -> None:
        right(self, node, greeting, when)
        self.due[node] = INFINITY

    return greet


def repeats_as_another(right: Any) -> Any:
    def repeat(self: Acquisition) -> Generator[Any, Any, Any]:
        return (yield from self._begin(self._attempt.slugs).steps(self._since))

    return repeat


def asks_nobody(right: Any) -> Any:
    def asked(*args: Any, **options: Any) -> Round:
        round = right(*args, **options)
        round.requests = {}
        return round

    return asked


def yes_voters(right: Any) -> Any:
    def traces(self: Acquisition, leaving: bool) -> set[int]:
        rounds = [] if self._attempt.given_back else self._attempt.rounds
        return {node for old in rounds for node, reply in old.replies.items() if reply.kind in GRANTS}

    return traces


def mixes_rounds(right: Any) -> Any:
    def second_round(self: Attempt, first: Round, number: int) -> Round:
        second = right(self, first, number)
        second.replies.update({node: reply for node, reply in first.replies.items() if reply.kind is Kind.ACCEPTED})
        return second

    return second_round


def one_secret(right: Any) -> Any:
    def init(self: Acquisition, wanted: Any, rules: Any, highest: Any, fresh_secret: Any, *more: Any) -> None:
        secret = fresh_secret()
        right(self, wanted, rules, highest, lambda: secret, *more)

    return init


def counts_from_the_reply(right: Any) -> Any:
    def steps(self: Attempt, *start: Any) -> Generator[Any, Any, Any]:
        granted = yield from right(self, *start)
        return granted and granted._replace(deadline=self._rules.deadline(self.at.now, self._wanted.ttl))

    return steps


def keeps_by_itself(self: Attempt, token: int, deadline: float) -> Generator[Any, Any, bool]:
    return True
    yield


def forgives_steps_back(right: Any) -> Any:
    def look_at_clock(self: Any, node: int, *args: Any) -> None:
        before = self._quarantined.get(node)
        right(self, node, *args)
        if self._quarantined.get(node, ("", "", ""))[1].endswith("back to the others'"):
            if before:
                self._quarantined[node] = before
            else:
                del self._quarantined[node]

    return look_at_clock


def reads_first(right: Any) -> Any:
    """Read the value before the row is claimed."""

    def increment(store: database.Database, client: Any, name: str, token: int, owner: str) -> Any:
        with database.transaction(client, name) as session:
            value = store.ask(client, store.read, name, database.CLAIMED)
            client.breathe()
            if store.ask(client, store.claim, session, name, token, owner):
                store.ask(client, store.commit, session, name, value + 1, token, owner)

    return increment


NET = ("net", "pause")
KEEPS = ("keeps data and clocks", *NET)
LOSES = ("crash without data", "loses data")

READ_BEFORE_CLAIM = Mutant(
    "the value is read before the row is claimed", ("no lock", "pause"), (database, "increment_claimed"), reads_first
)

MUTANTS = (
    # The node
    Mutant(
        "a node accepts a number that it has accepted before",
        ("skew", "same microsecond"),
        (Records, "highest_fence"),
        lambda right: lambda *args: max(0, right(*args) - 1),
    ),
    Mutant("a node grants a lock that somebody else holds", ("calm",), (NodeState, "_acquire"), grants_to_anybody),
    Mutant("a release does not look at the owner", ("calm", "net"), (NodeState, "_release"), for_anybody),
    Mutant("an extension does not look at the owner", KEEPS, (NodeState, "_extend_one"), for_anybody),
    Mutant(
        "a node restores a holder although it has accepted a later token",
        KEEPS,
        (NodeState, "_extend_one"),
        knows_no_token,
    ),
    Mutant(
        "a node raises the token of a client that does not hold the lock",
        ("late raises",),
        (NodeState, "_raise_token"),
        raises_for_anybody,
    ),
    Mutant(
        "a release leaves no tombstone against late requests",
        ("net",),
        (NodeState, "_release"),
        lambda right: lambda node, request: right(node, request._replace(tombstone=0.0)),
    ),
    Mutant("a node writes keys without expiry", ("calm",), (Records, "write"), writes_without_end),
    Mutant(
        "a node lets a shared holder in beside an exclusive one",
        ("calm",),
        (NodeState, "_in_the_way"),
        lambda right: lambda self, request, *more: not request.shared and right(self, request, *more),
    ),
    Mutant(
        "a node lets an exclusive holder in beside shared ones",
        ("calm",),
        (NodeState, "_in_the_way"),
        lambda right: lambda self, request, slug, ours: right(self, request, slug, ours | {SHARED}),
    ),
    Mutant(
        "a node lets a permit in beside those who hold its lock in another way",
        ("calm",),
        (NodeState, "_is_held_otherwise"),
        returns(False),
    ),
    Mutant(
        "the extension of a permit does not keep the name of its lock",
        ("calm", "net"),
        (NodeState, "_extend_one"),
        lambda right: lambda self, term, keep: right(self, term._replace(common=""), keep),
    ),
    Mutant(
        "a waiter that left the queue by a useless grant queues behind later ones",
        ("keeps data and clocks", "loses data"),
        (NodeState, "_came_before"),
        returns(False),
    ),
    # The rounds
    Mutant("a lock for two has three places", ("calm",), (Acquisition, "_permits"), one_more),
    Mutant("a cancelled acquisition releases nothing", ("cancelled",), (Acquisition, "undo"), asks_nobody),
    Mutant(
        "a missing reply to a release that nobody waits for is dropped",
        ("sent releases",),
        (Round, "missed"),
        lambda right: lambda self: set() if self.unattended else right(self),
    ),
    Mutant(
        "nobody reads the replies to a release that nobody waits for",
        ("sent releases",),
        (UnattendedReleases, "add"),
        returns(None),
    ),
    Mutant(
        "one vote fewer than a majority is enough",
        ("calm", "net"),
        (Rules, "needed"),
        always(property(lambda self: max(1, majority(self.nodes) - 1))),
    ),
    Mutant(
        "votes for the lock count as votes for its token",
        ("skew",),
        (Verdict, "accepted"),
        always(Verdict.granted_lock),
    ),
    Mutant(
        "accepts of the first number count for the second",
        ("skew", "everything"),
        (Attempt, "_second_round"),
        mixes_rounds,
    ),
    Mutant(
        "all attempts of an acquisition share a secret", ("net", "loses data"), (Acquisition, "__init__"), one_secret
    ),
    Mutant("a quorum after its deadline is a lock", ("pause",), (Rules, "least_validity"), returns(-1e9)),
    Mutant(
        "a failed attempt is released only where it was granted",
        ("lost replies",),
        (Acquisition, "_traces"),
        yes_voters,
    ),
    Mutant(
        "a failed attempt is not released at all", ("lost replies", "net"), (Acquisition, "_traces"), returns(set())
    ),
    # Time
    Mutant("validity counts from the last reply", ("pause",), (Attempt, "steps"), counts_from_the_reply),
    Mutant("clocks are trusted to the last microsecond", ("skew",), (Rules, "drift"), returns(0.0)),
    Mutant(
        "leases are measured with the wall clock",
        ("clock steps",),
        (Process, "clock"),
        always(lambda self: self.wall()),
    ),
    Mutant(
        "an extension counts from its last reply",
        ("pause", "net"),
        (HoldState, "extended"),
        lambda right: lambda self, round, number, start, now: right(self, round, number, now, now),
    ),
    Mutant(
        "an extension that completes after the deadline counts",
        ("pause", "net"),
        (HoldState, "extended"),
        lambda right: (
            lambda self, round, number, start, now: right(self, round, number, start, min(now, self.deadline - 1e-9))
        ),
    ),
    # Minimum holds
    Mutant("a minimum hold ends with its process", ("minimum holds",), (Attempt, "_keep"), always(keeps_by_itself)),
    Mutant("the end of the work ends a minimum hold", ("minimum holds",), (HoldState, "holds_on"), returns(False)),
    Mutant(
        "an extension to a shorter lease ends a minimum hold",
        ("minimum holds",),
        (HoldState, "term"),
        lambda right: lambda self, *about: (term := right(self, *about)) and term._replace(ttl=TTL, shorten=True),
    ),
    # Admission
    Mutant("a node that has just restarted votes", LOSES, (Rules, "guards_restarts"), always(False)),
    Mutant(
        "a promoted replica counts its uptime, not the time for which it has served the locks",
        ("failover", "moving endpoint"),
        (NodeState, "serve"),
        returns(1e6),
    ),
    Mutant(
        "a node does not compare the mark of its memory",
        ("emptied", "memory lost", "demoted and promoted"),
        (NodeState, "execute"),
        lambda right: lambda self, request, mark="": right(self, request),
    ),
    Mutant(
        "a node compares the mark of its memory only when a lock is taken",
        ("moved by a proxy",),
        (NodeState, "execute"),
        lambda right: lambda self, request, mark="": right(self, request, mark if isinstance(request, Acquire) else ""),
    ),
    Mutant(
        "a node describes itself only on a new connection",
        ("evicting",),
        (Admission, "greet"),
        greets_once,
    ),
    Mutant(
        "a repetition does not know its own first attempt",
        ("own ghost",),
        (Acquisition, "_repeat"),
        repeats_as_another,
    ),
    Mutant(
        "nodes vote at once if none of them has ever served the locks",
        ("moved set",),
        (Admission, "greet"),
        trusts_new_sets,
    ),
    Mutant(
        "objections to a node are ignored", LOSES, (Admission, "judge"), always(lambda self, node, reply, *args: reply)
    ),
    Mutant(
        "a node whose clock ran forward votes for clients that know it",
        ("stepping node",),
        (Rules, "guards_clocks"),
        always(False),
        also=((Rules, "compares_clocks", always(False)),),
    ),
    Mutant(
        "a node whose clock is far from the others' votes for new clients",
        ("stepping node",),
        (Rules, "compares_clocks"),
        always(False),
    ),
    Mutant(
        "a node whose clock is set back votes at once for clients that saw it only while it was ahead",
        ("stepping node",),
        (Admission, "_look_at_clock"),
        forgives_steps_back,
    ),
    *OF_STORES,
    # The fenced transaction
    Mutant(
        "a claim does not look at the owner of an equal token",
        ("no lock",),
        (database, "holds"),
        always(lambda row, token, owner: row.token <= token),
    ),
    Mutant("a claim does not look at the token", ("no lock",), (database, "holds"), returns(True)),
    READ_BEFORE_CLAIM,
)
