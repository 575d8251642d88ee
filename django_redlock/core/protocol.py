"""
The requests to a node, and its replies (internal).

A node executes a request in one atomic step. The scripts of the Redis node and ``core/node_state`` define what a
request means.
"""

from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Any, NamedTuple, TypeVar

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

NOBODYS = "nobody".ljust(32, "-")
"""The secret in a release that ends no hold: it takes a waiter out of the queue, and does nothing else."""

PERMITS = "limit-"
"""What the word in place of a secret begins with, in the key of a lock with several permits; the limit follows."""

ENROLMENT = 3.0
"""Seconds for which a node keeps a caller that waits in its queue; such a caller asks at least once a second."""

QUEUE_CAP = 1000
"""The most waiters in the queue of a name; a waiter that finds it full waits without a position."""

SUPERSEDED = 30.0
"""Seconds for which a node refuses late requests of a holder that another one has replaced."""

SHOWN_WAITERS = 100
"""The most waiters that the survey for one lock's page lists."""

LONGEST_VALUE = 16_384
"""The most bytes that a survey reports of a value; every value that this package writes is shorter."""

LONGEST_HOLDER = 2_000
"""The most bytes of a value that a node reports when it refuses an extension or a release."""

LONGEST_SLUG = 10_000
"""The most bytes of a slug that a page of the index reports; every valid slug is shorter."""

ENDLESS = "inf "
"""The cursor of the index page that begins with the locks that never end, which are listed last."""

ABSENT = -2.0
"""The value of ``left`` for a key that does not exist."""


SECRETS = {"adopt", "record", "secret", "secrets", "token", "value", "watch"}
"""The fields that hold secrets, in the classes that :func:`without_secrets` decorates."""

T = TypeVar("T")


def without_secrets(kind: type[T]) -> type[T]:
    """Give a named tuple or dataclass a ``repr()`` that shows no secret; error pages show that of local variables."""
    names: Sequence[str] = getattr(kind, "_fields", None) or [*kind.__dataclass_fields__]  # type: ignore[attr-defined]

    def __repr__(self: Any) -> str:
        values = ((name, getattr(self, name)) for name in names)
        shown = ", ".join(f"{name}={'...' if name in SECRETS and value else repr(value)}" for name, value in values)
        return f"{kind.__name__}({shown})"

    kind.__repr__ = __repr__  # type: ignore[method-assign]
    return kind


class Instant(NamedTuple):
    """
    One reading of the client's clocks.

    Args:
        now: Seconds on a clock that never steps and counts suspension.
        wall: Microseconds since the epoch; it makes the first fencing token proposed likely to succeed.
    """

    now: float
    wall: int


@without_secrets
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
        queue: For a permit, the slug of its lock, whose queue counts instead of the permit's own.
        common: For a permit, the value that it stores under *queue*, beside the other permits with the same limit.
            Whoever holds that name in another way keeps the permit out, and is kept out by it.
        away: Seconds for which the waiter keeps its place in the queue although nobody asks again, because it goes
            away; 0.0 if its caller stays and asks.
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
    common: str = ""
    away: float = 0.0

    @property
    def passing(self) -> bool:
        """Whether a waiter leaves the queue when it is granted the lock, because others may hold it, or it was away."""
        return self.shared or bool(self.queue) or self.away > 0


@without_secrets
class Raise(NamedTuple):
    """Propose a higher *number* to a node that granted the lock but not the token."""

    slugs: tuple[str, ...]
    secret: str
    number: int
    keep: float | None
    shared: bool = False


@without_secrets
class Term(NamedTuple):
    """
    One lease to extend: its holder gets *ttl* seconds from now, under its *fencing_token*.

    A node that lost the lease restores it unless the node has accepted a later token; with a token below 0 no node
    restores it.

    If the lease ends later on a node, the node keeps that end, unless the request is to *shorten* the lease: extensions
    may be executed in a different order than they were sent. *number* identifies the term to its sender. *common* is as
    in :class:`Acquire`.

    The *last* term is that of a minimum hold after the work. It is also granted, where the node has the lease, if an
    operator has asked the holder to stop.
    """

    slugs: tuple[str, ...]
    secret: str
    value: str
    ttl: float
    fencing_token: int
    shared: bool = False
    shorten: bool = False
    number: int = 0
    common: str = ""
    last: bool = False


