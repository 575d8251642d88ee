"""Report locks of one node: those with given names, or a page of its index (internal)."""

import math

from ..names import queue_of
from ..protocol import HIGHEST, LONGEST_SLUG, LONGEST_VALUE, SHARED, Kind, Reply, Row, Survey
from .queues import NOBODY
from .records import Records


def survey(records: Records, request: Survey, now: float) -> Reply:
    """Return the reply of a node to a survey at *now*, in seconds since the epoch."""
    slugs, cursor = request.slugs, ""
    if request.size > 0:
        slugs, cursor = page(records, request.after, request.size)
    rows: list[Row] = []
    named = 0
    for slug in slugs:
        rows.append(row(records, slug, now, request.waiters, named))
        named += len(rows[-1].waiters)
    return Reply(Kind.LISTED, 0, int(now * 1e6), rows=tuple(rows), total=len(records.index), cursor=cursor)


def page(records: Records, after: str, size: int) -> tuple[tuple[str, ...], str]:
    """
    Return at most *size* slugs, and the cursor of the next page.

    A page begins after the position that the last name of the previous page had. If pages were numbered, names would be
    skipped whenever others before them are extended and move to the end.
    """
    score, _, last = after.partition(" ")
    behind = (float(score), last) if after else (-math.inf, "")
    found = sorted((ends, slug) for slug, ends in records.index.items() if (ends, slug) > behind)
    shown = [(ends, slug) for ends, slug in found[:size] if len(slug.encode()) <= LONGEST_SLUG]
    more = len(found) > size
    return tuple(slug for _, slug in shown), f"{shown[-1][0]!r} {shown[-1][1]}" if more and shown else ""


def row(records: Records, slug: str, now: float, asked: int | None, named: int) -> Row:
    """
    Return one lock of a survey.

    Args:
        records: What the node stores.
        slug: The lock's name, as written in the keys.
        now: The node's time, in seconds since the epoch.
        asked: The most waiters to list, over all rows; None counts neither waiters nor sharers.
        named: How many waiters the earlier rows list.
    """
    waiting = records.queues.get(queue_of(slug) or slug, NOBODY).waiting(now)
    held = (records.holder(slug, now) or "")[:LONGEST_VALUE]
    names = tuple(waiting[: max(0, (asked or 0) - named)]) if held else ()
    count = 0 if asked is None else len(waiting)
    shared = asked is not None and records.owner(slug, now) == SHARED
    sharers = len(records.sharers(slug, now)) if shared else 0
    return Row(slug, held, records.left(slug, now), min(records.fence(slug, now), HIGHEST + 1), names, count, sharers)
