"""
How the nodes are asked: one page of their indexes after the other, all nodes at once, bounded in names and in time.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..core.names import heartbeat, process_of
from ..core.owner import decode, fingerprint, lease_of
from ..core.replies import Kind, Reply, Row, is_absurd
from ..core.requests import ENDLESS, Survey
from ..engine.heartbeat import LIFE
from ..engine.manager import LockManager
from .judge import is_suspicious, judge, process_behind, soonest_first, with_process
from .model import HeldLock, NodeStatus, Snapshot, View
from .states import Life

PAGE = 50  # names in one request, for which a node needs a sixth of a millisecond, or a busy one half a millisecond
MAX_NAMES = 1000  # names in one listing, unless asked for more
MAX_SECONDS = 0.5  # after which a listing goes without the rest
PATIENCE = 0.75  # seconds for which a listing that may take less waits for a silent node, whatever its timeout


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
        self._sent = 0.0
        self._asked: set[int] = set()  # the nodes that the last question went to
        self._paging = False  # whether it was for a page of the index
        self._after: dict[int, str] = {}  # where each node goes on with its index
        self._through: set[int] = set()  # the nodes that have nothing more in theirs
        self._heard: dict[str, dict[int, float]] = {}  # of each process, how long ago each node heard it, in seconds
        self._lasting: set[str] = set()  # the names that some node holds
        self._locks: list[HeldLock] | None = None
        self._absurd: dict[str, set[int]] = {}  # which nodes have an absurd fencing token for a name
        self._suspects: dict[str, str] = {}  # by the slugs of their locks, the processes that may be dead

    def pages(self) -> Iterator[Survey]:
        """Yield the requests for the whole index, then for the names that not every node reported."""
        while len(self._lasting) < self.limit:  # names of locks that ended stay in the indexes for a while
            yield Survey(size=PAGE)
            if len(self._through | self.silent.keys()) == len(self.manager.nodes):
                break
        else:
            self.complete = False
            self._through.clear()
            self._after = dict.fromkeys(range(len(self.manager.nodes)), ENDLESS)
            yield Survey(size=PAGE)  # those that somebody has to see to do not hide behind the others
        yield from self._by_name(self._doubtful())
        yield from self._processes()

    def named(self, slugs: list[str], waiters: int | None = None) -> Iterator[Survey]:
        """Yield the requests for some names, with those that wait for them as :class:`Survey` says."""
        yield from self._by_name(slugs, waiters)
        yield from self._processes()

    def _by_name(self, slugs: list[str], waiters: int | None = None) -> Iterator[Survey]:
        for start in range(0, len(slugs), PAGE):
            yield Survey(slugs=tuple(slugs[start : start + PAGE]), waiters=waiters)

    def in_time(self, questions: Iterator[Survey], seconds: float, patience: float) -> Iterator[dict[str, Any]]:
        """Yield the questions, as arguments of a manager's survey, for about *seconds* at most."""
        started = self._sent = self.manager.runtime.clock()
        for slugs, _, size, waiters in questions:
            self._sent = self.manager.runtime.clock()
            if self._sent - started > seconds:
                self.complete = False
                for slug in self._doubtful():
                    del self.rows[slug]  # nobody can say what it is
                return
            but = {*self.silent, *(self._through if size else ())}
            self._asked, self._paging = set(range(len(self.manager.nodes))) - but, size > 0
            how = {"waiters": waiters, "but": but, "patience": patience}
            yield {"slugs": slugs, "count": size, "after": self._after, **how}

    def receive(self, replies: Mapping[int, Reply]) -> None:
        """Take the answers to the question that was yielded last."""
        for node in self._asked:
            reply = replies.get(node)
            if reply is None or reply.kind is not Kind.LISTED:
                self.silent[node] = str(reply) if reply else "timeout"
                continue
            self.total = max(self.total, reply.total)
            if reply.detail:
                self.refusing[node] = reply.detail
            self._file(node, reply.rows, reply.time)
            if self._paging:
                ended = bool(reply.rows) and not any(map(_present, reply.rows))
                self._go_on(node, after_ended(reply.cursor, reply.time) if ended else reply.cursor)

    def _go_on(self, node: int, cursor: str) -> None:
        """Note where a node goes on; one that is where it was has a page full of what nobody of us wrote."""
        if cursor and cursor == self._after.get(node):
            self.complete = False
            cursor = ""
        if not cursor:
            self._through.add(node)
        self._after[node] = cursor

    def _file(self, node: int, rows: Iterable[Row], time: int) -> None:
        """
        Sort in what a node said, with the moment at which each key ends instead of the time that it has left.

        An absurd fencing token is noted, and is no token of the lock.
        """
        filed, sent, lasting = self.rows, self._sent, self._lasting
        for slug, value, left, fence, waiters, waiting, sharers in rows:  # thousands: calls and copies count here
            if process := process_of(slug):
                ago = (
                    math.inf
                    if left is not None and left < 0
                    else max(0.0, lease_of(read_value(value)[1])[0] - (left or 0))
                )
                self._heard.setdefault(process, {})[node] = ago
                continue
            if left is None:
                lasting.add(slug)
            elif left >= 0:
                lasting.add(slug)
                left += sent  # at the latest: the node may have answered as soon as it was asked
            if fence and is_absurd(fence, time):
                self._absurd.setdefault(slug, set()).add(node)
                fence = 0
            known = filed.get(slug)
            if known is None:
                known = filed[slug] = {}
            known[node] = Row(slug, value, left, fence, waiters, waiting, sharers)

    def seen(self, slug: str) -> dict[int, Row]:
        """Return what each answering node has under a name; without those that have nothing."""
        rows = self.rows.get(slug, {})
        return {node: row for node, row in rows.items() if node not in self.silent and _present(row)}

    def absurd(self, slug: str) -> set[int]:
        """Return the nodes that have an absurd fencing token for a name."""
        return self._absurd.get(slug, set())

    def fence(self, slug: str) -> int:
        """Return the highest fencing token that any node knows of a name, absurd ones aside."""
        return max([row.fence for row in self.rows.get(slug, {}).values()], default=0)

    def left(self, row: Row) -> float:
        """Return for how many more seconds a node keeps what it has; 0 if for ever."""
        return max(0.0, row.left - self.manager.runtime.clock()) if row.left is not None else 0.0

    def snapshot(self) -> Snapshot:
        """Return what was learned."""
        enough = len(self.manager.nodes) - len(self.silent) >= self.manager.rules.needed
        listed = self._told() if enough else []
        return Snapshot(
            alias=self.manager.alias,
            nodes=tuple(self._status(place) for place in range(len(self.manager.nodes))),
            locks=tuple(sorted(listed, key=soonest_first)),
            complete=self.complete,
            taken=self.manager.runtime.wall(),
            rules=self.manager.rules,
            total=self.total,
            absurd={
                slug: tuple(self.manager.nodes[place].name for place in sorted(places))
                for slug, places in self._absurd.items()
            },
        )

    def _processes(self) -> Iterator[Survey]:
        """Yield the requests that tell whether the processes of locks that nobody extends live."""
        self._locks = self._judge_all()  # now that all have answered
        self._suspects = {lock.slug: process_behind(lock) for lock in self._locks if is_suspicious(lock)}
        known = {process for process in self._heard if self._life(process) is Life.LIVING}
        yield from self._by_name([heartbeat(process) for process in sorted({*self._suspects.values()} - known)])

    def _life(self, process: str) -> Life:
        """Return what the nodes that answer know of a process."""
        heard = [ago for node, ago in self._heard.get(process, {}).items() if node not in self.silent]
        last = min(heard, default=math.inf)
        if last <= LIFE:
            return Life.LIVING
        if len(heard) < self.manager.rules.needed:
            return Life.UNKNOWN
        return Life.SILENT if last < math.inf else Life.GONE

    def _doubtful(self) -> list[str]:
        answering = len(self.manager.nodes) - len(self.silent)
        return [slug for slug, rows in self.rows.items() if len(rows) < answering and self.seen(slug)]

    def _status(self, place: int) -> NodeStatus:
        name = self.manager.nodes[place].name
        if place in self.silent:
            return NodeStatus(name, False, self.silent[place])
        return NodeStatus(name, True, self.manager.driver.admission.objection(place) or self.refusing.get(place, ""))

    def _told(self) -> list[HeldLock]:
        """Return the locks, now that it is known whose processes live."""
        listed = self._judge_all() if self._locks is None else self._locks
        if not self._suspects:
            return listed
        now = self.manager.runtime.wall()
        lives = {slug: self._life(process) for slug, process in self._suspects.items()}
        return [with_process(lock, lives[lock.slug], now) if lock.slug in lives else lock for lock in listed]

    def _judge_all(self) -> list[HeldLock]:
        names = [None if place in self.silent else node.name for place, node in enumerate(self.manager.nodes)]
        now = self.manager.runtime.clock()
        judged = [self._judge(slug, rows, names, now) for slug, rows in self.rows.items()]
        return [lock for lock in judged if lock]

    def _judge(self, slug: str, rows: Mapping[int, Row], names: Sequence[str | None], now: float) -> HeldLock | None:
        """Return the lock that the nodes' rows make together; None if no node that answers has it."""
        views, lines, held, waiting, sharers = [], [], False, 0, []
        seen, mark, about = None, "", ""  # as a rule all nodes have the same value
        for place, name in enumerate(names):
            row = rows.get(place) if name is not None else None
            if name is None:
                views.append(View(self.manager.nodes[place].name, False))
            elif row is None:
                views.append(View(name, True))
            elif row.left is None or row.left > now:
                held = True
                if row.value != seen:
                    seen = row.value
                    mark, about = read_value(seen)
                views.append(View(name, True, mark, about, row.left and row.left - now, row.fence))
            else:
                views.append(View(name, True, fence=row.fence))
            if row and row.waiting:
                lines.append(row.waiters)
                waiting = max(waiting, row.waiting)
            if row and row.sharers:
                sharers.append(row.sharers)
        if not held:
            return None
        lock = judge(slug, self.manager.alias, tuple(views), self.manager.rules, lines)
        if not (waiting or sharers):
            return lock
        return lock._replace(
            waiting=max(waiting, len(lock.waiters)), sharers=agreed(sharers, self.manager.rules.needed)
        )


