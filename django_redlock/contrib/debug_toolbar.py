"""
A panel for django-debug-toolbar that shows the locks that a request tried to take.

    from debug_toolbar.settings import PANELS_DEFAULTS

    DEBUG_TOOLBAR_PANELS = [*PANELS_DEFAULTS, "django_redlock.contrib.debug_toolbar.LocksPanel"]
"""

from contextvars import ContextVar
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..core.names import Owner
from ..core.protocol import EndReason
from ..engine.lease import Lease
from ..exceptions import LockTakenError, missing_extra, printable
from ..signals import lock_acquired, lock_taken

try:
    from debug_toolbar.panels import Panel
except ModuleNotFoundError as error:
    raise missing_extra(error, "debug-toolbar") from None

# The locks that the request tried to take: leases, and errors of failed attempts. A context variable follows a request
# from the event loop into threads and back, and no other request sees its value.
_tried: ContextVar[list[Any] | None] = ContextVar("django_redlock_tried", default=None)


def _note(lease: Lease | None = None, error: Exception | None = None, **about: Any) -> None:
    if (tried := _tried.get()) is not None:
        tried.append(lease or error)


class LocksPanel(Panel):
    """Show each lock that the request tried to take, how long the request waited for it, and the outcome."""

    title = gettext_lazy("Locks")
    template = "django_redlock/debug_toolbar.html"
    is_async = True

    @classmethod
    def ready(cls) -> None:
        """Connect to the signals once, for all requests."""
        lock_acquired.connect(_note, dispatch_uid="django_redlock.debug_toolbar")
        lock_taken.connect(_note, dispatch_uid="django_redlock.debug_toolbar")

    @property
    def nav_subtitle(self) -> str:
        """Return the number of locks and the time spent waiting for them."""
        locks = self.get_stats().get("locks", [])
        waited = sum(lock["waited"] for lock in locks)
        text = ngettext("%(count)d lock, %(waited).1f ms", "%(count)d locks, %(waited).1f ms", len(locks))
        return text % {"count": len(locks), "waited": waited}

    def enable_instrumentation(self) -> None:
        """Start collecting the locks of this request."""
        self._locks: list[Any] = []
        _tried.set(self._locks)

    def disable_instrumentation(self) -> None:
        """Stop collecting."""
        _tried.set(None)

    def generate_stats(self, request: Any, response: Any) -> None:
        """Record a copy of the locks for the panel to show."""
        rows = [
            {"name": printable(tried.name), "waited": tried.waited * 1000, "outcome": _outcome(tried)}
            for tried in self._locks
        ]
        self.record_stats({"locks": rows})


def _outcome(tried: Any) -> str:
    if isinstance(tried, Lease):
        if tried.reason is None:
            return _("held")
        return _("released") if tried.reason is EndReason.RELEASED else f"{_('lost')} ({tried.reason})"
    if isinstance(tried, LockTakenError):
        owner = Owner(**tried.holder)
        holder = f"{owner.kind} {owner.work}" if tried.holder else ""
        return f"{_('taken')} ({printable(holder)})" if holder else _("taken")
    return _("too few nodes answered")
