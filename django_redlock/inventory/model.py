"""
The data of an inventory: nodes, their views of each lock, and the locks that these views describe (internal).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from django.db.models import TextChoices
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..core.names import SHARED_KIND, Owner, decode, fingerprint, fingerprint_of_sharers, lease_of, shown
from ..core.protocol import HIGHEST
from ..core.rules import Rules
from ..core.votes import is_quorum
from ..engine.presence import OVERDUE
from ..exceptions import printable

LAST_SECOND = 253_402_128_000  # two days before the year 10000: datetime knows no later moment in any time zone
MAX_TEXT = 120  # characters of each text that describes a holder
MAX_ODD = 20  # keys of another type that one sentence names
MAX_SHOWN = 250  # characters of a name; names of this library are shorter
PLAIN = re.compile(r"[!#-&(-\[\]-~]+")  # ASCII that can be seen, without quotation marks and backslashes
NO_STRING = fingerprint("")  # of a key that has no string value


class State(TextChoices):
    """
    The state of a lock over all nodes.

    ``held``: all nodes have the same holder. ``degraded``: a quorum has one holder; other nodes lack it or do not
    answer. ``partial``: there is one holder, but too few nodes report it: an attempt in progress, or the remains of
    one. ``split``: several holders, none with a quorum. ``unrenewed``: a quorum has one holder, whose process is alive
    but has not renewed the lock for half of its lease. ``orphaned``: a quorum has one holder, whose process has sent
    no sign of life for ten seconds: it died or is paused. ``no_expiry``: no quorum lets the lock end by itself, so this
    library did not write it.
    """

    HELD = "held", gettext_lazy("held")
    DEGRADED = "degraded", gettext_lazy("degraded")
    PARTIAL = "partial", gettext_lazy("partial")
    SPLIT = "split", gettext_lazy("split")
    UNRENEWED = "unrenewed", gettext_lazy("not renewed")
    ORPHANED = "orphaned", gettext_lazy("orphaned")
    NO_EXPIRY = "no_expiry", gettext_lazy("no expiry")

    @property
    def severity(self) -> int:
        """The rank of the state. A higher rank needs attention sooner; ranks 0 and 1 are no trouble."""
        return SEVERITY.index(self)


MEANINGS = {
    State.DEGRADED: gettext_lazy("A quorum of the nodes has this holder. The others lack it, or do not answer."),
    State.PARTIAL: gettext_lazy(
        "Too few nodes report this holder: an attempt is in progress, an earlier one left keys behind, "
        "or other nodes do not answer."
    ),
    State.SPLIT: gettext_lazy("The nodes report different holders, and no quorum reports the same one."),
    State.UNRENEWED: gettext_lazy(
        "Nobody renews the lock, although its process seems alive: the lease was probably dropped without a release. "
        "The lock ends by itself."
    ),
    State.ORPHANED: gettext_lazy(
        "The holder's process has given no sign of life for ten seconds: it died or is paused. The lock ends by itself."
    ),
    State.NO_EXPIRY: gettext_lazy(
        "The lock does not end by itself. When no living process can hold it, manage.py redlock_clear deletes it."
    ),
}
SHARED_WITHOUT_EXPIRY = gettext_lazy(
    "The lock does not end by itself, and manage.py redlock_clear keeps it, because its key does not say who shares "
    "it. Release it when nobody uses it."
)
NOT_A_STRING = gettext_lazy(
    "The key is empty or not a string: another program wrote it. The nodes that have it grant nobody this lock "
    "until it is deleted there."
)
SEVERITY = (
    *(State.HELD, State.PARTIAL, State.DEGRADED, State.SPLIT),
    *(State.UNRENEWED, State.ORPHANED, State.NO_EXPIRY),
)
TROUBLE = SEVERITY[2:]


class Life(Enum):
    """
    What the nodes know about a process.

    ``LIVING``: its last sign of life came a moment ago. ``SILENT``: it gave some, but not lately: it is dead or
    paused. ``GONE``: a quorum has had no sign of life for longer than any lease lasts, so all its leases have ended.
    ``UNKNOWN``: too few nodes answered, or they were not asked.
    """

    LIVING = auto()
    SILENT = auto()
    GONE = auto()
    UNKNOWN = auto()


class Staleness(TextChoices):
    """Why a key is stale; see :func:`stale_keys`."""

    NO_EXPIRY = "no_expiry", gettext_lazy("it has no expiry, so it would never end")
    TOO_LONG = "too_long", gettext_lazy("it expires later than any lease of its holder could")
    WRONG_TYPE = "wrong_type", gettext_lazy("it is empty or not a string: another program wrote it")
    FOREIGN = "foreign", gettext_lazy("its value is not one that this library writes")
    RESIDUE = "residue", gettext_lazy("too few nodes have it, and it is older than its lease")
    ABSURD = "absurd", gettext_lazy("its fencing token is absurd, so that the node gives no vote on this lock")


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """
    One node and whether it answers.

    Args:
        name: The node's display name.
        answered: Whether the node answered in time.
        detail: Why the node did not answer, or why it answers but may not vote.
    """

    name: str
    answered: bool
    detail: str = ""

    @property
    def votes(self) -> bool:
        """Whether the node's vote counts."""
        return self.answered and not self.detail


