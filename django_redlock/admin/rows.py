"""
The columns of the list, for people and for the script that counts the time down (internal).
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import escape, format_html
from django.utils.http import urlencode
from django.utils.safestring import SafeString
from django.utils.timezone import localtime
from django.utils.translation import get_language, gettext
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..core.names import SHARED_KIND, is_cut
from ..engine.manager import LockManager
from ..handler import locks
from ..inventory import HeldLock as Held
from ..inventory import Snapshot, State, duration, find_locks, held_locks, holder_of, middle, printable
from ..inventory.model import leaders, meaning_of
from ..models import HeldLock, key_of

DASH = "\N{EN DASH}"
LONGEST = 80  # characters of a name in the list
MAX_ADDRESS = 4000  # characters; Gunicorn accepts a request line of 4,094, other servers about 8,000
DOTS = {True: '<i class="redlock-yes"></i>', False: '<i class="redlock-no"></i>'}
PARTS_END = re.compile(r"(?<=[._:/-])(?!$)")
KEY, NAME = "\ue000", "\ue001"  # where the tickbox of a row has the row's key and its name


if TYPE_CHECKING:
    AnyModelAdmin = admin.ModelAdmin[HeldLock]
else:
    AnyModelAdmin = object


class Columns(AnyModelAdmin):
    """The columns, for a :class:`~django.contrib.admin.ModelAdmin`."""

    def action_checkbox(self, row: HeldLock) -> SafeString:
        """Return the tickbox of a row: that of Django or of the theme, whose template is rendered only once."""
        box = tickbox(super().action_checkbox, get_language())
        text = {KEY: escape(row.pk), NAME: escape(str(row))}
        return SafeString(re.sub(f"[{KEY}{NAME}]", lambda found: text[found[0]], box))

    @admin.display(description=_("Lock"), ordering="name")
    def lock_name(self, row: HeldLock) -> SafeString:
        """Return the name, with the key by which the script finds the row."""
        identity = row.pk.partition("/")[2]  # without its holder
        page = reverse("admin:redlock_heldlock_detail", current_app=self.admin_site.name)
        address = f"{page}?{urlencode({'key': row.pk})}"
        if len(address) > MAX_ADDRESS:
            text = breakable(middle(row.name, LONGEST))
            return format_html('<span class="redlock-name" data-lock="{}">{}</span>', identity, text)
        return format_html(
            '<a class="redlock-name" data-lock="{}" href="{}" title="{}">{}</a>{}',
            identity,
            address,
            row.name,
            breakable(middle(row.name, LONGEST)),
            copy_button(row.name),
        )

    @admin.display(description=_("Alias"), ordering="alias")
    def alias_name(self, row: HeldLock) -> str:
        """Return the alias."""
        return labelled(_("Alias"), row.alias)

    @admin.display(description=_("State"), ordering="state")
    def lock_state(self, row: HeldLock) -> SafeString:
        """Return the state in words."""
        state = row.lock.state
        about = (state.value, meaning_of(row.lock), state.label)
        badge = format_html('<span class="redlock-state redlock-{}" title="{}">{}</span>', *about)
        return format_html("{} {}", badge, stopping(row.asked)) if row.asked else badge

    @admin.display(description=_("Remaining"), ordering="remaining")
    def time_left(self, row: HeldLock) -> str:
        """Return the time left, for people and for the script."""
        if row.remaining is None:
            return labelled(_("Remaining"), remaining(row.lock))
        bar = format_html(
            '<progress max="{}" value="{}" aria-hidden="true"></progress>',
            f"{max(row.lock.ttl or row.remaining, 0.1):.1f}",
            f"{row.remaining:.1f}",
        )
        left = format_html(
            '<span class="redlock-left" data-left="{}"><time datetime="PT{}S">{}</time> {}</span>',
            f"{row.remaining:.1f}",
            int(row.remaining),
            clock(row.remaining),
            bar,
        )
        return labelled(_("Remaining"), left)

    @admin.display(description=_("Votes"), ordering="votes")
    def votes_shown(self, row: HeldLock) -> SafeString:
        """Return how many nodes have this holder, with a dot for each node and the same in words."""
        lock = row.lock
        having = [view.fingerprint == lock.fingerprint for view in lock.views]
        dots = SafeString("".join([DOTS[has] for has in having]))
        lacking = ", ".join(view.node for view, has in zip(lock.views, having, strict=True) if not has)
        words = gettext("%(votes)d of %(nodes)d nodes") % {"votes": lock.votes, "nodes": lock.nodes}
        words += "; " + gettext("without %(nodes)s") % {"nodes": lacking} if lacking else ""
        votes = format_html(
            '<span class="redlock-votes" title="{words}">'
            '<span aria-hidden="true">{votes}/{nodes} <span>{dots}</span></span>'
            '<span class="visually-hidden">{words}</span></span>',
            words=words,
            votes=lock.votes,
            nodes=lock.nodes,
            dots=dots,
        )
        return labelled(_("Votes"), votes)

    @admin.display(description=_("Holder"), ordering="holder")
    def held_by(self, row: HeldLock) -> str:
        """Return the holder."""
        return labelled(_("Holder"), holder(row))

    @admin.display(description=_("Held for"), ordering="since")
    def held_time(self, row: HeldLock) -> str:
        """Return the time for which the lock has been held, which renewals do not reset, and when it was taken."""
        return labelled(_("Held for"), held_for(row))

    @admin.display(description=_("Waiting"))
    def waiting_count(self, row: HeldLock) -> str:
        """Return the number of waiters."""
        waiting = row.lock.waiting
        count = format_html('<strong class="redlock-waited">{}</strong>', waiting) if waiting else DASH
        return labelled(_("Waiting"), count)


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def remaining(lock: Held) -> str:
    """Return the time until a lock ends unless its holder extends it, in words if it never does."""
    if lock.remaining is None:
        return gettext("never ends") if lock.state == State.NO_EXPIRY else DASH
    return clock(lock.remaining)


def holder(row: HeldLock) -> str:
    """Return what the holder of a lock is, and where it runs."""
    owner = row.lock.owner
    if owner is None:
        return gettext("another program")
    if owner.kind == SHARED_KIND:
        return holder_of(row.lock)
    kind = dict(KINDS).get(owner.kind, owner.kind)
    what = " ".join(filter(None, (owner.label, owner.ref))) or str(kind)
    where = f"{owner.host}:{owner.pid}" if owner.host else ""
    detail = " · ".join(filter(None, (str(kind) if what != kind else "", where)))
    return format_html(
        '<span class="redlock-what">{}</span> <span class="redlock-where">{}</span>',
        breakable(printable(what)),
        printable(detail),
    )


def held_for(row: HeldLock, *, titled: bool = False) -> str:
    """Return the time for which a lock has been held, and since when; *titled* is the label of that moment."""
    seconds = row.lock.held_for(time.time())
    if seconds is None or row.since is None:
        return DASH
    when = moment(row.since)
    return format_html(
        '<span class="redlock-for">{}</span> <span class="redlock-where">{}</span>',
        duration(seconds),
        SafeString(escape(gettext("since %(moment)s")) % {"moment": when}) if titled else when,
    )


def stopping(asked: str) -> SafeString:
    """Return a badge with the time since the holder was asked to stop."""
    text = gettext("asked to stop %(asked)s ago") % {"asked": asked}
    return format_html('<span class="redlock-state redlock-stopping">{}</span>', text)


def copy_button(name: str) -> SafeString:
    """Return a button that copies a name which the list cuts; nothing if the nodes cut the name, too."""
    if len(name) <= LONGEST or is_cut(name):
        return SafeString("")
    return format_html(
        ' <button type="button" class="button redlock-copy" data-name="{}">'
        '{}<span class="visually-hidden"> {}</span></button>',
        name,
        gettext("Copy"),
        middle(name, LONGEST),
    )


def labelled(label: object, value: str) -> SafeString:
    """Return a cell that contains the title of its column, for screens on which a row is a card."""
    return SafeString(_title(str(label)) + (value if isinstance(value, SafeString) else escape(value)))


@lru_cache(maxsize=256)  # enough for all columns in all languages; hundreds of cells on a page share these titles
def _title(label: str) -> str:
    return format_html('<span class="redlock-label" aria-hidden="true">{}</span> ', label)


@lru_cache(maxsize=64)
def tickbox(render: Callable[[HeldLock], str], language: str | None) -> str:
    """Return the tickbox of any row in a language. Rendering it takes as long as all other cells of a row."""
    return render(HeldLock(key=KEY, name=NAME))


def breakable(text: str) -> SafeString:
    """Return *text* as HTML in which lines may break after each part."""
    return SafeString(PARTS_END.sub("<wbr>", escape(text)))  # escaping writes no separators


def moment(when: datetime | None) -> str:
    """Return a point in time for people: the time of day if it was today."""
    if when is None:
        return DASH
    local = localtime(when)
    today = local.date() == datetime.now(local.tzinfo).date()
    shown = local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")
    full = local.isoformat(" ", "seconds")
    return format_html('<time datetime="{}" title="{}">{}</time>', local.isoformat("T", "seconds"), full, shown)


FOREIGN = "other"  # the kind of a holder that another program created
SOON = 10.0  # seconds
WAITED_FOR = "yes"

KINDS = [
    ("task", _("task")),
    ("view", _("view")),
    ("model", _("model")),
    ("command", _("command")),
    ("manual", _("manual")),
    (SHARED_KIND, _("several, who share it")),
    (FOREIGN, _("another program")),
]


@dataclass(frozen=True, slots=True)
class Banner:
    """
    The data that the page shows about one alias.

    Args:
        alias: The alias in ``REDLOCK``.
        snapshot: Its nodes and locks; None if its settings cannot be used.
        problem: The error in the settings.
    """

    alias: str
    snapshot: Snapshot | None
    problem: str = ""

    @property
    def is_known(self) -> bool:
        """Whether enough nodes answered to list the held locks."""
        return self.snapshot is not None and self.snapshot.has_quorum

    @property
    def level(self) -> str:
        """The severity, as one of the admin's message classes."""
        if self.snapshot is None or not self.is_known:
            return "error"
        return "warning" if self.snapshot.trouble or not self.snapshot.complete else "success"


