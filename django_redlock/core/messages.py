"""
What is asked of a node, what it answers, and how the answers of one round are collected.

A request is executed by a node in one atomic step. ``scripts/*.lua`` beside the Redis node are its meaning;
the node in memory is the same in Python.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Instant(NamedTuple):
    """
    One reading of the client's clocks.

    Args:
        now: Seconds on a clock that never steps and counts suspension.
        wall: Microseconds since the epoch; only a hint for the fencing token.
    """

    now: float
    wall: int


class Acquire(NamedTuple):
    """
    Set all holder keys to *value* if they are free, ours or *adopt*'s, and propose *number* as token.

    Args:
        slugs: The names, as they stand in the keys.
        nonce: The holder's token.
        value: What to store: the nonce and who holds it.
        ttl: Length of the lease, in seconds.
        number: The fencing token proposed.
        keep: How long the node remembers the fencing token, in seconds; None is for ever.
        ahead: How far beyond its clock the node accepts a token, in seconds.
        adopt: The nonce of a holder that may be replaced.
        strict: Whether the keys must be ours or *adopt*'s already: a free one is refused as if somebody had it.
        waiter: Who waits, as ``process|number``; refused, it is put in the queue. Empty does not wait.
        stamp: The waiter's rank in the queue: when it began to wait, in microseconds.
        barge: Whether to ignore those that wait.
        shared: Whether other shared holders may have it too.
        queue: The slug whose queue counts instead of each name's own: that of a lock with several places.
    """

    slugs: tuple[str, ...]
    nonce: str
    value: str
    ttl: float
    number: int
    keep: float | None
    ahead: float
    adopt: str = ""
    waiter: str = ""
    stamp: int = 0
    barge: bool = False
    shared: bool = False
    queue: str = ""
    strict: bool = False

    @property
    def passing(self) -> bool:
        """Whether a holder leaves the queue with the grant, because the next in line may be let in beside it."""
        return self.shared or bool(self.queue)


class Raise(NamedTuple):
    """Propose a higher *number* to a node that granted the lock but not the token."""

    slugs: tuple[str, ...]
    nonce: str
    number: int
    keep: float | None
    shared: bool = False


class Term(NamedTuple):
    """
    One lease to extend: give its holder *ttl* more, in seconds, under its fencing *token*.

    A node that lost it gets it back unless it has seen a later token, so with one below 0 none does.

    A node that would keep it for longer does so, unless the request is to *shorten* it: extensions may be executed
    in another order than they were sent. *number* is for who sends it.
    """

    slugs: tuple[str, ...]
    nonce: str
    value: str
    ttl: float
    token: int
    shared: bool = False
    shorten: bool = False
    number: int = 0


class Extend(NamedTuple):
    """Extend leases, each by itself; a node that lost a key gets it back unless it has seen a later token."""

    terms: tuple[Term, ...]
    keep: float | None


class Release(NamedTuple):
    """
    Delete the holder keys that are ours, and wake who waits first.

    *bury* leaves a marker against our own late requests for so many seconds; *leaving* is a waiter that leaves the
    queue; *revoke* has the marker say that somebody asked the holder to stop. Without names it is only the marker. The
    others are as in :class:`Acquire`.

    With ``SHARED`` as nonce it ends the holds of all who share the lock, unless one joined with a later *token*. An
    exclusive hold with a later *token* it does not end either: it is another one with the same nonce.
    """

    slugs: tuple[str, ...]
    nonce: str
    bury: float = 0.0
    leaving: str = ""
    shared: bool = False
    queue: str = ""
    revoke: bool = False
    token: int = 2**53 - 1  # HIGHEST


class Survey(NamedTuple):
    """
    Report the locks named, or one page of the index.

    Args:
        slugs: The names, as they stand in the keys.
        after: The ``cursor`` of the page before; empty for the first page.
        size: How many names to report; 0 for those named.
        waiters: How many to name at most, in all, of those that wait for the locks named; 0 only counts those of each
            lock, None asks nothing about them.
    """

    slugs: tuple[str, ...] = ()
    after: str = ""
    size: int = 0
    waiters: int | None = None


class Repair(NamedTuple):
    """
    Replace an absurd fencing token of a lock by *number*, or by nothing if that is 0; leave any other as it is.

    *keep* is as in :class:`Acquire`.
    """

    slug: str
    number: int
    keep: float | None


Request = Acquire | Raise | Extend | Release | Survey | Repair

HIGHEST = 2**53 - 1
"""The highest number that the scripts can count to; no greater one is taken from a node."""

FAR = 100 * 31_557_600 * 10**6
"""Microseconds, a hundred years. A fencing token so far ahead of its node's clock was never a time."""

