"""
The rows of a database node, and the decisions on them (internal).

A request is decided by the node in memory (:mod:`~django_redlock.core.node_state`), which is given the rows as they
were read. Nothing here reads or writes: see :mod:`.table`.
"""

import json
import random
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from ...core.node_state import NodeState
from ...core.requests import Acquire, Extend, Raise, Release, Repair, Request, Survey

FOR_EVER = 2**62  # microseconds since the epoch: a time that never comes


def digest(*parts: str) -> str:
    """Return a digest of names for a column that every database compares byte by byte."""
    return blake2b("\n".join(parts).encode(), digest_size=16).hexdigest()


def micros(seconds: float | None) -> int:
    """Return seconds since the epoch as the columns store them; None is never."""
    return FOR_EVER if seconds is None else min(FOR_EVER, round(seconds * 1e6))


class Stored(NamedTuple):
    """A row as it was read; ``version`` is None if there is no such row."""

    version: int | None
    record: dict[str, Any]


class Change(NamedTuple):
    """The new content of a row, to be written if its version is still *version*."""

    digest: str
    version: int | None
    ends: int | None
    kept: int
    state: str


class Names(NamedTuple):
    """The slugs that requests concern, and the nonces that may have been released before they were granted."""

    slugs: set[str]
    nonces: set[str]


def names_of(requests: Iterable[Request]) -> Names:
    """Return the keys that must be read to decide on *requests*."""
    names = Names(set(), set())
    for request in requests:
        match request:
            case Extend(terms):
                for term in terms:
                    names.slugs.update(term.slugs)
                    names.nonces.add(term.nonce)
            case Acquire() | Release():
                names.slugs.update(request.slugs)
                names.slugs.update({request.queue} - {""})
                names.nonces.add(request.nonce)
            case Raise() | Survey():
                names.slugs.update(request.slugs)
            case Repair():
                names.slugs.add(request.slug)
    return names


def tombstoned(requests: Iterable[Request]) -> set[str]:
    """Return the slugs whose rows a release changes, so that no earlier request is granted after it."""
    return {slug for one in requests if isinstance(one, Release) and one.tombstone for slug in one.slugs}


def columns_of(change: Change) -> tuple[Any, ...]:
    """Return the first parameters of both ways to write a row; the version is new each time."""
    return random.getrandbits(62), change.ends, change.kept, change.state, change.digest


class Known:
    """The rows of some names, read at one moment, and the node in memory that decides on them."""

    def __init__(
        self, now: int, slugs: Mapping[str, str], tombstones: Mapping[str, str], rows: Mapping[str, Stored]
    ) -> None:
        self.store = NodeState(lambda: now / 1e6)
        self.rows = rows
        self.now = now
        self._slugs = slugs
        self._tombstones = tombstones
        for key, slug in slugs.items():
            if key in rows:
                self.store.load(slug, rows[key].record)
        for key, nonce in tombstones.items():
            if key in rows:
                self.store.load_tombstone(nonce, rows[key].record)

    def dump(self) -> dict[str, dict[str, Any]]:
        """Return the new content of the rows, by their keys."""
        records = {key: {"slug": slug, **self.store.dump(slug)} for key, slug in self._slugs.items()}
        return records | {key: self.store.dump_tombstone(nonce) for key, nonce in self._tombstones.items()}


def change(known: Known, key: str, record: dict[str, Any]) -> Change:
    """Return a record as JSON, with the columns for listings and for when it is no longer needed."""
    ends = micros(record["holder"][1]) if "holder" in record else None
    times = [record[part][1] for part in ("holder", "fence") if part in record]
    times += [until for _, until in record.get("queue", {}).values()]
    times += [record["until"]] if "until" in record else []
    kept = max([known.now, *map(micros, times)])
    version = known.rows[key].version if key in known.rows else None
    return Change(key, version, ends, kept, json.dumps(record, separators=(",", ":")))
