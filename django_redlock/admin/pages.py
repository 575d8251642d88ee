"""
The page of one lock, and the panel of nodes (internal).
"""

import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from django.contrib.admin.models import LogEntry
from django.http import Http404
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..core.names import is_cut
from ..handler import locks
from ..inventory import HeldLock as Held
from ..inventory import (
    Snapshot,
    View,
    described,
    find_locks,
    held_locks,
    holder_of,
    name_of,
    printable,
    slugs_of,
    stale_keys,
)
from ..inventory.model import meaning_of
from ..inventory.node_checks import remedy_of
from ..models import HeldLock, key_of, parse_key
from .rows import DASH, MAX_ADDRESS, clock, held_for, known_aliases, remaining, stopping

INSPECT_TIMEOUT = 0.5  # seconds to wait for each answer; the page must not wait for a silent node
ENTRIES = 10  # entries of the admin's log on the page


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
class Panel:
    """The nodes of one alias."""

    alias: str
    snapshot: Snapshot | None
    rows: tuple[NodeRow, ...]
    problem: str = ""


def detail(key: str) -> dict[str, Any]:
    """
    Return the context of the page of one lock.

    Raises:
        Http404: *key* names no lock.
    """
    try:
        _fingerprint, alias, slug = parse_key(key)
        if len(key) > MAX_ADDRESS or alias not in known_aliases():
            raise ValueError
        snapshot = find_locks([slug], alias)
    except (ValueError, InvalidRedlockError):
        raise Http404(gettext("There is no such lock.")) from None
    name = printable(name_of(slug))
    held = snapshot.locks[0] if snapshot.locks else None
    row = HeldLock.of(held) if held else None
    if row:
        note_requests([row])
    return {
        "name": name,
        "copied_name": "" if is_cut(name) else name,
        "alias": alias,
        "snapshot": snapshot,
        "row": row,
        "stopping": stopping(row.asked) if row else "",
        "key": key_of(held.fingerprint, alias, slug) if held else "",
        "meaning": meaning_of(held) if held else "",
        "facts": _facts(held) if held else [],
        "views": [_view(held, view) for view in held.views] if held else [],
        "waiters": [printable(str(waiter)) for waiter in held.waiters] if held else [],
        "more_waiters": held.waiting - len(held.waiters) if held else 0,
        "stale": [(each.reason.label, ", ".join(each.nodes)) for each in stale_keys(snapshot)],
        "clearing": _clearing(alias, name, slug),
        "entries": _entries(name, alias),
    }


def panels() -> Iterator[Panel]:
    """Yield the nodes of each alias; show errors in the settings instead of raising them."""
    try:
        names = list(locks)
    except InvalidRedlockError as error:
        yield Panel("", None, (), str(error))
        return
    for alias in names:
        try:
            yield _panel(alias)
        except InvalidRedlockError as error:
            yield Panel(alias, None, (), str(error))


def _facts(held: Held) -> list[tuple[Any, str]]:
    row = HeldLock.of(held)
    return [
        (_("Remaining"), remaining(held)),
        (_("Votes"), f"{held.votes}/{held.nodes}"),
        (_("Holder"), holder_of(held) or gettext("another program")),
        (_("Held for"), held_for(row, titled=True)),
        (_("Waiting"), str(held.waiting or gettext("nobody"))),
        (_("Lease"), DASH if held.ttl is None else clock(held.ttl)),
        (_("Extended"), str(held.extensions)),
        (_("Fencing token"), str(held.fencing_token or DASH)),
        (_("Fingerprint"), held.fingerprint),
    ]


def _clearing(alias: str, name: str, slug: str) -> str:
    """Return the command that clears a stale key, for this lock alone if a command can name it."""
    with suppress(ValueError):
        if slug in slugs_of(name):
            return shlex.join(["manage.py", "redlock_clear", "--using", alias, "--name", name])
    return shlex.join(["manage.py", "redlock_clear", "--using", alias])


def _view(held: Held, view: View) -> tuple[str, ...]:
    if not view.answered:
        return (view.node, gettext("no answer"), DASH, DASH, DASH)
    if not view.fingerprint:
        return (view.node, gettext("nothing"), DASH, str(view.fence or DASH), DASH)
    same = view.fingerprint == held.fingerprint
    has = gettext("this holder") if same else gettext("another holder")
    left = gettext("never ends") if view.left is None else clock(view.left)
    owner = described(view.owner) or gettext("another program")
    return (view.node, has, left, str(view.fence or DASH), owner)


def _entries(name: str, alias: str) -> list[LogEntry]:
    found = entries_of([name]).filter(change_message__contains=LOGGED_ALIAS % alias)
    return list(found.select_related("user")[:ENTRIES])


def _panel(alias: str) -> Panel:
    from ..nodes.redis.inspect import inspect_all  # only here: the other pages do not need redis-py

    manager = locks[alias]
    snapshot = held_locks(alias)
    inspected = inspect_all(manager.nodes, INSPECT_TIMEOUT, rights=False)
    nodes = zip(snapshot.nodes, inspected, strict=True)  # a silent node shows one reason, the later one
    silent = [replace(node, detail=each.detail or node.detail) if not node.answered else node for node, each in nodes]
    snapshot = replace(snapshot, nodes=tuple(silent))
    rows = [_node(snapshot, index, inspection) for index, inspection in enumerate(inspected)]
    return Panel(alias, snapshot, tuple(sorted(rows, key=attrgetter("votes"))))  # nodes in trouble come first


def _node(snapshot: Snapshot, index: int, inspection: Any) -> NodeRow:
    status = snapshot.nodes[index]
    detail = inspection.detail or status.detail
    answers = detail or gettext("yes")
    count = sum(bool(lock.views[index].fingerprint) for lock in snapshot.locks)
    held = f"{count}{'+' if snapshot.cut_short else ''}" if snapshot.has_quorum else DASH
    if not inspection.info:
        remedy = remedy_of(inspection.failure).replace("`", "") if detail and not status.answered else ""
        return NodeRow(
            status.name,
            status.votes,
            answers,
            round_trip=f"{inspection.round_trip * 1000:.2f} ms" if inspection.store else DASH,
            version=inspection.store or DASH,
            locks=held if status.answered else DASH,
            remedy=remedy,
        )
    limited = inspection.number("maxmemory")
    policy = inspection.info.get("maxmemory_policy", DASH)
    server = "Valkey" if "valkey_version" in inspection.info else "Redis"
    appends = inspection.info.get("aof_enabled") == "1"
    return NodeRow(
        status.name,
        status.votes,
        answers,
        round_trip=f"{inspection.round_trip * 1000:.2f} ms",
        role=inspection.info.get("role", DASH),
        version=f"{server} {inspection.info.get('valkey_version') or inspection.info.get('redis_version')}",
        clock=f"{round(inspection.ahead, 3) + 0.0:+.3f} s",  # no -0.000
        locks=held,
        memory=policy if limited else gettext("unlimited"),
        persistence=gettext("append-only file") if appends else gettext("none"),
        age=DASH if inspection.age is None else clock(inspection.age),
    )