ABSURD = "has an absurd fencing token for this lock (redlock_clear repairs it)"
"""Why a node may not vote on a name: its next token could not be higher."""

PART = 200
"""Names that a node is asked for in one atomic step; of more, it may grant some and refuse others."""

SHARED = "shared".ljust(32, "-")
"""Stands for the nonce in the holder's key while shared holders have it; each of them has a nonce of its own."""

ENROLMENT = 3.0
"""Seconds for which a node keeps a waiter's place without hearing of it; a waiter asks at least once a second."""

QUEUE_CAP = 1000
"""Waiters per name; who comes later waits without a place."""

SHOWN_WAITERS = 100
"""Waiters that a survey for the page of one lock names at most."""

LONGEST_VALUE = 16_384
"""What a survey reports of a value, in bytes; those that this library writes are shorter, whatever they are about."""

LONGEST_SLUG = 10_000
"""Slugs that a page of the index reports, in bytes; that of the longest name is shorter."""


ENDLESS = "inf "
"""The cursor with which a page of the index begins with the locks that never end, which are its last."""


class Kind(Enum):
    """What a node's reply means. The last four are said by the client, about a node."""

    ACCEPTED = "accepted"  # lock and token granted
    GRANTED = "granted"  # lock granted, token too low
    BUSY = "taken"  # somebody else holds it
    QUEUED = "others wait"  # nobody holds it, and others came first
    CANCELLED = "cancelled"  # this attempt was released before its request arrived
    HELD = "held"  # extended
    MIXED = "partly held"  # some leases of the request were extended; ``Reply.terms`` says which
    REFUSED = "refused"  # not ours any more
    REVOKED = "revoked"  # as refused, because an operator asked the holder to stop
    RELEASED = "released"
    GONE = "gone"  # nothing there to release
    LISTED = "listed"
    NO_VOTE = "no vote"  # granted by a node that may not vote yet
    EXCLUDED = "excluded"  # granted by a node that may not vote as it is set up
    FAILED = "failed"  # no vote, and certainly not applied
    UNKNOWN = "unknown"  # no vote, perhaps applied: the reply did not come

    __hash__ = object.__hash__  # each is there once; that of Enum is made of the name, in Python


POSITIVE = frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.HELD, Kind.MIXED})
"""Replies that count as a vote for what was asked."""

REFUSALS = frozenset({Kind.REFUSED, Kind.REVOKED})
"""What becomes of a lease that a node does not extend."""

ANSWERS = frozenset(
    {Kind.ACCEPTED, Kind.GRANTED, Kind.BUSY, Kind.QUEUED, Kind.HELD, Kind.MIXED, Kind.REFUSED, Kind.RELEASED, Kind.GONE}
)
"""Replies of a node that knows; the others are silence."""


MISCONFIGURED = (
    *("NOPERM", "NOAUTH", "WRONGPASS", "has no password", "no such database", "READONLY", "MASTERDOWN"),
    *("CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN", "MOVED", "ASK", "runs in", "is a replica", "is unknown"),
    *("lacks its table", "is in memory", "is unknown to DATABASES", "cannot be used"),
    "has an absurd fencing token",
    *("certificate refused", "has a certificate for another host", "wants a client certificate"),
)
"""How the details begin that stay the same until the server or the settings are changed."""


LEAVING_TRACES = frozenset(Kind) - {Kind.BUSY, Kind.QUEUED, Kind.CANCELLED, Kind.REFUSED, Kind.REVOKED, Kind.FAILED}
"""Replies after which a node may have something of ours."""

MISSES = frozenset({Kind.UNKNOWN, Kind.FAILED})
"""What a node is said to have replied that did not get a request, as far as can be told, or whose answer was lost."""


ABSENT = -2.0
"""The seconds left of a key that is not there."""


