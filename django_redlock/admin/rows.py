"""
What the admin shows of one lock: the cells of its row, and the entries about it in the admin's log (internal).
"""

import re
import time
from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import lru_cache

from django.contrib.admin.models import CHANGE, DELETION, LogEntry
from django.contrib.contenttypes.models import ContentType
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.html import escape, format_html
from django.utils.safestring import SafeString
from django.utils.timezone import localtime, now
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _

from ..conf import InvalidRedlockError
from ..core.names import SHARED_KIND, is_cut
from ..exceptions import printable
from ..handler import locks
from ..inventory import LockReport
from ..inventory.model import State, duration, middle, name_of
from ..models import HeldLock

DASH = "\N{EN DASH}"
LONGEST = 80  # characters of a name in the list
PARTS_END = re.compile(r"(?<=[._:/-])(?!$)")
DOTS = {True: '<i class="redlock-yes"></i>', False: '<i class="redlock-no"></i>'}
FOREIGN = "other"  # the kind of a holder that another program created
KINDS = {
    "task": _("task"),
    "view": _("view"),
    "model": _("model"),
    "command": _("command"),
    "manual": _("manual"),
    SHARED_KIND: _("several, who share it"),
    FOREIGN: _("another program"),
}
AUDITED = {
    "release": (DELETION, "Released by force"),
    "stop": (CHANGE, "Asked its holder to stop"),
    "revoke": (CHANGE, "Told the workers to revoke its task"),
}
PERIOD = timedelta(days=1)  # after which a request to stop is no longer shown


def known_aliases() -> list[str]:
    """Return the aliases of the setting; none if it cannot be read."""
    try:
        return list(locks)
    except InvalidRedlockError:
        return []


# The cells


def labelled(label: object, value: str) -> SafeString:
    """Return a cell that contains the title of its column, for screens on which a row is a card."""
    return SafeString(_title(str(label)) + (value if isinstance(value, SafeString) else escape(value)))


@lru_cache(maxsize=256)  # enough for all columns in all languages; hundreds of cells on a page share these titles
def _title(label: str) -> str:
    return format_html('<span class="redlock-label" aria-hidden="true">{}</span> ', label)


def state(row: HeldLock) -> SafeString:
    """Return the state in words, and whether the holder was asked to stop."""
    lock = row.lock
    about = (lock.state.value, lock.meaning, row.status)
    badge = format_html('<span class="redlock-state redlock-{}" title="{}">{}</span>', *about)
    return format_html("{} {}", badge, stopping(row.asked)) if row.asked else badge


def stopping(asked: str) -> SafeString:
    """Return a badge with the time since the holder was asked to stop."""
    text = gettext("asked to stop %(asked)s ago") % {"asked": asked}
    return format_html('<span class="redlock-state redlock-stopping">{}</span>', text)


def waiting(lock: LockReport) -> str:
    """Return the number of waiters."""
    return format_html('<strong class="redlock-waited">{}</strong>', lock.waiting) if lock.waiting else DASH


def countdown(lock: LockReport) -> SafeString:
    """Return the time until a lock ends, for people and for the script that counts it down."""
    if lock.remaining is None:
        return SafeString(remaining(lock))
    left = f"{lock.remaining:.1f}"
    most = f"{max(lock.ttl or 0.0, lock.remaining, 0.1):.1f}"  # a minimum hold may be longer than the lease
    bar = format_html('<progress max="{}" value="{}" aria-hidden="true"></progress>', most, left)
    return format_html(
        '<span class="redlock-left" data-left="{}"><time datetime="PT{}S">{}</time> {}</span>',
        left,
        int(lock.remaining),
        clock(lock.remaining),
        bar,
    )


def remaining(lock: LockReport) -> str:
    """Return the time until a lock ends unless its holder extends it, in words if it never does."""
    if lock.remaining is None:
        return gettext("never ends") if lock.state == State.NO_EXPIRY else DASH
    return clock(lock.remaining)