def agreed(counts: list[int], needed: int) -> int:
    """Return the highest number that *needed* nodes reach; 0 if fewer nodes counted anybody."""
    return sorted(counts, reverse=True)[needed - 1] if len(counts) >= needed else 0


def after_ended(cursor: str, time: int) -> str:
    """
    Return where to go on behind a page of locks that all have ended: with the first that may last.

    Names of locks that ended stay in an index until later locks push them out. Thousands of them would use up the time
    of a listing.

    Args:
        cursor: Where the node would go on: a moment, and a name. Servers count milliseconds, nodes in memory seconds.
        time: What the node's clock shows, in microseconds.
    """
    try:
        moment = float(cursor.partition(" ")[0])
    except ValueError:
        return cursor
    now = time // 1000 if moment > time / 1e5 else time / 1e6
    return f"{now!r} " if moment < now else cursor


def ask(poll: Poll, questions: Iterator[Survey], seconds: float = MAX_SECONDS, patience: float = math.inf) -> None:
    """
    Put the questions to the nodes.

    Args:
        poll: What takes the answers.
        questions: Its questions.
        seconds: For how long to go on asking, about.
        patience: How long to wait for a silent node; at most one node timeout.
    """
    for question in poll.in_time(questions, seconds, patience):
        poll.receive(poll.manager.survey(**question))


async def aask(
    poll: Poll, questions: Iterator[Survey], seconds: float = MAX_SECONDS, patience: float = math.inf
) -> None:
    """Do what :func:`ask` does without blocking."""
    for question in poll.in_time(questions, seconds, patience):
        poll.receive(await poll.manager.asurvey(**question))


def ask_for(
    slugs: Iterable[str], manager: LockManager, silent: Mapping[int, str] | None = None, waiters: int | None = None
) -> Poll:
    """Return what the nodes answered about some locks, by their slugs; *silent* ones are not asked."""
    poll = Poll(manager, silent=silent)
    ask(poll, poll.named(list(slugs), waiters), math.inf)  # bounded in names
    return poll


@lru_cache(maxsize=4096)
def read_value(value: str) -> tuple[str, str]:
    """
    Return the fingerprint of a value and what it says of its holder, which is nothing if it is not ours.

    The same value is on every node, and on the next page that somebody loads.
    """
    about = value[value.find("{") :] if "{" in value else ""
    return fingerprint(value), about if any(lease_of(about)) or decode(about) else ""


def _present(row: Row) -> bool:
    return row.left is None or row.left >= 0
