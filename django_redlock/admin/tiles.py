"""
The tiles above the list: each counts the locks or nodes in one state, and links to them (internal).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from django.contrib.admin.views.main import ORDER_VAR, PAGE_VAR
from django.urls import reverse
from django.utils.translation import gettext as _

from ..inventory import TROUBLE, HeldLock, Snapshot, duration
from .rows import WAITED_FOR, Banner

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


def _longest(held: list[tuple[HeldLock, Snapshot]], more: str, blind: bool, link: Callable[..., str]) -> Tile:
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