def clock(seconds: float) -> str:
    """Return a duration as minutes and seconds, or hours, minutes and seconds."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def votes(lock: LockReport) -> SafeString:
    """Return how many nodes have the holder, with a dot for each node and the same in words."""
    having = [view.fingerprint == lock.fingerprint for view in lock.views]
    lacking = ", ".join(view.node for view, has in zip(lock.views, having, strict=True) if not has)
    words = gettext("%(votes)d of %(nodes)d nodes") % {"votes": lock.votes, "nodes": lock.nodes}
    words += "; " + gettext("without %(nodes)s") % {"nodes": lacking} if lacking else ""
    return format_html(
        '<span class="redlock-votes" title="{words}">'
        '<span aria-hidden="true">{votes}/{nodes} <span>{dots}</span></span>'
        '<span class="visually-hidden">{words}</span></span>',
        words=words,
        votes=lock.votes,
        nodes=lock.nodes,
        dots=SafeString("".join([DOTS[has] for has in having])),
    )


def holder(lock: LockReport) -> str:
    """Return what the holder of a lock is, and where it runs."""
    owner = lock.owner
    if owner is None:
        return gettext("another program")
    if owner.kind == SHARED_KIND:
        return isolated(lock.holder)
    kind = str(KINDS.get(owner.kind, owner.kind))
    what = " ".join(filter(None, (owner.work, owner.ref))) or kind
    where = f"{owner.host}:{owner.pid}" if owner.host else ""
    detail = " · ".join(filter(None, (kind if what != kind else "", where)))
    return format_html(
        '<span class="redlock-what">{}</span> <span class="redlock-where">{}</span>',
        breakable(printable(what)),
        printable(detail),
    )


def isolated(text: str) -> SafeString:
    """Return a text that begins with a number, which would move to the end on a page from right to left."""
    return format_html("<bdi>{}</bdi>", text)


def held_for(row: HeldLock, *, titled: bool = False) -> str:
    """Return the time for which a lock has been held, and since when; *titled* is the label of that moment."""
    seconds = row.lock.held_for(time.time())
    if seconds is None or row.since is None:
        return DASH
    when = moment(row.since)
    return format_html(
        '<span class="redlock-for">{}</span> <span class="redlock-where">{}</span>',
        duration(seconds),
        SafeString(escape(gettext("since %(moment)s")) % {"moment": when}) if titled else when,
    )


def moment(when: datetime) -> SafeString:
    """Return a point in time for people: the time of day if it was today."""
    local = localtime(when)
    today = local.date() == datetime.now(local.tzinfo).date()
    shown = local.strftime("%H:%M:%S" if today else "%Y-%m-%d %H:%M")
    full = local.isoformat(" ", "seconds")
    return format_html('<time datetime="{}" title="{}">{}</time>', local.isoformat("T", "seconds"), full, shown)


def copy_button(name: str) -> SafeString:
    """Return a button that copies a name which the list cuts; nothing if the nodes cut the name, too."""
    if len(name) <= LONGEST or is_cut(name):
        return SafeString("")
    return format_html(
        ' <button type="button" class="button redlock-copy" data-name="{}">'
        '{}<span class="visually-hidden"> {}</span></button>',
        name,
        gettext("Copy"),
        middle(name, LONGEST),
    )


def breakable(text: str) -> SafeString:
    """Return *text* as HTML in which lines may break after each part."""
    return SafeString(PARTS_END.sub("<wbr>", escape(text)))  # escaping writes no separators


# The admin's log


def audit(
    request: HttpRequest, action: str, row: HeldLock | None, key: tuple[str, str, str], outcome: str, reason: str
) -> None:
    """
    Log who did what to which holder, and why. Django's own helpers differ between releases.

    Args:
        request: The request of the operator.
        action: A key of ``AUDITED``.
        row: The lock before the action; None if it was not found.
        key: The slug of the lock, its alias, and the fingerprint of the holder.
        outcome: Its result.
        reason: What the operator wrote.
    """
    slug, alias, fingerprint = key
    name = printable(name_of(slug))
    flag, done = AUDITED[action]
    left = f"{row.remaining:.1f} s left" if row and row.remaining is not None else "no time known"
    holder = row.holder or "another program" if row else "unknown"
    parts = [f"{done} ({outcome}).", f"{logged(slug, alias)} {holder}, fingerprint {fingerprint}, {left}."]
    LogEntry.objects.create(
        user_id=request.user.pk,  # type: ignore[misc]  # an administrator has one, of whatever type
        content_type=ContentType.objects.get_for_model(HeldLock, for_concrete_model=False),
        object_id=name,
        object_repr=name[:200],
        action_flag=flag,
        change_message=" ".join([*parts, f"Reason: {reason}"] if reason else parts),
    )


def logged(slug: str, alias: str) -> str:
    """Return the words of an entry that distinguish its lock from others that are shown with the same name."""
    key = "" if slug == "{" + printable(name_of(slug)) + "}" else f" key {printable(slug)},"
    return f"Alias {alias},{key} holder"


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
        holder = (logged(row.lock.slug, row.alias), f"fingerprint {row.lock.fingerprint},")
        times = [when for name, text, when in asked if name == row.name and all(part in text for part in holder)]
        row.asked = duration(max(1.0, (now() - max(times)).total_seconds())) if times else ""
