"""
Decide what a node stores and replies for each request (internal).

A node carries out a request in one step. It reads everything before it writes anything, and grants either all names of
a request or none. The reply has the highest token and the node's time, which the client uses for its next proposal.
"""

import math
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext

from ..names import SECRET_SIZE, queue_of
from ..protocol import (
    HIGHEST,
    LONGEST_HOLDER,
    LONGEST_SLUG,
    LONGEST_VALUE,
    PERMITS,
    SHARED,
    STOPPED,
    SUPERSEDED,
    Acquire,
    Extend,
    Extended,
    Failure,
    Kind,
    Raise,
    Release,
    Repair,
    Reply,
    Request,
    Row,
    Survey,
    Term,
    failed,
    is_absurd,
)
from .queues import NOBODY, Queues
from .records import Records, Tombstone


class NodeState:
    """
    The keys of one node, and how it carries out requests.

    Args:
        clock: Returns the node's time in seconds since the epoch.
        mutex: Held during each step; without it, only one thread at a time may use this object.
        wall: Returns seconds since the epoch, for the bound of fencing tokens. Given if *clock* counts from another
            moment; replies then have no time.

    ``skew`` is by how many seconds the node's time is ahead of *clock*. ``listeners`` has a function for each process,
    which is called with the name of a waiter of that process when it is first in a queue.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        mutex: AbstractContextManager[object] | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._mutex = mutex or nullcontext()
        self.skew = 0.0
        self.listeners: dict[str, Callable[[str], object]] = {}
        self.records = Records()
        # Those of the present step: its time, the time that its reply reports, and the date that bounds tokens, both in
        # microseconds.
        self._now = 0.0
        self._time = self._date = 0
        self._queues = Queues({}, {})

    def now(self) -> float:
        """Return the node's time, in seconds since the epoch."""
        # Whole microseconds, as TIME gives them: expiry and tokens are compared with this time.
        return int((self._clock() + self.skew) * 1e6) / 1e6

    @property
    def mark(self) -> str:
        """What tells this memory from every other; empty until a server serves it."""
        served = self.records.served
        return "{}/{} {}".format(*served) if served else ""

    def execute(self, request: Request, mark: str = "") -> Reply:
        """Carry out one request in one atomic step, for a client that knows the memory with this *mark*, if any."""
        with self._mutex:
            if mark and isinstance(request, (Acquire, Extend)) and mark != self.mark:
                return failed(Failure.FORGOT)
            now = self._now = self.now()
            self._time = 0 if self._wall else int(now * 1e6)
            self._date = int((self._wall() if self._wall else now) * 1e6)
            self._queues = Queues(self.records.queues, self.listeners)
            match request:
                case Acquire():
                    return self._acquire(request)
                case Raise():
                    return self._raise_token(request)
                case Extend():
                    return self._extend(request)
                case Release():
                    return self._release(request)
                case Survey():
                    return self._survey(request)
                case Repair():
                    return self._repair(request)

    def reset(self) -> None:
        """Forget everything, as a restart without data does."""
        with self._mutex:
            self.records = Records()

    def serve(self, run_id: str, replication_id: str, *, was_replica: bool = False) -> float:
        """
        Return for how many seconds the server with these ids has served these locks; see ``served.lua``.

        Args:
            run_id: Changes with every start.
            replication_id: Changes when the server becomes a master again, and when it has had no replica for long.
            was_replica: Whether the server remembers having been a replica.
        """
        with self._mutex:
            now = int(self.now() * 1e6)
            ran, replicated, since = self.records.served or ("", "", now)
            # A master without a replica for an hour gets another replication id and has lost nothing. A master that was
            # a replica meanwhile may lack the last locks. A start in the future was noted before the clock was set
            # back.
            stayed = replicated == replication_id or not was_replica
            if ran != run_id or not stayed or since > now:
                since = now
            self.records.served = (run_id, replication_id, since)
            return (now - since) / 1e6

    def put(self, slug: str, value: str, ttl: float | None) -> None:
        """Write a holder key as a foreign program would; *ttl* in seconds, None for no expiry."""
        with self._mutex:
            now = self.now()
            self.records.holders[slug] = (value, None if ttl is None else now + ttl)
            self.records.index[slug] = now + (ttl or 0.0)

    def lift(self, fences: Mapping[str, int]) -> None:
        """Remember fencing tokens that other nodes have accepted, by name, for ever."""
        with self._mutex:
            now = self.now()
            for slug, number in fences.items():
                self.records.write_fence((slug,), max(number, self.records.fence(slug, now)), None, now)

    def sharers(self, slug: str) -> list[str]:
        """Return the secrets that share a name."""
        return list(self.records.shared.get(slug, {}))

    def waiters(self, slug: str) -> list[str]:
        """Return the waiters for a name, in the order of their turns."""
        with self._mutex:
            return self.records.queues.get(slug, NOBODY).waiting(self.now())

    def _acquire(self, request: Acquire) -> Reply:
        """Grant all names or none; accept the proposed token if it is the highest so far."""
        records, now = self.records, self._now
        high = records.highest_fence(request.slugs, now)
        ours = {request.secret, request.adopt or request.secret}
        others = [request.queue] if self._is_held_otherwise(request.queue, request.common) else []
        others += [slug for slug in request.slugs if self._in_the_way(request, slug, ours)]
        first_in, behind_in = self._turns(request, ours)
        cancelled = records.cancelled(request.secret, now)
        if cancelled and not self._is_handed_back(request):
            # This attempt was released, or another holder has replaced it, before its request arrived. A grant now
            # would have no holder until it expires.
            return Reply(Kind.CANCELLED, high, self._time)
        if others or behind_in:
            return self._refuse(request, others, behind_in, high)
        for slug in request.slugs:
            if request.shared:
                records.share(slug, request.secret, shared_value(request), request.ttl, now)
            else:
                records.write(slug, request.value, request.ttl, now)
        if request.common:
            records.share(request.queue, request.secret, request.common, request.ttl, now)
        if cancelled:
            del records.tombstones[request.secret]
        if request.adopt not in ("", request.secret) and not records.cancelled(request.adopt, now):
            records.tombstones[request.adopt] = Tombstone(now + SUPERSEDED, revoked=False, superseded=True)
        if first_in:
            self._queues.granted(request, first_in, now)
        records.trim(now)
        # The number must be strictly greater, so that no number is accepted twice. Nor may it be far ahead of the
        # node's clock: one client whose clock is wrong would otherwise use up the numbers of all others.
        if high < request.number <= self._date + request.ahead * 1e6:
            records.write_fence(request.slugs, request.number, request.keep, now)
            return Reply(Kind.ACCEPTED, request.number, self._time)
        return Reply(Kind.GRANTED, high, self._time)

    def _is_handed_back(self, request: Acquire) -> bool:
        """Return whether the holder that has replaced this one hands the lock back to it."""
        records, now = self.records, self._now
        present = all(records.owner(slug, now) == request.adopt for slug in request.slugs)
        return bool(request.adopt) and present and records.tombstones[request.secret].superseded

    def _in_the_way(self, request: Acquire, slug: str, ours: set[str]) -> bool:
        """Return whether another owner holds a name, or whether nobody does although it must be taken over."""
        holder = self.records.holder(slug, self._now)
        if holder is None:
            return request.strict
        owner = holder[:SECRET_SIZE]
        return owner not in ours and not (request.shared and owner == SHARED)

    def _is_held_otherwise(self, lock: str, common: str) -> bool:
        """Return whether somebody holds the name of a permit's *lock* alone, as a reader, or with another limit."""
        holder = self.records.holder(lock, self._now)
        return bool(common) and holder is not None and holder[:SECRET_SIZE] != common[:SECRET_SIZE]

    def _turns(self, request: Acquire, ours: set[str]) -> tuple[list[str], list[str]]:
        """Return the names in whose queue the waiter is first, and those whose queue has others before it."""
        first_in: list[str] = []
        behind_in: list[str] = []
        for slug in request.slugs if self._queues else ():
            queue = self._queues.of(request, slug)
            if queue is NOBODY or self.records.owner(slug, self._now) in ours:
                continue
            first = queue.first(self._now, request.waiter)
            if first and first == request.waiter:
                first_in.append(slug)
            elif first and not request.barge and not self._came_before(request, slug, first):
                behind_in.append(slug)
        return first_in, behind_in

    def _came_before(self, request: Acquire, slug: str, first: str) -> bool:
        """
        Return whether a waiter that is not in the queue began to wait before *first*.

        Where several may hold the lock, a node that grants it to a waiter takes that waiter out of the queue. If the
        attempt then fails as a whole, the waiter has left this queue for nothing; its stamp shows when it joined.
        """
        return bool(request.waiter) and request.stamp < self._queues.of(request, slug).stamps[first]

    def _refuse(self, request: Acquire, others: list[str], behind_in: list[str], high: int) -> Reply:
        records, now = self.records, self._now
        longest: float | None = 0.0
        for slug in others:
            left = records.left(slug, now)
            if left is None:
                # Another program wrote a key without expiry. It blocks the name for ever, so listings must show it.
                records.index[slug] = float("inf")
            longest = None if left is None or longest is None else max(left, longest)
        detail = (records.holder(others[0], now) or "")[SECRET_SIZE:] if others else ""
        position = self._queues.enrol(request, {*others, *behind_in}, now) if request.waiter else -1
        return Reply(Kind.BUSY if others else Kind.QUEUED, high, self._time, longest, detail, position)

    def _raise_token(self, request: Raise) -> Reply:
        """Accept a higher token of a holder, unless the holder has lost a name."""
        records, now = self.records, self._now
        high = records.highest_fence(request.slugs, now)
        if not all(records.has(slug, request.secret, request.shared, now) for slug in request.slugs):
            return Reply(Kind.REFUSED, high, self._time)
        if request.number <= high:
            return Reply(Kind.GRANTED, high, self._time)
        records.write_fence(request.slugs, request.number, request.keep, now)
        return Reply(Kind.ACCEPTED, request.number, self._time)

    def _extend(self, request: Extend) -> Reply:
        """Extend leases, each independently of the others."""
        terms = tuple(self._extend_one(term, request.keep) for term in request.terms)
        held = sum(term.kind is Kind.HELD for term in terms)
        kind = Kind.HELD if held == len(terms) else Kind.MIXED if held else Kind.REFUSED
        return Reply(kind, max(term.fence for term in terms), self._time, terms=terms)

    def _extend_one(self, term: Term, keep: float | None) -> Extended:
        records, now = self.records, self._now
        high = records.highest_fence(term.slugs, now)
        lost = [slug for slug in term.slugs if not records.has(slug, term.secret, term.shared, now)]
        base = queue_of(term.slugs[0]) if term.common else ""
        held_otherwise = self._is_held_otherwise(base, term.common)
        may_come_back = not held_otherwise and all(self._may_come_back(term, slug) for slug in lost)
        revoked = records.revoked(term.secret, now)
        cancelled = records.cancelled(term.secret, now) and not (revoked and term.last and not lost)
        if cancelled or not may_come_back:
            others = [holder for slug in lost if (holder := self._other_holder(term, slug)) is not None]
            others += [records.holder(base, now) or ""] if held_otherwise else []
            detail = next(iter(others), "")[SECRET_SIZE:LONGEST_HOLDER]
            return Extended(Kind.REVOKED if revoked else Kind.REFUSED, high, detail)
        if term.common:
            self._share_longer(term, base, term.common)
        for slug in term.slugs:
            self._renew(term, slug)
            if slug in lost:
                # The node may have lost the fence with the key, and would accept a lower number from the next holder.
                records.write_fence((slug,), term.fencing_token, keep, now)
            elif keep is not None and slug in records.fences:
                records.write_fence((slug,), records.fence(slug, now), keep, now)
        return Extended(Kind.HELD, high)

    def _may_come_back(self, term: Term, slug: str) -> bool:
        """
        Return whether a holder that this node has lost gets the name back.

        The name must be free, or shared if the lease is shared. The node must not have accepted a later token, which
        would show that another caller has held the lock since, or was about to.
        """
        free = self._other_holder(term, slug) is None
        return free and self.records.fence(slug, self._now) <= term.fencing_token

    def _other_holder(self, term: Term, slug: str) -> str | None:
        """Return what a holder that keeps this one out has stored; None if the name is free, or shared by both."""
        holder = self.records.holder(slug, self._now)
        shared = term.shared and holder is not None and holder[:SECRET_SIZE] == SHARED
        return None if shared else holder

    def _renew(self, term: Term, slug: str) -> None:
        """Let a lease hold a name for its ttl from now on; a later end stays, unless the lease is shortened."""
        # Two extensions may arrive in a different order than they were sent, so the later end counts.
        records, now = self.records, self._now
        if term.shared:
            self._share_longer(term, slug, shared_value(term))
        else:
            left = 0.0 if term.shorten else records.left(slug, now) or 0.0
            records.write(slug, term.value, max(term.ttl, left), now)

    def _share_longer(self, term: Term, slug: str, value: str) -> None:
        records, now = self.records, self._now
        keeps = not term.shorten and records.owner(slug, now) == value[:SECRET_SIZE]
        until = records.shared[slug].get(term.secret, 0.0) if keeps else 0.0
        records.share(slug, term.secret, value, max(term.ttl, until - now), now)

    def _release(self, request: Release) -> Reply:
        """End a hold, leave a tombstone against its late requests, and notify the first waiter."""
        records, now = self.records, self._now
        everybody = request.shared and request.secret == SHARED
        one_of_several = request.shared and not everybody
        held = mine = [slug for slug in request.slugs if records.has(slug, request.secret, one_of_several, now)]
        if not one_of_several:
            # A later token belongs to a later hold with the same secret, or to a holder that joined after the caller
            # looked. The highest one stands for any token, even an absurd one.
            last = math.inf if request.fencing_token == HIGHEST else request.fencing_token
            mine = [slug for slug in held if records.fence(slug, now) <= last]
        others = [slug for slug in request.slugs if slug not in mine and records.holder(slug, now) is not None]
        taken = [slug for slug in others if not (one_of_several and records.owner(slug, now) == SHARED)]
        free = [slug for slug in mine if self._let_go(request, slug)]
        permits = records.shared.get(request.queue, {}) if records.owner(request.queue, now).startswith(PERMITS) else {}
        if request.secret in permits:
            records.leave(request.queue, request.secret, now)
        revoked = records.revoked(request.secret, now)
        later = mine != held and not request.shared  # whose extensions a tombstone would refuse
        # Also if nothing was held: the request to hold it may arrive after this one.
        if request.tombstone > 0 and not later:
            self._tombstone(request, {request.secret})
        self._queues.released(request, free)
        if mine:
            return Reply(Kind.RELEASED, 0, self._time)
        if not taken:
            return Reply(Kind.GONE, 0, self._time, detail=STOPPED if revoked else "")
        holder = records.holder(taken[0], now) or ""
        return Reply(Kind.BUSY, 0, self._time, detail=holder[SECRET_SIZE:LONGEST_HOLDER])

    def _let_go(self, request: Release, slug: str) -> bool:
        """End one holder's hold on a name; return whether the name is free now."""
        records, now = self.records, self._now
        if request.shared and request.secret == SHARED:
            if request.tombstone > 0:
                self._tombstone(request, records.shared.get(slug, {}).keys())
            records.shared.pop(slug, None)
        elif request.shared:
            return records.leave(slug, request.secret, now)
        records.remove(slug)
        return True

    def _tombstone(self, request: Release, secrets: Set[str]) -> None:
        """Leave tombstones: a request that is still on its way must not bring back what is released here."""
        self.records.tombstones |= dict.fromkeys(secrets, Tombstone(self._now + request.tombstone, request.revoke))

    def _repair(self, request: Repair) -> Reply:
        """Replace an absurd fencing token, and no other."""
        records, slug = self.records, request.slug
        if not is_absurd(records.fence(slug, self._now), self._date):
            return Reply(Kind.GONE, 0, self._time)
        if request.number:
            records.write_fence((slug,), request.number, request.keep, self._now)
        else:
            del records.fences[slug]
        if records.holder(slug, self._now) is None:
            records.index.pop(slug, None)
        return Reply(Kind.RELEASED, 0, self._time)

    def _survey(self, request: Survey) -> Reply:
        """Report the locks with given names, or a page of the index."""
        slugs, cursor = self._page(request.after, request.size) if request.size > 0 else (request.slugs, "")
        rows: list[Row] = []
        named = 0
        for slug in slugs:
            rows.append(self._row(slug, request.waiters, named))
            named += len(rows[-1].waiters)
        total = len(self.records.index)
        return Reply(Kind.LISTED, 0, self._time, rows=tuple(rows), total=total, cursor=cursor)

    def _page(self, after: str, size: int) -> tuple[tuple[str, ...], str]:
        """
        Return at most *size* slugs, and the cursor of the next page.

        A page begins after the position that the last name of the previous page had. If pages were numbered, names
        would be skipped whenever others before them are extended and move to the end.
        """
        score, _, last = after.partition(" ")
        behind = (float(score), last) if after else (-math.inf, "")
        found = sorted((ends, slug) for slug, ends in self.records.index.items() if (ends, slug) > behind)
        shown = [(ends, slug) for ends, slug in found[:size] if len(slug.encode()) <= LONGEST_SLUG]
        more = len(found) > size
        return tuple(slug for _, slug in shown), f"{shown[-1][0]!r} {shown[-1][1]}" if more and shown else ""

    def _row(self, slug: str, asked: int | None, named: int) -> Row:
        """
        Return one lock of a survey.

        Args:
            slug: The lock's name, as written in the keys.
            asked: The most waiters to list, over all rows; None counts neither waiters nor sharers.
            named: How many waiters the earlier rows list.
        """
        records, now = self.records, self._now
        queue = records.queues.get(queue_of(slug) or slug, NOBODY)
        waiting = queue.waiting(now)
        held = (records.holder(slug, now) or "")[:LONGEST_VALUE]
        names = tuple(waiting[: max(0, (asked or 0) - named)]) if held else ()
        count = 0 if asked is None else len(waiting)
        shared = asked is not None and records.owner(slug, now) == SHARED
        sharers = len(records.sharers(slug, now)) if shared else 0
        since = queue.stamps[waiting[0]] if count else 0
        fence = min(records.fence(slug, now), HIGHEST + 1)
        return Row(slug, held, records.left(slug, now), fence, names, count, sharers, since)


def shared_value(request: Acquire | Term) -> str:
    """Return the value of a shared lock's key, which has a word in place of the secret."""
    return SHARED + request.value[SECRET_SIZE:]
