"""
The list of held locks, whose rows come from the nodes: its filters, its counts and its order (internal).

Only the access to the database is replaced; columns, filters, search, sorting, pages and actions are Django's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.options import IS_POPUP_VAR
from django.contrib.admin.views.main import ALL_VAR, ORDER_VAR, PAGE_VAR, SEARCH_VAR, ChangeList, ChangeListSearchForm
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..core.names import queue_of, slug
from ..exceptions import printable
from ..handler import locks
from ..inventory import LockReport, held_in_each
from ..inventory.model import TROUBLE, Snapshot, State, duration, urgency
from ..models import HeldLock, key_of
from .rows import DASH, FOREIGN, KINDS, known_aliases, note_requests

MAX_SEARCH = 200  # characters
MAX_VALUE = 500  # characters of a parameter, because each link of the page repeats it
SOON = 10.0  # seconds
ALIAS = "using"  # the parameter that names an alias
WAITED_FOR = "yes"
KEYED_ACTIONS = {"stop", "release"}  # read the posted keys alone; others get the locks, as in any list of Django's


class HeldLocks(list[LockReport]):
    """
    A list of locks with those methods of a queryset that the admin uses.

    The items are locks of the inventory. Rows take longer to create, so they are only created for a page.
    """

    def filter(self, *, pk__in: Iterable[str]) -> "HeldLocks":
        """Return the locks that were selected on the page."""
        chosen = set(pk__in)
        return self.matching(lambda lock: key_of(lock.fingerprint, lock.alias, lock.slug) in chosen)

    def matching(self, condition: Callable[[LockReport], bool]) -> "HeldLocks":
        """Return the locks that meet a condition."""
        return HeldLocks(lock for lock in self if condition(lock))

    def sorted_by(self, field: Any, descending: bool) -> "HeldLocks":
        """Return the locks sorted by a field of the model; unknown values come last in either direction."""
        if not isinstance(field, str):
            return self
        value = attrgetter(field)
        known = self.matching(lambda lock: value(lock) is not None)
        known.sort(key=value, reverse=descending)
        return HeldLocks([*known, *self.matching(lambda lock: value(lock) is None)])


def filter_by(
    parameter: str,
    heading: Any,
    labels: Callable[[], Mapping[str, Any]],
    values_of: Callable[[LockReport], Iterable[str]],
) -> type[admin.SimpleListFilter]:
    """
    Return a filter over a list of locks; an unknown value has no effect.

    Args:
        parameter: Its name in the query string.
        heading: Its title.
        labels: Returns the values to choose from, each with its label.
        values_of: Returns the values that match a lock.
    """

    class HeldLockFilter(admin.SimpleListFilter):
        title, parameter_name = heading, parameter

        def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
            return [(value, str(label)) for value, label in labels().items()]

        def queryset(self, request: HttpRequest, queryset: Any) -> Any:
            value = self.value() or ""
            if value not in dict(self.lookup_choices):
                return queryset
            return queryset.matching(lambda lock: value in values_of(lock))

    return HeldLockFilter


def alias_labels() -> dict[str, str]:
    """Return the aliases; none if there is nothing to choose."""
    names = known_aliases()
    return {name: name for name in names if len(names) > 1}


def node_labels() -> dict[str, str]:
    """Return the nodes of all aliases; none if there is nothing to choose."""
    names: dict[str, str] = {}
    for alias in known_aliases():
        with suppress(InvalidRedlockError):
            names |= {node.name: node.name for node in locks[alias].nodes}
    return names if len(names) > 1 else {}


def ends_soon(lock: LockReport) -> bool:
    """Return whether a lock is about to end."""
    return lock.remaining is not None and lock.remaining < SOON


FILTERS = (
    filter_by(ALIAS, _("alias"), alias_labels, lambda lock: [lock.alias]),
    filter_by("state", _("state"), lambda: dict(State.choices), lambda lock: [lock.state]),
    filter_by("kind", _("holder"), lambda: KINDS, lambda lock: [lock.owner.kind if lock.owner else FOREIGN]),
    # Which locks lose a vote when a node stops?
    filter_by("node", _("node"), node_labels, lambda lock: [view.node for view in lock.leaders]),
    filter_by(
        "left", _("remaining"), lambda: {"soon": _("less than 10 seconds")}, lambda lock: ["soon"] * ends_soon(lock)
    ),
    filter_by(
        "waiting",
        _("waiting"),
        lambda: {WAITED_FOR: _("somebody waits")},
        lambda lock: [WAITED_FOR] if lock.waiting else [],
    ),
)


class Counted(int):
    """A number of locks that may be incomplete; its text is then ``1000+`` or ``?``."""

    sign = ""

    def __str__(self) -> str:
        return "?" if self.sign == "?" and not self else f"{int(self)}{self.sign and '+'}"


class LockSearchForm(ChangeListSearchForm):
    """A search whose text is short enough for every link of the page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields = {SEARCH_VAR: forms.CharField(required=False, strip=False, max_length=MAX_SEARCH)}


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node as the panel shows it; each cell is text."""

    name: str
    votes: bool
    answers: str
    round_trip: str = DASH
    role: str = DASH
    version: str = DASH
    clock: str = DASH
    locks: str = DASH
    memory: str = DASH
    persistence: str = DASH
    age: str = DASH
    remedy: str = ""

    @property
    def empty(self) -> bool:
        """Whether nothing but its answer is known about the node."""
        return {self.role, self.version, self.locks} == {DASH}


@dataclass(frozen=True, slots=True)
class Banner:
    """
    The data that a page shows about one alias.

    Args:
        alias: The alias in ``REDLOCK``.
        snapshot: Its nodes and locks; None if its settings cannot be used.
        problem: The error in the settings.
        rows: Its nodes, on the page that describes each.
    """

    alias: str
    snapshot: Snapshot | None
    problem: str = ""
    rows: tuple[NodeRow, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether enough nodes answered to list the held locks."""
        return self.snapshot is not None and self.snapshot.has_quorum

    @property
    def level(self) -> str:
        """The severity, as one of the admin's message classes."""
        if self.snapshot is None or not self.is_known:
            return "error"
        sound = self.snapshot.complete and not (self.snapshot.trouble or self.snapshot.wrong_type)
        return "success" if sound else "warning"


