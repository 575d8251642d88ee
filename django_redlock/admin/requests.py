"""
Read the entries about locks in the admin's log, above all the requests to stop (internal).
"""

from collections.abc import Iterable
from datetime import timedelta

from django.contrib.admin.models import LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import QuerySet
from django.utils.timezone import now

from ..inventory import duration
from ..models import HeldLock
from .pages import AUDITED, LOGGED_ALIAS

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