class Row(NamedTuple):
    """
    One lock as one node sees it.

    Args:
        slug: Its name, as it stands in the keys.
        value: What is under the holder's key.
        left: Seconds until that expires, None for a key without expiry, ``ABSENT`` for no key.
        fence: Highest token that the node accepted.
        waiters: Who waits for it, in the order in which their turns come, as far as the survey asked for them.
        waiting: How many wait for it, if the survey asked.
    """

    slug: str
    value: str
    left: float | None
    fence: int
    waiters: tuple[str, ...] = ()
    waiting: int = 0


class Reply(NamedTuple):
    """
    One node's answer.

    Args:
        kind: What it means.
        fence: Highest token that the node accepted for these names.
        time: The node's clock, in microseconds since the epoch.
        left: Seconds until the present hold ends there; None when it has no expiry.
        detail: Why there is no vote, who holds the lock, or why a node that lists its locks would take none.
        place: The waiter's place in the queue, 0 for the first; -1 for none.
        terms: What became of each lease of an extension, and its fence.
        rows: The locks of a survey.
        total: How many names the node's index has.
        cursor: Where the next page of the index begins, for ``Survey.after``; empty behind the last.
    """

    kind: Kind
    fence: int = 0
    time: int = 0
    left: float | None = 0.0
    detail: str = ""
    place: int = -1
    terms: tuple[tuple[Kind, int], ...] = ()
    rows: tuple[Row, ...] = ()
    total: int = 0
    cursor: str = ""

    def __str__(self) -> str:
        silent = self.kind in (Kind.NO_VOTE, Kind.EXCLUDED, Kind.FAILED, Kind.UNKNOWN)
        return self.detail if silent and self.detail else self.kind.value

    @property
    def misconfigured(self) -> bool:
        """Whether there will be no vote until the server or the settings are changed, however long one waits."""
        failed = self.kind in (Kind.FAILED, Kind.UNKNOWN)
        return self.kind is Kind.EXCLUDED or (failed and self.detail.startswith(MISCONFIGURED))


def is_absurd(fence: int, time: int) -> bool:
    """Return whether no node can have accepted *fence* in earnest, by the node's *time*, which is 0 if unknown."""
    return fence >= HIGHEST or (fence > time + FAR and time > 0)


def believable(reply: Reply) -> Reply:
    """
    Return *reply* without absurd fencing tokens, and without what rests on them.

    A grant is no vote then, because no token of the quorum could be accepted there. That a lease was extended is true
    all the same. Of a refusal nobody knows whether the token alone was the reason, so it counts as no answer.
    """
    if not is_absurd(reply.fence, reply.time):
        return reply
    if reply.kind in (Kind.ACCEPTED, Kind.GRANTED):
        return no_vote(reply._replace(fence=0), ABSURD, Kind.EXCLUDED)
    terms = tuple(
        (Kind.NO_VOTE if kind is Kind.REFUSED else kind, 0) if is_absurd(fence, reply.time) else (kind, fence)
        for kind, fence in reply.terms
    )
    return reply._replace(fence=max([fence for _, fence in terms], default=0), terms=terms)


def no_vote(reply: Reply, why: str, kind: Kind = Kind.NO_VOTE) -> Reply:
    """Return *reply* as that of a node that may not vote."""
    return reply._replace(kind=kind, detail=why, terms=())