class Extend(NamedTuple):
    """Extend leases independently; a node that lost a key restores it unless it has accepted a later token."""

    terms: tuple[Term, ...]
    keep: float | None


@without_secrets
class Release(NamedTuple):
    """
    Delete the holder keys that are ours, and notify the first waiter.

    For *tombstone* seconds a tombstone refuses late requests with the same secret. *leaving* is a waiter that leaves
    the queue. *revoke* makes the tombstone report that an operator asked the holder to stop. A release without names
    only writes the tombstone. With a *queue* it is that of a permit, which leaves the name of its lock, too. The other
    fields are as in :class:`Acquire`.

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
    fencing_token: int = HIGHEST


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


class Failure(Enum):
    """
    Why a node did not carry out a request, or cannot be asked at all. The value is the text for people.

    Details, such as the mode of a server, are kept apart from the failure, because no decision compares texts.
    """

    # The way to the node
    REFUSED = "refused"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    UNKNOWN_HOST = "unknown host"
    NO_SUCH_FILE = "no such file"
    RESET = "reset"
    CLOSED = "closed"
    INTERRUPTED = "interrupted"
    TLS_FAILED = "TLS failed"
    CERTIFICATE_EXPIRED = "certificate refused, certificate has expired"
    CERTIFICATE_REFUSED = "certificate refused"
    WRONG_CERTIFICATE = "has a certificate for another host"
    NO_CLIENT_CERTIFICATE = "wants a client certificate"
    SENTINEL = "sentinel"
    FOREIGN_MASTER = "names a master that MASTERS does not list"
    UNKNOWN_TO_SENTINEL = "is unknown to the sentinel"

    # What this process did not do
    LATE = "this process was late"
    NOT_CONNECTED = "not connected"
    FAILED_LATELY = "failed lately"
    BACKLOG = "backlog"
    NO_THREAD = "no thread"
    OPEN_FILES = "too many open files"
    DOES_NOT_NOTIFY = "does not notify waiters"

    # What the node replied
    NOAUTH = "NOAUTH"
    WRONGPASS = "WRONGPASS"
    NO_PASSWORD = "has no password"
    NOPERM = "NOPERM"
    NO_COMMAND = "lacks a command that locks need"
    NO_SUCH_DATABASE = "no such database"
    MAX_CLIENTS = "max clients"
    LOADING = "LOADING"
    READONLY = "READONLY"
    MASTERDOWN = "MASTERDOWN"
    CLUSTERDOWN = "CLUSTERDOWN"
    CROSSSLOT = "CROSSSLOT"
    TRYAGAIN = "TRYAGAIN"
    MOVED = "MOVED"
    ASK = "ASK"
    OOM = "OOM"
    BUSY = "BUSY"
    MISCONF = "MISCONF"
    NOREPLICAS = "NOREPLICAS"
    WRONGTYPE = "WRONGTYPE"
    NOSCRIPT = "NOSCRIPT"
    ERROR_REPLY = "error reply"
    MALFORMED = "malformed reply"
    INCOMPLETE = "incomplete"
    ABSURD_TOKEN = "has an absurd fencing token for this lock (redlock_clear repairs it)"

    # What the node is
    REPLICA = "is a replica"
    FAILING_OVER = "no master at present"
    MIGRATING = "its hash slot moves to another shard"
    WRONG_MODE = "runs in another mode"
    TWO_SERVERS = "answers as two servers"
    RESTARTED = "restarted"
    FORGOT = "has another memory than when it was asked last"
    OWN_ATTEMPT = "has an earlier attempt of this call, which is being released"

    # Stores that are replicated
    NO_LEADER = "has no leader at present"
    LEADER_CHANGED = "has changed its leader"
    NO_SPACE = "is out of space"
    TOO_MANY = (
        "has too many records to list them or to delete old ones, though locks work (while nobody holds a lock, delete "
        "its path; a lower OPTIONS['fence_keep'] keeps fewer)"
    )

    # Databases
    DISK = "cannot use its disk"
    DISK_FULL = "its disk is full"
    LOCKED = "locked"
    CONTENDED = "contended"
    IN_MEMORY = "is in memory, where no other process finds a lock"
    NO_TABLE = "lacks its table"
    UNKNOWN_ALIAS = "is unknown to DATABASES"
    UNUSABLE = "cannot be used"
    OWN_TRANSACTION = (
        "is locked by this thread's own transaction (take the lock before atomic(), or give the locks a database file "
        "of their own or a database server)"
    )

    __hash__ = object.__hash__  # each member exists once; Enum's own hash runs in Python, on the name

    @property
    def lasting(self) -> bool:
        """Whether the node gives no vote until the server or the settings change, however long the caller waits."""
        return self in LASTING

    @property
    def perhaps_lasting(self) -> bool:
        """Whether only time shows if the node votes again by itself: after a failover it does, as a replica never."""
        return self in LASTING or self in PERHAPS_LASTING


LASTING = frozenset(
    {
        *(Failure.NOPERM, Failure.NOAUTH, Failure.WRONGPASS, Failure.NO_PASSWORD, Failure.NO_SUCH_DATABASE),
        *(Failure.CROSSSLOT, Failure.WRONG_MODE),
        *(Failure.NO_TABLE, Failure.IN_MEMORY, Failure.UNKNOWN_ALIAS, Failure.UNUSABLE, Failure.OWN_TRANSACTION),
        *(Failure.TOO_MANY, Failure.NO_COMMAND, Failure.DISK),
        *(Failure.CERTIFICATE_EXPIRED, Failure.CERTIFICATE_REFUSED, Failure.WRONG_CERTIFICATE),
        *(Failure.NO_CLIENT_CERTIFICATE, Failure.ABSURD_TOKEN),
    }
)

# An address moves to the promoted server a moment after the old one became a replica; a slot moves to another shard; a
# disk is cleared.
PERHAPS_LASTING = frozenset(
    {
        *(Failure.REPLICA, Failure.READONLY, Failure.MASTERDOWN, Failure.UNKNOWN_TO_SENTINEL),
        *(Failure.CLUSTERDOWN, Failure.TRYAGAIN, Failure.MOVED, Failure.ASK),
        *(Failure.NO_SPACE, Failure.DISK_FULL),
    }
)


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

STOPPED = "stop"
"""The detail of the reply ``GONE`` to a release, if an operator took the lock away."""

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


@without_secrets
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
        since: When the first waiter began to wait, in microseconds since the epoch on its clock; 0 if nobody waits, or
            the survey did not ask about waiters.
        odd: The keys of the lock that are of another type, if the survey asked about waiters; each in full.
    """

    slug: str
    value: str
    left: float | None
    fence: int
    waiters: tuple[str, ...] = ()
    waiting: int = 0
    sharers: int = 0
    since: int = 0
    odd: tuple[str, ...] = ()


