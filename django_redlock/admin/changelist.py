"""
A change list whose rows come from the nodes (internal).

Only the access to the database is replaced; columns, filters, search, sorting, pages and actions are Django's.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django import forms
from django.contrib.admin.options import IS_POPUP_VAR
from django.contrib.admin.views.main import ALL_VAR, ORDER_VAR, PAGE_VAR, SEARCH_VAR, ChangeList, ChangeListSearchForm
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from ..core.names import slug
from ..inventory import TROUBLE, Snapshot, duration, find_locks, holder_of, printable
from ..inventory import HeldLock as Held
from ..inventory.survey import with_counts
from ..models import HeldLock
from .pages import note_requests
from .rows import FILTERS, WAITED_FOR, Banner, HeldLocks, banners

MAX_SEARCH = 200  # characters
MAX_VALUE = 500  # characters of a parameter, because each link of the page repeats it


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


class HeldLockChangeList(ChangeList):
    """A change list whose rows come from the nodes; each page takes one listing and one query of the admin's log."""

    search_form_class = LockSearchForm

    def get_queryset(self, request: HttpRequest, exclude_parameters: Any = None) -> Any:
        """Return the locks that match the filters and the search, in the requested order."""
        self._forget_strange_parameters()
        (self.filter_specs, self.has_filters, _rest, _many, self.has_active_filters) = self.get_filters(request)
        self.clear_all_filters_qs = self.get_query_string(remove=list(self.get_filters_params()))
        if not hasattr(self, "banners"):
            self.banners = list(banners(request.GET))
        held = HeldLocks(self._listed())
        self.tiles = list(tiles(self.banners, self.get_query_string, dict(request.GET.items())))
        for spec in self.filter_specs:
            held = spec.queryset(request, held)  # type: ignore[assignment, arg-type]  # a list, not a queryset
        return self._in_order(self._found(held))

    def _listed(self) -> Iterator[Held]:
        """Yield the listed locks and, because a listing may be cut short, the lock whose exact name is searched for."""
        for banner in self.banners:
            if banner.snapshot is None:
                continue
            yield from banner.snapshot.locks
            if self.query and not banner.snapshot.complete:
                named = find_locks([slug(self.query)], banner.alias, waiters=0, after=banner.snapshot).locks
                known = {lock.slug for lock in banner.snapshot.locks}
                yield from (lock for lock in named if lock.slug not in known)

    def get_results(self, request: HttpRequest) -> None:
        """Select one page of the locks; if the page does not exist, select the nearest one."""
        paginator = self.model_admin.get_paginator(request, self.queryset, self.list_per_page)
        page = paginator.get_page(self.page_num)
        self.page_num = page.number
        self.result_count = self.full_result_count = Counted(paginator.count)
        self.result_count.sign = "?" if not self.is_known else "" if self.is_complete else "+"
        self.show_full_result_count = False
        self.can_show_all = paginator.count <= self.list_max_show_all
        self.multi_page = paginator.count > self.list_per_page
        everything = self.show_all and self.can_show_all
        self.result_list = [HeldLock.of(lock) for lock in (self.queryset if everything else page.object_list)]
        self._count_waiters(self.result_list)
        if self.result_list:
            note_requests(self.result_list)
        self.show_admin_actions = bool(self.result_list)
        self.paginator = paginator

    def _count_waiters(self, rows: list[HeldLock]) -> None:
        """Count the waiters and sharers of the locks on the page; for all locks that would take too long."""
        for banner in self.banners:
            alias = banner.alias
            slugs = [row.lock.slug for row in rows if row.alias == alias]
            if not slugs:
                continue
            asked = find_locks(slugs, alias, waiters=0, after=banner.snapshot)
            counted = {lock.slug: lock for lock in asked.locks}
            for row in rows:
                if row.alias == alias:
                    row.lock = with_counts(row.lock, counted.get(row.lock.slug))

    @property
    def is_known(self) -> bool:
        """Whether enough nodes answered to list the held locks."""
        return not self.unknown

    @property
    def unknown(self) -> list[str]:
        """The aliases whose locks cannot be listed, because too few nodes answer."""
        return [banner.alias for banner in self.banners if not banner.is_known]

    @property
    def counted(self) -> str:
        """The number of locks in the list, in the words that Django writes below it."""
        names = self.opts.verbose_name if self.result_count == 1 else self.opts.verbose_name_plural
        return f"{self.result_count!s} {names}"

    @property
    def is_complete(self) -> bool:
        """Whether the listing has all locks."""
        return all(banner.snapshot and banner.snapshot.complete for banner in self.banners)

    def _forget_strange_parameters(self) -> None:
        """Drop unknown parameters; Django would look for fields of these names."""
        known = {spec.parameter_name for spec in FILTERS}
        known |= {ORDER_VAR, ALL_VAR, IS_POPUP_VAR} | ({SEARCH_VAR} if self.query else set())
        known = {name for name in known if len(self.params.get(name, "")) <= MAX_VALUE}
        self.filter_params = {name: values for name, values in self.filter_params.items() if name in known}
        self.params = {name: value for name, value in self.params.items() if name in known}

    def _found(self, held: HeldLocks) -> HeldLocks:
        words = self.query.casefold().split()
        if not words:
            return held

        def has_all(lock: Held) -> bool:
            text = f"{printable(lock.name)} {holder_of(lock)}".casefold()
            return all(word in text for word in words)

        return held.matching(has_all)

    def _in_order(self, held: HeldLocks) -> HeldLocks:
        held = held.worst_first()
        for column, direction in reversed(self.get_ordering_field_columns().items()):
            if column < len(self.list_display):
                held = held.sorted_by(self.get_ordering_field(self.list_display[column]), direction == "desc")
        return held


UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Tile:
    """
    One count with its link.

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


def tiles(banners: Iterable[Banner], link: Callable[..., str], asked: Mapping[str, Any]) -> Iterator[Tile]:
    """
    Yield the tiles.

    Args:
        banners: The listing of each alias.
        link: Returns the query of the list with other parameters.
        asked: The parameters of the request.
    """
    snapshots = [banner.snapshot for banner in banners if banner.snapshot]
    known = [snapshot for snapshot in snapshots if snapshot.has_quorum]
    held = [(lock, snapshot) for snapshot in known for lock in snapshot.locks]
    counts = Counter(lock.state for lock, _snapshot in held)
    blind = len(known) < len(snapshots)  # without a quorum, the number of locks of an alias is unknown, not zero
    more = "+" if blind or not all(snapshot.complete for snapshot in known) else ""
    everything = link(remove=["state", "waiting", PAGE_VAR])
    state = asked.get("state")
    whole = not state and asked.get("waiting") != WAITED_FOR
    yield Tile(_("All"), _count(len(held), more), "", everything, whole)
    for each in reversed(TROUBLE):
        value = _count(counts[each], more)
        url = everything if state == each else link({"state": each.value}, remove=["waiting", PAGE_VAR])
        yield Tile(_first_upper(str(each.label)), value, "bad" if counts[each] else "", url, state == each)
    waited = asked.get("waiting") == WAITED_FOR
    url = everything if waited else link({"waiting": WAITED_FOR}, remove=["state", PAGE_VAR])
    yield Tile(_("Waited for"), _("show"), "", url, waited)
    yield _longest(held, more, blind, link)
    yield _nodes(snapshots)


def _count(number: int, more: str) -> str:
    """Return the count, or the least count if *more* is not empty; then none is unknown, as some were not listed."""
    return UNKNOWN if more and not number else f"{number}{more}"


def _longest(held: list[tuple[Held, Snapshot]], more: str, blind: bool, link: Callable[..., str]) -> Tile:
    times = [time for lock, snapshot in held if (time := lock.held_for(snapshot.taken)) is not None]
    none = UNKNOWN if blind else "\N{EN DASH}"
    value = f"{duration(max(times))}{more}" if times else none
    return Tile(_("Longest hold"), value, "", link(remove=[ORDER_VAR]))


def _nodes(snapshots: list[Snapshot]) -> Tile:
    """Return how many nodes may vote, and how many more may fail in the alias where fewest may."""
    voting = sum(node.votes for snapshot in snapshots for node in snapshot.nodes)
    nodes = sum(len(snapshot.nodes) for snapshot in snapshots)
    spares = [sum(node.votes for node in each.nodes) - each.rules.needed for each in snapshots]
    spare = max(0, min(spares, default=0))
    level = "good" if nodes and voting == nodes else "bad"
    label = _("Nodes, %(spare)d spare") % {"spare": spare}
    return Tile(label, f"{voting}/{nodes}", level, reverse("admin:redlock_heldlock_nodes"))


def _first_upper(text: str) -> str:
    return text[:1].upper() + text[1:]