@dataclass(eq=False, slots=True)
class Ballot:
    """
    One round: the same question to some nodes, and their answers.

    Args:
        requests: What to ask of which node, by the node's place in the settings.
        decided: Whether the replies so far settle the round.
        timeout: Seconds to wait for replies; 0 sends and does not wait.
        needed: How many nodes must be asked for the round to make sense, whatever their recent failures.
        farewell: Whether it ends something, so that it is sent to a node even if that node is silent.
        patience: For how many seconds a round that was refused waits for the replies that are still on their way: a
            node that refused as well has nothing to give back, which otherwise it would be asked to.
        lasting: For how many seconds it is worth to bring a node what it missed; 0.0 is not at all.
        remedy: What to bring which node instead of the request that it missed, for those that differ.
        mending: Whether, though decided, it waits within its timeout for links that are being made: it gives nodes back
            what they have lost, and those have just been away.

    ``replies`` are those in time; ``late`` came after the round was over and only inform. Its driver says which nodes
    are ``doubted``, in ``closed`` whether it is over. ``on_missed`` hears of nodes that turn out to have missed it when
    it is over.
    """

    requests: Mapping[int, Request]
    decided: Callable[[Mapping[int, Reply]], bool]
    timeout: float
    needed: int = 0
    farewell: bool = False
    lasting: float = 0.0
    patience: float = 0.0
    remedy: Mapping[int, Request] = field(default_factory=dict)
    mending: bool = False
    replies: dict[int, Reply] = field(default_factory=dict)
    late: dict[int, Reply] = field(default_factory=dict)
    closed: bool = False
    on_late: Callable[[Reply], None] | None = None
    on_missed: "Callable[[Ballot, set[int]], None] | None" = None
    doubted: Callable[[], Mapping[int, str]] = dict

    @property
    def in_full(self) -> bool:
        """Whether to send requests so that no node has to ask back: nobody would be there to answer."""
        return not self.timeout

    @property
    def wanted(self) -> bool:
        """Whether a request that a node could not understand should be sent again, in full."""
        return self.farewell or not self.closed

    def receive(self, node: int, reply: Reply) -> None:
        """Take one node's reply, in time or late."""
        if self.closed:
            self.late[node] = reply
            if self.on_late:
                self.on_late(reply)
            if self.on_missed and reply.kind in MISSES:
                self.on_missed(self, {node})
            return
        self.replies[node] = reply
        if len(self.replies) == len(self.requests) or self.decided(self._votes() if self.doubted() else self.replies):
            self.close()

    def close(self) -> None:
        """End the round; what comes now is late."""
        if not self.closed:
            self.closed = True
            self.replies = self._votes()

    def _votes(self) -> dict[int, Reply]:
        """Return the replies as they count at this moment."""
        doubted = self.doubted()
        if not doubted:
            return self.replies
        return {
            node: no_vote(reply, doubted[node]) if node in doubted and reply.kind in POSITIVE else reply
            for node, reply in self.replies.items()
        }

    @property
    def terms(self) -> tuple[Term, ...]:
        """The leases that the round extends."""
        return next((request.terms for request in self.requests.values() if isinstance(request, Extend)), ())

    def known(self) -> dict[int, Reply]:
        """Return what has come from each node, in time or late."""
        return self.replies | self.late if self.late else self.replies

    def unanswered(self) -> set[int]:
        """Return the nodes that may still execute, or have executed, a request without our knowing."""
        known = self.known()
        return {node for node in self.requests if node not in known or known[node].kind is Kind.UNKNOWN}

    @property
    def unheard(self) -> bool:
        """Whether it was refused before all have replied, and has patience for the rest."""
        missing = any(node not in self.replies and node not in self.late for node in self.requests)
        return missing and self.patience > 0 and self.count(*POSITIVE) < self.needed

    def missed(self) -> set[int]:
        """Return the nodes that did not get the request, as far as can be told, or whose answer was lost."""
        return {node for node, reply in self.known().items() if reply.kind in MISSES}

    def may_queue(self) -> set[int]:
        """Return the nodes that have put the waiter in line, or may have without our knowing."""
        known = self.known()
        return {
            node
            for node in self.requests
            if node not in known or known[node].place >= 0 or known[node].kind is Kind.UNKNOWN
        }

    def untouched(self) -> set[int]:
        """Return the nodes that certainly executed nothing, not even put a waiter in line."""
        return {
            node
            for node, reply in self.known().items()
            if reply.kind is Kind.FAILED and not in_parts(self.requests[node])
        }

    def may_hold(self) -> set[int]:
        """Return the nodes where something of ours may be left: all but those that certainly executed nothing."""
        known = self.known()
        return {
            node
            for node, request in self.requests.items()
            if node not in known or known[node].kind in LEAVING_TRACES or in_parts(request)
        }

    def count(self, *kinds: Kind) -> int:
        """Return how many nodes replied with one of *kinds* in time."""
        return count(self.replies, *kinds)


def in_parts(request: Request) -> bool:
    """Return whether a request has so many names that a node is asked in several steps."""
    return len(getattr(request, "slugs", ())) > PART


def count(replies: Mapping[int, Reply], *kinds: Kind) -> int:
    """Return how many replies are of one of *kinds*."""
    return sum([reply.kind in kinds for reply in replies.values()])
