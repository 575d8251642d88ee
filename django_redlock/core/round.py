"""
One round: the same request to several nodes, and their replies (internal).

Rounds of every kind are made elsewhere, except for two: the one that ends a hold or an attempt, and the one that asks
nodes which locks they have.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, TypedDict

from .protocol import (
    LEAVING_TRACES,
    MISSES,
    POSITIVE,
    Acquire,
    Extend,
    Failure,
    Kind,
    Release,
    Reply,
    Request,
    Survey,
    Term,
    in_parts,
    no_vote,
)
from .rules import Rules

if TYPE_CHECKING:
    from .admission import Admission

CUT = frozenset({Failure.RESET, Failure.CLOSED, Failure.READONLY, Failure.MASTERDOWN})
"""The failures of a link that had worked, after which a new one may work at once."""

NO_CURSORS: Mapping[int, str] = MappingProxyType({})
LIFETIME = 10.0  # seconds for which the reply to a round that takes or extends no lease is of use


@dataclass(eq=False, slots=True)
class Round:
    """
    One round: what it sends to which nodes, what decides it, and the nodes' replies.

    Args:
        requests: The request for each node, by the node's index in the settings.
        decided: Returns whether the replies so far settle the round. It is not called while all of them are the *hoped*
            one.
        timeout: Seconds to wait for replies; 0 sends the requests, with the text of their scripts, and does not wait.
        needed: How many nodes must be asked even if they have failed lately, so that the round can be decided.
        hoped: The reply that settles the round when *needed* nodes have given it; None if no reply does.
        cleanup: Whether the round ends a hold or an attempt, so that it is sent even to a silent node.
        patience: Seconds for which a refused round waits for the replies that are still in flight. A node that also
            refused then needs no release.
        lasting: Seconds for which a request that a node missed is redelivered; 0.0 redelivers nothing.
        remedy: The request to redeliver to a node instead of the one that it missed, where the two differ.
        mending: Whether a decided round still waits, within its timeout, for links that are being made. An extension
            does, because it restores the lock on nodes that were away and have lost it.
        unattended: Whether the round, with a timeout of 0, stays open after it was sent. The next reader of its
            connections gives it the replies; see :mod:`django_redlock.engine.unattended`.

    ``replies`` came in time. ``late`` has the replies that came after the round was closed, which decide nothing. The
    driver sets ``admission``, whose ``doubts`` are the nodes that may not vote at present. ``on_missed`` is called with
    the nodes that turn out, after the round was closed, to have missed it. ``on_late`` is called with each late reply,
    except a *hoped* one to a round that is already won. The driver sets ``rested`` if links had been idle for a while
    before they were used, so that a firewall may have cut them.

    A round is ``won`` if all replies that came in time are the *hoped* one, from at least *needed* nodes. It is
    ``complete`` if every node gave that reply in time. For nearly every lock these two flags suffice, and the replies
    are not examined.
    """

    requests: Mapping[int, Request]
    decided: Callable[[Mapping[int, Reply]], bool]
    timeout: float
    needed: int = 0
    hoped: Kind | None = None
    cleanup: bool = False
    lasting: float = 0.0
    patience: float = 0.0
    remedy: Mapping[int, Request] = field(default_factory=dict)
    mending: bool = False
    unattended: bool = False
    replies: dict[int, Reply] = field(default_factory=dict)
    late: dict[int, Reply] = field(default_factory=dict)
    closed: bool = False
    won: bool = False
    complete: bool = False
    rested: bool = False
    on_late: Callable[[Reply], None] | None = None
    on_missed: "Callable[[Round, set[int]], None] | None" = None
    admission: "Admission | None" = None
    _as_hoped: int = 0

    @property
    def in_full(self) -> bool:
        """Whether to send scripts with their text, because nobody reads a reply that a script is unknown."""
        return not (self.timeout or self.unattended)

    @property
    def wanted(self) -> bool:
        """Whether a request that a node could not understand should be sent again, in full."""
        # An attempt that nobody waits for must not be: it would take the lock for a caller that has gone.
        return self.cleanup or not self.closed

    def receive(self, node: int, reply: Reply) -> None:
        """
        Note one node's reply, in time or late, and decide the round if it can be decided.

        If all replies so far are the *hoped* one, a quorum of them decides. Otherwise the maker's *decided* does; for
        an attempt at a lock, see :class:`.attempt.Verdict`.
        """
        if self.closed:
            # The caller has acted on the outcome, so a late reply changes no vote. But its token is above the next
            # proposal, and a node that missed a release would keep the lock from everybody until it expires.
            self.late[node] = reply
            if self.on_late and not (self.won and reply.kind is self.hoped):
                self.on_late(reply)
            if self.on_missed and reply.kind in MISSES:
                self.on_missed(self, {node})
            return
        replies = self.replies
        replies[node] = reply
        if reply.kind is self.hoped:
            self._as_hoped += 1
        all_replied = len(replies) == len(self.requests)
        # A node must be allowed to vote when the round is decided, not when its reply came: only the replies of the
        # other nodes show which clock is right.
        if self._as_hoped == len(replies) and not (self.admission and self.admission.doubts):  # as nearly always
            if all_replied or self._as_hoped >= self.needed:
                self.closed, self.complete = True, all_replied
                self.won = self._as_hoped >= self.needed
        elif all_replied or self.decided(self._votes()):
            self.close()

    def close(self) -> None:
        """End the round; replies that come from now on are late."""
        if not self.closed:
            self.closed = True
            if self.admission and self.admission.doubts:
                # Stored as they count now. If the doubt ended a moment later, the caller would count votes that the
                # decision did not.
                self.replies = self._votes()
            elif self.hoped and self._as_hoped == len(self.replies):
                self.won = self._as_hoped >= self.needed
                self.complete = self._as_hoped == len(self.requests)

    def _votes(self) -> dict[int, Reply]:
        """Return the replies as they count at this moment."""
        if not (self.admission and (doubts := self.admission.doubts)):
            return self.replies
        return {
            node: no_vote(reply, doubts[node]) if node in doubts and reply.kind in POSITIVE else reply
            for node, reply in self.replies.items()
        }

    @property
    def cut(self) -> bool:
        """
        Whether links that had worked may have been cut, or lead to a server that is not what it was.

        The nodes may be well: a new link learns what they are now.
        """
        return any(
            reply.failure is Failure.FORGOT or (reply.kind is Kind.UNKNOWN and (self.rested or reply.failure in CUT))
            for reply in self.replies.values()
        )

    @property
    def lifetime(self) -> float:
        """Seconds after which no reply is of use, because the lease that the round takes or extends has ended."""
        leases = self.terms or [request for request in self.requests.values() if isinstance(request, Acquire)]
        return max([lease.ttl for lease in leases], default=LIFETIME)

    @property
    def terms(self) -> tuple[Term, ...]:
        """The leases that the round extends."""
        return next((request.terms for request in self.requests.values() if isinstance(request, Extend)), ())

    def known(self) -> dict[int, Reply]:
        """Return the reply of each node, in time or late."""
        return self.replies | self.late if self.late else self.replies

    def unanswered(self) -> set[int]:
        """Return the nodes that may still execute, or may have executed, a request without the client knowing."""
        if self.complete:
            return set()
        # After a lost connection the request may still be in a buffer of the node, which executes it after a release
        # that came on a new connection.
        known = self.known()
        return {node for node in self.requests if node not in known or known[node].kind is Kind.UNKNOWN}

    @property
    def unheard(self) -> bool:
        """Whether the round was refused before all nodes replied, and is patient enough to wait for the others."""
        if self.won or self.patience <= 0 or self.count(*POSITIVE) >= self.needed:
            return False
        return any(node not in self.replies and node not in self.late for node in self.requests)

    def missed(self) -> set[int]:
        """Return the nodes that did not get the request, as far as is known, or whose answer was lost."""
        if self.won and not self.late:
            return set()
        return {node for node, reply in self.known().items() if reply.kind in MISSES}

    def may_queue(self) -> set[int]:
        """Return the nodes that have put the waiter in their queue, or may have without the client knowing."""
        known = self.known()
        return {
            node
            for node in self.requests
            if node not in known or known[node].position >= 0 or known[node].kind is Kind.UNKNOWN
        }

    def untouched(self) -> set[int]:
        """Return the nodes that certainly executed nothing and did not even queue the waiter."""
        if self.won and not self.late:
            return set()
        return {
            node
            for node, reply in self.known().items()
            if reply.kind is Kind.FAILED and not in_parts(self.requests[node])
        }

    def may_hold(self) -> set[int]:
        """Return the nodes that may have something of this round: all but those that certainly executed nothing."""
        # A node that refused one part of a long request may have granted the parts before it.
        known = self.known()
        return {
            node
            for node, request in self.requests.items()
            if node not in known or known[node].kind in LEAVING_TRACES or in_parts(request)
        }

    def count(self, *kinds: Kind) -> int:
        """Return how many nodes replied with one of *kinds* in time."""
        return count(self.replies, *kinds)


def count(replies: Mapping[int, Reply], *kinds: Kind) -> int:
    """Return how many replies are of one of *kinds*."""
    return sum([reply.kind in kinds for reply in replies.values()])


def cleanup(
    release: Release,
    nodes: Iterable[int],
    unsure: Collection[int],
    tombstone: float,
    timeout: float,
    needed: int | None = None,
) -> Round:
    """
    Return the round that sends *release* to *nodes*.

    The round is decided when *needed* nodes have released the lock, or when all have replied if *needed* is None.

    A release may overtake a request that is still on its way, because that request sits in a buffer or on another
    connection. So the release to a node in *unsure*, which may execute an earlier request afterwards, also leaves a
    tombstone there, which refuses such requests for *tombstone* seconds.
    """
    requests: dict[int, Request] = dict.fromkeys(nodes, release)
    if unsure:
        refusing = release._replace(tombstone=tombstone)
        requests |= {node: refusing for node in requests if node in unsure}
    return Round(
        requests=requests,
        decided=lambda replies: needed is not None and count(replies, Kind.RELEASED) >= needed,
        timeout=timeout,
        needed=needed or 0,
        hoped=Kind.RELEASED if needed else None,
        cleanup=True,
        lasting=tombstone,
    )


def limit_releases(round: Round, granting: Iterable[Round], number: int) -> None:
    """
    Keep the releases of a *round* from ending a later hold with the same secret, which may have begun when one arrives.

    A node that granted the hold in spite of a higher fence reported that fence, so the limit for it is that fence. A
    node that has not answered gets this release after the request that it ends, so only a release that is redelivered
    to the node is limited.

    Args:
        round: The round that ends a hold or an attempt whose secret the caller chose.
        granting: The rounds that asked for it.
        number: The highest fencing token that they proposed.
    """
    requests, limited = dict(round.requests), {}
    known = [asked.known() for asked in granting]
    for node, release in round.requests.items():
        fence = max([replies[node].fence for replies in known if node in replies], default=0)
        if isinstance(release, Release):
            limited[node] = release._replace(fencing_token=max(number, fence))
            if fence:
                requests[node] = limited[node]
    round.requests, round.remedy = requests, limited


def unanswered(rounds: Iterable[Round]) -> set[int]:
    """Return the nodes that may still execute a request of one of *rounds*."""
    found: set[int] = set()
    for round in rounds:
        if not round.complete:  # as nearly always
            found |= round.unanswered()
    return found


class SurveyOptions(TypedDict, total=False):
    """
    The options of a survey.

    Attributes:
        slugs: The names, as written in the keys.
        after: The cursor that each node gave with the previous page; a node without a cursor gives its first page.
        count: How many names a page has; 0, the default, asks for the locks in *slugs*.
        waiters: The most waiters to list; 0 only counts them, and None, the default, does neither.
        but: The nodes that are not asked, by index.
        patience: The most seconds to wait; never longer than the node timeout, which is the default.
    """

    slugs: tuple[str, ...]
    after: Mapping[int, str]
    count: int
    waiters: int | None
    but: Iterable[int]
    patience: float


def survey_round(rules: Rules, options: SurveyOptions) -> Round:
    """Return the round of a survey, which waits for all nodes that it asks."""
    after = options.get("after", NO_CURSORS)
    slugs, count, waiters = options.get("slugs", ()), options.get("count", 0), options.get("waiters")
    asked = set(range(rules.nodes)).difference(options.get("but", ()))
    first = Survey(slugs, "", count, waiters)  # one object for all nodes, so that it is encoded once
    requests = {node: first._replace(after=after[node]) if node in after else first for node in asked}
    timeout = min(rules.timeout(rules.ttl), options.get("patience", math.inf))
    return Round(requests, lambda replies: False, timeout, rules.needed)
