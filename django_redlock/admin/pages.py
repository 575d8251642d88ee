"""
The page of one lock, the panel of nodes, and the choices on the page that confirms an action (internal).
"""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from operator import attrgetter
from typing import Any

from django.contrib import messages
from django.http import Http404
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..core.names import is_cut
from ..exceptions import printable
from ..handler import locks
from ..inventory import ActionResult, LockReport, Snapshot, View, find_locks, slugs_of, stale_keys
from ..inventory.model import described, name_of
from ..inventory.node_checks import remedy_of
from ..models import HeldLock, key_of, parse_key
from ..nodes.inspection import Inspection, inspect_all
from ..singleton.handle import celery_task
from .changelist import Banner, NodeRow, banners
from .rows import (
    DASH,
    clock,
    entries_of,
    held_for,
    isolated,
    known_aliases,
    logged,
    note_requests,
    remaining,
    stopping,
)

INSPECT_TIMEOUT = 0.5  # seconds to wait for each answer; the page must not wait for a silent node
ENTRIES = 10  # entries of the admin's log on the page
MAX_ADDRESS = 4000  # characters; Gunicorn accepts a request line of 4,094, other servers about 8,000


# The page of one lock


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
    row = HeldLock.of(snapshot.locks[0]) if snapshot.locks else None
    entries = entries_of([name]).filter(change_message__contains=logged(slug, alias))
    about = {
        "name": name,
        "copied_name": "" if is_cut(name) else name,
        "alias": alias,
        "snapshot": snapshot,
        "row": row,
        "stale": [(each.reason.label, ", ".join(each.nodes)) for each in stale_keys(snapshot)],
        "clearing": _clearing(alias, name, slug),
        "entries": list(entries.select_related("user")[:ENTRIES]),
    }
    if row is None:
        return about
    note_requests([row])
    held = row.lock
    return {
        **about,
        "stopping": stopping(row.asked),
        "key": key_of(held.fingerprint, alias, slug),
        "facts": [
            (_("Remaining"), remaining(held)),
            (_("Votes"), f"{held.votes}/{held.nodes}"),
            (_("Holder"), isolated(held.holder or gettext("another program"))),
            (_("Held for"), held_for(row, titled=True)),
            (_("Waiting"), str(held.waiting or gettext("nobody"))),
            (_("Lease"), DASH if held.ttl is None or held.kept_until else clock(held.ttl)),
            (_("Extended"), str(held.extensions)),
            (_("Fencing token"), str(held.fencing_token or DASH)),
            (_("Fingerprint"), held.fingerprint),
        ],
        "views": [_view(held, view) for view in held.views],
        "waiters": [printable(str(waiter)) for waiter in held.waiters],
        "more_waiters": held.waiting - len(held.waiters),
    }


def _view(held: LockReport, view: View) -> tuple[str, ...]:
    if not view.answered:
        return (view.node, gettext("no answer"), DASH, DASH, DASH)
    if not view.fingerprint:
        return (view.node, gettext("nothing"), DASH, str(view.fence or DASH), DASH)
    same = view.fingerprint == held.fingerprint
    has = gettext("this holder") if same else gettext("another holder")
    left = gettext("never ends") if view.left is None else clock(view.left)
    owner = described(view.owner) or gettext("another program")
    return (view.node, has, left, str(view.fence or DASH), owner)


def _clearing(alias: str, name: str, slug: str) -> str:
    """Return the command that clears a stale key, for this lock alone if a command can name it."""
    command = ["manage.py", "redlock_clear", "--using", alias]
    with suppress(ValueError):
        if slug in slugs_of(name):
            command += ["--name", name]
    return shlex.join(command)


# The panel of nodes


def panels() -> Iterator[Banner]:
    """Yield each alias with a description of its nodes, those in trouble first."""
    found = list(banners())
    nodes_of = {banner.alias: locks[banner.alias].nodes for banner in found if banner.snapshot}
    # All at once, so that silent nodes of several aliases are waited for only once.
    inspections = iter(inspect_all(tuple(chain(*nodes_of.values())), INSPECT_TIMEOUT, rights=False))
    for banner in found:
        if (snapshot := banner.snapshot) is None:
            yield banner
            continue
        inspected = list(islice(inspections, len(nodes_of[banner.alias])))
        nodes = [
            # A silent node shows one reason, the later one.
            node if node.answered else replace(node, detail=each.detail or node.detail)
            for node, each in zip(snapshot.nodes, inspected, strict=True)
        ]
        snapshot = replace(snapshot, nodes=tuple(nodes))
        rows = [_node(snapshot, index, inspection) for index, inspection in enumerate(inspected)]
        yield replace(banner, snapshot=snapshot, rows=tuple(sorted(rows, key=attrgetter("votes"))))


def _node(snapshot: Snapshot, index: int, inspection: Inspection) -> NodeRow:
    status, info = snapshot.nodes[index], inspection.info
    detail = inspection.detail or status.detail
    count = sum(bool(lock.views[index].fingerprint) for lock in snapshot.locks)
    held = f"{count}{'+' if snapshot.cut_short else ''}" if snapshot.has_quorum else DASH
    row = NodeRow(status.name, status.votes, detail or gettext("yes"), f"{inspection.round_trip * 1000:.2f} ms")
    if not info:
        remedy = remedy_of(inspection.failure).replace("`", "") if inspection.detail and not status.answered else ""
        return replace(
            row,
            round_trip=row.round_trip if inspection.store else DASH,
            version=inspection.store or DASH,
            locks=held if status.answered else DASH,
            remedy=remedy,
        )
    policy = info.get("maxmemory_policy", DASH)
    return replace(
        row,
        role=info.get("role", DASH),
        version=f"{inspection.server} {inspection.version}",
        clock=f"{round(inspection.ahead, 3) + 0.0:+.3f} s",  # no -0.000
        locks=held,
        memory=policy if inspection.number("maxmemory") else gettext("unlimited"),
        persistence=gettext("append-only file") if info.get("aof_enabled") == "1" else gettext("none"),
        age=DASH if inspection.age is None else clock(inspection.age),
    )


