"""
One attempt to take a lock (internal).

An attempt asks all nodes at once, agrees with a quorum on a fencing token, and checks that enough time is left.

The request proposes a fencing token. A node accepts the number only if it is greater than every number it accepted
before. If a quorum accepts the same number, that number is the token. If a quorum grants the lock but not the number,
one more round raises it. Any two quorums share a node, and a node accepts strictly increasing numbers. So tokens are
unique and increase from hold to hold, without any assumption about clocks. The wall clock only makes the first proposal
likely to succeed.
"""

from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from .names import SECRET_SIZE, SHARED_KIND, Owner, decode, encode, encode_since, queue_of, uncounted
from .protocol import ANSWERS, HIGHEST, Acquire, Instant, Kind, Raise, Reply, Request, is_absurd
from .round import Round, count, unanswered
from .rules import Rules, Wanted

PATIENCE = 0.005  # seconds for which a waiter's refused round waits for the replies still in flight

GRANTS = (Kind.ACCEPTED, Kind.GRANTED)
VOTELESS = (Kind.NO_VOTE, Kind.EXCLUDED)
NOT_FREE = (Kind.BUSY, Kind.QUEUED)

NEVER = Instant(0.0, 0)
NO_NODES: frozenset[int] = frozenset()
NO_REPLIES: Mapping[int, Reply] = MappingProxyType({})


class Granted(NamedTuple):
    """
    A won lock.

    Args:
        slugs: The names that are held, as written in the keys.
        secret: The secret that extends and releases the hold.
        value: The value that the nodes store: the secret and a description of the holder.
        fencing_token: The fencing token.
        start: When the winning round began, in seconds on the client's steady clock.
        deadline: When the lease ends, in seconds on the same clock.
        rounds: The rounds of the attempt; some of their replies may still be in flight.
        leaving: The waiter that leaves the queue with the release; empty if no waiter is queued.
        queue: The slug whose queue counts, for a lock with several permits.
        untouched: The nodes that certainly have neither the lock nor the waiter.
        waited: Seconds from the first attempt until the lock was held.
    """

    slugs: tuple[str, ...]
    secret: str
    value: str
    fencing_token: int
    start: float
    deadline: float
    rounds: tuple[Round, ...]
    leaving: str = ""
    queue: str = ""
    untouched: frozenset[int] = frozenset()
    waited: float = 0.0


