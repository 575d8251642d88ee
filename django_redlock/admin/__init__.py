"""
The admin page *Held locks*: a change list over the nodes instead of a table, a page for each lock, and the nodes.

Its templates extend the admin's instead of copying them, because these differ between releases of Django.
"""

import logging
import re
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.utils import unquote
from django.contrib.admin.views.main import SEARCH_VAR, ChangeList
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.forms.widgets import Script
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.template.loader import render_to_string
from django.urls import URLPattern, path, reverse
from django.utils.html import escape, format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.translation import get_language, gettext, ngettext
from django.utils.translation import gettext_lazy as _

from ..core.names import named
from ..exceptions import printable
from ..inventory import ask_to_stop, force_release
from ..inventory.actions import MAX_RELEASE, still_held
from ..inventory.model import middle
from ..models import HeldLock
from .base import ReadOnlyAdmin, column
from .changelist import FILTERS, HeldLockChangeList
from .pages import (
    DONE,
    MAX_ADDRESS,
    OUTCOMES,
    Choice,
    detail,
    look_again,
    panels,
)
from .rows import (
    LONGEST,
    audit,
    breakable,
    copy_button,
    countdown,
    held_for,
    holder,
    known_aliases,
    state,
    votes,
    waiting,
)

REFRESH = 5  # seconds
POLL = "X-Redlock-Poll"  # the header of requests that a page makes by itself, as held_locks.js does
MAX_REASON = 200  # characters
log = logging.getLogger("django_redlock")

KEY, NAME = "\ue000", "\ue001"  # where the tickbox of a row has the row's key and its name