class Extended(NamedTuple):
    """
    What one node replied about one lease of an extension.

    Args:
        kind: ``HELD``, ``REFUSED`` or ``REVOKED``.
        fence: Highest token that the node accepted for the names of the lease.
        holder: The other holder that a refusal reports: the value of its key, without the secret.
    """

    kind: Kind
    fence: int
    holder: str = ""


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
        terms: The results of an extension, one for each lease.
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
    terms: tuple[Extended, ...] = ()
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

    @property
    def perhaps_misconfigured(self) -> bool:
        """Whether the node gives no vote until the server or the settings change, unless the failure passes."""
        return self.kind is Kind.EXCLUDED or (self.failure is not None and self.failure.perhaps_lasting)


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
        absurd = Failure.ABSURD_TOKEN
        return no_vote(reply._replace(fence=0, failure=absurd), absurd.value, Kind.EXCLUDED)
    terms = tuple(
        Extended(Kind.NO_VOTE if term.kind is Kind.REFUSED else term.kind, 0)
        if is_absurd(term.fence, reply.time)
        else term
        for term in reply.terms
    )
    return reply._replace(fence=max([term.fence for term in terms], default=0), terms=terms)


def no_vote(reply: Reply, why: str, kind: Kind = Kind.NO_VOTE, votes_in: float = 0.0) -> Reply:
    """Return *reply* as one of a node that may not vote, or only in another *votes_in* seconds."""
    return reply._replace(kind=kind, detail=why, terms=(), votes_in=votes_in)


