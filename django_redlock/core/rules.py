"""
The options of one alias, the arithmetic of quorum, drift and validity, and what a caller wants (internal).

Sources: "Distributed Locks with Redis"
(https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/), steps 2 to 5, for quorum, drift and
validity. All durations are seconds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeVar

from .names import Owner, check_names
from .protocol import PART, without_secrets

DEFAULT_ALIAS = "default"
"""The alias in ``REDLOCK`` of locks that name none."""


class Unset(Enum):
    """The stand-in for an argument that the caller did not pass, where None has a meaning of its own."""

    UNSET = "unset"


UNSET: Final = Unset.UNSET
Wait = float | Unset | None
Waits = TypeVar("Waits", bound=Wait)
InTransaction = Literal["warn", "error", "allow"]
ReleaseMode = Literal["wait", "send"]

MIN_TTL = 0.1
# Nodes expire keys to the nearest millisecond; two leave room for rounding.
EXPIRY_ROUNDING = 0.002
HUGE = 1e12
MAX_LIMIT = 1000  # holders of one lock at once
MOMENT = 1.0  # seconds: whoever keeps a place waits for less than this, or stays


def majority(nodes: int) -> int:
    """Return the smallest number of votes for which any two sets of voters share a node."""
    return nodes // 2 + 1


@dataclass(frozen=True)
class Rules:
    """
    The options of one alias, and the arithmetic that follows from them.

    Args:
        nodes: How many nodes there are.
        quorum: Votes that a lock needs; None is the majority, and fewer are not accepted.
        ttl: Length of a lease, unless the lock sets one.
        wait: How long to try for a lock, unless the lock sets it; 0 is one attempt, None is for ever.
        max_ttl: Longest lease that a lock may ask for.
        min_validity: An acquisition with less validity left than this has failed; None is a quarter of the ttl.
        node_timeout: How long one round waits for its slowest node. None is a twentieth of the ttl, at most 0.25, with
            several nodes; with one, for which patience costs nothing, a fifth of the ttl, at most 1. Each further 200
            names of a lock add a tenth of that, up to a fifth of the ttl.
        drift_factor: Share of the ttl by which clocks may disagree.
        renew: Whether leases are extended while they are held.
        max_hold: Longest time that renewal keeps a lock.
        max_extensions: How often a lease may be extended; None is no limit but ``max_hold``.
        retry_delay: Shortest pause of a waiter between two attempts; the longest is ten times that.
        fence_keep: How long a node remembers the fencing token of a lock that nobody takes; None is for ever.
        restart_guard: Whether a restarted node gives no vote until ``max_ttl`` has passed; None applies this from three
            nodes on.
        clock_guard: Whether a node whose clock ran forward gives no vote. None and True apply this. A client that has
            just started can only compare the nodes' clocks: with None it does so from three nodes on, with True from
            two.
        durable: Names of nodes that lose nothing in a restart (append-only file with ``appendfsync always``).
        allow_evicting: Names of nodes that may vote although they may evict keys.
        in_transaction: What to do about a lock that would be released before the transaction around it ends: ``warn``,
            ``error`` or ``allow``.
        release: Whether the end of a block waits for the replies to the release (``wait``) or only sends it (``send``);
            None sends it at the end of a locked view and of a singleton's run without a result, and waits elsewhere.

    Raises:
        ValueError: A number cannot work, or two of them cannot work together.
    """

    nodes: int
    quorum: int | None = None
    ttl: float = 30.0
    wait: float | None = None
    max_ttl: float = 60.0
    min_validity: float | None = None
    node_timeout: float | None = None
    drift_factor: float = 0.01
    renew: bool = True
    max_hold: float = 3600.0
    max_extensions: int | None = None
    retry_delay: float = 0.05
    fence_keep: float | None = 3600.0
    restart_guard: bool | None = None
    clock_guard: bool | None = None
    durable: tuple[str, ...] = ()
    allow_evicting: tuple[str, ...] = ()
    in_transaction: InTransaction = "warn"
    release: ReleaseMode | None = None

    def __post_init__(self) -> None:
        self._check_quorum()
        self._check_durations()
        self._check_choices()
        check_wait(self.wait)
        check_release(self.release)
        self.check_ttl(self.ttl)

    def _check_quorum(self) -> None:
        if self.quorum is not None and not is_whole(self.quorum, majority(self.nodes), self.nodes):
            raise ValueError(
                f"quorum must be a whole number from {majority(self.nodes)} (the majority of {self.nodes} nodes) "
                f"to {self.nodes}, not {quoted(self.quorum)}."
            )

    def _check_durations(self) -> None:
        for field in ("max_ttl", "max_hold", "retry_delay"):
            seconds(field, getattr(self, field))
        for field in ("min_validity", "node_timeout", "fence_keep"):
            if getattr(self, field) is not None:
                seconds(field, getattr(self, field))
        if not 0 <= number("drift_factor", self.drift_factor, "a finite number") < 0.5:
            raise ValueError(f"drift_factor must be at least 0 and below 0.5, not {self.drift_factor!r}.")

    def _check_choices(self) -> None:
        if not isinstance(self.renew, bool):
            raise ValueError(f"renew must be True or False, not {quoted(self.renew)}.")
        for field in ("restart_guard", "clock_guard"):
            if not isinstance(getattr(self, field), bool | None):
                raise ValueError(f"{field} must be True, False or None, not {quoted(getattr(self, field))}.")
        for field in ("durable", "allow_evicting"):
            if not isinstance(getattr(self, field), (tuple, list)):
                raise ValueError(f"{field} must be a list of the names of nodes, not {quoted(getattr(self, field))}.")
        if self.max_extensions is not None and not is_whole(self.max_extensions, 0, float("inf")):
            raise ValueError(f"max_extensions must be a whole number or None, not {quoted(self.max_extensions)}.")
        if self.in_transaction not in ("warn", "error", "allow"):
            raise ValueError(f"in_transaction must be 'warn', 'error' or 'allow', not {quoted(self.in_transaction)}.")

    def check_ttl(self, ttl: float) -> float:
        """
        Return *ttl* if a lease of that length can work.

        Raises:
            ValueError: It is not a number of seconds from 0.1 to ``max_ttl``, or too short for the node timeout.
        """
        if not MIN_TTL <= seconds("ttl", ttl) <= self.max_ttl:
            raise ValueError(
                f"ttl must be from {MIN_TTL} to {self.max_ttl:g} seconds (OPTIONS['max_ttl']), not {ttl!r}; "
                "a lease is renewed while it is held, so it need not cover the whole work."
            )
        spent = 2 * self.timeout(ttl) + self.drift(ttl)
        if spent > ttl / 2:
            raise ValueError(
                f"ttl {ttl!r} is too short for a node_timeout of {self.timeout(ttl):g} s: two rounds and the drift "
                f"take {spent:g} s, more than half of it. Raise ttl, or lower OPTIONS['node_timeout'] or "
                "OPTIONS['drift_factor']."
            )
        return float(ttl)

    @cached_property
    def needed(self) -> int:
        """How many votes a lock needs."""
        return self.quorum or majority(self.nodes)

    @cached_property
    def spare(self) -> int:
        """How many votes may be missing."""
        return self.nodes - self.needed

    def timeout(self, ttl: float, names: int = 1) -> float:
        """Return the seconds for which one round about a lock with *names* names waits for its slowest node."""
        if self.node_timeout is not None:
            return self.node_timeout
        timeout = 0.25 if ttl > 5 else ttl / 20
        if self.nodes == 1:  # two rounds and the drift must fit in half of the ttl, whatever drift_factor is
            room = (ttl * (0.5 - self.drift_factor) - EXPIRY_ROUNDING) / 2.1
            if room > timeout:
                timeout = min(1.0, ttl / 5, room)
        return min(timeout * (1 + (names - 1) // PART / 10), ttl / 5)

    def drift(self, ttl: float) -> float:
        """Return the seconds by which the clocks of nodes and holder may disagree during a lease."""
        return ttl * self.drift_factor + EXPIRY_ROUNDING

    def deadline(self, start: float, ttl: float) -> float:
        """Return when a lease ends for its holder; *start* is the time before the first byte of its round was sent."""
        return start + ttl - self.drift(ttl)

    def least_validity(self, ttl: float) -> float:
        """Return the seconds of validity that an acquisition must have left."""
        return min(self.min_validity, ttl / 2) if self.min_validity is not None else ttl / 4

    @property
    def guards_restarts(self) -> bool:
        """Whether a restarted node gives no vote for a while."""
        return self.nodes > 2 if self.restart_guard is None else self.restart_guard

    @cached_property
    def guards_clocks(self) -> bool:
        """Whether a node whose clock is seen to run forward gives no vote for a while."""
        return self.clock_guard is not False

    @cached_property
    def compares_clocks(self) -> bool:
        """Whether a node whose clock is far from the others' gives no vote."""
        return self.nodes > (1 if self.clock_guard else 2) and self.guards_clocks

    @cached_property
    def guard(self) -> float:
        """Seconds after which every lease that a restarted node forgot has ended."""
        return self.max_ttl + self.drift(self.max_ttl)

    @cached_property
    def ahead(self) -> float:
        """Seconds by which a proposed token may be ahead of the node's own clock."""
        return self.guard / 2


