"""
One attempt to take a lock, and what the nodes' replies to it mean (internal).

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
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

from .names import SECRET_SIZE, SHARED_KIND, Owner, common_value, decode, encode, encode_since, queue_of, uncounted
from .protocol import ANSWERS, FAR, HIGHEST, LASTING, Acquire, Failure, Instant, Kind, Raise, Reply, Request, failed
from .round import Round, count
from .rules import Rules, Wanted

PATIENCE = 0.005  # seconds for which a waiter's refused round waits for the replies still in flight

GRANTS = (Kind.ACCEPTED, Kind.GRANTED)
VOTELESS = (Kind.NO_VOTE, Kind.EXCLUDED)
NOT_FREE = (Kind.BUSY, Kind.QUEUED)

NEVER = Instant(0.0, 0)
NO_NODES: frozenset[int] = frozenset()
NO_ATTEMPTS: frozenset[str] = frozenset()
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
        timeout: Seconds for which a round about the hold waits for its slowest node.
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
    timeout: float
    rounds: tuple[Round, ...]
    leaving: str = ""
    queue: str = ""
    untouched: frozenset[int] = NO_NODES
    waited: float = 0.0


class Attempt:
    """
    One attempt, its secret, and what it may have left on the nodes.

    Args:
        wanted: The lock to take.
        slugs: The names to take, as written in the keys; for a lock with several permits, one permit.
        secret: The secret that proves the hold if the attempt succeeds.
        rules: The options of the alias.
        highest: The highest tokens seen in this process.
        waiter: The waiter's name in the nodes' queues; a caller with an empty name joins no queue.
        timeout: Seconds for which a round waits for its slowest node.
        enrolled: The nodes that may have the waiter in their queue; the attempt adds to this set.
        at: The present time.
        earlier: How earlier attempts of the same call described themselves, if a node may still execute one.

    ``given_back`` is whether everything that the attempt may have been granted has been released. ``at`` is the time
    after the last step. ``number`` is the highest fencing token that the attempt proposed. ``skipped`` has the last
    replies of silent nodes that need not be asked again while contenders decide a split vote.
    """

    __slots__ = (
        *("_earlier", "_enrolled", "_highest", "_queue", "_replies", "_rules", "_timeout", "_waiter", "_wanted"),
        *("at", "given_back", "number", "rounds", "secret", "skipped", "slugs", "value"),
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
        enrolled: set[int],
        at: Instant,
        earlier: Set[str] = NO_ATTEMPTS,
    ) -> None:
        self.slugs = slugs
        self.secret = secret
        self.at = at
        self.rounds: list[Round] = []
        self.given_back = False
        self.skipped = NO_REPLIES
        self.value = ""
        self.number = 0
        self._wanted = wanted
        self._rules = rules
        self._highest = highest
        self._waiter = waiter
        self._timeout = timeout
        self._enrolled = enrolled
        self._earlier = earlier
        self._queue = queue_of(slugs[0]) if wanted.limit > 1 else ""
        self._replies: Mapping[int, Reply] = NO_REPLIES

    def steps(self, since: Instant) -> Generator[Round, Instant, Granted | None]:
        """
        Yield rounds, and return the outcome, None if the attempt failed; the driver sends the time after each round.

        Args:
            since: When the first attempt began, which is the waiter's rank in the queues.
        """
        # Step 1 of "Distributed Locks with Redis": the time before the first byte is sent. However long the request or
        # the reply takes, the nodes' keys expire later than ``start + ttl``, never sooner. A start taken from the reply
        # would let this holder work on while a node has already given the lock to the next one.
        start, ttl, again = self.at.now, self._wanted.ttl, bool(self.rounds)
        if self._wanted.shared:  # the value describes no single holder
            self.value = encode(self.secret, Owner(kind=SHARED_KIND, ttl=ttl))
        elif not again:
            self.value = encode_since(self.secret, self._wanted.owner, self.at.wall / 1e6)
        fencing_token = self.number = max(self.at.wall, self._above_highest())
        first = self._first_round(fencing_token, since.wall)
        self.at = yield first
        if self._earlier and not first.won:
            first.replies = {node: self._of_another(reply) for node, reply in first.replies.items()}
        self._replies = {**self.skipped, **first.replies} if self.skipped else first.replies
        if not first.won:  # else all replies have the number proposed, and there is nothing to look at
            self._note_tokens(first)
            if self._waiter:
                self._enrolled |= first.may_queue()
            verdict = Verdict(first.replies, self._rules)
            if not verdict.accepted:
                if not verdict.granted_lock:
                    return None
                # The client's clock may be too far ahead for the nodes, and they may have forgotten every token. So the
                # second proposal is at least the slowest granting node's own time.
                fencing_token = self.number = max(self._above_highest(), verdict.granting_time)
                second = self._second_round(first, fencing_token)
                self.at = yield second
                self._note_tokens(second)
                # Only the second round counts. A node that accepted the first number may not have accepted this one,
                # and a token that no quorum accepted can be given twice.
                if not Verdict(second.replies, self._rules).accepted:
                    return None
        self._highest.lift(self.slugs, fencing_token)
        deadline = self._rules.deadline(start, ttl)
        # A quorum that was read late proves nothing: by then the first nodes may have given the lock to somebody else.
        if self.at.now + self._rules.least_validity(ttl) > deadline:
            if self._waiter:
                self._enrolled |= first.may_queue()
            return None
        # A secret that the caller chose, or that was used before, may also be on nodes that did not get this round.
        # Unless they get the release, they keep the lock until it expires.
        known = not (self._wanted.secret or again or self.skipped)
        return Granted(
            self.slugs,
            self.secret,
            self.value,
            fencing_token,
            start,
            deadline,
            self._timeout,
            tuple(self.rounds),
            self._waiter,
            self._queue,
            frozenset(first.untouched() - self._enrolled) if known and not first.complete else NO_NODES,
            self.at.now - since.now,
        )

    def _of_another(self, reply: Reply) -> Reply:
        """
        Return *reply*, or that of a node that cannot tell, if it refuses the lock because of an attempt of this call.

        The node executed that attempt late, after its connection had been given up, and its release is on the way.
        """
        ours = reply.kind is Kind.BUSY and uncounted(reply.detail) in self._earlier
        return failed(Failure.OWN_ATTEMPT, Kind.UNKNOWN) if ours else reply

    @property
    def verdict(self) -> "Verdict":
        """The meaning of the replies to the first round."""
        return Verdict(self._replies, self._rules)

    def _above_highest(self) -> int:
        """
        Return the lowest token above every token seen; 0 if the highest one seen is absurd.

        A fence in a database may hold any number. The lock can still be taken, and the fence then refuses its token.
        """
        highest = self._highest.of(self.slugs)
        return 0 if highest > self.at.wall + FAR else highest + 1

    def _first_round(self, number: int, stamp: int) -> Round:
        wanted, rules = self._wanted, self._rules
        request = Acquire(
            self.slugs,
            self.secret,
            self.value,
            wanted.ttl,
            number,
            wanted.ttl if wanted.once else rules.fence_keep,
            rules.ahead,
            wanted.adopt,
            self._waiter,
            stamp,
            wanted.barge,
            wanted.shared,
            self._queue,
            wanted.strict,
            common_value(wanted.limit) if self._queue else "",
        )
        requests: dict[int, Request] = dict.fromkeys(range(rules.nodes), request)
        for node in self.skipped:  # silent before, and waiting for it again would lengthen the contest by a timeout
            del requests[node]
        return self._round(requests, lambda replies: Verdict(replies, rules).settled)

    def _second_round(self, first: Round, number: int) -> Round:
        wanted, rules = self._wanted, self._rules
        keep = wanted.ttl if wanted.once else rules.fence_keep
        request = Raise(self.slugs, self.secret, number, keep, wanted.shared)
        granted = [node for node, reply in first.replies.items() if reply.kind in GRANTS]
        return self._round(dict.fromkeys(granted, request), lambda replies: Verdict(replies, rules).accepted)

    def _round(self, requests: Mapping[int, Request], decided: Callable[[Mapping[int, Reply]], bool]) -> Round:
        # Nothing that the round calls refers to the attempt: the reference cycle would leave every lock to the garbage
        # collector, which costs more than the lock in a large process.
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
        return round

    def _note_tokens(self, round: Round) -> None:
        self._highest.lift(self.slugs, max([reply.fence for reply in round.replies.values()], default=0))


def learn(highest: "HighestToken", slugs: tuple[str, ...], reply: Reply) -> None:
    """Remember the highest token that a node has accepted."""
    highest.lift(slugs, reply.fence)


class Verdict:
    """
    What the replies to a round of an attempt mean together, which decides what happens next.

    "Taken" and "cannot tell" are kept apart here. A node that reports another holder has answered, so waiting may help.
    A silent node has not answered; if too many nodes are silent, nobody knows whether the lock is free.

    A round whose nodes all gave the hoped reply is decided by :class:`~.round.Round` itself, with a count.

    Args:
        replies: The replies of the round by node; a node that did not reply in time is missing.
        rules: The options of the alias.
    """

    __slots__ = ("replies", "rules")

    def __init__(self, replies: Mapping[int, Reply], rules: Rules) -> None:
        self.replies = replies
        self.rules = rules

    # Whether the attempt has the lock

    @property
    def accepted(self) -> bool:
        """Whether a quorum granted the lock and accepted the proposed token."""
        return count(self.replies, Kind.ACCEPTED) >= self.rules.needed

    @property
    def granted_lock(self) -> bool:
        """Whether a quorum granted the lock, so that one more round may raise the token."""
        return count(self.replies, *GRANTS) >= self.rules.needed

    @property
    def settled(self) -> bool:
        """
        Whether the replies so far settle what happens next.

        A failure is settled early only together with its reason. Either one holder and earlier waiters have a quorum;
        or too many nodes are silent, and it is known whether waiting for them can help.
        """
        accepted, pending = count(self.replies, Kind.ACCEPTED), self._pending
        if accepted >= self.rules.needed:
            return True
        if accepted == len(self.replies):
            return False  # the usual case, so far
        # Votes for the lock are enough for a second round, which raises the token, as soon as the first number cannot
        # get a quorum any more.
        if self.granted_lock and accepted + pending < self.rules.needed:
            return True
        if self._in_the_way >= self.rules.needed:
            return True
        # Only misconfigured nodes make waiting pointless. Decided too early, a caller would wait for ever for servers
        # that will not vote, or give up because of a restart.
        hopeless, spare = self._misconfigured, self.rules.spare
        explained = hopeless > spare or hopeless + pending <= spare
        return explained and self.cut_off

    @property
    def granting_time(self) -> int:
        """The time on the slowest clock of the nodes that granted, in microseconds; 0 if none reports one."""
        return min([reply.time for reply in self.replies.values() if reply.kind in GRANTS and reply.time], default=0)

    @property
    def granted(self) -> set[int]:
        """The nodes that granted the attempt, including those whose vote does not count."""
        return {node for node, reply in self.replies.items() if reply.kind in (*GRANTS, *VOTELESS)}

    @property
    def lacks_votes(self) -> bool:
        """Whether a quorum of nodes granted the lock, but too few of them may vote."""
        return len(self.granted) >= self.rules.needed

    # Whether somebody else has it

    @property
    def taken(self) -> bool:
        """
        Whether the lock is known to be held, or to have waiters that came first.

        Fewer refusals than this prove nothing: the others may be free, and a vote on a single node may be all that is
        left of a client that died during its attempt.
        """
        return count(self.replies, *NOT_FREE) > self.rules.spare and not self.misconfigured

    @property
    def agreed(self) -> bool:
        """Whether a quorum of nodes names one holder."""
        return self._most_held >= self.rules.needed

    @property
    def queued(self) -> bool:
        """Whether the lock is free, but other callers wait for it."""
        return count(self.replies, Kind.QUEUED) > 0 and count(self.replies, Kind.BUSY) == 0

    @property
    def behind_others(self) -> bool:
        """Whether earlier waiters, in the queues of too many nodes, must be served before a quorum is possible."""
        return count(self.replies, Kind.QUEUED) > self.rules.spare

    @property
    def split(self) -> bool:
        """
        Whether contenders may each hold some of the nodes that answer, so that none of them has a quorum.

        A silent node may have granted the lock to any of them. So nobody can know whether one of them has won; those
        that have not go on, see :meth:`precedes`.
        """
        taken = count(self.replies, Kind.BUSY) > 0
        return taken and not self.cut_off and self._in_the_way + self._pending < self.rules.needed

    def precedes(self, value: str) -> bool:
        """
        Return whether the contender that stores *value* comes before all others that were seen.

        Of several contenders, the one that began first keeps what it was granted, and the others give theirs back. All
        of them compare the same texts, so they agree who that is. If the lock is free, but a node serves a waiter
        first, that waiter comes first.
        """
        # Not by the secret: every attempt has a new one, so the order would change with each.
        mine = _rank(value[SECRET_SIZE:])
        rivals = [reply.detail for reply in self.replies.values() if reply.kind is Kind.BUSY]
        return count(self.replies, Kind.QUEUED) == 0 and all(mine < _rank(rival) for rival in rivals)

    @property
    def holder(self) -> str:
        """The holder of the lock on the most nodes, described as JSON; empty if no node reports one."""
        refused = [reply.detail for reply in self.replies.values() if reply.kind in NOT_FREE and reply.detail]
        holders = [uncounted(detail) for detail in refused]
        return max(dict.fromkeys(holders), key=holders.count, default="")  # of several, the one of the first node

    @property
    def retry_after(self) -> float | None:
        """The seconds after which a quorum can be free by expiry alone; None if never or unknown."""
        held = sorted(
            float("inf") if reply.left is None else reply.left
            for reply in self.replies.values()
            if reply.kind is Kind.BUSY
        )
        # ``spare`` nodes may stay taken. When all other nodes are free, those are a quorum.
        enough = len(held) - self.rules.spare
        if enough <= 0:
            return None
        return None if held[enough - 1] == float("inf") else max(held[enough - 1], 0.0)

    @property
    def last_position(self) -> int:
        """The waiter's worst position in the queue of any node, 0 for the first; -1 if it is in none."""
        return max([reply.position for reply in self.replies.values()], default=-1)

    # Whether anybody can tell

    @property
    def cut_off(self) -> bool:
        """Whether too few nodes answered. A waiter that cannot win must not be first in the queues that it reaches."""
        return len(self.unanswering) > self.rules.spare

    @property
    def misconfigured(self) -> bool:
        """Whether no quorum is possible until servers or settings change."""
        return self._misconfigured > self.rules.spare

    @property
    def pointless(self) -> bool:
        """Whether waiting is pointless. Where a node may not vote, it is not: that may be ten seconds old."""
        return sum([reply.failure in LASTING for reply in self.replies.values()]) > self.rules.spare

    @property
    def perhaps_misconfigured(self) -> bool:
        """Whether no quorum is possible unless nodes whose failure may pass by itself, or may last, vote again."""
        return sum([reply.perhaps_misconfigured for reply in self.replies.values()]) > self.rules.spare

    @property
    def unanswering(self) -> Mapping[int, Reply]:
        """The replies that are no answer."""
        return {node: reply for node, reply in self.replies.items() if reply.kind not in ANSWERS}

    @property
    def silent(self) -> Mapping[int, Reply]:
        """The replies that are no answer, if they leave too few nodes for a quorum; otherwise none."""
        return self.unanswering if self.cut_off else {}

    # Counts

    @property
    def _pending(self) -> int:
        """How many nodes have not replied."""
        return self.rules.nodes - len(self.replies)

    @property
    def _misconfigured(self) -> int:
        """How many nodes will not vote until they or the settings change."""
        return sum([reply.misconfigured for reply in self.replies.values()])

    @property
    def _in_the_way(self) -> int:
        """How many nodes one holder and the waiters that came first have together."""
        return self._most_held + count(self.replies, Kind.QUEUED)

    @property
    def _most_held(self) -> int:
        """
        How many nodes one other holder has: the one that has the most nodes.

        Holders on different nodes must not be added up: three contenders with a node each would be taken for one holder
        with a quorum, and all of them would give up. Values are compared without the number of extensions, because a
        node may have missed some.
        """
        holders = [uncounted(reply.detail) for reply in self.replies.values() if reply.kind is Kind.BUSY]
        return max(map(holders.count, holders), default=0)


def _rank(detail: str) -> tuple[float, str]:
    """Return the rank of a contender: when it began, and the rest of its description for those that began together."""
    described = decode(detail)
    return (described.since if described else 0.0, uncounted(detail))


class HighestToken:
    """The highest token seen for each name; the next proposal goes above it. The oldest entries are dropped first."""

    def __init__(self, size: int = 10_000) -> None:
        self._size = size
        self._highest: OrderedDict[str, int] = OrderedDict()

    def of(self, slugs: Iterable[str]) -> int:
        """Return the highest number seen for any of *slugs*."""
        return max(map(self._highest.get, slugs, repeat(0)))

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
