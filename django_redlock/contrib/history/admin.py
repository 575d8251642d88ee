"""The admin of former locks: a list, and a chart by kind."""

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ...admin.base import ReadOnlyAdmin, column
from ...admin.rows import DASH, labelled
from ...core.names import SHOWN
from ...inventory.model import duration
from ...models import HeldLock
from .models import Hold, KindStatistics, kinds

HELD_LOCKS = "admin:redlock_heldlock_changelist"
OUTCOMES = {
    "released": ("good", _("released")),
    "held": ("good", _("released, kept for its minimum time")),
    "taken": ("warn", _("gave up: taken")),
    "no_quorum": ("bad", _("gave up: no quorum")),
    "expired": ("bad", _("lost: expired")),
    "superseded": ("bad", _("lost: superseded")),
    "forgotten": ("bad", _("lost: forgotten by the nodes")),
    "fenced": ("bad", _("lost: refused by the database")),
    "heartbeat": ("bad", _("lost: no heartbeat")),
    "max_hold": ("bad", _("lost: max_hold reached")),
    "max_extensions": ("bad", _("lost: max_extensions reached")),
    "revoked": ("warn", _("lost: ended by an operator")),
    "unknown": ("warn", _("released, not confirmed")),
}
"""The level of each outcome, and its label on the page."""


class OutcomeFilter(admin.AllValuesFieldListFilter):
    """Filter by outcome, with the same labels as the list."""

    def choices(self, changelist: Any) -> Iterator[Any]:
        """Yield the choices with their labels."""
        for choice in super().choices(changelist):
            outcome, *count = str(choice["display"]).split(" (")  # the count follows if the user shows counts
            yield choice | {"display": " (".join([str(_label(outcome)[1]), *count])}


@admin.register(Hold)
class HoldAdmin(ReadOnlyAdmin, admin.ModelAdmin):  # type: ignore[type-arg]
    """Former locks; nobody can add, change or delete one."""

    list_display = (
        *("name", "outcome_shown", "held_for", "waited_for", "ended"),
        *("alias", "host", "process", "extensions", "token"),
    )
    fields = (
        *("alias", "name", "template", "outcome", "waited", "held", "ttl", "extensions", "token"),
        *("host", "process", "ended"),
    )
    list_filter = (("outcome", OutcomeFilter), "alias", "template")
    search_fields = ("name", "host")
    date_hierarchy = "ended"
    show_full_result_count = False

    class Media:
        css = {"all": ["django_redlock/history.css"]}

    outcome_shown = column(_("outcome"), lambda row: _outcome(row), ordering="outcome")
    waited_for = column(_("waited"), lambda row: duration(row.waited), ordering="waited")
    held_for = column(_("held"), lambda row: DASH if row.held is None else duration(row.held), ordering="held")

    # Not the fields themselves: Django would put separators of thousands into what people copy.
    process = admin.display(description=_("process"), ordering="pid")(lambda self, row: str(row.pid))
    token = admin.display(description=_("fencing token"), ordering="fencing_token")(
        lambda self, row: DASH if row.fencing_token is None else str(row.fencing_token)
    )

    @admin.display(description=_("now"))
    def live(self, row: Hold) -> SafeString:
        """Return a link that looks for the lock among the held locks."""
        name = row.name if len(row.name) < 200 else row.name[:SHOWN]  # the row may lack the rest, as the list does
        query = urlencode({"q": name, "using": row.alias})
        address = reverse(HELD_LOCKS, current_app=self.admin_site.name)
        text = gettext("Look for “%(lock)s” among the held locks") % {"lock": row.name}
        link = format_html('<a href="{}?{}" aria-label="{}">{}</a>', address, query, text, gettext("show"))
        return labelled(_("now"), link)

    def get_list_display(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the columns, with a link to the live lock for users who may see it."""
        name, *rest = self.list_display
        return (name, "live", *rest) if self._held_locks(request) else self.list_display

    def _held_locks(self, request: HttpRequest) -> str:
        """Return the address of the held locks; an empty text for users who may not see them."""
        seen = self.admin_site.is_registered(HeldLock) and request.user.has_perm("redlock.view_heldlock")
        return reverse(HELD_LOCKS, current_app=self.admin_site.name) if seen else ""

    def get_urls(self) -> list[URLPattern]:
        """Add the URL of the chart."""
        chart = self.admin_site.admin_view(self.chart_view)
        return [path("kinds/", chart, name="redlock_history_hold_kinds"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, and pass a link to the held locks for users who may see them."""
        shared = {"title": gettext("Former locks"), "held_locks": self._held_locks(request)}
        return super().changelist_view(request, shared | (extra_context or {}))

    def chart_view(self, request: HttpRequest) -> HttpResponse:
        """Show how long locks of each kind are held and waited for."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        found, since = kinds()
        longest = max((max(kind.hold[1], kind.wait[1]) for kind in found), default=0.0) or 1.0
        rows = [(kind, list(_bars(kind, longest)), list(kind.suggestions)) for kind in found]
        template, title = "admin/redlock_history/hold/kinds.html", gettext("Kinds of locks")
        return self.page(request, template, title=title, rows=rows, since=since, held_locks=self._held_locks(request))


def _label(outcome: str) -> tuple[str, Any]:
    """Return the level and the label of an outcome; an outcome of a later release is its own label."""
    return OUTCOMES.get(outcome, ("warn", outcome))


def _outcome(row: Hold) -> SafeString:
    """Return the label of an outcome, styled by its level."""
    level, text = _label(row.outcome)
    return format_html('<span class="redlock-outcome redlock-{}">{}</span>', level, text)


def _bars(kind: KindStatistics, longest: float) -> Iterator[tuple[str, str, str]]:
    """Yield the bars of one kind: label, length in percent, and a text with the median and the 99th percentile."""
    for what, (half, most), known in ((gettext("held"), kind.hold, kind.holds), (gettext("waited"), kind.wait, True)):
        yield what, f"{100 * most / longest:.1f}", f"{duration(half)}, {duration(most)}" if known else DASH