def banners(chosen: str | None = None, also: Iterable[str] = ()) -> Iterator[Banner]:
    """
    Ask the nodes of each alias once; show errors in the settings, do not raise them.

    Args:
        chosen: The alias to ask about; all of them if there is no such alias.
        also: Slugs of locks to ask for even if there are more locks than a page asks for.
    """
    try:
        names = list(locks)
    except InvalidRedlockError as error:
        yield Banner("", None, str(error))
        return
    for alias, found in held_in_each([chosen] if chosen in names else names, also=also).items():
        if isinstance(found, InvalidRedlockError):
            yield Banner(alias, None, str(found))
        else:
            yield Banner(alias, found)


@dataclass(frozen=True, slots=True)
class Tile:
    """
    One count above the list, with its link.

    Args:
        label: The name of what is counted.
        value: The count; ``?`` if too few nodes answer.
        level: The colour: ``bad``, ``good`` or none.
        url: The target of its link.
        chosen: Whether the list is filtered by this tile.
    """

    label: str
    value: str
    level: str
    url: str
    chosen: bool = False


class HeldLockChangeList(ChangeList):
    """A change list whose rows come from the nodes; each page takes one survey and one query of the admin's log."""

    search_form_class = LockSearchForm
    banners: list[Banner] | None = None

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Return the locks that match the filters and the search, in the requested order."""
        self._forget_strange_parameters()
        (self.filter_specs, self.has_filters, _rest, _many, self.has_active_filters) = self.get_filters(request)
        self.clear_all_filters_qs = self.get_query_string(remove=list(self.get_filters_params()))
        named = _slugs(self.query)
        if self.banners is None:  # Django calls this method a second time for an action
            self.banners = [] if self._acts_on_keys(request) else list(banners(request.GET.get(ALIAS), named))
        found = HeldLocks(lock for banner in self.banners if banner.snapshot for lock in banner.snapshot.locks)
        self.tiles = list(self._tiles(dict(request.GET.items())))
        for spec in self.filter_specs:
            found = spec.queryset(request, found)  # type: ignore[assignment, arg-type]  # a list, not a queryset
        words = self.query.casefold().split()
        if words:
            found = found.matching(lambda lock: _is_one_of(lock, named) or _has_all(lock, words))
        # Those first that most people wait for, then those in trouble, then the longest holds.
        found = HeldLocks(sorted(found, key=urgency))
        for column, direction in reversed(self.get_ordering_field_columns().items()):
            if column < len(self.list_display):
                found = found.sorted_by(self.get_ordering_field(self.list_display[column]), direction == "desc")
        return found

    def get_results(self, request: HttpRequest) -> None:
        """Select one page of the locks; if the page does not exist, select the nearest one."""
        paginator = self.model_admin.get_paginator(request, self.queryset, self.list_per_page)
        page = paginator.get_page(self.page_num)
        self.page_num = page.number
        self.result_count = self.full_result_count = Counted(paginator.count)
        self.result_count.sign = "?" if self.unknown else "" if self.is_complete else "+"
        self.show_full_result_count = False
        self.can_show_all = paginator.count <= self.list_max_show_all
        self.multi_page = paginator.count > self.list_per_page
        everything = self.show_all and self.can_show_all
        self.result_list = [HeldLock.of(lock) for lock in (self.queryset if everything else page.object_list)]
        if self.result_list:
            note_requests(self.result_list)
        self.show_admin_actions = bool(self.result_list)
        self.paginator = paginator

    @property
    def unknown(self) -> list[str]:
        """The aliases whose locks cannot be listed, because too few nodes answer."""
        return [banner.alias for banner in self.banners or () if not banner.is_known]

    @property
    def counted(self) -> str:
        """The number of locks in the list, in the words that Django writes below it."""
        names = self.opts.verbose_name if self.result_count == 1 else self.opts.verbose_name_plural
        return f"{self.result_count!s} {names}"

    @property
    def is_complete(self) -> bool:
        """Whether the listing has all locks."""
        return all(banner.snapshot and banner.snapshot.complete for banner in self.banners or ())

    def _forget_strange_parameters(self) -> None:
        """Drop unknown parameters; Django would look for fields of these names."""
        known = {str(spec.parameter_name) for spec in FILTERS}
        known |= {ORDER_VAR, ALL_VAR, IS_POPUP_VAR} | ({SEARCH_VAR} if self.query else set())
        known = {name for name in known if len(self.params.get(name, "")) <= MAX_VALUE}
        self.filter_params = {name: values for name, values in self.filter_params.items() if name in known}
        self.params = {name: value for name, value in self.params.items() if name in known}

    def _acts_on_keys(self, request: HttpRequest) -> bool:
        """Return whether the answer is not the list, but that of an action of ours, which asks for the posted keys."""
        if request.method != "POST" or ACTION_CHECKBOX_NAME not in request.POST or "_save" in request.POST:
            return False
        chosen = set(request.POST.getlist("action")) - {""}
        return bool(chosen) and chosen <= KEYED_ACTIONS & self.model_admin.get_actions(request).keys()

    def _tiles(self, asked: dict[str, Any]) -> Iterator[Tile]:
        """Yield the tiles above the list: each counts the locks or nodes in one state, and links to them."""
        snapshots = [banner.snapshot for banner in self.banners or () if banner.snapshot]
        known = [snapshot for snapshot in snapshots if snapshot.has_quorum]
        held = [(lock, snapshot) for snapshot in known for lock in snapshot.locks]
        counts = Counter(lock.state for lock, _snapshot in held)
        blind = len(known) < len(snapshots)  # without a quorum, the number of locks of an alias is unknown, not zero
        more = "+" if blind or not all(snapshot.complete for snapshot in known) else ""
        link = self.get_query_string
        everything = link(remove=["state", "waiting", PAGE_VAR])
        state, waited = asked.get("state"), asked.get("waiting") == WAITED_FOR
        yield Tile(gettext("All"), _count(len(held), more), "", everything, not state and not waited)
        for each in reversed(TROUBLE):
            label = str(each.label)
            url = everything if state == each else link({"state": each.value}, remove=["waiting", PAGE_VAR])
            level = "bad" if counts[each] else ""
            yield Tile(label[:1].upper() + label[1:], _count(counts[each], more), level, url, state == each)
        waits = [lock.waiting for lock, _snapshot in held if lock.waiting]
        waiting = _count(len(waits), more)
        if sum(waits) > len(waits):
            waiting = gettext("%(locks)s, %(waiting)d waiting") % {"locks": waiting, "waiting": sum(waits)}
        url = everything if waited else link({"waiting": WAITED_FOR}, remove=["state", PAGE_VAR])
        yield Tile(gettext("Waited for"), waiting, "", url, waited)
        times = [time for lock, snapshot in held if (time := lock.held_for(snapshot.taken)) is not None]
        longest = f"{duration(max(times))}{more}" if times else "?" if blind else DASH
        yield Tile(gettext("Longest hold"), longest, "", link(remove=[ORDER_VAR]))
        panel = reverse("admin:redlock_heldlock_nodes", current_app=self.model_admin.admin_site.name)
        yield _nodes(snapshots, panel)


def _slugs(query: str) -> set[str]:
    """Return the slugs of the locks that a search may name: one, or several, as their holder names them."""
    return {slug(name) for name in (query, *query.split(", ")) if name}


def _is_one_of(lock: LockReport, slugs: set[str]) -> bool:
    return lock.slug in slugs or queue_of(lock.slug) in slugs


def _has_all(lock: LockReport, words: list[str]) -> bool:
    text = f"{printable(lock.name)} {lock.holder}".casefold()
    return all(word in text for word in words)


def _count(number: int, more: str) -> str:
    """Return the count, or the least count if *more* is not empty; then none is unknown, as some were not listed."""
    return "?" if more and not number else f"{number}{more}"


def _nodes(snapshots: list[Snapshot], url: str) -> Tile:
    """Return how many nodes may vote, and how many more may fail in the alias where fewest may."""
    voting = sum(node.votes for snapshot in snapshots for node in snapshot.nodes)
    nodes = sum(len(snapshot.nodes) for snapshot in snapshots)
    level = "good" if nodes and voting == nodes else "bad"
    label = gettext("Nodes, %(spare)d spare") % {"spare": max(0, min([each.spare for each in snapshots], default=0))}
    return Tile(label, f"{voting}/{nodes}", level, url)
