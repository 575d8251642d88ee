"""
How the nodes are asked: one page of their indexes after the other, all nodes at once, bounded in names and in time.
"""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from ..core.messages import Kind, Reply, Row, Survey
from ..core.names import presence, process_of
from ..core.owner import Owner, decode, fingerprint
from ..locks import LockManager
from ..nodes.gather import steady
from .judge import is_suspicious, judge, soonest_first
from .model import HeldLock, NodeStatus, Snapshot, State, View

PAGE = 64  # names in one request: a script over more could block its node for a millisecond
MAX_NAMES = 1024  # names in one listing, unless asked for more
MAX_SECONDS = 0.5  # after which a listing goes without the rest
LAST_SECOND = 253_402_300_799  # of the year 9999, the last that datetime knows


class Poll:
    """
    The questions of one listing and what the nodes answered; a silent node is not asked again, and does not count.

    Args:
        manager: Whose nodes are asked.
        limit: How many names to list at most.
        silent: The nodes that are known to be silent, and why.
    """

    def __init__(self, manager: LockManager, limit: int = MAX_NAMES, silent: Mapping[int, str] | None = None) -> None:
        self.manager = manager
        self.limit = limit
        self.rows: dict[str, dict[int, Row]] = {}
        self.silent: dict[int, str] = dict(silent or {})
        self.total = 0
        self.refusing: dict[int, str] = {}  # which nodes would not write, and why
        self.complete = True
        self._living: dict[str, dict[int, bool]] = {}  # of each process, which node knows that it lives
        self._locks: dict[str, HeldLock] = {}

    def pages(self) -> Iterator[Survey]:
        """Yield the requests for the whole index, then for the names that not every node reported."""
        for offset in range(0, self.limit, PAGE):
            yield Survey(offset=offset, size=PAGE)
            if offset + PAGE >= self.total:
                break
        else:
            self.complete = False
        yield from self._by_name(self._doubtful())
        yield from self._processes()

    def named(self, slugs: list[str]) -> Iterator[Survey]:
        """Yield the requests for some names."""
        yield from self._by_name(slugs)
        yield from self._processes()

    def _by_name(self, slugs: list[str]) -> Iterator[Survey]:
        for start in range(0, len(slugs), PAGE):
            yield Survey(slugs=tuple(slugs[start : start + PAGE]))

    def receive(self, replies: Mapping[int, Reply], elapsed: float) -> None:
        """Take the answers to one request; *elapsed* seconds have passed since it was sent."""
        for node in range(len(self.manager.nodes)):
            if node in self.silent:
                continue
            reply = replies.get(node)
            if reply is None or reply.kind is not Kind.LISTED:
                self.silent[node] = str(reply) if reply else "timeout"
                continue
            self.total = max(self.total, reply.total)
            if reply.detail:
                self.refusing[node] = reply.detail
            for row in reply.rows:
                process = process_of(row.slug)
                if process:
                    self._living.setdefault(process, {})[node] = _present(row)
                else:
                    self.rows.setdefault(row.slug, {})[node] = _aged(row, elapsed)

    def seen(self, slug: str) -> dict[int, Row]:
        """Return what each answering node has under a name; without those that have nothing."""
        rows = self.rows.get(slug, {})
        return {node: row for node, row in rows.items() if node not in self.silent and _present(row)}

    def snapshot(self) -> Snapshot:
        """Return what was learned."""
        enough = len(self.manager.nodes) - len(self.silent) >= self.manager.rules.needed
        listed = [self._lock(slug) for slug in self.rows if self.seen(slug)] if enough else []
        return Snapshot(
            alias=self.manager.alias,
            nodes=tuple(self._status(place) for place in range(len(self.manager.nodes))),
            locks=tuple(sorted(listed, key=soonest_first)),
            complete=self.complete,
            taken=time.time(),
            rules=self.manager.rules,
            total=self.total,
        )

    def _processes(self) -> Iterator[Survey]:
        """Yield the requests that tell whether the processes of locks that nobody extends live."""
        self._locks.clear()  # of before all had answered
        locks = [self._judged(slug) for slug in self.rows if self.seen(slug)]
        owners = [lock.owner for lock in locks if is_suspicious(lock)]
        unknown = {owner.process for owner in owners if owner and not any(self._living.get(owner.process, {}).values())}
        yield from self._by_name([presence(process) for process in sorted(unknown)])

    def _is_dead(self, process: str) -> bool:
        """Return whether so many nodes do not know the process to live that it cannot be at work on any lock."""
        said = {node: lives for node, lives in self._living.get(process, {}).items() if node not in self.silent}
        return not any(said.values()) and len(said) >= self.manager.rules.needed

    def _doubtful(self) -> list[str]:
        answering = len(self.manager.nodes) - len(self.silent)
        return [slug for slug, rows in self.rows.items() if self.seen(slug) and len(rows) < answering]

    def _status(self, place: int) -> NodeStatus:
        name = self.manager.nodes[place].name
        if place in self.silent:
            return NodeStatus(name, False, self.silent[place])
        return NodeStatus(name, True, self.manager.admission.objection(place) or self.refusing.get(place, ""))

    def _view(self, place: int, slug: str) -> View:
        name = self.manager.nodes[place].name
        if place in self.silent:
            return View(name, False)
        row = self.rows[slug].get(place)
        if row is None or not _present(row):
            return View(name, True, fence=row.fence if row else 0)
        mark, owner = read_value(row.value)
        return View(name, True, mark, owner, row.left, row.fence)

    def _lock(self, slug: str) -> HeldLock:
        lock = self._judged(slug)
        if is_suspicious(lock) and lock.owner and self._is_dead(lock.owner.process):
            return replace(lock, state=State.ORPHANED)
        return lock

    def _judged(self, slug: str) -> HeldLock:
        lock = self._locks.get(slug)
        if lock is None:
            lock = self._locks[slug] = self._judge(slug)
        return lock

    def _judge(self, slug: str) -> HeldLock:
        views = tuple([self._view(place, slug) for place in range(len(self.manager.nodes))])
        lines = [row.waiters for node, row in self.rows[slug].items() if row.waiters and node not in self.silent]
        return judge(slug, self.manager.alias, views, self.manager.rules, lines)