class HeldLocks(list[Held]):
    """
    A list of locks with those methods of a queryset that the admin uses.

    The items are locks of the inventory. Rows take longer to create, so they are only created for a page.
    """

    def filter(self, *, pk__in: Iterable[str]) -> "HeldLocks":
        """Return the locks that were selected on the page."""
        chosen = set(pk__in)
        return self.matching(lambda lock: key_of(lock.fingerprint, lock.alias, lock.slug) in chosen)

    def worst_first(self) -> "HeldLocks":
        """Return the locks, worst state first, and within a state the longest hold first."""
        return HeldLocks(sorted(self, key=lambda lock: (-lock.state.severity, lock.since or 0.0, lock.slug)))

    def matching(self, condition: Callable[[Held], bool]) -> "HeldLocks":
        """Return the locks that meet a condition."""
        return HeldLocks(lock for lock in self if condition(lock))

    def sorted_by(self, field: Any, descending: bool) -> "HeldLocks":
        """Return the locks sorted by a field of the model; unknown values come last in either direction."""
        if not isinstance(field, str):
            return self
        value = holder_of if field == "holder" else attrgetter(field)
        known = self.matching(lambda lock: value(lock) is not None)
        known.sort(key=value, reverse=descending)
        return HeldLocks([*known, *self.matching(lambda lock: value(lock) is None)])


