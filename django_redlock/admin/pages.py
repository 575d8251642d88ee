"""
The page of one lock, and the panel of nodes (internal).
"""

import logging
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import QuerySet
from django.http import Http404, HttpRequest
from django.utils.timezone import now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..core.names import is_cut
from ..handler import locks
from ..inventory import (
    ActionResult,
    Snapshot,
    View,
    ask_to_stop,
    described,
    duration,
    extend_lock,
    find_locks,
    force_release,
    held_locks,
    holder_of,
    name_of,
    printable,
    slugs_of,
    stale_keys,
)
from ..inventory import HeldLock as Held
from ..inventory.model import meaning_of
from ..inventory.node_checks import remedy_of
from ..inventory.survey import is_shared
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


log = logging.getLogger("django_redlock")
MAX_REASON = 200  # characters
MAX_RELEASE = 20  # locks in one action: as many as a person can read on one page
LOGGED_ALIAS = "Alias %s, holder"  # distinguishes the entries about locks with the same name
MORE_TIME = 30.0  # the default number of seconds on the page


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
    def possible(self) -> bool:
        """Whether the action is possible."""
        return not self.problem

    @property
    def can_be_asked(self) -> bool:
        """Whether its holder can be asked to stop."""
        return self.row is not None and self.possible and not obstacle(self.row.lock, "stop")

    @property
    def shared(self) -> bool:
        """Whether several holders may share the lock."""
        return self.row is not None and is_shared(self.row.lock)

    @property
    def name(self) -> str:
        """The lock's name."""
        return self.row.name if self.row else printable(self.slug.removeprefix("{").removesuffix("}"))

    @property
    def held_for(self) -> str:
        """The time for which the holder has held the lock."""
        return held_for(self.row, titled=True) if self.row else ""

    @property
    def remaining(self) -> str:
        """The time until the hold ends unless its holder extends it."""
        return remaining(self.row.lock) if self.row else ""

    @property
    def waiting(self) -> int:
        """The number of waiters."""
        return self.row.lock.waiting if self.row else 0

    @property
    def next(self) -> str:
        """The first waiter; empty if there is none."""
        waiters = self.row.lock.waiters if self.row else ()
        return printable(str(waiters[0])) if waiters else ""

    @property
    def unrenewed(self) -> bool:
        """Whether the holder never renews the lock."""
        owner = self.row.lock.owner if self.row else None
        return bool(owner and not owner.process and not self.shared)

    @property
    def meaning(self) -> str:
        """What its state means."""
        return meaning_of(self.row.lock) if self.row else ""

    @property
    def task(self) -> str:
        """The id of the Celery task that holds the lock; empty if none does."""
        owner = self.row.lock.owner if self.row else None
        return owner.ref if owner and owner.kind == "task" else ""

    @property
    def explanation(self) -> str:
        """The reason why the action is not possible."""
        return OUTCOMES[self.problem][1] % {"lock": self.name} if self.problem else ""


