"""The admin of former locks: a list, and a chart by kind."""

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.translation import gettext

from .advice import kinds
from .models import Hold


@admin.register(Hold)
class HoldAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Former locks; nobody can add, change or delete one."""

    list_display = ("name", "alias", "outcome", "waited", "held", "extensions", "host", "pid", "fencing_token", "ended")
    list_filter = ("outcome", "alias", "template")
    search_fields = ("name", "host")
    date_hierarchy = "ended"
    show_full_result_count = False

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: rows are written automatically."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: the past does not change."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: old rows are deleted automatically."""
        return False

    def get_urls(self) -> list[URLPattern]:
        """Add the chart."""
        chart = self.admin_site.admin_view(self.chart_view)
        return [path("kinds/", chart, name="redlock_history_hold_kinds"), *super().get_urls()]

    def chart_view(self, request: HttpRequest) -> HttpResponse:
        """Show how long locks of each kind are held and waited for."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        found = kinds()
        longest = max((max(kind.hold[1], kind.wait[1]) for kind in found), default=0.0) or 1.0
        rows = [(kind, list(_bars(kind, longest)), list(kind.suggestions)) for kind in found]
        request.current_app = self.admin_site.name
        context = {**self.admin_site.each_context(request), "opts": Hold._meta, "rows": rows}
        context["title"] = gettext("Kinds of locks")
        return TemplateResponse(request, "admin/redlock_history/hold/kinds.html", context)


def _bars(kind: Any, longest: float) -> list[tuple[str, str, str]]:
    """Return the bars of one kind: what it is, its length in percent, and the number."""
    figures = ((gettext("held"), kind.hold[1]), (gettext("waited"), kind.wait[1]))
    return [(what, f"{100 * seconds / longest:.1f}", f"{seconds:.2f} s") for what, seconds in figures]
