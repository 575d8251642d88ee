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
from collections.abc import Generator, Iterable, Mapping, Set
from functools import partial
from itertools import repeat
from types import MappingProxyType
from typing import NamedTuple

from .names import SHARED_KIND, Owner, common_value, encode, encode_since, queue_of, uncounted
from .protocol import (
    FAR,
    HIGHEST,
    NOBODYS,
    Acquire,
    Failure,
    Instant,
    Kind,
    Raise,
    Release,
    Reply,
    Term,
    failed,
    without_secrets,
)
from .round import Round
from .rules import Rules, Wanted
from .votes import GRANTS, Verdict, extended_by_quorum

PATIENCE = 0.005  # seconds for which a waiter's refused round waits for the replies still in flight

NEVER = Instant(0.0, 0)
NO_NODES: frozenset[int] = frozenset()
NO_ATTEMPTS: frozenset[str] = frozenset()
NO_REPLIES: Mapping[int, Reply] = MappingProxyType({})


@without_secrets
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
        hold_until: Until when the nodes keep the lock taken, even if its holder dies, on the client's steady clock; 0
            if it ends with its work.
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
    hold_until: float = 0.0


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
            first.reread(self._of_another)
        self._replies = {**self.skipped, **first.replies} if self.skipped else first.replies
        if not first.won:  # else all replies have the number proposed, and there is nothing to look at
            self._note_tokens(first)
            if self._waiter:
                self._enrolled |= first.may_queue()
            verdict = Verdict(first.replies, self._rules)
            if not verdict.granted_lock:
                return None
            if not verdict.accepted:
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
        hold_for, hold_until = self._wanted.hold_for, 0.0
        if hold_for:
            hold_until = self.at.now + hold_for
            if hold_for > ttl and not (yield from self._keep(fencing_token, deadline)):
                if self._waiter:
                    self._enrolled |= first.may_queue()
                return None
        if self._enrolled and (self._queue or self._wanted.shared or self._wanted.place):
            yield from self._move_up(first)
        # A quorum that was read late proves nothing: by then the first nodes may have given the lock to somebody else.
        if self.at.now + self._rules.least_validity(ttl) > deadline:
            if self._waiter:
                self._enrolled |= first.may_queue()
            return None
        # A secret that the caller chose, or that was used before, may also be on nodes that did not get this round, and
        # a minimum hold on nodes that got only its own. Unless they get the release, they keep the lock until it
        # expires.
        known = not (self._wanted.secret or again or self.skipped or hold_for > ttl)
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
            hold_until,
        )

    def _keep(self, fencing_token: int, deadline: float) -> Generator[Round, Instant, bool]:
        """
        Have the nodes keep the lock for a minimum hold that is longer than its lease; return whether a quorum does.

        This comes before the work begins, so that nothing that happens to its process can end the hold earlier. The
        lease itself stays as short as any: a process that dies in the middle of its attempt leaves nothing for longer.
        A node whose link is still being made, as the first lock of a process often finds one, gets the hold as well:
        with no more than a quorum, one node that loses its memory would end it.
        """
        wanted, rules = self._wanted, self._rules
        common = common_value(wanted.limit) if self._queue else ""
        about = (self.slugs, self.secret, self.value, wanted.hold_for, fencing_token, wanted.shared)
        round = Round.to_extend((Term(*about, common=common),), rules, self._timeout, deadline - self.at.now)
        self.rounds.append(round)
        self.at = yield round
        self._note_tokens(round)
        self._replies = round.replies
        kinds = [reply.terms[0].kind for reply in round.replies.values() if reply.terms]
        return extended_by_quorum(kinds, rules) is True

    def _move_up(self, first: Round) -> Generator[Round, Instant, None]:
        """
        Leave the queues of the nodes that did not grant the lock; those that granted it have taken the waiter out.

        Where others may hold the lock as well, the holder would keep the next waiter out until its enrolment ends; and
        two holders on a node each would keep everybody out, though the lock has room. The enrolment of somebody who was
        away can outlast the work: the next one would find some nodes taken and others free, and could not tell when its
        turn comes.
        """
        if nodes := self._enrolled - Verdict(first.replies, self._rules).granted:
            release = Release(self.slugs, NOBODYS, 0.0, self._waiter, queue=self._queue)
            self.at = yield Round.to_release(release, nodes, 0.0)

    def _of_another(self, reply: Reply) -> Reply:
        """
        Return *reply*, or that of a node that cannot tell, if it refuses the lock because of an attempt of this call.

        The node executed that attempt late, after its connection had been given up, and its release is on the way.
        """
        ours = reply.kind is Kind.BUSY and uncounted(reply.detail) in self._earlier
        return failed(Failure.OWN_ATTEMPT, Kind.UNKNOWN) if ours else reply

    @property
    def verdict(self) -> Verdict:
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
            waiter=self._waiter,
            stamp=stamp,
        )
        if wanted.place:
            request = request._replace(stamp=wanted.place.stamp, away=wanted.place.away)
        if self._queue:
            request = request._replace(queue=self._queue, common=common_value(wanted.limit))
        if wanted.shared or wanted.barge:
            request = request._replace(shared=wanted.shared, barge=wanted.barge)
        if wanted.adopt or wanted.strict:
            request = request._replace(adopt=wanted.adopt, strict=wanted.strict)
        nodes: Iterable[int] = range(rules.nodes)
        if self.skipped:  # silent before, and waiting for them again would lengthen the contest by a timeout
            nodes = set(nodes).difference(self.skipped)
        learn = partial(note_token, self._highest, self.slugs)
        first = Round.to_take(request, nodes, rules, self._timeout, learn, PATIENCE if self._waiter else 0.0)
        # Recorded before the first byte is sent: after an interruption the round must be found here and released.
        self.rounds.append(first)
        return first

    def _second_round(self, first: Round, number: int) -> Round:
        wanted, rules = self._wanted, self._rules
        keep = wanted.ttl if wanted.once else rules.fence_keep
        request = Raise(self.slugs, self.secret, number, keep, wanted.shared)
        granted = [node for node, reply in first.replies.items() if reply.kind in GRANTS]
        learn = partial(note_token, self._highest, self.slugs)
        second = Round.to_raise(request, granted, rules, self._timeout, learn, PATIENCE if self._waiter else 0.0)
        self.rounds.append(second)
        return second

    def _note_tokens(self, round: Round) -> None:
        self._highest.lift(self.slugs, max([reply.fence for reply in round.replies.values()], default=0))


def note_token(highest: "HighestToken", slugs: tuple[str, ...], reply: Reply) -> None:
    """Remember the highest token that a node has accepted."""
    highest.lift(slugs, reply.fence)


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