def number(what: str, value: object, kind: str = "a finite number of seconds") -> float:
    """Return *value* if it is a finite number, else raise ValueError naming *what* and its *kind*."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -HUGE < value < HUGE:
        raise ValueError(f"{what} must be {kind}, not {quoted(value)[:40]}.")
    return float(value)


def is_whole(value: object, least: float, most: float) -> bool:
    """Return whether *value* is a whole number from *least* to *most*."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def seconds(what: str, value: object) -> float:
    """Return *value* if it is a positive number of seconds, else raise ValueError naming *what*."""
    length = number(what, value)
    if length <= 0:
        raise ValueError(f"{what} must be more than 0 seconds, not {value!r}.")
    return length


def from_zero(what: str, value: object) -> float:
    """Return *value* if it is a number of seconds from 0, else raise ValueError naming *what*."""
    kind = "a number of seconds from 0"
    length = number(what, value, kind)
    if length < 0:
        raise ValueError(f"{what} must be {kind}, not {value!r}.")
    return length


def optional_seconds(what: str, value: float | None) -> float | None:
    """Return *value* if it is None or a positive number of seconds, else raise ValueError naming *what*."""
    return None if value is None else seconds(what, value)


def may_be_url(value: object) -> bool:
    """Return whether a wrong value may be a URL, or the end of one, which may have a password: no message shows it."""
    return "//" in str(value) or "@" in str(value)


