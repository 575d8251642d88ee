"""
The admin page *Held locks*: a change list over the nodes instead of a table.

Only what a change list takes from its database is replaced; columns, filters, search, sorting, pages and actions
are Django's. Its templates are extended and never copied, because they differ from release to release.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import helpers
from django.contrib.admin.models import DELETION, LogEntry
from django.contrib.admin.options import IS_POPUP_VAR
from django.contrib.admin.views.main import ALL_VAR, ORDER_VAR, SEARCH_VAR, ChangeList, ChangeListSearchForm
from django.contrib.contenttypes.models import ContentType
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.forms.widgets import Script
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.template.response import TemplateResponse
from django.urls import URLPattern, path
from django.utils.formats import date_format
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import gettext, ngettext
from django.utils.translation import gettext_lazy as _

from .conf import InvalidRedlockError
from .handler import locks
from .inventory import Snapshot, State, find_locks, force_release, held_locks, printable
from .models import HeldLock, parse_key

if TYPE_CHECKING:
    AnyModelAdmin = admin.ModelAdmin[HeldLock]
else:
    AnyModelAdmin = object

MAX_SEARCH = 200  # characters
MAX_REASON = 200  # characters
MAX_RELEASE = 20  # locks in one go: what one can read on one page
REFRESH = 5  # seconds
DASH = "\N{EN DASH}"
FOREIGN = "other"  # the kind of a holder that did not use this library

KINDS = [
    ("task", _("task")),
    ("view", _("view")),
    ("model", _("model")),
    ("command", _("command")),
    ("manual", _("other code")),
    (FOREIGN, _("another program")),
]


@dataclass(frozen=True, slots=True)
class Banner:
    """
    What the page says of one alias.

    Args:
        alias: The alias in ``REDLOCK``.
        snapshot: Its nodes and locks; None if its settings cannot be used.
        problem: Why not.
    """

    alias: str
    snapshot: Snapshot | None
    problem: str = ""

    @property
    def level(self) -> str:
        """How bad it is, as one of the admin's classes of messages."""
        if self.snapshot is None or not self.snapshot.has_quorum:
            return "error"
        return "warning" if self.snapshot.trouble or not self.snapshot.complete else "success"


class HeldLocks(list[HeldLock]):
    """A list of locks with the little of a queryset that the admin asks of it."""

    def filter(self, *, pk__in: Iterable[str]) -> "HeldLocks":
        """Return those that were selected on the page."""
        chosen = set(pk__in)
        return HeldLocks(row for row in self if row.pk in chosen)

    def matching(self, condition: Callable[[HeldLock], bool]) -> "HeldLocks":
        """Return those that meet a condition."""
        return HeldLocks(row for row in self if condition(row))


class _Filter(admin.SimpleListFilter):
    """A filter over a list; a value that is not offered does not filter."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return the locks that match."""
        value = self.value()
        if value not in dict(self.lookup_choices):
            return queryset
        return queryset.matching(lambda row: self.value_of(row) == value)

    def value_of(self, row: HeldLock) -> str:
        """Return what the filter compares."""
        raise NotImplementedError


class AliasFilter(_Filter):
    """By alias, if there are several."""

    title = _("alias")
    parameter_name = "using"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the aliases."""
        names = _aliases()
        return [(name, name) for name in names] if len(names) > 1 else []

    def value_of(self, row: HeldLock) -> str:
        """Return the lock's alias."""
        return row.alias


class StateFilter(_Filter):
    """By state."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the states."""
        return [(state.value, str(state.label)) for state in State]

    def value_of(self, row: HeldLock) -> str:
        """Return the lock's state."""
        return row.state


class KindFilter(_Filter):
    """By what holds the lock."""

    title = _("holder")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the kinds of holders."""
        return [(kind, str(label)) for kind, label in KINDS]

    def value_of(self, row: HeldLock) -> str:
        """Return the kind of the lock's holder."""
        return row.lock.owner.kind if row.lock.owner else FOREIGN


FILTERS = (AliasFilter, StateFilter, KindFilter)


