"""What one node stores: a record for each name, and tombstones against late requests (internal)."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..names import SECRET_SIZE
from ..protocol import ABSENT, HIGHEST, LONGEST_VALUE, PERMITS, SHARED
from .queues import NOBODY, Queue

NO_FENCE: tuple[int, float | None] = (0, None)


class Tombstone(NamedTuple):
    """
    The record that refuses late requests with a secret that was released or replaced.

    Args:
        until: When it ends.
        revoked: Whether an operator asked the holder to stop.
        superseded: Whether another holder has replaced this one, and may hand the lock back to it.
    """

    until: float
    revoked: bool
    superseded: bool = False


class Records:
    """
    The keys of one node.

    An expired entry counts as absent and is dropped when it is found. Times are in seconds since the epoch.
    """

    def __init__(self) -> None:
        self.holders: dict[str, tuple[str, float | None]] = {}
        """The value under each name, and when it ends; None is never."""
        self.shared: dict[str, dict[str, float]] = {}
        """The secrets that share a name, and when each hold ends; ignored unless its value says that several do."""
        self.fences: dict[str, tuple[int, float | None]] = {}
        """The highest fencing token that was accepted for each name, and when it is forgotten; None is never."""
        self.queues: dict[str, Queue] = {}
        """The waiters of each name."""
        self.tombstones: dict[str, Tombstone] = {}
        """The secrets whose requests are refused."""
        self.index: dict[str, float] = {}
        """The names that listings show, and about when each of them ends."""
        self.served: tuple[str, str, int] | None = None
        """Run id and replication id of the server that has the keys, and since when, in microseconds."""

    def holder(self, slug: str, now: float) -> str | None:
        """Return the value under a name, None if it is free."""
        held = self.holders.get(slug)
        if held is None:
            return None
        value, until = held
        if until is not None and until <= now:
            self.holders.pop(slug, None)
            return None
        return value

    def owner(self, slug: str, now: float) -> str:
        """Return the secret that holds a name, or the word in its place if several may; empty if the name is free."""
        return (self.holder(slug, now) or "")[:SECRET_SIZE]

    def left(self, slug: str, now: float) -> float | None:
        """Return for how many seconds more a name is held: None for ever, ``ABSENT`` if it is free."""
        if self.holder(slug, now) is None:
            return ABSENT
        until = self.holders[slug][1]
        return None if until is None else until - now

    def has(self, slug: str, secret: str, shared: bool, now: float) -> bool:
        """Return whether a name is held with *secret*, alone or beside others."""
        if shared:
            return self.owner(slug, now) == SHARED and secret in self.shared.get(slug, {})
        # A longer secret is the whole value of a key that another program wrote and that an operator wants to release.
        value = self.holder(slug, now) or ""
        return value[: SECRET_SIZE if len(secret) <= SECRET_SIZE else LONGEST_VALUE] == secret

    def sharers(self, slug: str, now: float) -> dict[str, float]:
        """Return the secrets that share a name, and when each hold ends."""
        self.shared[slug] = {secret: until for secret, until in self.shared.get(slug, {}).items() if until > now}
        return self.shared[slug]

    def fence(self, slug: str, now: float) -> int:
        """Return the highest fencing token that was accepted for a name, 0 if none is remembered."""
        number, until = self.fences.get(slug, NO_FENCE)
        if until is not None and until <= now:
            self.fences.pop(slug, None)
            return 0
        return number

    def highest_fence(self, slugs: tuple[str, ...], now: float) -> int:
        """Return the highest fencing token that was accepted for any of *slugs*."""
        return max([self.fence(slug, now) for slug in slugs])

    def cancelled(self, secret: str, now: float) -> bool:
        """Return whether requests with *secret* are refused, because its attempt or hold was released."""
        tombstone = self.tombstones.get(secret)
        return tombstone is not None and tombstone.until > now

    def revoked(self, secret: str, now: float) -> bool:
        """Return whether an operator asked the holder with *secret* to stop, or took its lock away."""
        return self.cancelled(secret, now) and self.tombstones[secret].revoked

    def write(self, slug: str, value: str, ttl: float, now: float) -> None:
        """Store *value* as the holder of a name for *ttl* seconds."""
        self.holders[slug] = (value, now + ttl)
        if not value.startswith(PERMITS):  # its permits are listed
            self.index[slug] = now + ttl

    def share(self, slug: str, secret: str, value: str, ttl: float, now: float) -> None:
        """Let one more holder share a name for *ttl* seconds; the name is held until the last hold on it ends."""
        if self.owner(slug, now) != value[:SECRET_SIZE]:
            # Entries of earlier holders mean nothing unless the value says that they share the name in this way.
            self.shared[slug] = {}
        sharers = self.sharers(slug, now)
        sharers[secret] = now + ttl
        self.write(slug, value, max(sharers.values()) - now, now)

    def leave(self, slug: str, secret: str, now: float) -> bool:
        """Take a hold away from those that share a name; return whether it was the last, and the name is free."""
        del self.shared[slug][secret]
        if others := self.sharers(slug, now):
            self.write(slug, self.holders[slug][0], max(others.values()) - now, now)
            return False
        self.remove(slug)
        return True

    def write_fence(self, slugs: tuple[str, ...], number: int, keep: float | None, now: float) -> None:
        """Remember a fencing token for *keep* seconds, None for ever."""
        for slug in slugs:
            self.fences[slug] = (number, None if keep is None else now + keep)

    def remove(self, slug: str) -> None:
        """Free a name."""
        del self.holders[slug]
        self.index.pop(slug, None)

    def trim(self, now: float) -> None:
        """Remove some names whose hold has expired from the index; a name without expiry stays in it."""
        stale = [(until, slug) for slug, until in self.index.items() if until <= now]
        for _, slug in sorted(stale)[:8]:
            left = self.left(slug, now)
            if left == ABSENT:
                del self.index[slug]
            else:
                self.index[slug] = float("inf") if left is None else now + left

    # For nodes that store the record of a name elsewhere, as JSON. Other programs may change such a record, so each
    # number is checked when it is read.

    def load(self, slug: str, record: Mapping[str, Any]) -> None:
        """Restore the record of a name from what :meth:`dump` returned."""
        if "holder" in record:
            value, until = record["holder"]
            ends = moment(until)
            self.holders[slug], self.index[slug] = (str(value), ends), math.inf if ends is None else ends
            self.shared[slug] = {secret: moment(until) or 0.0 for secret, until in record.get("sharers", {}).items()}
        if "fence" in record:
            number, until = record["fence"]
            self.fences[slug] = (counted(number), moment(until))
        if "queue" in record:
            queue = self.queues[slug] = Queue()
            for waiter, (stamp, until) in record["queue"].items():
                queue.stamps[waiter], queue.enrolled[waiter] = counted(stamp), moment(until) or 0.0

    def dump(self, slug: str, now: float) -> dict[str, Any]:
        """Return everything stored under a name, except what has expired."""
        record: dict[str, Any] = {}
        if self.holder(slug, now) is not None:
            record["holder"] = list(self.holders[slug])
        if self.owner(slug, now).startswith((SHARED, PERMITS)):
            record["sharers"] = dict(self.sharers(slug, now))
        if self.fence(slug, now):
            record["fence"] = list(self.fences[slug])
        queue = self.queues.get(slug, NOBODY)
        if waiting := queue.waiting(now):
            record["queue"] = {waiter: [queue.stamps[waiter], queue.enrolled[waiter]] for waiter in waiting}
        return record

    def load_tombstone(self, secret: str, record: Mapping[str, Any]) -> None:
        """Restore a tombstone from what :meth:`dump_tombstone` returned."""
        if "until" in record:
            words = bool(record.get("revoked")), bool(record.get("superseded"))
            self.tombstones[secret] = Tombstone(moment(record["until"]) or 0.0, *words)

    def dump_tombstone(self, secret: str, now: float) -> dict[str, Any]:
        """Return the tombstone of an attempt or hold that was released; empty if there is none."""
        if not self.cancelled(secret, now):
            return {}
        return self.tombstones[secret]._asdict()


def counted(number: Any) -> int:
    """Return the number in a record; anything that is not a valid number becomes one above the highest."""
    return number if isinstance(number, int) and 0 <= number <= HIGHEST else HIGHEST + 1


def moment(until: Any) -> float | None:
    """Return when something ends, in seconds since the epoch; None, for never, if *until* is not a time."""
    return float(until) if isinstance(until, (int, float)) and abs(until) <= HIGHEST / 1e6 else None