def ask(poll: Poll, questions: Iterator[Survey], seconds: float = MAX_SECONDS) -> None:
    """Put the questions to the nodes, for about so many seconds at most."""
    started = steady()
    for slugs, offset, size, _ in questions:
        sent = steady()
        if sent - started > seconds:
            poll.complete = False
            return
        replies = poll.manager.survey(slugs=slugs, offset=offset, count=size, but=poll.silent)
        poll.receive(replies, steady() - sent)


async def aask(poll: Poll, questions: Iterator[Survey], seconds: float = MAX_SECONDS) -> None:
    """Do what :func:`ask` does without blocking."""
    started = steady()
    for slugs, offset, size, _ in questions:
        sent = steady()
        if sent - started > seconds:
            poll.complete = False
            return
        replies = await poll.manager.asurvey(slugs=slugs, offset=offset, count=size, but=poll.silent)
        poll.receive(replies, steady() - sent)


def ask_for(slugs: Iterable[str], manager: LockManager, silent: Mapping[int, str] | None = None) -> Poll:
    """Return what the nodes answered about some locks, by their slugs; *silent* ones are not asked."""
    poll = Poll(manager, silent=silent)
    ask(poll, poll.named(list(slugs)), math.inf)  # bounded in names
    return poll


@lru_cache(maxsize=4096)
def read_value(value: str) -> tuple[str, Owner | None]:
    """
    Return the fingerprint of a value and the owner that it describes, in numbers that can be shown.

    The same value is on every node, and on the next page that somebody loads.
    """
    owner = decode(value)
    if owner is None:
        return fingerprint(value), None
    since = owner.since if 0 < owner.since < LAST_SECOND else 0.0
    ttl = owner.ttl if 0 < owner.ttl < LAST_SECOND else 0.0
    return fingerprint(value), owner._replace(since=since, ttl=ttl, extensions=max(0, owner.extensions))


def _present(row: Row) -> bool:
    return row.left is None or row.left >= 0


def _aged(row: Row, elapsed: float) -> Row:
    """Return a row as it is by now: the node may have answered as soon as it was asked."""
    return row._replace(left=max(0.0, row.left - elapsed)) if row.left is not None and row.left >= 0 else row
