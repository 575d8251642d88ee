"""The rows in which a database keeps records (internal)."""

import json
import secrets
from typing import Any, NamedTuple

from ..records.record import Change, needed_until

FOR_EVER = 2**62  # microseconds since the epoch: a time that never comes


def micros(seconds: float | None) -> int:
    """Return seconds since the epoch as the columns store them; None means never."""
    return FOR_EVER if seconds is None else min(FOR_EVER, round(seconds * 1e6))


class Row(NamedTuple):
    """The new content of a row, to be written if its version is still *version*."""

    digest: str
    version: int | None
    ends: int | None
    kept: int
    state: str

    @property
    def columns(self) -> tuple[Any, ...]:
        """
        The first parameters of both the update and the insertion of a row; the version is new each time.

        It comes from the operating system. Programs seed ``random``, and two with one seed would write equal versions:
        a late write would then find the version that it read, although the row has changed twice since. A counter would
        do the same where a row is deleted and inserted again.
        """
        return secrets.randbits(62), self.ends, self.kept, self.state, self.digest


def row(change: Change, now: int) -> Row:
    """Return the row of a record: its JSON, when its hold ends, and until when the record is needed."""
    record = change.record
    ends = micros(record["holder"][1]) if "holder" in record else None
    kept = max(now, micros(needed_until(record)))
    return Row(change.key, change.version, ends, kept, json.dumps(record, separators=(",", ":")))
