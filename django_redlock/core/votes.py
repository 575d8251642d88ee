"""
Count the votes of the nodes, and say what their replies mean together (internal).

This is the one place that compares a number of nodes with a quorum. :func:`is_quorum` and :func:`prevents_quorum` are
the two comparisons; the rest of the file applies them to the replies to a request: :class:`Verdict` to those of an
attempt at a lock, :func:`extended_by_quorum` to an extension, :func:`release_outcome` and :func:`is_gone` to a release.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from .names import SECRET_SIZE, decode, uncounted
from .protocol import ANSWERS, LASTING, REFUSALS, STOPPED, Kind, Outcome, Reply
from .rules import Rules

GRANTS = (Kind.ACCEPTED, Kind.GRANTED)
VOTELESS = (Kind.NO_VOTE, Kind.EXCLUDED)
NOT_FREE = (Kind.BUSY, Kind.QUEUED)

Number = TypeVar("Number", int, float)


def count(replies: Mapping[int, Reply], *kinds: Kind) -> int:
    """Return how many replies are of one of *kinds*."""
    return sum([reply.kind in kinds for reply in replies.values()])


def is_quorum(votes: int, needed: int) -> bool:
    """Return whether this number of votes decides."""
    return votes >= needed


def prevents_quorum(lost: int, rules: Rules) -> bool:
    """Return whether the other nodes are no quorum when *lost* nodes are silent, or against it."""
    return lost > rules.spare


def agreed(values: Collection[Number], needed: int) -> Number:
    """Return the highest value that a quorum of nodes reaches; 0 if fewer nodes have one."""
    return sorted(values, reverse=True)[needed - 1] if is_quorum(len(values), needed) else 0


def votes_in(replies: Iterable[Reply], needed: int) -> float | None:
    """
    Return the seconds until *needed* nodes vote, if the missing votes are those of nodes that give no vote for a while.

    Return None if too few nodes answer.
    """
    waits = sorted(reply.votes_in for reply in replies if reply.votes_in or reply.kind in ANSWERS)
    return waits[needed - 1] if is_quorum(len(waits), needed) else None


def extended_by_quorum(kinds: Collection[Kind], rules: Rules) -> bool | None:
    """
    Return whether a quorum has extended a lease, by the results of the nodes that replied.

    A few nodes that refuse have lost their data or the key, and the others still keep everybody else out. So the result
    is False only if no quorum is left that could have the lease; it is None while neither is known.
    """
    if is_quorum(sum([kind is Kind.HELD for kind in kinds]), rules.needed):
        return True
    return False if prevents_quorum(sum([kind in REFUSALS for kind in kinds]), rules) else None


def release_outcome(replies: Mapping[int, Reply], rules: Rules) -> Outcome:
    """Return what a release found on a quorum of the nodes; ``UNKNOWN`` without one."""
    if is_quorum(count(replies, Kind.RELEASED), rules.needed):
        return Outcome.RELEASED
    if prevents_quorum(count(replies, Kind.GONE, Kind.BUSY), rules):
        return Outcome.TAKEN if count(replies, Kind.BUSY) else Outcome.EXPIRED
    return Outcome.UNKNOWN


def as_released(replies: Mapping[int, Reply]) -> dict[int, Reply]:
    """Return what a release would have found, by the replies to a request that leaves the lock to its minimum hold."""
    return {node: _released(reply) for node, reply in replies.items()}


def _released(reply: Reply) -> Reply:
    if not reply.terms:
        return reply
    kind, _, holder = reply.terms[0]
    if kind is Kind.HELD:
        return reply._replace(kind=Kind.RELEASED)
    if kind is Kind.REVOKED and not holder:
        return reply._replace(kind=Kind.GONE, detail=STOPPED)
    if kind in (Kind.REVOKED, Kind.REFUSED):
        return reply._replace(kind=Kind.BUSY if holder else Kind.GONE, detail=holder)
    return reply


def is_gone(replies: Mapping[int, Reply], rules: Rules) -> bool:
    """Return whether the replies to a release show that its hold has ended: the silent nodes cannot be a quorum."""
    return is_quorum(count(replies, Kind.RELEASED, Kind.GONE, Kind.BUSY), rules.needed)


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
        return is_quorum(count(self.replies, Kind.ACCEPTED), self.rules.needed)

    @property
    def granted_lock(self) -> bool:
        """Whether a quorum granted the lock, so that one more round may raise the token."""
        return is_quorum(count(self.replies, *GRANTS), self.rules.needed)

    @property
    def settled(self) -> bool:
        """
        Whether the replies so far settle what happens next.

        A failure is settled early only together with its reason. Either one holder and earlier waiters have a quorum;
        or too many nodes are silent, and it is known whether waiting for them can help.
        """
        accepted, pending = count(self.replies, Kind.ACCEPTED), self._pending
        if is_quorum(accepted, self.rules.needed):
            return True
        if accepted == len(self.replies):
            return False  # the usual case, so far
        # Votes for the lock are enough for a second round, which raises the token, as soon as the first number cannot
        # get a quorum any more.
        if self.granted_lock and not is_quorum(accepted + pending, self.rules.needed):
            return True
        if is_quorum(self._in_the_way, self.rules.needed):
            return True
        # Only misconfigured nodes make waiting pointless. Decided too early, a caller would wait for ever for servers
        # that will not vote, or give up because of a restart.
        explained = self.misconfigured or not prevents_quorum(self._misconfigured + pending, self.rules)
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
        return is_quorum(len(self.granted), self.rules.needed)

    # Whether somebody else has it

    @property
    def taken(self) -> bool:
        """
        Whether the lock is known to be held, or to have waiters that came first.

        Fewer refusals than this prove nothing: the others may be free, and a vote on a single node may be all that is
        left of a client that died during its attempt.
        """
        return prevents_quorum(count(self.replies, *NOT_FREE), self.rules) and not self.misconfigured

    @property
    def agreed(self) -> bool:
        """Whether a quorum of nodes names one holder."""
        return is_quorum(self._most_held, self.rules.needed)

    @property
    def queued(self) -> bool:
        """Whether the lock is free, but other callers wait for it."""
        return count(self.replies, Kind.QUEUED) > 0 and count(self.replies, Kind.BUSY) == 0

    @property
    def behind_others(self) -> bool:
        """Whether earlier waiters, in the queues of too many nodes, must be served before a quorum is possible."""
        return prevents_quorum(count(self.replies, Kind.QUEUED), self.rules)

    @property
    def split(self) -> bool:
        """
        Whether contenders may each hold some of the nodes that answer, so that none of them has a quorum.

        A silent node may have granted the lock to any of them. So nobody can know whether one of them has won; those
        that have not go on, see :meth:`precedes`.
        """
        if not count(self.replies, Kind.BUSY):
            return False
        return not is_quorum(self._in_the_way + self._pending, self.rules.needed) and not self.cut_off

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
        if not prevents_quorum(len(held), self.rules):
            return None
        # ``spare`` nodes may stay taken. When all other nodes are free, those are a quorum.
        last = held[len(held) - self.rules.spare - 1]
        return None if last == float("inf") else max(last, 0.0)

    @property
    def last_position(self) -> int:
        """The waiter's worst position in the queue of any node, 0 for the first; -1 if it is in none."""
        return max([reply.position for reply in self.replies.values()], default=-1)

    @property
    def ahead(self) -> int | None:
        """
        How many waiters come before this one; None if it is in no queue.

        The queue of a single node counts for nothing: it may still have a waiter that has the lock now.
        """
        positions = sorted([reply.position for reply in self.replies.values() if reply.position >= 0])
        return positions[min(self.rules.needed, len(positions)) - 1] if positions else None

    # Whether anybody can tell

    @property
    def cut_off(self) -> bool:
        """Whether too few nodes answered. A waiter that cannot win must not be first in the queues that it reaches."""
        return prevents_quorum(len(self.unanswering), self.rules)

    @property
    def misconfigured(self) -> bool:
        """Whether no quorum is possible until servers or settings change."""
        return prevents_quorum(self._misconfigured, self.rules)

    @property
    def pointless(self) -> bool:
        """Whether waiting is pointless. Where a node may not vote, it is not: that may be ten seconds old."""
        return prevents_quorum(sum([reply.failure in LASTING for reply in self.replies.values()]), self.rules)

    @property
    def perhaps_misconfigured(self) -> bool:
        """Whether no quorum is possible unless nodes whose failure may pass by itself, or may last, vote again."""
        return prevents_quorum(sum([reply.perhaps_misconfigured for reply in self.replies.values()]), self.rules)

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
