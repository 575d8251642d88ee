"""
What is asked of a node (internal).

A node executes a request in one atomic step. The scripts of the Redis node and ``core/node_state`` are its meaning.
"""

from typing import NamedTuple


class Instant(NamedTuple):
    """
    One reading of the client's clocks.

    Args:
        now: Seconds on a clock that never steps and counts suspension.
        wall: Microseconds since the epoch; only a notification for the fencing token.
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
        queue: The slug whose queue counts instead of each name's own: that of a lock with several permits.
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

    *tombstone* is for how many seconds a tombstone refuses our own late requests; *leaving* is a waiter that leaves the
    queue; *revoke* has the tombstone report that somebody asked the holder to stop. Without names it is only the
    tombstone. The others are as in :class:`Acquire`.

    With ``SHARED`` as nonce it ends the holds of all who share the lock, unless one joined with a later *token*. An
    exclusive hold with a later *token* it does not end either: it is another one with the same nonce.
    """

    slugs: tuple[str, ...]
    nonce: str
    tombstone: float = 0.0
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


def in_parts(request: Request) -> bool:
    """Return whether a request has so many names that a node is asked in several steps."""
    return len(getattr(request, "slugs", ())) > PART
