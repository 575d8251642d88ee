"""
What the replies of an attempt's first round mean together (internal).

"Taken" and "cannot tell" are kept apart here. A node that reports another holder has answered, so waiting may help. A
silent node has not answered; if too many nodes are silent, nobody knows whether the lock is free.
"""

from collections.abc import Mapping

from . import names as owners
from .protocol import ANSWERS, Kind, Reply
from .round import count
from .rules import Rules

GRANTS = (Kind.ACCEPTED, Kind.GRANTED)
VOTELESS = (Kind.NO_VOTE, Kind.EXCLUDED)
REFUSALS = (Kind.BUSY, Kind.QUEUED)


class Verdict:
    """
    The meaning of the replies to one attempt, which decides what happens next.

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
        mine = _rank(value[owners.SECRET_SIZE :])
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
        return count(self.replies, *REFUSALS) > self._rules.spare and not self.misconfigured

    @property
    def agreed(self) -> bool:
        """Whether a quorum of nodes names one holder."""
        return most_held(self.replies) >= self._rules.needed

    @property
    def holder(self) -> str:
        """The holder of the lock on the most nodes, described as JSON; empty if no node reports one."""
        refused = [reply.detail for reply in self.replies.values() if reply.kind in REFUSALS and reply.detail]
        holders = [owners.uncounted(detail) for detail in refused]
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
    described = owners.decode(detail)
    return (described.since if described else 0.0, owners.uncounted(detail))


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
    holders = list(map(owners.uncounted, reported))
    return max(map(holders.count, holders))
