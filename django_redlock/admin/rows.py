"""
The rows of the list: held locks in place of a queryset, and what chooses among them.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..handler import locks
from ..inventory import Snapshot, State, held_locks
from ..models import HeldLock

FOREIGN = "other"  # the kind of a holder that did not use this library
SOON = 10.0  # seconds

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

    def sorted_by(self, field: Any, descending: bool) -> "HeldLocks":
        """Return them by a field of the model; what is not known comes last, in either direction."""
        if not isinstance(field, str):
            return self
        known = self.matching(lambda row: getattr(row, field) is not None)
        known.sort(key=lambda row: getattr(row, field), reverse=descending)
        return HeldLocks([*known, *self.matching(lambda row: getattr(row, field) is None)])


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
        names = known_aliases()
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


class SoonFilter(_Filter):
    """By whether the lock is about to end."""

    title = _("remaining")
    parameter_name = "left"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the one choice."""
        return [("soon", str(_("less than 10 seconds")))]

    def value_of(self, row: HeldLock) -> str:
        """Return whether it ends soon."""
        return "soon" if row.remaining is not None and row.remaining < SOON else ""


FILTERS = (AliasFilter, StateFilter, KindFilter, SoonFilter)


def known_aliases() -> list[str]:
    """Return the aliases of the setting; none if it cannot be read."""
    try:
        return list(locks)
    except InvalidRedlockError:
        return []


def banners(chosen: str | None) -> Iterator[Banner]:
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