class View(NamedTuple):
    """
    One lock as one node sees it; a tuple, because a listing makes thousands of them.

    Args:
        node: The node's display name.
        answered: Whether the node answered in time; if not, the other fields are empty.
        fingerprint: Distinguishes the holder from others; empty if the node has no key.
        about: The description of the holder, as written in the key; empty without a key of this library.
        left: Seconds until the key expires on this node; None if it has no expiry.
        fence: The highest fencing token that the node accepted for this name.
    """

    node: str
    answered: bool
    fingerprint: str = ""
    about: str = ""
    left: float | None = 0.0
    fence: int = 0

    @property
    def owner(self) -> Owner | None:
        """The holder; None if there is no key, or another program wrote it."""
        return owner_of(self.about)


@dataclass(frozen=True, slots=True)
class Waiting:
    """
    A waiter of a lock.

    Args:
        host: The host's name.
        pid: The process id on that host.
        number: The waiter's number within its process.
        nodes: How many nodes have the waiter in their queue.
        label: The work that waits, as ``label=`` of the lock gives it; empty if it does not.
    """

    host: str
    pid: int
    number: int
    nodes: int
    label: str = ""

    def __str__(self) -> str:
        where = f"{self.host}:{self.pid} #{self.number}"
        return f"{self.label} on {where}" if self.label else where


class OddKey(NamedTuple):
    """
    A key of a lock that another program wrote as one of another type, so that the node grants nobody this lock.

    Args:
        slug: The form of the lock's name in the keys.
        node: The node's display name.
        key: The key, in full.
    """

    slug: str
    node: str
    key: str

    @property
    def name(self) -> str:
        """The lock's name; a very long one is cut short."""
        return name_of(self.slug)

    @property
    def deletion(self) -> str:
        """The command of a Redis server that deletes the key."""
        return deletion(self.key)


