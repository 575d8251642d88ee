"""
What one node decides: the record of each name, its queue, and the reply to each request (internal).

This is the reference that the Lua scripts are compared with. It is also what the nodes in memory and in databases run.
It reads no clock but the one that it is given.
"""

import math
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from .names import queue_of
from .owner import NONCE_SIZE
from .replies import ABSENT, Kind, Reply, Row, is_absurd
from .requests import (
    ENROLMENT,
    HIGHEST,
    LONGEST_SLUG,
    LONGEST_VALUE,
    QUEUE_CAP,
    SHARED,
    Acquire,
    Extend,
    Raise,
    Release,
    Repair,
    Request,
    Survey,
    Term,
)


class Queue:
    """Those that wait for one name: their stamps, and until when each is enrolled."""

    def __init__(self) -> None:
        self.stamps: dict[str, int] = {}
        self.enrolled: dict[str, float] = {}

    def first(self, now: float, waiter: str = "") -> str:
        """Return who is first in line; drops, up to *waiter*, those whose enrolment is over. Empty if nobody is."""
        while self.stamps:
            first = self.head()
            if first == waiter or self.enrolled.get(first, now) > now:
                return first
            self.leave(first)
        return ""

    def head(self) -> str:
        """Return who is first in line, be it enrolled too long ago; empty if nobody is."""
        if len(self.stamps) < 2:
            return next(iter(self.stamps), "")
        return min(zip(self.stamps.values(), self.stamps, strict=True))[1]

    def in_order(self) -> list[str]:
        """Return the waiters, those enrolled too long ago included."""
        return [member for _, member in sorted(zip(self.stamps.values(), self.stamps, strict=True))]

    def enrol(self, waiter: str, stamp: int, until: float) -> int:
        """Put *waiter* in line or keep it there; returns its place, -1 if the line is full."""
        if waiter not in self.stamps and len(self.stamps) >= QUEUE_CAP:
            return -1
        self.stamps.setdefault(waiter, stamp)
        self.enrolled[waiter] = until
        rank = (self.stamps[waiter], waiter)
        return sum([rank > other for other in zip(self.stamps.values(), self.stamps, strict=True)])

    def leave(self, waiter: str) -> bool:
        """Take *waiter* out; returns whether it was in line."""
        self.enrolled.pop(waiter, None)
        return self.stamps.pop(waiter, None) is not None


NO_FENCE: tuple[int, float | None] = (0, None)

NOBODY = Queue()
"""Stands for the queue of a name that nobody waits for."""


def counted(number: Any) -> int:
    """Return a number that a record holds; one that is none, or too high, is just above all others."""
    return number if isinstance(number, int) and 0 <= number <= HIGHEST else HIGHEST + 1


def moment(until: Any) -> float | None:
    """Return when something ends, in seconds since the epoch; what is no such time is never, and None stays so."""
    return float(until) if isinstance(until, (int, float)) and abs(until) <= HIGHEST / 1e6 else None


