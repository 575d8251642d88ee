"""
Convert the record of one name to and from JSON, for nodes that store it elsewhere (internal).

Other programs may change the record, so each number is checked when it is read.
"""

import math
from collections.abc import Mapping
from typing import Any

from ..protocol import HIGHEST, SHARED
from .queues import NOBODY, Queue
from .records import Records, Tombstone


def load(records: Records, slug: str, record: Mapping[str, Any]) -> None:
    """Restore the record of a name from what :func:`dump` returned."""
    if "holder" in record:
        value, until = record["holder"]
        ends = moment(until)
        records.holders[slug], records.index[slug] = (str(value), ends), math.inf if ends is None else ends
        records.shared[slug] = {secret: moment(until) or 0.0 for secret, until in record.get("sharers", {}).items()}
    if "fence" in record:
        number, until = record["fence"]
        records.fences[slug] = (counted(number), moment(until))
    if "queue" in record:
        queue = records.queues[slug] = Queue()
        for waiter, (stamp, until) in record["queue"].items():
            queue.stamps[waiter], queue.enrolled[waiter] = counted(stamp), moment(until) or 0.0


def dump(records: Records, slug: str, now: float) -> dict[str, Any]:
    """Return everything stored under a name, except what has expired."""
    record: dict[str, Any] = {}
    if records.holder(slug, now) is not None:
        record["holder"] = list(records.holders[slug])
    if records.owner(slug, now) == SHARED:
        record["sharers"] = dict(records.sharers(slug, now))
    if records.fence(slug, now):
        record["fence"] = list(records.fences[slug])
    queue = records.queues.get(slug, NOBODY)
    if waiting := queue.waiting(now):
        record["queue"] = {waiter: [queue.stamps[waiter], queue.enrolled[waiter]] for waiter in waiting}
    return record


def load_tombstone(records: Records, secret: str, record: Mapping[str, Any]) -> None:
    """Restore a tombstone from what :func:`dump_tombstone` returned."""
    if "until" in record:
        words = bool(record.get("revoked")), bool(record.get("superseded"))
        records.tombstones[secret] = Tombstone(moment(record["until"]) or 0.0, *words)


def dump_tombstone(records: Records, secret: str, now: float) -> dict[str, Any]:
    """Return the tombstone of an attempt or hold that was released; empty if there is none."""
    if not records.cancelled(secret, now):
        return {}
    return records.tombstones[secret]._asdict()


def counted(number: Any) -> int:
    """Return the number in a record; anything that is not a valid number becomes one above the highest."""
    return number if isinstance(number, int) and 0 <= number <= HIGHEST else HIGHEST + 1


def moment(until: Any) -> float | None:
    """Return when something ends, in seconds since the epoch; None, for never, if *until* is not a time."""
    return float(until) if isinstance(until, (int, float)) and abs(until) <= HIGHEST / 1e6 else None