class LockReport(NamedTuple):
    """
    One lock, as all nodes together see it.

    Args:
        slug: The form of the lock's name in the keys.
        alias: The lock's alias in ``REDLOCK``.
        state: See :class:`State`.
        remaining: Seconds until the hold ends unless the holder extends it: the time that a quorum of nodes grants,
            less the allowance for drift. None if no quorum has one holder, or if the hold never ends.
        votes: How many nodes have this holder.
        fingerprint: Distinguishes this holder from others; safe to show.
        about: The description of the holder, as written in the keys; empty if this library did not write it.
        ttl: Length of the holder's lease in seconds; None when unknown.
        fencing_token: The number of this hold; 0 when the nodes no longer know it.
        views: The view of each node of the alias, in the order of the settings.
        waiters: The first hundred waiters, in the order of their turns. Only known if the query named this lock alone.
        waiting: How many callers wait, by the node that knows of the most.
        waiting_since: When the first waiter began to wait, in seconds since the epoch on its clock; 0 if nobody waits.
        life: The state of the holder's process; only queried when nobody extends the lock, or when it lasts too long.
        sharers: How many holders share the lock, by a quorum of nodes; 0 if one process holds it alone, or if the
            number is unknown.
        kept_until: If the work of the holder is over, and nobody renews the lock, which stays taken for a minimum time
            (``hold_for``): until when, in seconds since the epoch on this host's clock. Otherwise 0.
    """

    slug: str
    alias: str
    state: State
    remaining: float | None
    votes: int
    fingerprint: str
    about: str
    ttl: float | None
    fencing_token: int
    views: tuple[View, ...]
    waiters: tuple[Waiting, ...] = ()
    waiting: int = 0
    waiting_since: float = 0.0
    life: Life = Life.UNKNOWN
    sharers: int = 0
    kept_until: float = 0.0

    @property
    def name(self) -> str:
        """The lock's name; a very long one is cut short."""
        return name_of(self.slug)

    @property
    def nodes(self) -> int:
        """How many nodes the alias has."""
        return len(self.views)

    @property
    def owner(self) -> Owner | None:
        """The holder; None if another program wrote the keys."""
        return owner_of(self.about)

    @property
    def since(self) -> float | None:
        """When the holder took the lock, in seconds since the epoch on the holder's clock; None when unknown."""
        owner = self.owner
        return owner.since or None if owner else None

    def status(self, moment: str) -> str:
        """Return the state in words; *moment* is ``kept_until`` for people, as the page or the command writes it."""
        if not self.kept_until:
            return str(self.state.label)
        until = _("held until %(moment)s") % {"moment": moment}
        return until if self.state is State.HELD else f"{self.state.label}, {until}"

    @property
    def is_note(self) -> bool:
        """Whether it is a note, and no lock; a note on which the nodes disagree may be a stale key, so it is none."""
        agreed = self.state is State.DEGRADED or self.state not in TROUBLE  # a node that is down lacks all notes
        return agreed and self.owner is not None and self.owner.is_note

    def held_for(self, now: float) -> float | None:
        """Return how many seconds the holder has held the lock, by the clock of its own host; None when unknown."""
        since = self.since
        return None if since is None else max(0.0, now - since)

    @property
    def extensions(self) -> int:
        """How often the holder has extended the lock."""
        return max((view.owner.extensions for view in self.leaders if view.owner), default=0)

    @property
    def leaders(self) -> list[View]:
        """The views of the nodes that have the holder."""
        return [view for view in self.views if view.fingerprint == self.fingerprint]

    @property
    def holders(self) -> dict[str, list[View]]:
        """The views that have a key, by the fingerprint of its holder."""
        groups: dict[str, list[View]] = {}
        for view in self.views:
            if view.fingerprint:
                groups.setdefault(view.fingerprint, []).append(view)
        return groups

    @property
    def process(self) -> str:
        """The holder's process; empty if it is unknown, or if the lock does not depend on one."""
        return lease_of(self.about)[1]

    @property
    def is_shared(self) -> bool:
        """Whether several holders may share the lock."""
        return self.fingerprint == fingerprint_of_sharers(max([view.fence for view in self.leaders], default=0))

    @property
    def longest_left(self) -> float:
        """The longest time left on any of the holder's nodes; infinite if a node keeps the key for ever."""
        return max([math.inf if view.left is None else view.left for view in self.leaders])

    @property
    def silent_for(self) -> float:
        """The seconds since the holder last took or extended the lock, by the nodes' clocks; 0 if unknown."""
        return max(0.0, self.ttl - self.longest_left) if self.ttl else 0.0

    @property
    def is_suspicious(self) -> bool:
        """
        Whether to look up if the holder's process is alive.

        A process gives its first sign of life soon after it takes a lock, and repeats it. If the nodes' clocks show
        that the process has neither taken nor extended the lock for a while, a sign must have arrived by now. If
        somebody else changed the expiry of the keys, the nodes cannot tell when the holder last extended the lock.
        """
        ttl = self.ttl or 0.0
        return bool(self.process) and not ttl - OVERDUE <= self.longest_left <= ttl

    def of_process(self, life: Life, now: float) -> "LockReport":
        """Return a suspicious lock in the state that follows from the *life* of its process; *now* is the date."""
        state = self.state
        if state in (State.HELD, State.DEGRADED):
            # A process may not have given a sign of life yet in the first seconds of its hold.
            heard = self.silent_for > OVERDUE or now - (self.since or now) > OVERDUE
            if life is Life.LIVING and self.silent_for > (self.ttl or 0.0) / 2:
                state = State.UNRENEWED
            elif life in (Life.SILENT, Life.GONE) and heard:
                state = State.ORPHANED
        return self._replace(state=state, life=life)

    @property
    def holder(self) -> str:
        """The holder in one line for people; empty if another program holds the lock."""
        if self.sharers:
            text = ngettext("%(count)d holder, who shares it", "%(count)d holders, who share it", self.sharers)
            return text % {"count": self.sharers}
        return described(self.owner)

    @property
    def meaning(self) -> str:
        """What the state means and what will happen, in sentences for people; empty if all is well."""
        if self.fingerprint == NO_STRING:
            return str(NOT_A_STRING)
        if self.state is State.NO_EXPIRY and self.owner is not None and self.owner.kind == SHARED_KIND:
            return str(SHARED_WITHOUT_EXPIRY)
        return str(MEANINGS.get(self.state, ""))