class Attempt:
    """
    One attempt, its secret, and what it may have left on the nodes.

    Args:
        wanted: The lock to take.
        slugs: The names to take, as written in the keys; for a lock with several permits, one permit.
        secret: The secret that proves the hold if the attempt succeeds; empty for an attempt that is never made.
        rules: The options of the alias.
        highest: The highest tokens seen in this process.
        waiter: The waiter's name in the nodes' queues; a caller with an empty name joins no queue.
        timeout: Seconds for which a round waits for its slowest node.

    ``enrolled`` has the nodes that have the waiter in their queue, or may have. ``given_back`` is whether everything
    that the attempt may have been granted has been released. ``at`` is the time after the attempt's last round.
    ``skipped`` has the last replies of silent nodes that need not be asked again while contenders decide a split vote.
    """

    __slots__ = (
        *("_highest", "_queue", "_replies", "_rules", "_timeout", "_waiter", "_wanted"),
        *("at", "enrolled", "given_back", "rounds", "secret", "skipped", "slugs", "value"),
    )

    def __init__(
        self,
        wanted: Wanted,
        slugs: tuple[str, ...],
        secret: str,
        rules: Rules,
        highest: "HighestToken",
        waiter: str,
        timeout: float,
    ) -> None:
        self.slugs = slugs
        self.secret = secret
        self.at = NEVER
        self.rounds: list[Round] = []
        self.enrolled: Set[int] = NO_NODES
        self.given_back = False
        self.skipped = NO_REPLIES
        self.value = ""
        self._wanted = wanted
        self._rules = rules
        self._highest = highest
        self._waiter = waiter
        self._timeout = timeout
        self._queue = queue_of(slugs[0]) if wanted.limit > 1 else ""
        self._replies: Mapping[int, Reply] = NO_REPLIES

    def steps(self, at: Instant, since: Instant, enrolled: Set[int]) -> Generator[Round, Instant, Granted | None]:
        """
        Yield rounds, and return the outcome, None if the attempt failed; the driver sends the time after each round.

        An attempt that :meth:`goes_on` after a split vote runs its steps again: with the same secret, it keeps what it
        was granted, and asks for the rest.

        Args:
            at: The present time.
            since: When the first attempt began, which is the waiter's rank in the queues.
            enrolled: The nodes that may have the waiter in their queue since an earlier attempt.
        """
        # Step 1 of "Distributed Locks with Redis": the time before the first byte is sent. However long the request or
        # the reply takes, the nodes' keys expire later than ``start + ttl``, never sooner.
        self.at = at
        start, ttl, again = at.now, self._wanted.ttl, bool(self.rounds)
        self.value = self.value or self._new_value()
        fencing_token = max(at.wall, self._above_highest())
        first = yield from self._ask_all(fencing_token, since.wall)
        if not first.won and first.count(Kind.ACCEPTED) < self._rules.needed:
            if first.count(*GRANTS) < self._rules.needed:
                return None
            # The client's clock may be too far ahead for the nodes, and they may have forgotten every token. So the
            # second proposal is at least the slowest granting node's own time.
            fencing_token = max(self._above_highest(), granting_time(first.replies))
            second = yield from self._raise_token(first, fencing_token)
            # Only the second round counts. A node that accepted the first number may not have accepted this one, and a
            # token that no quorum accepted can be given twice.
            if second.count(Kind.ACCEPTED) < self._rules.needed:
                return None
        self._highest.lift(self.slugs, fencing_token)
        deadline = self._rules.deadline(start, ttl)
        if self.at.now + self._rules.least_validity(ttl) > deadline:
            self.enrolled = first.may_queue() if self._waiter else NO_NODES
            return None
        # A secret that the caller chose, or that was used before, may also be on nodes that did not get this round.
        known = not (self._wanted.secret or again or self.skipped)
        untouched = frozenset(first.untouched() - self.enrolled - enrolled) if known else NO_NODES
        rounds, waited = tuple(self.rounds), self.at.now - since.now
        return Granted(
            self.slugs,
            self.secret,
            self.value,
            fencing_token,
            start,
            deadline,
            rounds,
            self._waiter,
            self._queue,
            untouched,
            waited,
        )

    @property
    def verdict(self) -> "Verdict":
        """The meaning of the replies to the first round."""
        return Verdict(self._replies, self._rules)

    def goes_on(self) -> bool:
        """Return whether the attempt keeps what it was granted in a split vote, because it came before all others."""
        return bool(self.verdict.granted) and self.verdict.precedes(self.value)

    def may_hold(self) -> set[int]:
        """Return the nodes that may still have something of this attempt."""
        return {node for round in self.rounds for node in round.may_hold()}

    def may_queue(self) -> set[int]:
        """Return the nodes that have the waiter in their queue, or may have."""
        # A round that was interrupted has not been counted in ``enrolled`` yet.
        return set(self.enrolled).union(*(round.may_queue() for round in self.rounds))

    def unanswered(self) -> set[int]:
        """Return the nodes that may still execute a request of this attempt."""
        return unanswered(self.rounds)

    def _above_highest(self) -> int:
        """
        Return the lowest token above every token seen; 0 if the highest one seen is absurd.

        A fence in a database may hold any number. The lock can still be taken, and the fence then refuses its token.
        """
        highest = self._highest.of(self.slugs)
        return 0 if is_absurd(highest, self.at.wall) else highest + 1

    def _new_value(self) -> str:
        """Return the value to store; that of a shared lock describes no single holder."""
        if self._wanted.shared:
            return encode(self.secret, Owner(kind=SHARED_KIND, ttl=self._wanted.ttl))
        return encode_since(self.secret, self._wanted.owner, self.at.wall / 1e6)

    def _ask_all(self, number: int, stamp: int) -> Generator[Round, Instant, Round]:
        wanted, rules = self._wanted, self._rules
        request = Acquire(
            self.slugs,
            self.secret,
            self.value,
            wanted.ttl,
            number,
            rules.fence_keep,
            rules.ahead,
            wanted.adopt,
            self._waiter,
            stamp,
            wanted.barge,
            wanted.shared,
            self._queue,
            wanted.strict,
        )
        requests: dict[int, Request] = dict.fromkeys(range(rules.nodes), request)
        for node in self.skipped:
            del requests[node]
        round = yield from self._ask(requests, partial(first_round_decided, rules))
        self._replies = {**self.skipped, **round.replies} if self.skipped else round.replies
        if self._waiter and not round.won:
            self.enrolled = round.may_queue()
        return round

    def _raise_token(self, first: Round, number: int) -> Generator[Round, Instant, Round]:
        request = Raise(self.slugs, self.secret, number, self._rules.fence_keep, self._wanted.shared)
        granted = [node for node, reply in first.replies.items() if reply.kind in GRANTS]
        return (yield from self._ask(dict.fromkeys(granted, request), partial(second_round_decided, self._rules)))

    def _ask(
        self, requests: Mapping[int, Request], decided: Callable[[Mapping[int, Reply]], bool]
    ) -> Generator[Round, Instant, Round]:
        round = Round(
            requests=requests,
            decided=decided,
            timeout=self._timeout,
            needed=self._rules.needed,
            hoped=Kind.ACCEPTED,
            on_late=partial(learn, self._highest, self.slugs),
            patience=PATIENCE if self._waiter else 0.0,
        )
        # Recorded before the first byte is sent: after an interruption the round must be found here and released.
        self.rounds.append(round)
        self.at = yield round
        if not round.won:  # all replies to a won round have the proposed token, which steps() notes
            self._highest.lift(self.slugs, max([reply.fence for reply in round.replies.values()], default=0))
        return round


