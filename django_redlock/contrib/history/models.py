"""One row for each lock that ended, and for each attempt that was given up."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...core.protocol import EndReason


class Hold(models.Model):
    """A lock that was held, or that a caller did not get."""

    alias = models.CharField(_("alias"), max_length=100)
    name = models.CharField(_("lock"), max_length=200)
    template = models.CharField(_("kind of lock"), max_length=100)
    outcome = models.CharField(_("outcome"), max_length=20)
    waited = models.FloatField(_("waited, in seconds"))
    held = models.FloatField(_("held, in seconds"), null=True)
    ttl = models.FloatField(_("lease, in seconds"), null=True)
    extensions = models.IntegerField(_("extensions"), default=0)
    fencing_token = models.BigIntegerField(_("fencing token"), null=True)
    host = models.CharField(_("host"), max_length=100)
    pid = models.IntegerField(_("process"))
    ended = models.DateTimeField(_("ended"), db_index=True)

    class Meta:
        default_permissions = ("view",)
        verbose_name = _("former lock")
        verbose_name_plural = _("former locks")
        ordering = ("-ended", "-pk")
        indexes = (models.Index(fields=["template", "ended"], name="redlock_history_template"),)

    def __str__(self) -> str:
        return self.name


PERIOD = timedelta(days=7)
ROWS = 50_000  # only the latest rows are read
FEW = 20  # with fewer holds, there is no advice
Row = tuple[str, float, float | None, float | None]

LOST: frozenset[str] = frozenset(EndReason) - {EndReason.RELEASED, EndReason.REVOKED, EndReason.FORKED}
OUTLIVED = (EndReason.EXPIRED, EndReason.SUPERSEDED)  # the losses that a longer lease prevents


@dataclass(frozen=True, slots=True)
class KindStatistics:
    """
    The statistics of the locks of one kind; durations are in seconds.

    Args:
        template: The common part of their names.
        holds: How often a lock was held.
        refused: How often a caller gave up.
        taken: How often a caller gave up because others had the lock.
        lost: How often a lock was lost.
        outlived: How often a lock was lost because it was held for longer than its lease.
        hold: The median and the 99th percentile of the holding times; 0 without any holds.
        wait: The median and the 99th percentile of the times that callers waited for others.
        ttl: The longest lease.
    """

    template: str
    holds: int
    refused: int
    taken: int
    lost: int
    outlived: int
    hold: tuple[float, float]
    wait: tuple[float, float]
    ttl: float

    @property
    def suggestions(self) -> Iterator[str]:
        """Yield suggested changes with figures; yield nothing if all is well or if there are too few holds."""
        if self.holds < FEW:
            return
        about = {
            "lost": self.outlived,
            "holds": self.holds,
            "refused": self.taken,
            "held": f"{self.hold[1]:.1f}",
            "waited": f"{self.wait[1]:.1f}",
            "ttl": f"{self.ttl:g}",
            "better": str(max(10, round(2 * self.hold[1] + 0.5))),
            "wait": f"{max(1.0, 3 * self.hold[1]):.0f}",
        }
        for text in self._advice():
            yield text % about

    def _advice(self) -> Iterator[str]:
        if self.outlived:
            yield gettext("%(lost)d of %(holds)d holds were lost: leave renewal on, or set ttl to %(better)s s.")
        elif self.hold[1] > self.ttl / 2 and not self.lost:
            yield gettext(
                "held for up to %(held)s s, more than half of its ttl: leave renewal on, or set ttl to %(better)s s."
            )
        elif self.ttl > 60 and self.hold[1] < self.ttl / 20:
            yield gettext(
                "held for %(held)s s at most, with a ttl of %(ttl)s s: after a crash all wait that long; "
                "set it to %(better)s s."
            )
        if self.taken > self.holds / 10:
            yield gettext("%(refused)d gave up: wait=%(wait)s would let most of them in.")
        if self.wait[1] > 1 and self.wait[1] > 3 * self.hold[1]:
            yield gettext("waited for %(waited)s s: many callers use one name; make it narrower, or use limit=.")


def kinds(using: str | None = None) -> tuple[list[KindStatistics], datetime | None]:
    """
    Return the statistics of each kind of lock in the last week, the longest holds first.

    If there are more rows than are read, return since when the statistics count, too; otherwise None.
    """
    rows = Hold.objects.filter(ended__gte=timezone.now() - PERIOD)
    rows = rows.filter(alias=using) if using else rows
    found: dict[str, list[Row]] = {}
    latest = list(rows.values_list("ended", "template", "outcome", "waited", "held", "ttl")[: ROWS + 1])
    for _ended, name, outcome, waited, held, ttl in latest[:ROWS]:
        found.setdefault(name, []).append((outcome, waited, held, ttl))
    since = latest[ROWS - 1][0] if len(latest) > ROWS else None
    return sorted((_kind(name, rows) for name, rows in found.items()), key=lambda kind: -kind.hold[1]), since


def _kind(name: str, rows: list[Row]) -> KindStatistics:
    held = [hold for _, _, hold, _ in rows if hold is not None]
    answered = [(waited, hold) for outcome, waited, hold, _ in rows if outcome != "no_quorum"]
    return KindStatistics(
        template=name,
        holds=len(held),
        refused=sum(hold is None for _, _, hold, _ in rows),
        taken=sum(hold is None for _, hold in answered),
        lost=sum(outcome in LOST for outcome, _, _, _ in rows),
        outlived=sum(outcome in OUTLIVED for outcome, _, _, _ in rows),
        hold=_spread(held),
        wait=_spread([waited for waited, _ in answered]),
        ttl=max((ttl or 0.0 for _, _, _, ttl in rows), default=0.0),
    )


def _spread(values: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    if not values:
        return 0.0, 0.0
    values = sorted(values)
    return values[len(values) // 2], values[min(len(values) - 1, int(len(values) * 0.99))]