@dataclass(frozen=True, slots=True)
class Snapshot:
    """
    The held locks of one alias at one moment.

    Args:
        alias: The alias in ``REDLOCK``.
        nodes: The nodes of the alias, in the order of the settings.
        locks: The held locks, soonest end first; empty if too few nodes answered.
        complete: Whether *locks* has all held locks; a listing is bounded.
        taken: When the snapshot was made, in seconds since the epoch.
        rules: The rules of the alias.
        total: How many names the nodes' indexes have; locks whose holders died a while ago may be among them.
        absurd: The nodes with an absurd fencing token, by the slug of the lock, which may be held or free.
        wrong_type: The keys of another type under the names of these locks, and of locks that somebody could not take.
        notes: The notes of singleton tasks on the nodes, in the form of locks; nobody holds or waits for these.
    """

    alias: str
    nodes: tuple[NodeStatus, ...]
    locks: tuple[LockReport, ...]
    complete: bool
    taken: float
    rules: Rules = field(repr=False)
    total: int = 0
    absurd: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    wrong_type: tuple[OddKey, ...] = ()
    notes: tuple[LockReport, ...] = ()

    def parted(self) -> "Snapshot":
        """Return the same, with notes apart from locks."""
        locks = tuple(lock for lock in self.locks if not lock.is_note)
        return replace(self, locks=locks, notes=tuple(lock for lock in self.locks if lock.is_note))

    @property
    def answering(self) -> int:
        """How many nodes answered."""
        return sum(node.answered for node in self.nodes)

    @property
    def has_quorum(self) -> bool:
        """Whether enough nodes answered to list the held locks."""
        return is_quorum(self.answering, self.rules.needed)

    @property
    def cut_short(self) -> bool:
        """Whether more locks are held than are listed; False if too few nodes answered to know."""
        return self.has_quorum and not self.complete

    @property
    def quorum(self) -> str:
        """How many nodes answer and how many are needed, in words."""
        counts = {"answering": self.answering, "nodes": len(self.nodes), "needed": self.rules.needed}
        have = _("%(answering)d of %(nodes)d nodes answer; %(needed)d needed.") % counts
        if not self.has_quorum:
            outlook = _("Too few to say which locks are held, or to take one.")
        elif self.spare < 0:
            outlook = _("Too few of them may vote: no lock can be taken.")
        elif self.spare == 0:
            outlook = _("None of them may fail.")
        else:
            outlook = ngettext("%(spare)d more may fail.", "%(spare)d more may fail.", self.spare)
            outlook %= {"spare": self.spare}
        return f"{have} {outlook}"

    @property
    def spare(self) -> int:
        """How many more nodes may fail; negative if too few may vote."""
        return sum(node.votes for node in self.nodes) - self.rules.needed

    @property
    def odd_keys(self) -> str:
        """What to do about keys of another type, in words; empty if there are none."""
        if not self.wrong_type:
            return ""
        nodes: dict[str, list[str]] = {}
        for key in self.wrong_type:
            nodes.setdefault(key.deletion, []).append(key.node)
        keys = "; ".join(f"{deletion} ({', '.join(where)})" for deletion, where in islice(nodes.items(), MAX_ODD))
        more = " …" if len(nodes) > MAX_ODD else ""
        return _(
            "Another program wrote keys of another type. Until they are deleted, these nodes give no vote on the "
            "locks: %(keys)s"
        ) % {"keys": keys + more}

    @property
    def trouble(self) -> str:
        """Which nodes do not answer or may not vote, and why; empty if all do."""
        return ", ".join(f"{node.name} ({node.detail})" for node in self.nodes if not node.votes)


