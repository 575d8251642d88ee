"""
The requests to a node (internal).

A node executes a request in one atomic step. The scripts of the Redis node and ``core/node_state`` define what a
request means.
"""

from typing import NamedTuple


class Instant(NamedTuple):
    """
    One reading of the client's clocks.

    Args:
        now: Seconds on a clock that never steps and counts suspension.
        wall: Microseconds since the epoch; it makes the first fencing token proposed likely to succeed.
    """

    now: float
    wall: int


class Acquire(NamedTuple):
    """
    Set all holder keys to *value* if they are free, ours or *adopt*'s, and propose *number* as the token.

    A node that grants this refuses late requests of *adopt* afterwards, whether or not it has seen earlier ones. Only
    the new holder itself can hand the lock back.

    Args:
        slugs: The names, as written in the keys.
        secret: The holder's secret.
        value: The value to store: the secret and a description of the holder.
        ttl: Length of the lease, in seconds.
        number: The fencing token proposed.
        keep: How long the node remembers the fencing token, in seconds; None is for ever.
        ahead: How far beyond its clock the node accepts a token, in seconds.
        adopt: The secret of a holder that may be replaced.
        strict: Whether the keys must already be ours or *adopt*'s; a free key is refused like a taken one.
        waiter: The waiter, as ``process|number``, which joins the queue if the lock is refused; empty if the caller
            does not wait.
        stamp: When the waiter began to wait, in microseconds since the epoch; the queue is ordered by it.
        barge: Whether to ignore the queue.
        shared: Whether other shared holders may have it too.
        queue: The slug whose queue counts instead of each name's own, for a lock with several permits.
    """

    slugs: tuple[str, ...]
    secret: str
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
        """Whether a waiter leaves the queue when it is granted the lock, so that the next one may hold it as well."""
        return self.shared or bool(self.queue)


class Raise(NamedTuple):
    """Propose a higher *number* to a node that granted the lock but not the token."""

    slugs: tuple[str, ...]
    secret: str
    number: int
    keep: float | None
    shared: bool = False


class Term(NamedTuple):
    """
    One lease to extend: its holder gets *ttl* seconds from now, under its *fencing_token*.

    A node that lost the lease restores it unless the node has accepted a later token; with a token below 0 no node
    restores it.

    If the lease ends later on a node, the node keeps that end, unless the request is to *shorten* the lease: extensions
    may be executed in a different order than they were sent. *number* identifies the term to its sender.
    """

    slugs: tuple[str, ...]
    secret: str
    value: str
    ttl: float
    fencing_token: int
    shared: bool = False
    shorten: bool = False
    number: int = 0


class Extend(NamedTuple):
    """Extend leases independently; a node that lost a key restores it unless it has accepted a later token."""

    terms: tuple[Term, ...]
    keep: float | None


class Release(NamedTuple):
    """
    Delete the holder keys that are ours, and notify the first waiter.

    For *tombstone* seconds a tombstone refuses late requests with the same secret. *leaving* is a waiter that leaves
    the queue. *revoke* makes the tombstone report that an operator asked the holder to stop. A release without names
    only writes the tombstone. The other fields are as in :class:`Acquire`.

    With ``SHARED`` as the secret, the release ends the holds of all callers that share the lock, unless one of them
    joined with a token later than *fencing_token*. It does not end an exclusive hold with a later token either: that is
    another hold with the same secret.
    """

    slugs: tuple[str, ...]
    secret: str
    tombstone: float = 0.0
    leaving: str = ""
    shared: bool = False
    queue: str = ""
    revoke: bool = False
    fencing_token: int = 2**53 - 1  # HIGHEST


class Survey(NamedTuple):
    """
    Report the locks named, or one page of the index.

    Args:
        slugs: The names, as written in the keys.
        after: The ``cursor`` of the previous page; empty for the first page.
        size: How many names of the index to report; 0 reports the locks in *slugs*.
        waiters: The most waiters to list, over all locks of the reply; 0 only counts the waiters of each lock, and None
            asks nothing about them. Unless it is None, the holders that share a lock are counted too.
    """

    slugs: tuple[str, ...] = ()
    after: str = ""
    size: int = 0
    waiters: int | None = None


class Repair(NamedTuple):
    """
    Replace an absurd fencing token of a lock by *number*, or remove it if that is 0; leave any other token as it is.

    *keep* is as in :class:`Acquire`.
    """

    slug: str
    number: int
    keep: float | None


Request = Acquire | Raise | Extend | Release | Survey | Repair

HIGHEST = 2**53 - 1
"""The highest number that the scripts can count to; a fence that reaches it is absurd."""

FAR = 100 * 31_557_600 * 10**6
"""A hundred years, in microseconds. A fencing token that is further ahead of its node's clock was never a time."""

PART = 200
"""The most names in one atomic step of a node; of a longer request, a node may grant some names and refuse others."""

SMALLEST_PART = 100
"""The most names in one step of etcd, the kind of node that takes the fewest."""

SHARED = "shared".ljust(32, "-")
"""The secret in the key of a shared lock; each of its holders has a secret of its own besides."""

ENROLMENT = 3.0
"""Seconds for which a node keeps a waiter in its queue without a request; a waiter asks at least once a second."""

QUEUE_CAP = 1000
"""The most waiters in the queue of a name; a waiter that finds it full waits without a position."""

SUPERSEDED = 30.0
"""Seconds for which a node refuses late requests of a holder that another one has replaced."""

SHOWN_WAITERS = 100
"""The most waiters that the survey for one lock's page lists."""

LONGEST_VALUE = 16_384
"""The most bytes that a survey reports of a value; every value that this package writes is shorter."""

LONGEST_SLUG = 10_000
"""The most bytes of a slug that a page of the index reports; every valid slug is shorter."""


ENDLESS = "inf "
"""The cursor of the index page that begins with the locks that never end, which are listed last."""


def in_parts(request: Request) -> bool:
    """Return whether a request has more names than fit in one step on every kind of node."""
    return len(getattr(request, "slugs", ())) > SMALLEST_PART