# These are functions, not methods of the attempt: a round that referred to its attempt would make a reference cycle,
# and leave every lock to the garbage collector. In a large process that costs more than the lock.


def first_round_decided(rules: Rules, replies: Mapping[int, Reply]) -> bool:
    """
    Return whether the replies so far settle what happens next.

    A failure is settled early only together with its reason. Either one holder and earlier waiters have a quorum; or
    too many nodes are silent, and it is known whether waiting for them can help.
    """
    accepted = count(replies, Kind.ACCEPTED)
    if accepted >= rules.needed:
        return True
    if accepted == len(replies):
        return False  # the usual case, so far
    granted = count(replies, *GRANTS)
    pending = rules.nodes - len(replies)
    if granted >= rules.needed and accepted + pending < rules.needed:
        return True
    if in_the_way(replies) >= rules.needed:
        return True
    hopeless = misconfigured(replies)
    explained = hopeless > rules.spare or hopeless + pending <= rules.spare
    return explained and silent(replies) > rules.spare


def second_round_decided(rules: Rules, replies: Mapping[int, Reply]) -> bool:
    """Return whether the raised token has a quorum."""
    return count(replies, Kind.ACCEPTED) >= rules.needed


def learn(highest: "HighestToken", slugs: tuple[str, ...], reply: Reply) -> None:
    """Remember the highest token that a node has accepted."""
    highest.lift(slugs, reply.fence)


class Verdict:
    """
    What the replies of an attempt's first round mean together, which decides what happens next.

    "Taken" and "cannot tell" are kept apart here. A node that reports another holder has answered, so waiting may help.
    A silent node has not answered; if too many nodes are silent, nobody knows whether the lock is free.

    Args:
        replies: The replies of the first round by node; a node that did not reply in time is missing.
        rules: The options of the alias.
    """

    __slots__ = ("_rules", "replies")

    def __init__(self, replies: Mapping[int, Reply], rules: Rules) -> None:
        self.replies = replies
        self._rules = rules

    @property
    def split(self) -> bool:
        """
        Whether contenders may each hold some of the nodes that answer, so that none of them has a quorum.

        A silent node may have granted the lock to any of them. So nobody can know whether one of them has won; those
        that have not go on, see :meth:`precedes`.
        """
        pending = self._rules.nodes - len(self.replies)
        return (
            not self.cut_off
            and count(self.replies, Kind.BUSY) > 0
            and in_the_way(self.replies) + pending < self._rules.needed
        )

    def precedes(self, value: str) -> bool:
        """
        Return whether the contender that stores *value* comes before all others that were seen.

        Of several contenders, the one that began first keeps what it was granted, and the others give theirs back. All
        of them compare the same texts, so they agree who that is. If the lock is free, but a node serves a waiter
        first, that waiter comes first.
        """
        mine = _rank(value[SECRET_SIZE:])
        rivals = [reply.detail for reply in self.replies.values() if reply.kind is Kind.BUSY]
        return count(self.replies, Kind.QUEUED) == 0 and all(mine < _rank(rival) for rival in rivals)

    @property
    def queued(self) -> bool:
        """Whether earlier waiters, in the queues of too many nodes, must be served before a quorum is possible."""
        return count(self.replies, Kind.QUEUED) > self._rules.spare

    @property
    def cut_off(self) -> bool:
        """Whether too few nodes answered. A waiter that cannot win must not be first in the queues that it reaches."""
        return silent(self.replies) > self._rules.spare

    @property
    def misconfigured(self) -> bool:
        """Whether no quorum is possible until servers or settings change, so that waiting is pointless."""
        return misconfigured(self.replies) > self._rules.spare

    @property
    def taken(self) -> bool:
        """
        Whether the lock is known to be held, or to have waiters that came first.

        Fewer refusals than this prove nothing: the others may be free, and a vote on a single node may be all that is
        left of a client that died during its attempt.
        """
        return count(self.replies, *NOT_FREE) > self._rules.spare and not self.misconfigured

    @property
    def agreed(self) -> bool:
        """Whether a quorum of nodes names one holder."""
        return most_held(self.replies) >= self._rules.needed

    @property
    def holder(self) -> str:
        """The holder of the lock on the most nodes, described as JSON; empty if no node reports one."""
        refused = [reply.detail for reply in self.replies.values() if reply.kind in NOT_FREE and reply.detail]
        holders = [uncounted(detail) for detail in refused]
        return max(dict.fromkeys(holders), key=holders.count, default="")  # of several, the one of the first node

    @property
    def granted(self) -> set[int]:
        """The nodes that granted the attempt, including those whose vote does not count."""
        return {node for node, reply in self.replies.items() if reply.kind in (*GRANTS, *VOTELESS)}

    @property
    def unanswering(self) -> Mapping[int, Reply]:
        """The replies that are no answer."""
        return {node: reply for node, reply in self.replies.items() if reply.kind not in ANSWERS}

    @property
    def silent(self) -> Mapping[int, Reply]:
        """The replies that are no answer, if they leave too few nodes for a quorum; otherwise none."""
        return self.unanswering if self.cut_off else {}

    @property
    def last_position(self) -> int:
        """The waiter's worst position in the queue of any node, 0 for the first; -1 if it is in none."""
        return max([reply.position for reply in self.replies.values()], default=-1)

    @property
    def lacks_votes(self) -> bool:
        """Whether a quorum of nodes granted the lock, but too few of them may vote."""
        return len(self.granted) >= self._rules.needed

    @property
    def free_in(self) -> float | None:
        """The seconds after which a quorum can be free by expiry alone; None if never or unknown."""
        held = sorted(
            float("inf") if reply.left is None else reply.left
            for reply in self.replies.values()
            if reply.kind is Kind.BUSY
        )
        # ``spare`` nodes may stay taken. When all other nodes are free, those are a quorum.
        enough = len(held) - self._rules.spare
        if enough <= 0:
            return None
        return None if held[enough - 1] == float("inf") else max(held[enough - 1], 0.0)