def quoted(value: object) -> str:
    """Return the repr of a wrong value for a message; a URL is not shown, because it may have a password."""
    return "a URL" if may_be_url(value) else repr(value)


def nearest(word: object, known: Iterable[object]) -> str:
    """Return "; did you mean ...?" for the end of a message, or a full stop."""
    close = get_close_matches(str(word), map(str, known), n=1)
    return f"; did you mean {close[0]!r}?" if close else "."


def check_switch(what: str, value: object) -> None:
    """
    Make sure that a switch is a bool: ``"no"`` would mean True.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, not {repr(value)[:40]}.")


def check_label(label: object) -> None:
    """
    Make sure that *label* is text.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(label, str):
        raise TypeError(f"label must be a str, not {type(label).__name__}; write label=str(...).")


def check_release(release: object) -> None:
    """
    Make sure that *release* is ``wait``, ``send`` or None.

    Raises:
        ValueError: It is something else.
    """
    if release not in ("wait", "send", None):
        raise ValueError(f"release must be 'wait', 'send' or None, not {quoted(release)}.")


def check_wait(wait: Waits) -> Waits:
    """
    Return *wait* if it is None, a number of seconds from 0, or not passed.

    Raises:
        ValueError: It is something else.
    """
    kind = "None (for ever) or a number of seconds from 0"
    if wait is not None and wait is not UNSET and number("wait", wait, kind) < 0:
        raise ValueError(f"wait must be {kind}, not {wait!r}.")
    return wait