class EndReason(StrEnum):
    """
    Why a hold ended; :data:`django_redlock.exceptions.EXPLANATIONS` describes each for people.

    The members of this class and of :class:`Outcome` are strings, so users' code, logs and metrics can compare and show
    them as text. Code of this package compares members.
    """

    RELEASED = "released"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"  # another caller came since, and may have got the lock or failed
    FORGOTTEN = "forgotten"  # the nodes no longer know this holder
    FENCED = "fenced"  # a database has seen a later holder
    REVOKED = "revoked"  # an operator asked for it
    MAX_HOLD = "max_hold"
    MAX_EXTENSIONS = "max_extensions"
    HEARTBEAT = "heartbeat"
    FORKED = "forked"  # this process is a fork of the holder


class Outcome(StrEnum):
    """The result of a release."""

    RELEASED = "released"  # the lock was held until now
    EXPIRED = "expired"  # the lock had ended before
    TAKEN = "taken"  # another owner has it
    UNKNOWN = "unknown"  # too few nodes answered in time; the lock ends with its ttl at the latest
    HELD = "held"  # the lock was entered more than once, and is still held; or it is kept for its minimum hold


LOST = (Outcome.EXPIRED, Outcome.TAKEN)  # no set: to hash a member of a StrEnum takes longer than to compare it
"""The outcomes of a release that show that the lock had been lost before."""


# A script over a thousand names would block its node, and all other clients with it, for several milliseconds. So a
# request over very many names is split into parts, which are sent one after another and are no longer one atomic step
# on the node. At worst that costs an attempt: a node counts as granted only if it granted every part, and whatever a
# refused attempt got is released.

WORST_FIRST = (
    *(Kind.UNKNOWN, Kind.FAILED, Kind.CANCELLED, Kind.REFUSED, Kind.RELEASED),
    *(Kind.BUSY, Kind.QUEUED, Kind.GONE, Kind.GRANTED, Kind.ACCEPTED, Kind.HELD),
)


def in_parts(request: Request) -> bool:
    """Return whether a request has more names than fit in one step on every kind of node."""
    return len(getattr(request, "slugs", ())) > SMALLEST_PART


def many(request: Request, most: int = PART) -> bool:
    """Return whether a request has to be split for a node that takes *most* names in one step."""
    if isinstance(request, Extend):
        return len(request.terms) == 1 and len(request.terms[0].slugs) > most
    return isinstance(request, (Acquire, Raise, Release)) and len(request.slugs) > most


def split(request: Request, most: int = PART) -> list[Request]:
    """Return the parts of a request for a node that takes *most* names in one step; a small one is its only part."""
    if not many(request, most):
        return [request]
    if isinstance(request, Extend):
        term = request.terms[0]
        return [request._replace(terms=(term._replace(slugs=slugs),)) for slugs in pieces(term.slugs, most)]
    assert isinstance(request, (Acquire, Raise, Release))
    return [request._replace(slugs=slugs) for slugs in pieces(request.slugs, most)]


def pieces(slugs: tuple[str, ...], most: int) -> list[tuple[str, ...]]:
    """Return names in groups of at most *most*."""
    return [slugs[start : start + most] for start in range(0, len(slugs), most)]


def merge(replies: Sequence[Reply]) -> Reply:
    """Return one reply for the replies to the parts of a request; it means what the worst of them means."""
    if len(replies) == 1:
        return replies[0]
    worst = min(replies, key=lambda reply: WORST_FIRST.index(reply.kind))
    lefts = [reply.left for reply in replies]
    fence = max(reply.fence for reply in replies)
    return worst._replace(
        # One part may have been applied though another failed.
        kind=Kind.UNKNOWN if worst.kind is Kind.FAILED else worst.kind,
        fence=fence,
        left=None if None in lefts else max(left for left in lefts if left is not None),
        position=max(reply.position for reply in replies),
        terms=tuple(term._replace(fence=fence) for term in worst.terms),
    )