def _rank(detail: str) -> tuple[float, str]:
    """Return the rank of a contender: when it began, and the rest of its description for those that began together."""
    described = decode(detail)
    return (described.since if described else 0.0, uncounted(detail))


def silent(replies: Mapping[int, Reply]) -> int:
    """Return how many replies do not report the state of the lock."""
    return sum([reply.kind not in ANSWERS for reply in replies.values()])


def misconfigured(replies: Mapping[int, Reply]) -> int:
    """Return how many nodes will not vote until they or the settings change."""
    return sum([reply.misconfigured for reply in replies.values()])


def granting_time(replies: Mapping[int, Reply]) -> int:
    """Return the time on the slowest clock of the nodes that granted, in microseconds; 0 if none reports one."""
    return min([reply.time for reply in replies.values() if reply.kind in GRANTS and reply.time], default=0)


def in_the_way(replies: Mapping[int, Reply]) -> int:
    """Return how many nodes one holder and the waiters that came first have together."""
    return most_held(replies) + count(replies, Kind.QUEUED)


def most_held(replies: Mapping[int, Reply]) -> int:
    """
    Return how many nodes one other holder has: the one that has the most nodes.

    Values are compared without the number of extensions, because a node may have missed some.
    """
    reported = [reply.detail for reply in replies.values() if reply.kind is Kind.BUSY]
    if reported.count(reported[0] if reported else "") == len(reported):  # the usual case
        return len(reported)
    holders = list(map(uncounted, reported))
    return max(map(holders.count, holders))


class HighestToken:
    """The highest token seen for each name; the next proposal goes above it. The oldest entries are dropped first."""

    def __init__(self, size: int = 10_000) -> None:
        self._size = size
        self._highest: OrderedDict[str, int] = OrderedDict()

    def of(self, slugs: Iterable[str]) -> int:
        """Return the highest number seen for any of *slugs*."""
        return max([self._highest.get(slug, 0) for slug in slugs], default=0)  # a generator would take twice as long

    def lift(self, slugs: Iterable[str], number: int) -> None:
        """Remember that *number* has been seen for *slugs*, unless no node could accept a higher one."""
        if number >= HIGHEST:
            return
        for name in slugs:
            if number > self._highest.get(name, 0):
                self._highest[name] = number
                self._highest.move_to_end(name)
        while len(self._highest) > self._size:
            self._highest.popitem(last=False)