@dataclass(frozen=True, slots=True)
class StaleKey:
    """
    A key that no live holder needs and that keeps others out, or would do so for too long.

    Args:
        lock: The lock whose name the key has.
        fingerprint: Distinguishes the key's value from others.
        reason: Why the key is stale.
        nodes: The nodes that have the key.
        owner: The holder that the key describes, if this library wrote it.
    """

    lock: LockReport
    fingerprint: str
    reason: Staleness
    nodes: tuple[str, ...]
    owner: Owner | None

    @property
    def since(self) -> float | None:
        """When the key was written, in seconds since the epoch; None when unknown."""
        return self.owner.since or None if self.owner else None


@lru_cache(maxsize=4096)
def owner_of(about: str) -> Owner | None:
    """Return the owner that the text in a key describes, limited to values that can be shown."""
    owner = decode(about)
    if owner is None:
        return None
    since = owner.since if 0 < owner.since < LAST_SECOND else 0.0
    ttl = owner.ttl if 0 < owner.ttl < LAST_SECOND else 0.0
    hold = owner.hold if 0 < owner.hold < LAST_SECOND else 0.0
    return owner._replace(
        host=owner.host[:MAX_TEXT],
        kind=owner.kind[:MAX_TEXT],
        label=owner.label[:MAX_TEXT],
        ref=owner.ref[:MAX_TEXT],
        since=since,
        ttl=ttl,
        hold=hold,
        pid=owner.pid if 0 < owner.pid <= HIGHEST else 0,
        extensions=owner.extensions if 0 < owner.extensions <= HIGHEST else 0,
    )


def name_of(slug: str) -> str:
    """Return the name that a slug stands for, or the text itself if somebody else wrote it into the index."""
    try:
        name = shown(slug)
    except ValueError:
        name = slug
    return name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}…"


def typed(word: str) -> str:
    """Return a word of a command as ``redis-cli`` reads it: in quotation marks unless it is plain, and in ASCII."""
    if PLAIN.fullmatch(word):
        return word
    signs = map(chr, word.encode(errors="replace"))
    return '"' + "".join([sign if sign == " " or PLAIN.match(sign) else f"\\x{ord(sign):02x}" for sign in signs]) + '"'


def deletion(key: str) -> str:
    """Return the command of a Redis server that deletes a key, whatever its type."""
    return f"DEL {typed(key)}"


def described(owner: Owner | None) -> str:
    """Describe a holder in one line for people; return an empty text if it is another program."""
    if owner is None:
        return ""
    return _("several, who share it") if owner.kind == SHARED_KIND else printable(str(owner))


def urgency(lock: LockReport) -> tuple[int, int, float, str]:
    """Return the place of a lock in a list: what people wait for first, then locks in trouble, then long holds."""
    return (-lock.waiting, -lock.state.severity, lock.since or 0.0, lock.slug)


def middle(text: str, length: int) -> str:
    """Return *text* in at most *length* characters; the middle is cut, because names differ at their ends."""
    if len(text) <= length:
        return text
    end = (length - 1) // 2
    return f"{text[: length - 1 - end]}…{text[len(text) - end :]}"


def duration(seconds: float) -> str:
    """Return a duration for people, in the two largest units that matter: ``0.4 ms``, ``14 min``, ``3 h 20 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days} d {hour} h" if hour else f"{days} d"
    if hours:
        return f"{hours} h {minute} min" if minute else f"{hours} h"
    return f"{minutes} min"