class LockSearchForm(ChangeListSearchForm):
    """A search whose words every link of the page can carry."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields = {SEARCH_VAR: forms.CharField(required=False, strip=False, max_length=MAX_SEARCH)}


class HeldLockChangeList(ChangeList):
    """A change list whose rows come from the nodes: one answer per page, never a query."""

    search_form_class = LockSearchForm

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Return the locks that match the filters and the search, in the order asked for."""
        self._forget_strange_parameters()
        (self.filter_specs, self.has_filters, _rest, _many, self.has_active_filters) = self.get_filters(request)
        self.clear_all_filters_qs = self.get_query_string(remove=list(self.get_filters_params()))
        if not hasattr(self, "banners"):
            self.banners = list(_banners(request.GET.get(AliasFilter.parameter_name)))
        rows = HeldLocks(
            HeldLock.of(lock) for banner in self.banners if banner.snapshot for lock in banner.snapshot.locks
        )
        for spec in self.filter_specs:
            rows = spec.queryset(request, rows)  # type: ignore[assignment, arg-type]  # a list, not a queryset
        return self._in_order(rows.matching(self._found))

    def get_results(self, request: HttpRequest) -> None:
        """Cut one page out of the locks; a page that does not exist is the nearest one that does."""
        paginator = self.model_admin.get_paginator(request, self.queryset, self.list_per_page)
        page = paginator.get_page(self.page_num)
        self.page_num = page.number
        self.result_count = self.full_result_count = paginator.count
        self.show_full_result_count = False
        self.can_show_all = self.result_count <= self.list_max_show_all
        self.multi_page = self.result_count > self.list_per_page
        everything = self.show_all and self.can_show_all
        self.result_list = self.queryset if everything else page.object_list
        self.show_admin_actions = bool(self.result_list)
        self.paginator = paginator

    def _forget_strange_parameters(self) -> None:
        """Drop what this list does not know; Django would look for fields of these names."""
        known = {spec.parameter_name for spec in FILTERS}
        known |= {ORDER_VAR, ALL_VAR, IS_POPUP_VAR} | ({SEARCH_VAR} if self.query else set())
        self.filter_params = {name: values for name, values in self.filter_params.items() if name in known}
        self.params = {name: value for name, value in self.params.items() if name in known}

    def _found(self, row: HeldLock) -> bool:
        text = f"{row.name} {row.holder}".casefold()
        return all(word in text for word in self.query.casefold().split())

    def _in_order(self, rows: HeldLocks) -> HeldLocks:
        for column, direction in reversed(self.get_ordering_field_columns().items()):
            if column < len(self.list_display):
                rows = _sorted(rows, self.get_ordering_field(self.list_display[column]), direction == "desc")
        return rows


def _sorted(rows: HeldLocks, field: Any, descending: bool) -> HeldLocks:
    """Return *rows* by a field of the model; what is not known comes last, in either direction."""
    if not isinstance(field, str):
        return rows
    known = rows.matching(lambda row: getattr(row, field) is not None)
    known.sort(key=lambda row: getattr(row, field), reverse=descending)
    return HeldLocks([*known, *rows.matching(lambda row: getattr(row, field) is None)])