class NodeState:
    """
    The keys of one node: holders and fences, queues, the index, the cancel tombstones.

    Args:
        clock: Returns the node's time in seconds since the epoch.
        mutex: Held during each step; without it, one thread at a time may use this object.
    """

    def __init__(self, clock: Callable[[], float], mutex: AbstractContextManager[object] | None = None) -> None:
        self._clock = clock
        self._mutex = mutex or nullcontext()
        self.skew = 0.0
        self.listeners: dict[str, Callable[[str], object]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget everything, as a restart without data does."""
        with self._mutex:
            self._holders: dict[str, tuple[str, float | None]] = {}
            self._shared: dict[str, dict[str, float]] = {}
            self._fences: dict[str, tuple[int, float | None]] = {}
            self._queues: dict[str, Queue] = {}
            self._tombstones: dict[str, float] = {}
            self._revoked: set[str] = set()
            self._index: dict[str, float] = {}
            self._served: tuple[str, str, int] | None = None

    def serve(self, run_id: str, replication_id: str, *, was_replica: bool = False) -> float:
        """
        Return for how many seconds the server with these ids has served these locks; see ``served.lua``.

        Args:
            run_id: Changes with every start.
            replication_id: Changes when it becomes a master again, and when it has had no replica for long.
            was_replica: Whether it remembers to have been a replica.
        """
        with self._mutex:
            now = int(self._now() * 1e6)
            ran, replicated, since = self._served or ("", "", now)
            stayed = replicated == replication_id or not was_replica
            if ran != run_id or not stayed or since > now:
                since = now
            self._served = (run_id, replication_id, since)
            return (now - since) / 1e6

    def put(self, slug: str, value: str, ttl: float | None) -> None:
        """Write a holder key as a foreign program would; *ttl* in seconds, None for no expiry."""
        with self._mutex:
            now = self._now()
            self._holders[slug] = (value, None if ttl is None else now + ttl)
            self._index[slug] = now + (ttl or 0.0)

    def load(self, slug: str, record: Mapping[str, Any]) -> None:
        """Take what :meth:`dump` gave of a name; for nodes that keep it elsewhere."""
        if "holder" in record:
            value, until = record["holder"]
            ends = moment(until)
            self._holders[slug], self._index[slug] = (str(value), ends), math.inf if ends is None else ends
            self._shared[slug] = {nonce: moment(until) or 0.0 for nonce, until in record.get("sharers", {}).items()}
        if "fence" in record:
            number, until = record["fence"]
            self._fences[slug] = (counted(number), moment(until))
        if "queue" in record:
            queue = self._queues[slug] = Queue()
            for waiter, (stamp, until) in record["queue"].items():
                queue.stamps[waiter], queue.enrolled[waiter] = counted(stamp), moment(until) or 0.0

    def load_tombstone(self, nonce: str, record: Mapping[str, Any]) -> None:
        """Take what :meth:`dump_tombstone` gave."""
        if "until" in record:
            self._tombstones[nonce] = moment(record["until"]) or 0.0
        if record.get("revoked"):
            self._revoked.add(nonce)

    def dump(self, slug: str) -> dict[str, Any]:
        """Return what there is of a name, as JSON can write it; of what has expired, nothing."""
        now = self._now()
        record: dict[str, Any] = {}
        if self._holder(slug, now) is not None:
            record["holder"] = list(self._holders[slug])
        if self._owner(slug, now) == SHARED:
            record["sharers"] = dict(self._sharers(slug, now))
        if self._fence(slug, now):
            record["fence"] = list(self._fences[slug])
        queue = self._queues.get(slug, NOBODY)
        if waiting := [member for member in queue.in_order() if queue.enrolled[member] > now]:
            record["queue"] = {member: [queue.stamps[member], queue.enrolled[member]] for member in waiting}
        return record

    def dump_tombstone(self, nonce: str) -> dict[str, Any]:
        """Return what there is of an attempt that has been released."""
        if not self._cancelled(nonce, self._now()):
            return {}
        return {"until": self._tombstones[nonce], "revoked": nonce in self._revoked}

    def sharers(self, slug: str) -> list[str]:
        """Return the nonces of those who share a name."""
        return list(self._shared.get(slug, {}))

    def waiters(self, slug: str) -> list[str]:
        """Return who waits for a name, in order."""
        with self._mutex:
            queue = self._queues.get(slug, NOBODY)
            return [member for member in queue.in_order() if queue.enrolled[member] > self._now()]

    def execute(self, request: Request) -> Reply:
        """Carry out one request in one atomic step."""
        with self._mutex:
            now = self._now()
            match request:
                case Acquire():
                    return self._acquire(request, now)
                case Raise():
                    return self._raise(request, now)
                case Extend():
                    return self._extend(request, now)
                case Release():
                    return self._release(request, now)
                case Survey():
                    return self._survey(request, now)
                case Repair():
                    return self._repair(request, now)

    def _now(self) -> float:
        # Whole microseconds, as TIME gives them: expiry and tokens are compared with it.
        return int((self._clock() + self.skew) * 1e6) / 1e6

    def _holder(self, slug: str, now: float) -> str | None:
        held = self._holders.get(slug)
        if held is None:
            return None
        value, until = held
        if until is not None and until <= now:
            self._holders.pop(slug, None)
            return None
        return value

    def _owner(self, slug: str, now: float) -> str:
        return (self._holder(slug, now) or "")[:NONCE_SIZE]

    def _left(self, slug: str, now: float) -> float | None:
        if self._holder(slug, now) is None:
            return ABSENT
        until = self._holders[slug][1]
        return None if until is None else until - now

    def _fence(self, slug: str, now: float) -> int:
        number, until = self._fences.get(slug, NO_FENCE)
        if until is not None and until <= now:
            self._fences.pop(slug, None)
            return 0
        return number

    def _high(self, slugs: tuple[str, ...], now: float) -> int:
        return max([self._fence(slug, now) for slug in slugs])

    def _cancelled(self, nonce: str, now: float) -> bool:
        return self._tombstones.get(nonce, now) > now

    def _queue(self, request: Acquire | Release, slug: str) -> Queue:
        return self._queues.get(request.queue or slug, NOBODY)

    def _wake(self, queue: Queue) -> None:
        first = queue.head()
        listener = self.listeners.get(first.partition("|")[0]) if first else None
        if listener:
            listener(first)

    def _write(self, slug: str, value: str, ttl: float, now: float) -> None:
        self._holders[slug] = (value, now + ttl)
        self._index[slug] = now + ttl

    def _share(self, slug: str, nonce: str, value: str, ttl: float, now: float) -> None:
        """Let one more holder in; the key lasts as long as the last of them."""
        if self._owner(slug, now) != SHARED:
            self._shared[slug] = {}  # of no meaning without the holder's key
        sharers = self._sharers(slug, now)
        sharers[nonce] = now + ttl
        self._write(slug, SHARED + value[NONCE_SIZE:], max(self._shared[slug].values()) - now, now)

    def _sharers(self, slug: str, now: float) -> dict[str, float]:
        self._shared[slug] = {nonce: until for nonce, until in self._shared.get(slug, {}).items() if until > now}
        return self._shared[slug]

    def _write_fence(self, slugs: tuple[str, ...], number: int, keep: float | None, now: float) -> None:
        for slug in slugs:
            self._fences[slug] = (number, None if keep is None else now + keep)

    def _trim(self, now: float) -> None:
        stale = [(until, slug) for slug, until in self._index.items() if until <= now]
        for _, slug in sorted(stale)[:8]:
            left = self._left(slug, now)
            if left == ABSENT:
                del self._index[slug]
            else:
                self._index[slug] = float("inf") if left is None else now + left

    def _acquire(self, request: Acquire, now: float) -> Reply:
        high, time_us = self._high(request.slugs, now), int(now * 1e6)
        ours = {request.nonce, request.adopt or request.nonce}
        others = [slug for slug in request.slugs if self._in_the_way(request, slug, ours, now)]
        connected, queued = self._line(request, ours, now)
        if self._cancelled(request.nonce, now):
            return Reply(Kind.CANCELLED, high, time_us)
        if others or queued:
            return self._refuse(request, others, queued, high, now)
        for slug in request.slugs:
            if request.shared:
                self._share(slug, request.nonce, request.value, request.ttl, now)
            else:
                self._write(slug, request.value, request.ttl, now)
        if connected:
            self._keep_or_pass_on(request, connected, now)
        self._trim(now)
        if high < request.number <= time_us + request.ahead * 1e6:
            self._write_fence(request.slugs, request.number, request.keep, now)
            return Reply(Kind.ACCEPTED, request.number, time_us)
        return Reply(Kind.GRANTED, high, time_us)

    def _line(self, request: Acquire, ours: set[str], now: float) -> tuple[list[str], list[str]]:
        """Return the names of which the waiter is first in line, and those for which it has to let others go first."""
        connected: list[str] = []
        queued: list[str] = []
        for slug in request.slugs if self._queues else ():
            queue = self._queue(request, slug)
            if queue is NOBODY or self._owner(slug, now) in ours:
                continue
            first = queue.first(now, request.waiter)
            if first and first == request.waiter:
                connected.append(slug)
            elif first and not request.barge and not self._ahead_of(request, slug, first):
                queued.append(slug)
        return connected, queued

    def _ahead_of(self, request: Acquire, slug: str, first: str) -> bool:
        """Tell whether a waiter that is not in line came before the first that is: it had left with a vain grant."""
        return bool(request.waiter) and request.stamp < self._queue(request, slug).stamps[first]

    def _in_the_way(self, request: Acquire, slug: str, ours: set[str], now: float) -> bool:
        holder = self._holder(slug, now)
        if holder is None:
            return request.strict
        owner = holder[:NONCE_SIZE]
        return owner not in ours and not (request.shared and owner == SHARED)

    def _refuse(self, request: Acquire, others: list[str], queued: list[str], high: int, now: float) -> Reply:
        longest: float | None = 0.0
        for slug in others:
            left = self._left(slug, now)
            if left is None:
                self._index[slug] = float("inf")
            longest = None if left is None or longest is None else max(left, longest)
        detail = (self._holder(others[0], now) or "")[NONCE_SIZE:] if others else ""
        place = self._stand_in_line(request, {*others, *queued}, now) if request.waiter else -1
        return Reply(Kind.BUSY if others else Kind.QUEUED, high, int(now * 1e6), longest, detail, place)

    def _stand_in_line(self, request: Acquire, in_the_way: set[str], now: float) -> int:
        """
        Enrol a waiter as if it took one name after the other, in their order; returns its worst place.

        It has no claim yet to what comes behind the name it waits for, and who has that name may want those.
        """
        place = -1
        until = min(map(request.slugs.index, in_the_way)) + 1
        for slug in request.slugs[:until]:
            line = self._queue(request, slug)
            if line is NOBODY:
                line = self._queues[request.queue or slug] = Queue()
            place = max(place, line.enrol(request.waiter, request.stamp, now + ENROLMENT))
        for slug in request.slugs[until:]:
            self._leave(self._queue(request, slug), request.waiter)
        return place

    def _leave(self, queue: Queue, waiter: str) -> bool:
        """Take *waiter* out of line, and wake the next if it was first; returns whether it was."""
        was_first = queue.head() == waiter
        if queue.leave(waiter) and was_first:
            self._wake(queue)
            return True
        return False

    def _keep_or_pass_on(self, request: Acquire, connected: list[str], now: float) -> None:
        for slug in connected:
            queue = self._queue(request, slug)
            if request.passing:
                queue.leave(request.waiter)
                self._wake(queue)
            else:
                queue.enrolled[request.waiter] = now + min(request.ttl, ENROLMENT)

    def _raise(self, request: Raise, now: float) -> Reply:
        high, time_us = self._high(request.slugs, now), int(now * 1e6)
        if not all(self._has(slug, request.nonce, request.shared, now) for slug in request.slugs):
            return Reply(Kind.REFUSED, high, time_us)
        if request.number <= high:
            return Reply(Kind.GRANTED, high, time_us)
        self._write_fence(request.slugs, request.number, request.keep, now)
        return Reply(Kind.ACCEPTED, request.number, time_us)

    def _has(self, slug: str, nonce: str, shared: bool, now: float) -> bool:
        if shared:
            return self._owner(slug, now) == SHARED and nonce in self._shared.get(slug, {})
        value = self._holder(slug, now) or ""
        return value[: NONCE_SIZE if len(nonce) <= NONCE_SIZE else LONGEST_VALUE] == nonce

    def _extend(self, request: Extend, now: float) -> Reply:
        terms = tuple(self._extend_one(term, request.keep, now) for term in request.terms)
        held = sum(kind is Kind.HELD for kind, _ in terms)
        kind = Kind.HELD if held == len(terms) else Kind.MIXED if held else Kind.REFUSED
        return Reply(kind, max(fence for _, fence in terms), int(now * 1e6), terms=terms)

    def _extend_one(self, term: Term, keep: float | None, now: float) -> tuple[Kind, int]:
        high = self._high(term.slugs, now)
        lost = [slug for slug in term.slugs if not self._has(slug, term.nonce, term.shared, now)]
        if (
            self._cancelled(term.nonce, now)
            or any(self._owner(slug, now) not in ("", SHARED if term.shared else "") for slug in lost)
            or any(self._holder(slug, now) == "" for slug in lost)
            or any(self._fence(slug, now) > term.token for slug in lost)
        ):
            stopped = self._cancelled(term.nonce, now) and term.nonce in self._revoked
            return Kind.REVOKED if stopped else Kind.REFUSED, high
        for slug in term.slugs:
            if term.shared:
                keeps = not term.shorten and self._owner(slug, now) == SHARED
                until = self._shared[slug].get(term.nonce, 0.0) if keeps else 0.0
                self._share(slug, term.nonce, term.value, max(term.ttl, until - now), now)
            elif slug in lost:
                self._write(slug, term.value, term.ttl, now)
            else:
                left = 0.0 if term.shorten else self._left(slug, now) or 0.0
                self._write(slug, term.value, max(term.ttl, left), now)
            if slug in lost:
                self._write_fence((slug,), term.token, keep, now)
            elif keep is not None and slug in self._fences:
                self._write_fence((slug,), self._fence(slug, now), keep, now)
        return Kind.HELD, high

    def _release(self, request: Release, now: float) -> Reply:
        everybody = request.shared and request.nonce == SHARED
        mine = [slug for slug in request.slugs if self._has(slug, request.nonce, request.shared and not everybody, now)]
        if everybody or not request.shared:
            mine = [slug for slug in mine if self._fence(slug, now) <= request.token]
        others = [slug for slug in request.slugs if slug not in mine and self._holder(slug, now) is not None]
        taken = others and any(
            everybody or not (request.shared and self._owner(slug, now) == SHARED) for slug in others
        )
        free = [slug for slug in mine if self._let_go(request, slug, now)]
        if request.tombstone > 0:
            self._tombstone(request, {request.nonce}, now)
        for slug in request.slugs if self._queues else ():
            queue = self._queue(request, slug)
            if queue is NOBODY:
                continue
            left = bool(request.leaving) and self._leave(queue, request.leaving)
            if slug in free and not left:
                self._wake(queue)
            if not queue.stamps:
                self._queues.pop(request.queue or slug, None)
        kind = Kind.RELEASED if mine else Kind.BUSY if taken else Kind.GONE
        return Reply(kind, 0, int(now * 1e6))

    def _tombstone(self, request: Release, nonces: Set[str], now: float) -> None:
        self._tombstones |= dict.fromkeys(nonces, now + request.tombstone)
        (self._revoked.update if request.revoke else self._revoked.difference_update)(nonces)

    def _let_go(self, request: Release, slug: str, now: float) -> bool:
        """End one holder's hold; returns whether the name is free now."""
        if request.shared and request.nonce == SHARED:
            if request.tombstone > 0:
                self._tombstone(request, self._shared.get(slug, {}).keys(), now)
            self._shared.pop(slug, None)
        elif request.shared:
            del self._shared[slug][request.nonce]
            others = self._sharers(slug, now)
            if others:
                self._write(slug, self._holders[slug][0], max(others.values()) - now, now)
                return False
        del self._holders[slug]
        self._index.pop(slug, None)
        return True

    def _survey(self, request: Survey, now: float) -> Reply:
        slugs, cursor = request.slugs, ""
        if request.size > 0:
            slugs, cursor = self._page(request.after, request.size)
        rows: list[Row] = []
        named = 0
        for slug in slugs:
            rows.append(self._row(slug, now, request.waiters, named))
            named += len(rows[-1].waiters)
        return Reply(Kind.LISTED, 0, int(now * 1e6), rows=tuple(rows), total=len(self._index), cursor=cursor)

    def _repair(self, request: Repair, now: float) -> Reply:
        time_us = int(now * 1e6)
        if not is_absurd(self._fence(request.slug, now), time_us):
            return Reply(Kind.GONE, 0, time_us)
        if request.number:
            self._write_fence((request.slug,), request.number, request.keep, now)
        else:
            del self._fences[request.slug]
        if self._holder(request.slug, now) is None:
            self._index.pop(request.slug, None)
        return Reply(Kind.RELEASED, 0, time_us)

    def _page(self, after: str, size: int) -> tuple[tuple[str, ...], str]:
        """Return so many slugs, and where to go on."""
        score, _, last = after.partition(" ")
        behind = (float(score), last) if after else (-math.inf, "")
        waiting = sorted((ends, slug) for slug, ends in self._index.items() if (ends, slug) > behind)
        page = [(ends, slug) for ends, slug in waiting[:size] if len(slug.encode()) <= LONGEST_SLUG]
        more = len(waiting) > size
        return tuple(slug for _, slug in page), f"{page[-1][0]!r} {page[-1][1]}" if more and page else ""

    def _row(self, slug: str, now: float, asked: int | None, named: int) -> Row:
        queue = self._queues.get(queue_of(slug) or slug, NOBODY)
        waiting = tuple(member for member in queue.in_order() if queue.enrolled[member] > now)
        held = (self._holder(slug, now) or "")[:LONGEST_VALUE]
        names = waiting[: max(0, (asked or 0) - named)] if held else ()
        count = 0 if asked is None else len(waiting)
        return Row(slug, held, self._left(slug, now), min(self._fence(slug, now), HIGHEST + 1), names, count)