class QueuePlace(NamedTuple):
    """
    The place in the queue of somebody who goes away and comes back, such as the message of a task.

    Args:
        waiter: The name in the queue.
        stamp: When it joined, in microseconds since the epoch; the queue is ordered by it.
        away: Seconds for which the nodes keep the place if the lock is taken.
    """

    waiter: str
    stamp: int
    away: float


@without_secrets
class Wanted(NamedTuple):
    """
    The lock that a caller wants, and how the caller wants to hold it.

    Args:
        names: The names to lock, sorted.
        ttl: Length of the lease, in seconds.
        wait: How long to try, in seconds; 0 is one attempt, None is for ever.
        owner: The description of the future holder, with the length of its lease.
        secret: The secret to hold the lock with; empty draws a fresh one for every attempt. A node that did not answer
            an attempt in time refuses the same secret for one more ttl, because it cannot tell the two attempts apart.
        adopt: The secret of a holder whose lock may be taken over.
        strict: Whether the lock must be taken over, from *adopt* or from an earlier hold with the same *secret*; a free
            lock is refused like a taken one with an unknown holder.
        detached: Whether the lock is neither renewed nor watched.
        limit: How many holders the lock may have at once, each with a permit of its own.
        permit: The number of the permit to take; 0 takes any.
        shared: Whether other shared holders may have the lock too.
        barge: Whether to ignore the queue.
        heartbeat: Seconds without a heartbeat after which the lease is no longer extended; None requires no heartbeat.
        max_hold: Longest time that renewal keeps the lock, in seconds; None takes it from the options of the alias.
        sends: Whether the end of its block sends the release without waiting for the replies.
        once: Whether the names are not used again after this hold. Then nodes remember the fencing token for one ttl.
        place: The place in the queue that is kept if the lock is taken; None leaves the queue.
        hold_for: The least time for which the nodes keep the lock taken, in seconds, even if its holder dies; 0 if the
            lock ends with its work.
        hold_on_error: Whether they do so, too, if the work fails.
    """

    names: tuple[str, ...]
    ttl: float
    wait: float | None
    owner: Owner
    secret: str = ""
    adopt: str = ""
    detached: bool = False
    limit: int = 1
    shared: bool = False
    barge: bool = False
    heartbeat: float | None = None
    max_hold: float | None = None
    strict: bool = False
    sends: bool = False
    once: bool = False
    place: QueuePlace | None = None
    hold_for: float = 0.0
    hold_on_error: bool = True
    permit: int = 0

    @property
    def is_brief(self) -> bool:
        """Whether its caller tries once, or keeps its place and waits for a moment only, as a message does."""
        return self.wait == 0 or (self.place is not None and self.wait is not None and self.wait < MOMENT)

    @classmethod
    def left_alone(
        cls,
        name: str,
        owner: Owner,
        secret: str,
        *,
        adopt: str = "",
        strict: bool = False,
        limit: int = 1,
        permit: int = 0,
    ) -> "Wanted":
        """
        Return one attempt at a lock that nobody renews or watches: the caller takes it and goes away.

        The lease lasts for the *owner*'s ``ttl``, which may be longer than ``max_ttl``. The other arguments are those
        of this class.

        Raises:
            TypeError: The name is not a string.
            ValueError: The name or the ttl cannot work.
        """
        names, ttl = check_names(name), seconds("ttl", owner.ttl)
        return cls(names, ttl, 0, owner, secret, adopt, True, limit, strict=strict, once=owner.is_note, permit=permit)


def check_limit(limit: int, names: tuple[str, ...], shared: bool) -> None:
    """
    Raise ValueError unless *limit* holders can have the lock at once.

    Raises:
        ValueError: It is not a whole number from 1 to 1000, or is combined with several names or with *shared*.
    """
    if not is_whole(limit, 1, MAX_LIMIT):
        raise ValueError(f"limit must be a whole number from 1 to {MAX_LIMIT}, not {limit!r}.")
    if limit > 1 and (shared or len(names) > 1):
        other = "shared=True" if shared else "several names"
        raise ValueError(f"limit={limit} and {other} cannot be combined; take two locks.")