class HeldLockAdminMixin(AnyModelAdmin):
    """The page, for any base class: ``class Locks(HeldLockAdminMixin, unfold.admin.ModelAdmin)``."""

    actions = ("release",)
    list_display = ("lock_name", "lock_state", "time_left", "votes_shown", "held_by", "held_since", "fence")
    list_display_links = None
    list_filter = FILTERS
    list_per_page = 50
    ordering = ("remaining",)
    search_fields = ("name", "holder")
    search_help_text = _("Words of the lock's name or its holder.")
    show_facets = admin.ShowFacets.NEVER

    class Media:
        css = {"all": ["django_redlock/held_locks.css"]}
        js = [Script("django_redlock/held_locks.js", defer=True)]

    # Who may do what

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
        """Return whether the user may take a lock away from its holder."""
        return request.user.has_perm("redlock.release_heldlock")

    # Pages

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list over the nodes."""
        return HeldLockChangeList

    def get_list_display(self, request: HttpRequest) -> tuple[str, ...]:
        """Return the columns: with the alias if there are several."""
        name, *rest = self.list_display
        return (name, "alias", *rest) if len(_aliases()) > 1 else self.list_display

    def get_urls(self) -> list[URLPattern]:
        """Add what the page asks every few seconds."""
        live = self.admin_site.admin_view(self.live_view)
        return [path("live/", live, name="redlock_heldlock_live"), *super().get_urls()]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list."""
        context = {"title": gettext("Held locks"), "refresh": REFRESH, **(extra_context or {})}
        return super().changelist_view(request, context)

    def live_view(self, request: HttpRequest) -> HttpResponse:
        """Return the same rows as the list with the same query string, and the nodes, as JSON with HTML in it."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        cl = self.get_changelist_instance(request)
        cl.formset = None  # before Django 6.1 this is left to changelist_view
        context = {"cl": cl, "opts": cl.opts}
        parts = {part: render_to_string(f"admin/redlock/heldlock/{part}.html", context) for part in ("nodes", "rows")}
        return JsonResponse({"version": 1, "count": cl.result_count, **parts})

    # Columns

    @admin.display(description=_("Lock"), ordering="name")
    def lock_name(self, row: HeldLock) -> SafeString:
        """Return the name, and for the script the key by which it finds the row again."""
        identity = f"{row.alias} {row.lock.slug}"
        return format_html('<span class="redlock-name" data-lock="{}">{}</span>', identity, breakable(row.name))

    @admin.display(description=_("Alias"), ordering="alias")
    def alias(self, row: HeldLock) -> str:
        """Return the alias."""
        return row.alias

    @admin.display(description=_("State"), ordering="state")
    def lock_state(self, row: HeldLock) -> SafeString:
        """Return the state in words."""
        return format_html('<span class="redlock-state redlock-{}">{}</span>', row.state, row.lock.state.label)

    @admin.display(description=_("Remaining"), ordering="remaining")
    def time_left(self, row: HeldLock) -> str:
        """Return the time left, for people and for the script."""
        if row.remaining is None:
            return DASH if row.state != State.NO_EXPIRY else gettext("never ends")
        bar = format_html(
            '<progress max="{}" value="{}" aria-hidden="true"></progress>',
            f"{max(row.lock.ttl or row.remaining, 0.1):.1f}",
            f"{row.remaining:.1f}",
        )
        return format_html(
            '<span class="redlock-left" data-left="{}"><time datetime="PT{}S">{}</time> {}</span>',
            f"{row.remaining:.1f}",
            int(row.remaining),
            clock(row.remaining),
            bar,
        )

    @admin.display(description=_("Votes"), ordering="votes")
    def votes_shown(self, row: HeldLock) -> SafeString:
        """Return how many nodes have this holder, with a dot for each node and the same in words."""
        lock = row.lock
        having = [view.fingerprint == lock.fingerprint for view in lock.views]
        dots = format_html_join("", '<i class="redlock-{}"></i>', (("yes" if has else "no",) for has in having))
        lacking = ", ".join(view.node for view, has in zip(lock.views, having, strict=True) if not has)
        words = gettext("%(votes)d of %(nodes)d nodes") % {"votes": lock.votes, "nodes": lock.nodes}
        words += "; " + gettext("without %(nodes)s") % {"nodes": lacking} if lacking else ""
        return format_html(
            '<span class="redlock-votes" title="{words}">'
            '<span aria-hidden="true">{votes}/{nodes} <span>{dots}</span></span>'
            '<span class="visually-hidden">{words}</span></span>',
            words=words,
            votes=lock.votes,
            nodes=lock.nodes,
            dots=dots,
        )

    @admin.display(description=_("Holder"), ordering="holder")
    def held_by(self, row: HeldLock) -> str:
        """Return who holds it: what, then where."""
        owner = row.lock.owner
        if owner is None:
            return gettext("another program")
        kind = dict(KINDS).get(owner.kind, owner.kind)
        what = " ".join(filter(None, (owner.label, owner.ref))) or str(kind)
        where = f"{owner.host}:{owner.pid}" if owner.host else ""
        detail = " · ".join(filter(None, (str(kind) if what != kind else "", printable(where))))
        return format_html(
            '<span class="redlock-what">{}</span> <span class="redlock-where">{}</span>',
            breakable(printable(what)),
            detail,
        )

    @admin.display(description=_("Since"), ordering="since")
    def held_since(self, row: HeldLock) -> str:
        """Return when it was taken: the time if that was today."""
        return moment(row.since)

    @admin.display(description=_("Fencing token"), ordering="fencing_token")
    def fence(self, row: HeldLock) -> str:
        """Return the number of this hold."""
        return str(row.fencing_token) if row.fencing_token else DASH

    # Release

    @admin.action(permissions=["release"], description=_("Release the selected locks"))
    def release(self, request: HttpRequest, queryset: QuerySet[HeldLock]) -> HttpResponse | None:
        """
        Ask for confirmation, then release exactly the holders that were on the page.

        What was posted decides, not *queryset*: it says which holder of a lock the user saw, and "select all" would
        add locks that nobody saw.
        """
        keys = list(dict.fromkeys(request.POST.getlist(helpers.ACTION_CHECKBOX_NAME)))
        refusal = _refusal(request, keys)
        if refusal:
            self._say(request, messages.ERROR, refusal)
            return None
        seen = list(_look_again(keys))
        if request.POST.get("confirmed") != "yes":
            return self._confirmation(request, seen)
        for choice in seen:
            self._release_one(request, choice)
        return None

    def _confirmation(self, request: HttpRequest, seen: "list[Choice]") -> HttpResponse:
        count = sum(choice.unchanged for choice in seen)
        context = {
            **self.admin_site.each_context(request),
            "title": ngettext("Release a lock", "Release %(count)d locks", count) % {"count": count},
            "choices": seen,
            "count": count,
            "max_reason": MAX_REASON,
            "checkbox": helpers.ACTION_CHECKBOX_NAME,
            "opts": HeldLock._meta,
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, "admin/redlock/heldlock/release.html", context)

    def _release_one(self, request: HttpRequest, choice: "Choice") -> None:
        outcome = choice.problem or force_release("", choice.fingerprint, choice.alias, slug=choice.slug)
        level, text = OUTCOMES[outcome]
        self._say(request, level, text % {"lock": choice.name})
        if outcome in ("released", "unknown"):
            reason = printable(request.POST.get("reason", "").strip()[:MAX_REASON])
            _audit(request, choice, outcome, reason)

    def _say(self, request: HttpRequest, level: int, text: str) -> None:
        self.message_user(request, text, level)


@admin.register(HeldLock)
class HeldLockAdmin(HeldLockAdminMixin, admin.ModelAdmin):  # type: ignore[type-arg]
    """The page in Django's own admin."""