class HeldLockAdminMixin(ReadOnlyAdmin):
    """The admin page, for any base class: ``class Locks(HeldLockAdminMixin, unfold.admin.ModelAdmin)``."""

    actions = ("stop", "release")
    list_display = (
        *("lock_name", "lock_state", "held_by", "held_time", "waiting_count"),
        *("time_left", "votes_shown"),
    )
    list_display_links = None
    list_filter = FILTERS
    list_per_page = 50
    ordering = ()  # locks that people wait for come first, then those in trouble, then the longest holds
    search_fields = ("name", "holder")
    search_help_text = _("Words of the lock's name or its holder.")
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css = {"all": ["django_redlock/held_locks.css"]}
        js = [Script("django_redlock/held_locks.js", defer=True)]

    # Columns

    def action_checkbox(self, obj: HeldLock) -> SafeString:
        """Return the tickbox of a row: that of Django or of the theme, whose template is rendered only once."""
        box = tickbox(super().action_checkbox, get_language())
        text = {KEY: escape(obj.pk), NAME: escape(str(obj))}
        return SafeString(re.sub(f"[{KEY}{NAME}]", lambda found: text[found[0]], box))

    @admin.display(description=_("Lock"), ordering="name")
    def lock_name(self, row: HeldLock) -> SafeString:
        """Return the name, with the key by which the script finds the row."""
        identity = row.pk.partition("/")[2]  # without its holder
        page = reverse("admin:redlock_heldlock_detail", current_app=self.admin_site.name)
        address = f"{page}?{urlencode({'key': row.pk})}"
        text = breakable(middle(row.name, LONGEST))
        if len(address) > MAX_ADDRESS:
            return format_html('<span class="redlock-name" data-lock="{}">{}</span>', identity, text)
        return format_html(
            '<a class="redlock-name" data-lock="{}" href="{}" title="{}">{}</a>{}',
            *(identity, address, row.name, text, copy_button(row.name)),
        )

    lock_state = admin.display(description=_("State"), ordering="state")(lambda self, row: state(row))
    alias_name = column(_("Alias"), lambda row: row.alias, ordering="alias")
    held_by = column(_("Holder"), lambda row: holder(row.lock), ordering="holder")
    held_time = column(_("Held for"), held_for, ordering="since")
    waiting_count = column(_("Waiting"), lambda row: waiting(row.lock))
    time_left = column(_("Remaining"), lambda row: countdown(row.lock), ordering="remaining")
    votes_shown = column(_("Votes"), lambda row: votes(row.lock), ordering="votes")

    # Permissions

    def has_release_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may take a lock away from its holder, or ask it to stop."""
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
        renewed = request.session.session_key != request.COOKIES.get(settings.SESSION_COOKIE_NAME)
        # A page that asks by itself is no sign that somebody is there. If SECRET_KEY was rotated, Django has just put a
        # new session in the place of the old one.
        if POLL in request.headers and not renewed:
            request.session.save = lambda must_create=False: None  # type: ignore[method-assign]

    def _page(self, request: HttpRequest, template: str, **context: Any) -> HttpResponse:
        shared = {"checkbox": helpers.ACTION_CHECKBOX_NAME, "may_release": self.has_release_permission(request)}
        if POLL in request.headers:
            context["messages"] = ()  # the page that asks would drop them unread
        return self.page(request, f"admin/redlock/heldlock/{template}", **shared, **context)

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

    def _act(self, request: HttpRequest, action: str) -> HttpResponse | None:
        keys = list(dict.fromkeys(request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)))
        problem = ""
        if request.POST.get("select_across", "0") not in ("", "0"):
            problem = gettext("Nothing was done: “select all” includes locks that you have not seen. Tick them.")
        elif len(keys) > MAX_RELEASE:
            problem = gettext("Nothing was done: select at most %(max)d locks at a time.") % {"max": MAX_RELEASE}
        if problem:
            self.message_user(request, problem, messages.ERROR)
            return None
        seen = list(look_again(keys, action))
        if request.POST.get("confirmed") != "yes":
            return self._confirmation(request, action, seen)
        reason = printable(request.POST.get("reason", "").strip()[:MAX_REASON])
        done = [choice for choice in seen if self._act_on(request, action, choice, reason)]
        if action == "release":
            self._tell_what_is_left(request, done)
        if request.POST.get("revoke") == "yes":
            for choice in done:  # last, because the broker may be slow
                self._revoke(request, choice)
        return None

    def _confirmation(self, request: HttpRequest, action: str, seen: list[Choice]) -> HttpResponse:
        count = sum(not choice.problem for choice in seen)
        titles = {
            "release": ngettext("Release a lock", "Release %(count)d locks", count),
            "stop": ngettext("Ask a holder to stop", "Ask %(count)d holders to stop", count),
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
            can_stop=any(choice.can_be_asked for choice in seen),
            can_revoke=any(not choice.problem and choice.task for choice in seen) and find_spec("celery") is not None,
        )

    def _act_on(self, request: HttpRequest, action: str, choice: Choice, reason: str) -> bool:
        """Carry out an action, report its result and log it; return whether anything was done."""
        if choice.problem:
            outcome = choice.problem
        elif action == "stop":
            outcome = ask_to_stop("", choice.fingerprint, choice.alias, slug=choice.slug)
        else:
            outcome = force_release("", choice.fingerprint, choice.alias, slug=choice.slug, reason=reason)
        level, text = OUTCOMES[outcome]
        self.message_user(request, text % {"lock": choice.name}, level)
        done = not choice.problem and outcome in DONE
        if done:
            audit(request, action, choice.row, (choice.slug, choice.alias, choice.fingerprint), outcome, reason)
        return done

    def _tell_what_is_left(self, request: HttpRequest, released: list[Choice]) -> None:
        """Say which other names the holders still have whose locks were released."""
        for alias in dict.fromkeys(choice.alias for choice in released):
            first = {choice.fingerprint: choice for choice in reversed(released) if choice.alias == alias}
            for owner, names in still_held(first, alias).items():
                text = gettext(
                    "The holder of “%(lock)s” still has %(names)s, until its lease or its minimum hold ends."
                )
                left = {"lock": first[owner].name, "names": printable(named(names))}
                self.message_user(request, text % left, messages.WARNING)

    def _revoke(self, request: HttpRequest, choice: Choice) -> None:
        """Tell Celery's workers to end the task that holds a lock, and log that."""
        if not choice.task:
            return
        from ..celery.handle import revoke  # only here: Celery is optional

        outcome = "revoked"
        try:
            revoke(choice.task, terminate=True)
        except Exception as error:  # from any broker's client, or from its settings
            log.warning("revoking the task that holds a lock failed", exc_info=True)
            outcome = f"not revoked: {type(error).__name__}"
            text = gettext("“%(lock)s”: the workers could not be told to revoke its task: %(why)s.")
            why = {"lock": choice.name, "why": type(error).__name__}
            self.message_user(request, text % why, messages.WARNING)
        key = (choice.slug, choice.alias, choice.fingerprint)
        audit(request, "revoke", choice.row, key, outcome, f"task {printable(choice.task)}")


@lru_cache(maxsize=64)
def tickbox(render: Callable[[HeldLock], str], language: str | None) -> str:
    """Return the tickbox of any row in a language. Rendering it takes as long as all other cells of a row."""
    return render(HeldLock(key=KEY, name=NAME))


@admin.register(HeldLock)
class HeldLockAdmin(HeldLockAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """The page in Django's own admin."""
