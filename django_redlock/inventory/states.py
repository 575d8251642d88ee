"""
The states of a lock, of a holder's process and of a key, in words for people (internal).
"""

from enum import Enum, auto

from django.db.models import TextChoices
from django.utils.translation import gettext_lazy


class State(TextChoices):
    """
    The state of a lock over all nodes.

    ``held``: all nodes have the same holder. ``degraded``: a quorum has one holder; other nodes lack it or do not
    answer. ``partial``: there is one holder, but too few nodes report it: an attempt in progress, or the remains of
    one. ``split``: several holders, none with a quorum. ``unrenewed``: a quorum has one holder, whose process is alive
    but has not renewed the lock for half of its lease. ``orphaned``: a quorum has one holder, whose process has sent
    no heartbeat for ten seconds: it died or is paused. ``no_expiry``: no quorum lets the lock end by itself, so this
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
        return RANKS[self]

    @property
    def meaning(self) -> str:
        """What the state means and what will happen, in sentences for people; empty if all is well."""
        return str(MEANINGS.get(self, ""))


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
RANKS = {state: rank for rank, state in enumerate(SEVERITY)}
TROUBLE = SEVERITY[2:]


class Life(Enum):
    """
    What the nodes know about a process.

    ``LIVING``: its last heartbeat came a moment ago. ``SILENT``: it sent heartbeats, but not lately: it is dead or
    paused. ``GONE``: a quorum has had no heartbeat for longer than any lease lasts, so all its leases have ended.
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