class _Filter(admin.SimpleListFilter):
    """A filter over a list; an unknown value has no effect."""

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return the locks that match."""
        value = self.value()
        if value not in dict(self.lookup_choices):
            return queryset
        return queryset.matching(lambda lock: self.value_of(lock) == value)

    def value_of(self, lock: Held) -> str:
        """Return the value that the filter compares."""
        raise NotImplementedError


class AliasFilter(_Filter):
    """Filter by alias, if there are several."""

    title = _("alias")
    parameter_name = "using"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the aliases."""
        names = known_aliases()
        return [(name, name) for name in names] if len(names) > 1 else []

    def value_of(self, lock: Held) -> str:
        """Return the lock's alias."""
        return lock.alias


class StateFilter(_Filter):
    """Filter by state."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the states."""
        return [(state.value, str(state.label)) for state in State]

    def value_of(self, lock: Held) -> str:
        """Return the lock's state."""
        return lock.state


class KindFilter(_Filter):
    """Filter by the kind of holder."""

    title = _("holder")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the kinds of holders."""
        return [(kind, str(label)) for kind, label in KINDS]

    def value_of(self, lock: Held) -> str:
        """Return the kind of the lock's holder."""
        return lock.owner.kind if lock.owner else FOREIGN


class SoonFilter(_Filter):
    """Filter by whether the lock is about to end."""

    title = _("remaining")
    parameter_name = "left"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the one choice."""
        return [("soon", str(_("less than 10 seconds")))]

    def value_of(self, lock: Held) -> str:
        """Return a value for a lock that ends soon, and none for the others."""
        return "soon" if lock.remaining is not None and lock.remaining < SOON else ""


class NodeFilter(_Filter):
    """Filter by a node that has the lock, to see which locks lose a vote when that node stops."""

    title = _("node")
    parameter_name = "node"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the nodes of all aliases."""
        names = dict.fromkeys(node.name for manager in _usable() for node in manager.nodes)
        return [(name, name) for name in names] if len(names) > 1 else []

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        """Return the locks whose holder the node has."""
        name = self.value()
        if name not in dict(self.lookup_choices):
            return queryset
        return queryset.matching(lambda lock: any(view.node == name for view in leaders(lock)))


