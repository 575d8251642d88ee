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


@dataclass(frozen=True, slots=True)
class Acquire:
    """Set all holder keys to *value* if they are free, ours or *adopt*'s, and propose *number* as token."""

    slugs: tuple[str, ...]
    nonce: str
    value: str
    ttl: float
    number: int
    keep: float | None
    ahead: float
    adopt: str = ""


@dataclass(frozen=True, slots=True)
class Raise:
    """Propose a higher *number* to a node that granted the lock but not the token."""

    slugs: tuple[str, ...]
    nonce: str
    number: int
    keep: float | None


@dataclass(frozen=True, slots=True)
class Extend:
    """Give the holder *ttl* more; a node that lost the key gets it back unless it has seen a later token."""

    slugs: tuple[str, ...]
    nonce: str
    value: str
    ttl: float
    token: int
    keep: float | None


@dataclass(frozen=True, slots=True)
class Release:
    """Delete the holder keys that are ours; *bury* leaves a marker against our own late requests for so long."""

    slugs: tuple[str, ...]
    nonce: str
    bury: float = 0.0


@dataclass(frozen=True, slots=True)
class Survey:
    """Report the locks named, or one page of the index of held names."""

    slugs: tuple[str, ...] = ()
    offset: int = 0
    count: int = 0


Request = Acquire | Raise | Extend | Release | Survey


class Kind(Enum):
    """What a node's reply means. The last four are said by the client, about a node."""

    ACCEPTED = "accepted"  # lock and token granted
    GRANTED = "granted"  # lock granted, token too low
    BUSY = "taken"  # somebody else holds it
    CANCELLED = "cancelled"  # this attempt was released before its request arrived
    HELD = "held"  # extended
    REFUSED = "refused"  # not ours any more
    RELEASED = "released"
    GONE = "gone"  # nothing there to release
    LISTED = "listed"
    NO_VOTE = "no vote"  # granted by a node that may not vote yet
    EXCLUDED = "excluded"  # granted by a node that may not vote as it is set up
    FAILED = "failed"  # no vote, and certainly not applied
    UNKNOWN = "unknown"  # no vote, perhaps applied: the reply did not come


ANSWERS = frozenset({Kind.ACCEPTED, Kind.GRANTED, Kind.BUSY, Kind.HELD, Kind.REFUSED, Kind.RELEASED, Kind.GONE})
"""Replies of a node that knows; the others are silence."""


MISCONFIGURED = (
    *("NOPERM", "NOAUTH", "WRONGPASS", "has no password", "no such database", "READONLY", "MASTERDOWN"),
    *("CLUSTERDOWN", "CROSSSLOT", "TRYAGAIN", "MOVED", "ASK", "runs in", "is a replica", "is unknown"),
    *("certificate refused", "has a certificate for another host", "wants a client certificate"),
)
"""How the details begin that stay the same until the server or the settings are changed."""


ABSENT = -2.0
"""The seconds left of a key that is not there."""


class Row(NamedTuple):
    """One lock as one node sees it; ``left`` in seconds, None for a key without expiry, ``ABSENT`` for no key."""

    slug: str
    value: str
    left: float | None
    fence: int


@dataclass(frozen=True, slots=True)
class Reply:
    """
    One node's answer.

    Args:
        kind: What it means.
        fence: Highest token that the node accepted for these names.
        time: The node's clock, in microseconds since the epoch.
        left: Seconds until the present hold ends there; None when it has no expiry.
        detail: Why there is no vote, or who holds the lock.
        rows: The locks of a survey.
        total: How many names the node's index has.
    """

    kind: Kind
    fence: int = 0
    time: int = 0
    left: float | None = 0.0
    detail: str = ""
    rows: tuple[Row, ...] = ()
    total: int = 0

    def __str__(self) -> str:
        silent = self.kind in (Kind.NO_VOTE, Kind.EXCLUDED, Kind.FAILED, Kind.UNKNOWN)
        return self.detail if silent and self.detail else self.kind.value

    @property
    def misconfigured(self) -> bool:
        """Whether there will be no vote until the server or the settings are changed, however long one waits."""
        failed = self.kind in (Kind.FAILED, Kind.UNKNOWN)
        return self.kind is Kind.EXCLUDED or (failed and self.detail.startswith(MISCONFIGURED))


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

    ``replies`` are those in time; ``late`` came after the round was over and only inform.
    """

    requests: Mapping[int, Request]
    decided: Callable[[Mapping[int, Reply]], bool]
    timeout: float
    needed: int = 0
    farewell: bool = False
    replies: dict[int, Reply] = field(default_factory=dict)
    late: dict[int, Reply] = field(default_factory=dict)
    closed: bool = False
    on_late: Callable[[Reply], None] | None = None

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
            return
        self.replies[node] = reply
        if len(self.replies) == len(self.requests) or self.decided(self.replies):
            self.closed = True

    def unanswered(self) -> set[int]:
        """Return the nodes that may still execute, or have executed, a request without our knowing."""
        known = self.replies | self.late
        return {node for node in self.requests if node not in known or known[node].kind is Kind.UNKNOWN}

    def count(self, *kinds: Kind) -> int:
        """Return how many nodes replied with one of *kinds* in time."""
        return count(self.replies, *kinds)


def count(replies: Mapping[int, Reply], *kinds: Kind) -> int:
    """Return how many replies are of one of *kinds*."""
    return sum(reply.kind in kinds for reply in replies.values())
