"""
The admin page *Held locks*: a change list over the nodes instead of a table, a page for each lock, and the nodes.

Its templates extend the admin's instead of copying them, because these differ between releases of Django.
"""

from typing import Any

import django
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.forms.widgets import Script
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..inventory import printable
from ..models import HeldLock
from .changelist import HeldLockChangeList
from .pages import (
    DONE,
    MAX_REASON,
    MAX_RELEASE,
    MORE_TIME,
    OUTCOMES,
    Choice,
    audit,
    can_revoke,
    carry_out,
    detail,
    look_again,
    panels,
    problem_with,
    revoke_task,
    seconds_wanted,
)
from .rows import FILTERS, Columns, clock, known_aliases

REFRESH = 5  # seconds

__all__ = ["MAX_RELEASE", "HeldLockAdmin", "HeldLockAdminMixin", "clock"]


class HeldLockAdminMixin(Columns):
    """The admin page, for any base class: ``class Locks(HeldLockAdminMixin, unfold.admin.ModelAdmin)``."""

    actions = ("stop", "release", "extend")
    list_display = (
        *("lock_name", "lock_state", "held_by", "held_time", "waiting_count"),
        *("time_left", "votes_shown"),
    )
    list_display_links = None
    list_filter = FILTERS
    list_per_page = 50
    ordering = ()  # locks in trouble come first, then those that have been held for longest
    search_fields = ("name", "holder")
    search_help_text = _("Words of the lock's name or its holder.")
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css = {"all": ["django_redlock/held_locks.css"]}
        js = [Script("django_redlock/held_locks.js", defer=True)]

    # Permissions

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: locks are taken in code."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: there is nothing to edit."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return False: a lock is released, with a permission of its own."""
        return False

    def has_release_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may take a lock away from its holder, ask it to stop, or give it more time."""
        return request.user.has_perm("redlock.release_heldlock")

    # Pages

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list over the nodes."""
        return HeldLockChangeList

    def get_list_display(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the columns, including the alias if there are several."""
        name, *rest = self.list_display
        return (name, "alias_name", *rest) if len(known_aliases()) > 1 else self.list_display

    def get_urls(self) -> list[URLPattern]:
        """Add the URLs of the live rows, the page of a lock, and the nodes."""
        wrap = self.admin_site.admin_view
        return [
            path("live/", wrap(self.live_view), name="redlock_heldlock_live"),
            path("lock/", wrap(self.detail_view), name="redlock_heldlock_detail"),
            path("nodes/", wrap(self.nodes_view), name="redlock_heldlock_nodes"),
            *super().get_urls(),
        ]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list."""
        context = {"title": gettext("Held locks"), "refresh": REFRESH, **(extra_context or {})}
        return super().changelist_view(request, context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Redirect from an entry of the admin's log, which has a name, to the locks of that name."""
        listing = reverse("admin:redlock_heldlock_changelist", current_app=self.admin_site.name)
        return HttpResponseRedirect(f"{listing}?{urlencode({SEARCH_VAR: unquote(object_id)})}")

    def live_view(self, request: HttpRequest) -> HttpResponse:
        """Return the rows of the list with the same query string, and the nodes, as JSON that contains HTML."""
        self._check_view(request)
        cl = self.get_changelist_instance(request)
        cl.formset = None  # before Django 6.1, changelist_view sets this
        context = {"cl": cl, "opts": cl.opts}
        parts = {part: render_to_string(f"admin/redlock/heldlock/{part}.html", context) for part in ("nodes", "rows")}
        about = {"count": int(cl.result_count), "counted": cl.counted, "unknown": cl.unknown}  # type: ignore[attr-defined]
        return JsonResponse({"version": 2, **about, **parts})

    def detail_view(self, request: HttpRequest) -> HttpResponse:
        """Show one lock: its record on each node, its holder, its waiters, and the actions on it."""
        self._check_view(request)
        about = detail(request.GET.get("key", ""))
        return self._page(request, "detail.html", title=about["name"], refresh=REFRESH, **about)

    def nodes_view(self, request: HttpRequest) -> HttpResponse:
        """Show the nodes of every alias."""
        self._check_view(request)
        return self._page(request, "panel.html", title=gettext("Nodes"), refresh=REFRESH, panels=list(panels()))

    def _check_view(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def _page(self, request: HttpRequest, template: str, **context: Any) -> HttpResponse:
        request.current_app = self.admin_site.name
        shared = {
            **self.admin_site.each_context(request),
            "opts": HeldLock._meta,
            "checkbox": helpers.ACTION_CHECKBOX_NAME,
            "may_release": self.has_release_permission(request),
            "breadcrumb_list": django.VERSION >= (6, 1),  # in earlier versions they were a <div>
        }
        return TemplateResponse(request, f"admin/redlock/heldlock/{template}", {**shared, **context})

    # Actions

    @admin.action(permissions=["release"], description=_("Ask the holders of the selected locks to stop"))
    def stop(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> HttpResponse | None:
        """Ask for confirmation, then ask exactly the holders that were on the page."""
        return self._act(request, "stop")

    @admin.action(permissions=["release"], description=_("Release the selected locks"))
    def release(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> HttpResponse | None:
        """
        Ask for confirmation, then release exactly the holders that were on the page.

        The posted keys decide, not *queryset*: they identify the holder that the user saw, and "select all" would add
        locks that the user did not see.
        """
        return self._act(request, "release")

    @admin.action(permissions=["release"], description=_("Keep others out of the selected locks for longer"))
    def extend(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> HttpResponse | None:
        """Ask for confirmation and a duration, then extend exactly the holds that were on the page."""
        return self._act(request, "extend")

    def _act(self, request: HttpRequest, action: str) -> HttpResponse | None:
        keys = list(dict.fromkeys(request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)))
        problem = problem_with(request, keys)
        if problem:
            self._show(request, messages.ERROR, problem)
            return None
        seen = list(look_again(keys, action))
        if request.POST.get("confirmed") != "yes":
            return self._confirmation(request, action, seen)
        seconds = 0.0
        if action == "extend":
            seconds, problem = seconds_wanted(request.POST.get("seconds", ""), seen)
        if problem:
            self._show(request, messages.ERROR, problem)
            return None
        done = [choice for choice in seen if self._act_on(request, action, choice, seconds)]
        if request.POST.get("revoke") == "yes" and action != "extend":
            for choice in done:
                self._revoke(request, choice)
        return None

    def _confirmation(self, request: HttpRequest, action: str, seen: list[Choice]) -> HttpResponse:
        count = sum(choice.possible for choice in seen)
        titles = {
            "release": ngettext("Release a lock", "Release %(count)d locks", count),
            "stop": ngettext("Ask a holder to stop", "Ask %(count)d holders to stop", count),
            "extend": ngettext("More time for a lock", "More time for %(count)d locks", count),
        }
        return self._page(
            request,
            "release.html",
            title=titles[action] % {"count": count} if count else gettext("Nothing can be done"),
            action=action,
            choices=seen,
            aliases=known_aliases(),
            count=count,
            max_reason=MAX_REASON,
            more_time=int(MORE_TIME),
            can_stop=any(choice.can_be_asked for choice in seen),
            can_revoke=action != "extend" and can_revoke(seen),
        )

    def _act_on(self, request: HttpRequest, action: str, choice: Choice, seconds: float) -> bool:
        """Carry out an action, report its result and log it; return whether anything was done."""
        reason = printable(request.POST.get("reason", "").strip()[:MAX_REASON])
        outcome = carry_out(action, choice, seconds, reason)
        level, text = OUTCOMES[outcome]
        self._show(request, level, text % {"lock": choice.name})
        done = not choice.problem and outcome in DONE
        if done:
            audit(request, action, choice, outcome, reason)
        return done

    def _revoke(self, request: HttpRequest, choice: Choice) -> None:
        """Revoke the task that holds a lock. This comes last, because the broker may be slow."""
        if not choice.task:
            return
        problem = revoke_task(choice)
        values = {"lock": choice.name, "why": problem}
        if problem:
            text = gettext("“%(lock)s”: the workers could not be told to revoke its task: %(why)s.") % values
            self._show(request, messages.WARNING, text)
        outcome = f"not revoked: {problem}" if problem else "revoked"
        audit(request, "revoke", choice, outcome, f"task {printable(choice.task)}")

    def _show(self, request: HttpRequest, level: int, text: str) -> None:
        self.message_user(request, text, level)


@admin.register(HeldLock)
class HeldLockAdmin(HeldLockAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """The page in Django's own admin."""
