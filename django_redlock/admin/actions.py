"""
Carry out an operator's action on chosen locks: check them again, act, and write the admin's log (internal).
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..handler import locks
from ..inventory import ActionResult, ask_to_stop, extend_lock, find_locks, force_release, printable
from ..inventory import HeldLock as Held
from ..inventory.model import meaning_of
from ..inventory.survey import is_shared
from ..models import HeldLock, parse_key
from .rows import held_for, known_aliases, remaining

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