@dataclass(frozen=True, slots=True)
class Choice:
    """
    One lock that somebody chose to release, as it is now.

    Args:
        key: What was chosen.
        fingerprint: The holder that was on the page.
        alias: The lock's alias.
        slug: The lock's slug.
        row: The lock as it is now; None if it is free or cannot be seen.
        problem: Why it cannot be released: ``changed``, ``gone``, ``unknown``; empty if it can.
    """

    key: str
    fingerprint: str
    alias: str
    slug: str
    row: HeldLock | None
    problem: str

    @property
    def unchanged(self) -> bool:
        """Whether the holder is still the one that was on the page."""
        return not self.problem

    @property
    def name(self) -> str:
        """The lock's name."""
        return self.row.name if self.row else printable(self.slug.removeprefix("{").removesuffix("}"))

    @property
    def since(self) -> str:
        """When the holder took it."""
        return moment(self.row.since if self.row else None)

    @property
    def explanation(self) -> str:
        """Why it cannot be released."""
        return OUTCOMES[self.problem][1] % {"lock": self.name} if self.problem else ""


OUTCOMES: dict[str, tuple[int, Any]] = {
    "released": (messages.SUCCESS, _("“%(lock)s” was released.")),
    "changed": (
        messages.ERROR,
        _("“%(lock)s” was not released: it changed hands since you looked. Look again and decide anew."),
    ),
    "gone": (messages.INFO, _("“%(lock)s” was not released: nobody holds it any more.")),
    "unknown": (
        messages.WARNING,
        _("“%(lock)s”: too few nodes answered to tell whether it is free. Look again, then repeat."),
    ),
}


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def breakable(text: str) -> SafeString:
    """Return *text* as HTML that may be broken where its parts end."""
    return format_html_join(SafeString("<wbr>"), "{}", ((part,) for part in re.split(r"(?<=[._:/-])", text)))


