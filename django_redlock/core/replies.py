"""What a node replies to a request (internal)."""

from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from .protocol import FAR, HIGHEST, Failure


class Kind(Enum):
    """The meaning of a node's reply. The last four are the client's own conclusions about a node."""

    ACCEPTED = "accepted"  # lock and token granted
    GRANTED = "granted"  # lock granted, token too low
    BUSY = "taken"  # another owner holds it
    QUEUED = "others wait"  # the lock is free, but others came first
    CANCELLED = "cancelled"  # this attempt was released before its request arrived
    HELD = "held"  # extended
    MIXED = "partly held"  # some leases of the request were extended; ``Reply.terms`` shows which
    REFUSED = "refused"  # no longer ours
    REVOKED = "revoked"  # like REFUSED, but because an operator asked the holder to stop
    RELEASED = "released"
    GONE = "gone"  # nothing there to release
    LISTED = "listed"
    NO_VOTE = "no vote"  # granted by a node that may not vote yet
    EXCLUDED = "excluded"  # granted by a node that may not vote as it is configured
    FAILED = "failed"  # no vote, and certainly not applied
    UNKNOWN = "unknown"  # no vote, perhaps applied: the reply did not come

    __hash__ = object.__hash__  # each member exists once; Enum's own hash runs in Python, on the name


POSITIVE = frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.HELD, Kind.MIXED})
"""Replies that count as a vote for the request."""

REFUSALS = frozenset({Kind.REFUSED, Kind.REVOKED})
"""The results for a lease that a node does not extend."""

ANSWERS = frozenset(
    {Kind.ACCEPTED, Kind.GRANTED, Kind.BUSY, Kind.QUEUED, Kind.HELD, Kind.MIXED, Kind.REFUSED, Kind.RELEASED, Kind.GONE}
)
"""Replies of a node that knows the state of the lock; after any other reply the node counts as silent."""


LEAVING_TRACES = frozenset(Kind) - {Kind.BUSY, Kind.QUEUED, Kind.CANCELLED, Kind.REFUSED, Kind.REVOKED, Kind.FAILED}
"""Replies after which a node may have something of this attempt."""

MISSES = frozenset({Kind.UNKNOWN, Kind.FAILED})
"""The replies that the client notes for a node that did not get a request, or whose answer was lost."""


ABSENT = -2.0
"""The value of ``left`` for a key that does not exist."""


class Row(NamedTuple):
    """
    One lock as one node sees it.

    Args:
        slug: The lock's name, as written in the keys.
        value: The value of the holder's key.
        left: Seconds until that key expires; None for a key without expiry, ``ABSENT`` for no key.
        fence: Highest token that the node accepted.
        waiters: The waiters in the order of their turns, as far as the survey asked for them.
        waiting: How many callers wait for the lock, if the survey asked about waiters.
        sharers: How many holders share the lock, if the survey asked about waiters.
    """

    slug: str
    value: str
    left: float | None
    fence: int
    waiters: tuple[str, ...] = ()
    waiting: int = 0
    sharers: int = 0


class Reply(NamedTuple):
    """
    One node's answer.

    Args:
        kind: The meaning of the reply.
        fence: Highest token that the node accepted for these names.
        time: The node's clock, in microseconds since the epoch.
        left: Seconds until the present hold ends there; None when it has no expiry.
        detail: A text for people: why there is no vote, who holds the lock, or why a node that lists its locks would
            not grant one.
        position: The waiter's position in the queue, 0 for the first; -1 for none.
        terms: For each lease of an extension, the result and the fence.
        rows: The locks of a survey.
        total: How many names the node's index has.
        cursor: Where the next page of the index begins, for ``Survey.after``; empty after the last page.
        failure: Why there is no vote, for decisions; None if there is a vote, or if the node may not vote.
        votes_in: Seconds until a node that gives no vote for a while votes again; 0.0 for all other nodes.
    """

    kind: Kind
    fence: int = 0
    time: int = 0
    left: float | None = 0.0
    detail: str = ""
    position: int = -1
    terms: tuple[tuple[Kind, int], ...] = ()
    rows: tuple[Row, ...] = ()
    total: int = 0
    cursor: str = ""
    failure: Failure | None = None
    votes_in: float = 0.0

    def __str__(self) -> str:
        silent = self.kind in (Kind.NO_VOTE, Kind.EXCLUDED, Kind.FAILED, Kind.UNKNOWN)
        return self.detail if silent and self.detail else self.kind.value

    @property
    def misconfigured(self) -> bool:
        """Whether the node gives no vote until the server or the settings change."""
        return self.kind is Kind.EXCLUDED or (self.failure is not None and self.failure.lasting)


def failed(failure: Failure, kind: Kind = Kind.FAILED, detail: str = "") -> Reply:
    """Return the reply that stands for a node that did not carry out a request, or may not have."""
    return Reply(kind, detail=detail or failure.value, failure=failure)


def is_absurd(fence: int, time: int) -> bool:
    """Return whether *fence* cannot be a real token, judged by the node's *time*, which is 0 if unknown."""
    return fence >= HIGHEST or (fence > time + FAR and time > 0)


def believable(reply: Reply) -> Reply:
    """
    Return *reply* without absurd fencing tokens, and without the results that depend on them.

    A grant with an absurd token gives no vote, because the node could not accept the quorum's token. An extension stays
    valid. A refused extension counts as no answer, because the token alone may have been the reason.
    """
    if not is_absurd(reply.fence, reply.time):
        return reply
    if reply.kind in (Kind.ACCEPTED, Kind.GRANTED):
        return no_vote(reply._replace(fence=0), Failure.ABSURD_TOKEN.value, Kind.EXCLUDED)
    terms = tuple(
        (Kind.NO_VOTE if kind is Kind.REFUSED else kind, 0) if is_absurd(fence, reply.time) else (kind, fence)
        for kind, fence in reply.terms
    )
    return reply._replace(fence=max([fence for _, fence in terms], default=0), terms=terms)


def no_vote(reply: Reply, why: str, kind: Kind = Kind.NO_VOTE, votes_in: float = 0.0) -> Reply:
    """Return *reply* as one of a node that may not vote, or only in another *votes_in* seconds."""
    return reply._replace(kind=kind, detail=why, terms=(), votes_in=votes_in)


def votes_in(replies: Iterable[Reply], needed: int) -> float | None:
    """
    Return the seconds until *needed* nodes vote, if the missing votes are those of nodes that give no vote for a while.

    Return None if too few nodes answer.
    """
    waits = sorted(reply.votes_in for reply in replies if reply.votes_in or reply.kind in ANSWERS)
    return waits[needed - 1] if len(waits) >= needed else None