OUTCOMES: dict[ActionResult, tuple[int, Any]] = {
    ActionResult.RELEASED: (messages.SUCCESS, _("“%(lock)s” was released.")),
    ActionResult.ASKED: (
        messages.SUCCESS,
        _("The holder of “%(lock)s” was asked to stop. It learns of it at its next renewal; watch the lock."),
    ),
    ActionResult.EXTENDED: (messages.SUCCESS, _("“%(lock)s” keeps others out for longer.")),
    ActionResult.LONGER: (messages.INFO, _("“%(lock)s” keeps others out for longer than that already.")),
    ActionResult.STOPPING: (
        messages.INFO,
        _("“%(lock)s” gets no more time: its holder was asked to stop, and learns of it at its next renewal."),
    ),
    ActionResult.SHARED: (
        messages.WARNING,
        _("“%(lock)s” is held by several holders, who cannot be asked or given time individually."),
    ),
    ActionResult.FOREIGN: (
        messages.WARNING,
        _("“%(lock)s” was left alone: another program holds it, and cannot be asked to stop."),
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
DONE = (ActionResult.RELEASED, ActionResult.UNKNOWN, ActionResult.ASKED, ActionResult.EXTENDED)  # or perhaps done
AUDITED = {
    "release": (DELETION, "Released by force"),
    "stop": (CHANGE, "Asked its holder to stop"),
    "extend": (CHANGE, "Extended by an operator"),
    "revoke": (CHANGE, "Told the workers to revoke its task"),
}


def carry_out(action: str, choice: Choice, seconds: float, reason: str) -> ActionResult:
    """Carry out the confirmed action and return the result."""
    if choice.problem:
        return choice.problem
    if action == "stop":
        return ask_to_stop("", choice.fingerprint, choice.alias, slug=choice.slug)
    if action == "extend":
        return extend_lock("", choice.fingerprint, seconds, choice.alias, slug=choice.slug)
    return force_release("", choice.fingerprint, choice.alias, slug=choice.slug, reason=reason)


def seconds_wanted(text: str, choices: Iterable[Choice]) -> tuple[float, str]:
    """Return the seconds by which to extend locks, and an error message if the input is invalid."""
    try:
        seconds = float(text.replace(",", ".")[:20])
    except ValueError:
        why = gettext("“%(text)s” is not a number of seconds.") % {"text": printable(text[:20])}
        return 0.0, gettext("Nothing was done: %(why)s") % {"why": why}
    try:
        for choice in choices:
            locks[choice.alias].rules.check_ttl(seconds)
    except (ValueError, InvalidRedlockError) as error:
        return 0.0, gettext("Nothing was done: %(why)s") % {"why": error}
    return seconds, ""


def problem_with(request: HttpRequest, keys: list[str]) -> str:
    """Return why the selection cannot be acted on; empty if it can."""
    if request.POST.get("select_across", "0") not in ("", "0"):
        return gettext("Nothing was done: “select all” includes locks that you have not seen. Tick them.")
    if len(keys) > MAX_RELEASE:
        return gettext("Nothing was done: select at most %(max)d locks at a time.") % {"max": MAX_RELEASE}
    return ""


def look_again(keys: Iterable[str], action: str) -> Iterator[Choice]:
    """Yield the chosen locks in their present state; query each alias once."""
    parsed: dict[str, list[tuple[str, str, str]]] = {}
    for key in keys:
        try:
            fingerprint, alias, slug = parse_key(key)
        except ValueError:
            continue  # the key is not from our page
        if alias in known_aliases():
            parsed.setdefault(alias, []).append((key, fingerprint, slug))
    for alias, chosen in parsed.items():
        yield from _choices(alias, chosen, action)


def obstacle(lock: Held, action: str) -> ActionResult | None:
    """Return why nobody can do this to a lock, whoever holds it when the action is confirmed; None if one can."""
    if action != "release" and is_shared(lock):
        return ActionResult.SHARED
    return ActionResult.FOREIGN if action == "stop" and lock.owner is None else None


def _choices(alias: str, chosen: list[tuple[str, str, str]], action: str) -> Iterator[Choice]:
    try:
        snapshot = find_locks([slug for _key, _fingerprint, slug in chosen], alias)
    except InvalidRedlockError:
        return
    found = {lock.slug: lock for lock in snapshot.locks}
    for key, fingerprint, slug in chosen:
        lock = found.get(slug)
        row = HeldLock.of(lock) if lock else None
        problem: ActionResult | None
        if lock is None:
            problem = ActionResult.GONE if snapshot.has_quorum else ActionResult.UNKNOWN
        else:
            problem = obstacle(lock, action) if lock.fingerprint == fingerprint else ActionResult.CHANGED
        yield Choice(key, fingerprint, alias, slug, row, problem)


def revoke_task(choice: Choice) -> str:
    """Tell Celery's workers to end the task that holds a lock; return why that failed, or an empty text."""
    from ..celery import handle as control  # only here: Celery is optional

    try:
        control.revoke(choice.task, terminate=True)
    except Exception as error:  # from any broker's client, or from its settings
        log.warning("revoking a task failed", exc_info=True)
        return type(error).__name__
    return ""


def can_revoke(choices: Iterable[Choice]) -> bool:
    """Return whether a task holds a lock on which the action is possible, and Celery is installed."""
    return any(choice.possible and choice.task for choice in choices) and find_spec("celery") is not None


def audit(request: HttpRequest, action: str, choice: Choice, outcome: str, reason: str) -> None:
    """Log who did what to which holder, and why. Django's own helpers differ between releases."""
    row = choice.row
    flag, done = AUDITED[action]
    left = f"{row.remaining:.1f} s left" if row and row.remaining is not None else "no time known"
    holder = row.holder or "another program" if row else "unknown"
    parts = [
        f"{done} ({outcome}).",
        f"{LOGGED_ALIAS % choice.alias} {holder}, fingerprint {choice.fingerprint}, {left}.",
    ]
    LogEntry.objects.create(
        user_id=request.user.pk,  # type: ignore[misc]  # an administrator has one, of whatever type
        content_type=ContentType.objects.get_for_model(HeldLock, for_concrete_model=False),
        object_id=choice.name,
        object_repr=choice.name[:200],
        action_flag=flag,
        change_message=" ".join([*parts, f"Reason: {reason}"] if reason else parts),
    )


PERIOD = timedelta(days=1)  # after which a request to stop is no longer shown


def entries_of(names: Iterable[str]) -> QuerySet[LogEntry]:
    """Return the entries about the locks with these names, of any alias, latest first."""
    about = ContentType.objects.get_for_model(HeldLock, for_concrete_model=False)
    return LogEntry.objects.filter(content_type=about, object_id__in=list(names)).order_by("-action_time")


def note_requests(rows: Iterable[HeldLock]) -> None:
    """Note in each row how long ago this holder was asked to stop on the admin's pages."""
    rows = list(rows)
    recent = entries_of({row.name for row in rows}).filter(action_time__gte=now() - PERIOD)
    recent = recent.filter(change_message__startswith=AUDITED["stop"][1])
    asked = list(recent.values_list("object_id", "change_message", "action_time"))
    for row in rows:
        holder = (LOGGED_ALIAS % row.alias, f"fingerprint {row.lock.fingerprint},")
        times = [when for name, text, when in asked if name == row.name and all(part in text for part in holder)]
        row.asked = duration(max(1.0, (now() - max(times)).total_seconds())) if times else ""
