"""
One round: the same request to several nodes, and their replies (internal).

Each kind of round has a constructor here, from :meth:`Round.to_take` to :meth:`Round.to_survey`. Nobody else sets a
field of a round. A driver says with :meth:`Round.begin` what it knows when it begins to carry the round out, and hands
in each reply with :meth:`Round.receive`.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self, TypedDict

from .admission import Admission
from .protocol import (
    ANSWERS,
    LEAVING_TRACES,
    MISSES,
    POSITIVE,
    Acquire,
    Extend,
    Failure,
    Kind,
    Raise,
    Release,
    Reply,
    Request,
    Survey,
    Term,
    in_parts,
    no_vote,
)
from .rules import Rules
from .votes import Verdict, count, extended_by_quorum, is_quorum, prevents_quorum

CUT = frozenset({Failure.RESET, Failure.CLOSED, Failure.READONLY, Failure.MASTERDOWN})
"""The failures of a link that had worked, after which a new one may work at once."""

NO_CURSORS: Mapping[int, str] = MappingProxyType({})
LIFETIME = 10.0  # seconds for which the reply to a round that takes or extends no lease is of use

Replies = Mapping[int, Reply]
"""The replies to a round, by node."""


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
        remedy: The requests to redeliver to nodes instead of those that they missed, if the two differ.
        mending: Whether a decided round still waits, within its timeout, for links that are being made. An extension
            does, because it restores the lock on nodes that were away and have lost it.
        unattended: Whether the round, with a timeout of 0, stays open after it was sent. The next reader of its
            connections gives it the replies; see :mod:`django_redlock.engine.unattended`.
        on_late: Called with each reply that comes after the round was closed, except a *hoped* one to a round that is
            already won.

    ``replies`` came in time. ``late`` has the replies that came after the round was closed, which decide nothing.
    ``rested`` is whether links had been idle for a while before they were used, so that a firewall may have cut them.

    A round is ``won`` if all replies that came in time are the *hoped* one, from at least *needed* nodes. It is
    ``complete`` if every node gave that reply in time. For nearly every lock these two flags suffice, and the replies
    are not examined.
    """

    requests: Mapping[int, Request]
    decided: Callable[[Replies], bool]
    timeout: float
    needed: int = 0
    hoped: Kind | None = None
    patience: float = 0.0
    on_late: Callable[[Reply], None] | None = None
    mending: bool = False
    cleanup: bool = False
    lasting: float = 0.0
    remedy: Mapping[int, Request] | None = None
    unattended: bool = False
    replies: dict[int, Reply] = field(default_factory=dict, init=False)
    late: dict[int, Reply] = field(default_factory=dict, init=False)
    closed: bool = field(default=False, init=False)
    won: bool = field(default=False, init=False)
    complete: bool = field(default=False, init=False)
    rested: bool = field(default=False, init=False)
    _on_missed: "Callable[[Round, set[int]], None] | None" = field(default=None, init=False)
    _admission: Admission | None = field(default=None, init=False)
    _as_hoped: int = field(default=0, init=False)

    # The kinds of rounds. Nothing that the round of an attempt calls may refer to the attempt: the reference cycle
    # would leave every lock to the garbage collector, which costs more than the lock in a large process.

    @classmethod
    def to_take(
        cls,
        request: Acquire,
        nodes: Iterable[int],
        rules: Rules,
        timeout: float,
        on_late: Callable[[Reply], None],
        patience: float = 0.0,
    ) -> Self:
        """Return the first round of an attempt at a lock; *patience* is for a caller that waits in the queue."""
        requests, needed = dict.fromkeys(nodes, request), rules.needed
        return cls(
            requests, lambda replies: Verdict(replies, rules).settled, timeout, needed, Kind.ACCEPTED, patience, on_late
        )

    @classmethod
    def to_raise(
        cls,
        request: Raise,
        nodes: Iterable[int],
        rules: Rules,
        timeout: float,
        on_late: Callable[[Reply], None],
        patience: float = 0.0,
    ) -> Self:
        """Return the second round of an attempt, which proposes a higher token to the nodes that granted the lock."""
        requests, needed = dict.fromkeys(nodes, request), rules.needed
        return cls(
            requests,
            lambda replies: Verdict(replies, rules).accepted,
            timeout,
            needed,
            Kind.ACCEPTED,
            patience,
            on_late,
        )

    @classmethod
    def to_extend(cls, terms: Sequence[Term], rules: Rules, timeout: float, left: float | None = None) -> Self:
        """
        Return the round that extends leases on all nodes, each lease independently of the others.

        Args:
            terms: At most :data:`~.hold.BATCH` leases.
            rules: The options of the alias.
            timeout: Seconds to wait for replies.
            left: Seconds until the first of the leases ends, before which the outcome must be known; None for claims,
                whose outcome nobody waits for.
        """

        def decided(replies: Replies) -> bool:
            silent = len(replies) - count(replies, *ANSWERS)
            if is_quorum(count(replies, Kind.HELD), rules.needed) or prevents_quorum(silent, rules):
                return True
            reported = [reply.terms for reply in replies.values() if len(reply.terms) == len(terms)]
            return all(
                extended_by_quorum([results[lease].kind for results in reported], rules) is not None
                for lease in range(len(terms))
            )

        requests = dict.fromkeys(range(rules.nodes), Extend(tuple(terms), rules.fence_keep))
        if left is None:
            return cls(requests, decided, timeout, rules.needed, Kind.HELD)
        timeout = min(timeout, max(left, 0.001))
        mending = left > 2 * timeout  # the outcome must be known before the first lease ends
        return cls(requests, decided, timeout, rules.needed, Kind.HELD, mending=mending)

    @classmethod
    def to_release(
        cls,
        release: Release,
        nodes: Iterable[int],
        timeout: float,
        needed: int = 0,
        *,
        unsure: Collection[int] = (),
        tombstone: float = 0.0,
        lasting: float = 0.0,
        granting: "Collection[Round] | None" = None,
        number: int = 0,
        unattended: bool = False,
    ) -> Self:
        """
        Return the round that releases a lock, or gives back what an attempt was granted and leaves the queues.

        Args:
            release: What to release.
            nodes: The nodes that get the release.
            timeout: Seconds to wait for replies.
            needed: How many nodes must have released the lock to decide the round; with 0, it waits for all replies.
            unsure: The nodes that may execute an earlier request after the release, because that request sits in a
                buffer or on another connection. The release then leaves a tombstone there.
            tombstone: Seconds for which a tombstone refuses such requests.
            lasting: Seconds for which the release is redelivered to a node that missed it.
            granting: If the caller chose the secret, the rounds that asked for the hold; otherwise None.
            number: The highest fencing token that those rounds proposed. The release must not end a later hold with the
                same secret, which may have begun when one arrives.
            unattended: Whether the round, with a timeout of 0, stays open after it was sent.
        """
        requests: dict[int, Request] = dict.fromkeys(nodes, release)
        if unsure:
            refusing = release._replace(tombstone=tombstone)
            requests |= dict.fromkeys(requests.keys() & unsure, refusing)
        remedy = None if granting is None else _limited(requests, granting, number)
        return cls(
            requests,
            (lambda replies: is_quorum(count(replies, Kind.RELEASED), needed)) if needed else never,
            timeout,
            needed,
            Kind.RELEASED if needed else None,
            cleanup=True,
            lasting=lasting,
            remedy=remedy,
            unattended=unattended,
        )

    @classmethod
    def to_keep(cls, terms: tuple[Term, ...], rules: Rules, timeout: float) -> Self:
        """
        Return the round that leaves a lock taken for the rest of its minimum hold; with *timeout* 0 it is *unattended*.

        A node that misses it keeps the lock by itself, so it is redelivered for a moment only.
        """
        requests: dict[int, Request] = dict.fromkeys(range(rules.nodes), Extend(terms, rules.fence_keep))
        return cls(
            requests,
            lambda replies: is_quorum(count(replies, Kind.HELD), rules.needed),
            timeout,
            rules.needed,
            cleanup=True,
            lasting=rules.timeout(rules.ttl),
            unattended=not timeout,
        )

    @classmethod
    def to_beat(cls, request: Acquire, rules: Rules) -> Self:
        """Return the round that writes the heartbeat of a process, which is decided when a quorum has it."""
        needed, everywhere = rules.needed, dict.fromkeys(range(rules.nodes), request)
        timeout = rules.timeout(rules.ttl)
        return cls(everywhere, lambda replies: is_quorum(count(replies, *POSITIVE), needed), timeout, needed)

    @classmethod
    def to_survey(cls, rules: Rules, options: SurveyOptions) -> Self:
        """Return the round of a survey, which waits for all nodes that it asks."""
        after = options.get("after", NO_CURSORS)
        slugs, size, waiters = options.get("slugs", ()), options.get("count", 0), options.get("waiters")
        asked = set(range(rules.nodes)).difference(options.get("but", ()))
        first = Survey(slugs, "", size, waiters)  # one object for all nodes, so that it is encoded once
        requests = {node: first._replace(after=after[node]) if node in after else first for node in asked}
        timeout = min(rules.timeout(rules.ttl), options.get("patience", math.inf))
        return cls(requests, never, timeout, rules.needed)

    @classmethod
    def to_find_free(cls, slugs: tuple[str, ...], rules: Rules, timeout: float) -> Self:
        """Return the round that asks which of several permits are free, and waits for a quorum only."""
        needed, requests = rules.needed, dict.fromkeys(range(rules.nodes), Survey(slugs))
        return cls(requests, lambda replies: is_quorum(count(replies, Kind.LISTED), needed), timeout, needed)

    @classmethod
    def to_tell(cls, requests: Mapping[int, Request], timeout: float) -> Self:
        """Return the round that tells nodes something on behalf of an operator, and waits for each reply."""
        return cls(requests, never, timeout, cleanup=True)

    def to_end_earlier(self) -> "Round | None":
        """Return the round that ends the hold that was taken over where this round may still arrive, if anywhere."""
        if not self.remedy or not (nodes := self.unanswered()):
            return None
        requests = {node: self.remedy[node] for node in nodes}
        return Round(requests, never, 0.0, cleanup=True, lasting=self.lasting)

    # What the driver knows

    def begin(self, admission: Admission) -> None:
        """Note which nodes may vote, before anything is sent: at present all but ``admission.doubts``."""
        self._admission = admission

    def note_rest(self) -> None:
        """Note that links had been idle for a while before they were used."""
        self.rested = True

    def attend(self, timeout: float) -> None:
        """Wait for the replies to a release that was *unattended*, because no link can carry it at once."""
        self.unattended, self.timeout = False, timeout

    def take_over(self, end: Release, lasting: float) -> None:
        """Have *end* redelivered to nodes that missed this round: it ends the hold that the round took over."""
        self.remedy, self.lasting = dict.fromkeys(self.requests, end), lasting

    def report_missed(self, on_missed: "Callable[[Round, set[int]], None]", unsure: Iterable[int] = ()) -> None:
        """Call *on_missed* with the nodes that have missed the round or are *unsure*, and later with each other one."""
        self._on_missed = on_missed
        if missed := self.missed().union(unsure):
            on_missed(self, missed)

    def to_redeliver(self, nodes: Iterable[int]) -> dict[int, Request]:
        """Return what to redeliver to nodes that have missed the round."""
        requests = self.remedy or self.requests
        return {node: requests[node] for node in nodes}

    # The replies

    def in_full(self) -> bool:
        """Return whether to send scripts with their text, because nobody reads a reply that a script is unknown."""
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
        an attempt at a lock, see :class:`.votes.Verdict`.
        """
        if self.closed:
            # The caller has acted on the outcome, so a late reply changes no vote. But its token is above the next
            # proposal, and a node that missed a release would keep the lock from everybody until it expires.
            self.late[node] = reply
            if self.on_late and not (self.won and reply.kind is self.hoped):
                self.on_late(reply)
            if self._on_missed and reply.kind in MISSES:
                self._on_missed(self, {node})
            return
        replies = self.replies
        replies[node] = reply
        if reply.kind is self.hoped:
            self._as_hoped += 1
        all_replied = len(replies) == len(self.requests)
        # A node must be allowed to vote when the round is decided, not when its reply came: only the replies of the
        # other nodes show which clock is right.
        if self._as_hoped == len(replies) and not (self._admission and self._admission.doubts):  # as nearly always
            won = is_quorum(self._as_hoped, self.needed)
            if won or all_replied:
                self.closed, self.complete, self.won = True, all_replied, won
        elif all_replied or self.decided(self._votes()):
            self.close()

    def close(self) -> None:
        """End the round; replies that come from now on are late."""
        if not self.closed:
            self.closed = True
            if self._admission and self._admission.doubts:
                # Stored as they count now. If the doubt ended a moment later, the caller would count votes that the
                # decision did not.
                self.replies = self._votes()
            elif self.hoped and self._as_hoped == len(self.replies):
                self.won = is_quorum(self._as_hoped, self.needed)
                self.complete = self._as_hoped == len(self.requests)

    def _votes(self) -> dict[int, Reply]:
        """Return the replies as they count at this moment."""
        if not (self._admission and (doubts := self._admission.doubts)):
            return self.replies
        return {
            node: no_vote(reply, doubts[node]) if node in doubts and reply.kind in POSITIVE else reply
            for node, reply in self.replies.items()
        }

    def reread(self, read: Callable[[Reply], Reply]) -> None:
        """Replace each reply by the one that *read* returns for it."""
        self.replies = {node: read(reply) for node, reply in self.replies.items()}

    @property
    def cut(self) -> set[int]:
        """
        The nodes whose links had worked and may have been cut, or lead to a server that is not what it was.

        The nodes may be well: a new link learns what they are now.
        """
        return {
            node
            for node, reply in self.replies.items()
            if reply.failure is Failure.FORGOT or (reply.kind is Kind.UNKNOWN and (self.rested or reply.failure in CUT))
        }

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
        if self.won or self.patience <= 0 or is_quorum(self.count(*POSITIVE), self.needed):
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


def never(replies: Replies) -> bool:
    """Decide a round that waits for the replies of all nodes."""
    return False


def _limited(requests: dict[int, Request], granting: Collection[Round], number: int) -> dict[int, Request]:
    """
    Limit releases to one hold, so that they end no later one with the same secret; return those to redeliver.

    A node that granted the hold in spite of a higher fence reported that fence, so the limit for it is that fence. A
    node that has not answered gets this release after the request that it ends, so only a release that is redelivered
    to the node is limited.
    """
    remedy = dict(requests)
    known = [asked.known() for asked in granting]
    for node, sent in requests.items():
        fence = max([replies[node].fence for replies in known if node in replies], default=0)
        assert isinstance(sent, Release)
        remedy[node] = limited = sent._replace(fencing_token=max(number, fence))
        if fence:
            requests[node] = limited
    return remedy


def unanswered(rounds: Iterable[Round]) -> set[int]:
    """Return the nodes that may still execute a request of one of *rounds*."""
    found: set[int] = set()
    for round in rounds:
        if not round.complete:  # as nearly always
            found |= round.unanswered()
    return found