# The choices on the page that confirms an action


@dataclass(frozen=True, slots=True)
class Choice:
    """
    One chosen lock in its present state.

    Args:
        key: The key of the chosen row.
        fingerprint: The holder that was on the page.
        alias: The lock's alias.
        slug: The lock's slug.
        row: The lock in its present state; None if it is free or its state is unknown.
        problem: The reason why the action is not possible; None if it is.
    """

    key: str
    fingerprint: str
    alias: str
    slug: str
    row: HeldLock | None
    problem: ActionResult | None

    @property
    def name(self) -> str:
        """The lock's name."""
        return printable(name_of(self.slug))

    @property
    def explanation(self) -> str:
        """The reason why the action is not possible."""
        return OUTCOMES[self.problem][1] % {"lock": self.name} if self.problem else ""

    @property
    def can_be_asked(self) -> bool:
        """Whether its holder can be asked to stop."""
        return self.row is not None and not self.problem and not obstacle(self.row.lock, "stop")

    @property
    def task(self) -> str:
        """The id of the Celery task that holds the lock; empty if none does."""
        return celery_task(self.row.lock.owner) if self.row else ""

    @property
    def unrenewed(self) -> bool:
        """Whether the holder never renews the lock."""
        owner = self.row.lock.owner if self.row else None
        return self.row is not None and owner is not None and not owner.process and not self.row.lock.is_shared

    @property
    def held_for(self) -> str:
        """The time for which the holder has held the lock."""
        return held_for(self.row, titled=True) if self.row else ""

    @property
    def remaining(self) -> str:
        """The time until the hold ends unless its holder extends it."""
        return remaining(self.row.lock) if self.row else ""

    @property
    def next(self) -> str:
        """The first waiter; empty if there is none."""
        waiters = self.row.lock.waiters if self.row else ()
        return printable(str(waiters[0])) if waiters else ""


OUTCOMES: dict[ActionResult, tuple[int, Any]] = {
    ActionResult.RELEASED: (messages.SUCCESS, _("“%(lock)s” was released.")),
    ActionResult.ASKED: (
        messages.SUCCESS,
        _("The holder of “%(lock)s” was asked to stop. It learns of it at its next renewal; watch the lock."),
    ),
    ActionResult.SHARED: (
        messages.WARNING,
        _("“%(lock)s” is held by several holders, who cannot be asked individually."),
    ),
    ActionResult.FOREIGN: (
        messages.WARNING,
        _("“%(lock)s” was left alone: another program holds it, and cannot be asked to stop."),
    ),
    ActionResult.UNRENEWED: (
        messages.WARNING,
        _("“%(lock)s” was left alone: nobody renews it, so its holder cannot be asked to stop. It ends by itself."),
    ),
    ActionResult.WRONG_TYPE: (
        messages.ERROR,
        _(
            "“%(lock)s” was left alone: its key is not a string, so another program wrote it. "
            "Delete it on the nodes (DEL)."
        ),
    ),
    ActionResult.CHANGED: (
        messages.ERROR,
        _("“%(lock)s” was left alone: it changed hands since you looked. Look again and decide anew."),
    ),
    ActionResult.GONE: (messages.INFO, _("“%(lock)s” was left alone: nobody holds it any more.")),
    ActionResult.UNKNOWN: (
        messages.WARNING,
        _("“%(lock)s”: too few nodes answered to tell whether it is free. Look again, then repeat."),
    ),
}
DONE = (ActionResult.RELEASED, ActionResult.UNKNOWN, ActionResult.ASKED)  # or perhaps done


def look_again(keys: Iterable[str], action: str) -> Iterator[Choice]:
    """Yield the chosen locks in their present state; query each alias once."""
    parsed: dict[str, list[tuple[str, str, str]]] = {}
    for key in keys:
        with suppress(ValueError):  # a key that is not from our page
            fingerprint, alias, slug = parse_key(key)
            if alias in known_aliases():
                parsed.setdefault(alias, []).append((key, fingerprint, slug))
    for alias, chosen in parsed.items():
        with suppress(InvalidRedlockError):
            snapshot = find_locks([slug for _key, _fingerprint, slug in chosen], alias)
            found = {lock.slug: lock for lock in snapshot.locks}
            for key, fingerprint, slug in chosen:
                lock = found.get(slug)
                problem: ActionResult | None
                if lock is None:
                    problem = ActionResult.GONE if snapshot.has_quorum else ActionResult.UNKNOWN
                else:
                    problem = obstacle(lock, action) if lock.fingerprint == fingerprint else ActionResult.CHANGED
                yield Choice(key, fingerprint, alias, slug, HeldLock.of(lock) if lock else None, problem)


def obstacle(lock: LockReport, action: str) -> ActionResult | None:
    """Return why nobody can do this to a lock, whoever holds it when the action is confirmed; None if one can."""
    if action == "release":
        return None
    if lock.is_shared:
        return ActionResult.SHARED
    if lock.owner is None:
        return ActionResult.FOREIGN
    extended = lock.process or lock.owner.extensions  # or its holder calls extend() itself
    return ActionResult.UNRENEWED if lock.kept_until or not extended else None
