"""
The rows of the list: held locks instead of a queryset, and the filters (internal).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..core.names import SHARED_KIND
from ..engine.manager import LockManager
from ..handler import locks
from ..inventory import HeldLock as Held
from ..inventory import Snapshot, State, find_locks, held_locks, holder_of
from ..inventory.model import leaders
from ..models import key_of

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