class WaitingFilter(_Filter):
    """Filter by whether the lock has waiters; only this filter counts the waiters of all locks."""

    title = _("waiting")
    parameter_name = "waiting"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the one choice."""
        return [(WAITED_FOR, str(_("somebody waits")))]

    def value_of(self, lock: Held) -> str:
        """Return a value for a lock with waiters, and none for the others."""
        return WAITED_FOR if lock.waiting else ""


FILTERS = (AliasFilter, StateFilter, KindFilter, NodeFilter, SoonFilter, WaitingFilter)


def known_aliases() -> list[str]:
    """Return the aliases of the setting; none if it cannot be read."""
    try:
        return list(locks)
    except InvalidRedlockError:
        return []


def _usable() -> Iterator[LockManager]:
    for alias in known_aliases():
        with suppress(InvalidRedlockError):
            yield locks[alias]


def banners(asked: Mapping[str, str]) -> Iterator[Banner]:
    """
    Yield one banner for each alias; show errors in the settings instead of raising them.

    Args:
        asked: The chosen filters; if they name an alias, only that one is queried.
    """
    try:
        names = list(locks)
    except InvalidRedlockError as error:
        yield Banner("", None, str(error))
        return
    chosen = asked.get(AliasFilter.parameter_name)
    for alias in [chosen] if chosen in names else names:
        try:
            snapshot = held_locks(alias)
            waiting = asked.get(WaitingFilter.parameter_name) == WAITED_FOR
            yield Banner(alias, _with_waiters(snapshot) if waiting else snapshot)
        except InvalidRedlockError as error:
            yield Banner(alias, None, str(error))


def _with_waiters(snapshot: Snapshot) -> Snapshot:
    named = find_locks([lock.slug for lock in snapshot.locks], snapshot.alias, waiters=0, after=snapshot)
    return replace(named, complete=snapshot.complete and named.complete, total=snapshot.total)