def moment(when: datetime | None) -> str:
    """Return a point in time for people: the time of day if it was today."""
    if when is None:
        return DASH
    local = localtime(when)
    today = local.date() == datetime.now(local.tzinfo).date()
    shown = local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")
    full = date_format(local, "DATETIME_FORMAT")
    return format_html('<time datetime="{}" title="{}">{}</time>', local.isoformat("T", "seconds"), full, shown)


def _aliases() -> list[str]:
    try:
        return list(locks)
    except InvalidRedlockError:
        return []


def _banners(chosen: str | None) -> Iterator[Banner]:
    """Yield one banner for each alias, or only for the one that is chosen; settings that fail are shown, not raised."""
    try:
        names = list(locks)
    except InvalidRedlockError as error:
        yield Banner("", None, str(error))
        return
    for alias in [chosen] if chosen in names else names:
        try:
            yield Banner(alias, held_locks(alias))
        except InvalidRedlockError as error:
            yield Banner(alias, None, str(error))


def _refusal(request: HttpRequest, keys: list[str]) -> str:
    """Return why so much cannot be released at once, or nothing."""
    if request.POST.get("select_across", "0") not in ("", "0"):
        return gettext("Nothing was released: “select all” includes locks that you have not seen. Tick them.")
    if len(keys) > MAX_RELEASE:
        return gettext("Nothing was released: select at most %(max)d locks at a time.") % {"max": MAX_RELEASE}
    return ""


def _look_again(keys: Iterable[str]) -> Iterator[Choice]:
    """Yield what was chosen as it is now; each alias is asked once."""
    parsed: dict[str, list[tuple[str, str, str]]] = {}
    for key in keys:
        try:
            fingerprint, alias, slug = parse_key(key)
        except ValueError:
            continue  # not from our page
        if alias in _aliases():
            parsed.setdefault(alias, []).append((key, fingerprint, slug))
    for alias, chosen in parsed.items():
        yield from _choices(alias, chosen)


def _choices(alias: str, chosen: list[tuple[str, str, str]]) -> Iterator[Choice]:
    try:
        snapshot = find_locks([slug for _key, _fingerprint, slug in chosen], alias)
    except InvalidRedlockError:
        return
    found = {lock.slug: lock for lock in snapshot.locks}
    for key, fingerprint, slug in chosen:
        lock = found.get(slug)
        row = HeldLock.of(lock) if lock else None
        if lock is None:
            problem = "gone" if snapshot.has_quorum else "unknown"
        else:
            problem = "" if lock.fingerprint == fingerprint else "changed"
        yield Choice(key, fingerprint, alias, slug, row, problem)


def _audit(request: HttpRequest, choice: Choice, outcome: str, reason: str) -> None:
    """Write who released what, from whom and why. The admin's helpers for it differ from release to release."""
    row = choice.row
    left = f"{row.remaining:.1f} s left" if row and row.remaining is not None else "no time known"
    holder = row.holder or "another program" if row else "unknown"
    parts = [
        f"Released by force ({outcome}).",
        f"Alias {choice.alias}, holder {holder}, fingerprint {choice.fingerprint}, {left}.",
    ]
    LogEntry.objects.create(
        user_id=int(request.user.pk or 0),
        content_type=ContentType.objects.get_for_model(HeldLock, for_concrete_model=False),
        object_id=choice.name,
        object_repr=choice.name[:200],
        action_flag=DELETION,
        change_message=" ".join([*parts, f"Reason: {reason}"] if reason else parts),
    )
