"""
Query the nodes: all at once, page by page through their indexes, bounded in names and in time (internal).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..core.names import HEARTBEAT, decode, fingerprint, fingerprint_of_sharers, heartbeat, lease_of, process_of
from ..core.protocol import ABSENT, ENDLESS, Kind, Reply, Row, Survey, is_absurd
from ..core.rules import Rules
from ..engine.manager import LockManager
from ..engine.watchdog import LIFE, SILENCE
from .model import (
    LAST_SECOND,
    SHARED_MARK,
    HeldLock,
    Life,
    NodeStatus,
    Snapshot,
    State,
    View,
    Waiting,
    by_holder,
    leaders,
)

PAGE = 50  # names in one request, which costs a node a sixth of a millisecond, or half of one when it is busy
MAX_NAMES = 1000  # names in one listing, unless asked for more
MAX_SECONDS = 0.5  # after this time, a listing leaves out the rest
PATIENCE = 0.75  # seconds that a listing waits for a silent node at most, even if the node timeout is longer


class Poll:
    """
    The queries of one listing and the nodes' answers; a silent node is not queried again, and does not count.

    Args:
        manager: The manager of the nodes to query.
        limit: How many names to list at most.
        silent: The nodes that are known to be silent, and why.
    """

    def __init__(self, manager: LockManager, limit: int = MAX_NAMES, silent: Mapping[int, str] | None = None) -> None:
        self.manager = manager
        self.limit = limit
        self.rows: dict[str, dict[int, Row]] = {}
        self.silent: dict[int, str] = dict(silent or {})
        self.total = 0
        self.refusing: dict[int, str] = {}  # the nodes that would not write, and why
        self.complete = True
        self._sent = 0.0
        self._asked: set[int] = set()  # the nodes that the last query went to
        self._paging = False  # whether the last query asked for a page of the index
        self._urgent = False  # whether the next query is sent even if the time is over
        self._after: dict[int, str] = {}  # where the next page of each node's index starts
        self._through: set[int] = set()  # the nodes whose index has been read to the end
        self._heard: dict[str, dict[int, float]] = {}  # by process and node, the seconds since the last heartbeat
        self._lasting: set[str] = set()  # the names that some node holds
        self._locks: list[HeldLock] | None = None
        self._absurd: dict[str, set[int]] = {}  # which nodes have an absurd fencing token for a name
        self._suspects: dict[str, str] = {}  # the processes that may be dead, by the slugs of their locks

    def pages(self) -> Iterator[Survey]:
        """Yield the requests for the whole index, then for the names that not every node reported."""
        yield Survey(size=PAGE)
        if not self._all_through():
            yield from self._endless()
        while not self._all_through():
            if len(self._lasting) >= self.limit:  # names of ended locks stay in the indexes for a while
                self.complete = False
                break
            yield Survey(size=PAGE)
        yield from self._by_name(self._doubtful())
        yield from self._processes()

    def _endless(self) -> Iterator[Survey]:
        """Yield the requests for locks that never end: they come last in the indexes, and somebody must see to them."""
        after, self._after = self._after, dict.fromkeys(range(len(self.manager.nodes)), ENDLESS)
        through, complete = set(self._through), self.complete
        self._urgent = True
        yield Survey(size=PAGE)
        endless = {slug for slug, rows in self.rows.items() if any(row.left is None for row in rows.values())}
        yield from self._by_name([slug for slug in self._doubtful() if slug in endless])
        self._urgent = False
        self._after, self._through, self.complete = after, through, complete

    def _all_through(self) -> bool:
        return len(self._through | self.silent.keys()) == len(self.manager.nodes)

    def named(self, slugs: list[str], waiters: int | None = None) -> Iterator[Survey]:
        """Yield the requests for some names, with their waiters as :class:`Survey` describes."""
        yield from self._by_name(slugs, waiters)
        yield from self._processes()

    def _by_name(self, slugs: list[str], waiters: int | None = None) -> Iterator[Survey]:
        for start in range(0, len(slugs), PAGE):
            yield Survey(slugs=tuple(slugs[start : start + PAGE]), waiters=waiters)

    def in_time(self, questions: Iterator[Survey], seconds: float, patience: float) -> Iterator[dict[str, Any]]:
        """
        Yield the queries, as arguments of a manager's survey, for about *seconds* at most.

        A query on which a node fell silent does not count: waiting for that node took the time that the others need.
        """
        started = self._sent = self.manager.runtime.clock()
        silent = len(self.silent)
        for slugs, _, size, waiters in questions:
            before, self._sent = self._sent, self.manager.runtime.clock()
            if len(self.silent) > silent:
                started, silent = started + self._sent - before, len(self.silent)
            if self._sent - started > seconds and not self._urgent:
                self.complete = False
                for slug in self._doubtful():
                    del self.rows[slug]  # not every node was asked about it, so its state is unknown
                return
            but = {*self.silent, *(self._through if size else ())}
            self._asked, self._paging = set(range(len(self.manager.nodes))) - but, size > 0
            how = {"waiters": waiters, "but": but, "patience": patience}
            yield {"slugs": slugs, "count": size, "after": self._after, **how}

    def receive(self, replies: Mapping[int, Reply]) -> None:
        """Record the answers to the query that was yielded last."""
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
        """Note where a node's next page starts; if that is where the last one did, the page has only foreign names."""
        if cursor and cursor == self._after.get(node):
            self.complete = False
            cursor = ""
        if not cursor:
            self._through.add(node)
        self._after[node] = cursor

    def _file(self, node: int, rows: Sequence[Row], time: int) -> None:
        """
        File the rows of a node, with the moment at which each key ends instead of the time that it has left.

        An absurd fencing token is noted separately and does not count as a token of the lock.
        """
        filed, sent, lasting = self.rows, self._sent, self._lasting
        # There are thousands of rows, so calls and copies are costly here.
        trusted = not is_absurd(max([row.fence for row in rows], default=0), time)
        for slug, value, left, fence, waiters, waiting, sharers in rows:
            if slug.endswith(HEARTBEAT):
                self._heard.setdefault(process_of(slug), {})[node] = since_heartbeat(value, left)
                continue
            if left is None:
                lasting.add(slug)
            elif left >= 0:
                lasting.add(slug)
                left += sent  # count from the request: the node may have answered at once
            if not trusted and is_absurd(fence, time):
                self._absurd.setdefault(slug, set()).add(node)
                fence = 0
            row = tuple.__new__(Row, (slug, value, left, fence, waiters, waiting, sharers))
            if slug in filed:
                filed[slug][node] = row
            else:
                filed[slug] = {node: row}

    def seen(self, slug: str) -> dict[int, Row]:
        """Return what each answering node has under a name, without the nodes that have nothing."""
        rows = self.rows.get(slug, {})
        return {node: row for node, row in rows.items() if node not in self.silent and _present(row)}

    def absurd(self, slug: str) -> set[int]:
        """Return the nodes that have an absurd fencing token for a name."""
        return self._absurd.get(slug, set())

    def fence(self, slug: str) -> int:
        """Return the highest fencing token that any node knows for a name, apart from absurd ones."""
        return max([row.fence for row in self.rows.get(slug, {}).values()], default=0)

    def left(self, row: Row) -> float:
        """Return how many more seconds a node keeps a row; 0 if it keeps the row for ever."""
        return max(0.0, row.left - self.manager.runtime.clock()) if row.left is not None else 0.0

    def snapshot(self) -> Snapshot:
        """Return the locks and the state of the nodes, as far as the answers show them."""
        enough = len(self.manager.nodes) - len(self.silent) >= self.manager.rules.needed
        listed = self._with_processes() if enough else []
        return Snapshot(
            alias=self.manager.alias,
            nodes=tuple(self._status(index) for index in range(len(self.manager.nodes))),
            locks=tuple(sorted(listed, key=soonest_first)),
            complete=self.complete,
            taken=self.manager.runtime.wall(),
            rules=self.manager.rules,
            total=self.total,
            absurd={
                slug: tuple(self.manager.nodes[index].name for index in sorted(indexes))
                for slug, indexes in self._absurd.items()
            },
        )

    def _processes(self) -> Iterator[Survey]:
        """Yield the requests that show whether the processes of locks that nobody extends are alive."""
        self._locks = self._judge_all()  # possible now that all nodes have answered
        self._suspects = {lock.slug: process_behind(lock) for lock in self._locks if is_suspicious(lock)}
        known = {process for process in self._heard if self._life(process) is Life.LIVING}
        yield from self._by_name([heartbeat(process) for process in sorted({*self._suspects.values()} - known)])

    def _life(self, process: str) -> Life:
        """Return what the answering nodes know about a process."""
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

    def _status(self, index: int) -> NodeStatus:
        name = self.manager.nodes[index].name
        if index in self.silent:
            return NodeStatus(name, False, self.silent[index])
        return NodeStatus(name, True, self.manager.driver.admission.objection(index) or self.refusing.get(index, ""))

    def _with_processes(self) -> list[HeldLock]:
        """Return the locks in the states that follow from whether their processes are alive."""
        listed = self._judge_all() if self._locks is None else self._locks
        if not self._suspects:
            return listed
        now = self.manager.runtime.wall()
        lives = {slug: self._life(process) for slug, process in self._suspects.items()}
        return [with_process(lock, lives[lock.slug], now) if lock.slug in lives else lock for lock in listed]

    def _judge_all(self) -> list[HeldLock]:
        names = [None if index in self.silent else node.name for index, node in enumerate(self.manager.nodes)]
        now = self.manager.runtime.clock()
        judged = [self._judge(slug, rows, names, now) for slug, rows in self.rows.items()]
        return [lock for lock in judged if lock]

    def _judge(self, slug: str, rows: Mapping[int, Row], names: Sequence[str | None], now: float) -> HeldLock | None:
        """Combine the nodes' rows into one lock; return None if no answering node has it."""
        views, lines, held, waiting, sharers = [], [], False, 0, []
        seen, mark, about = None, "", ""  # usually, all nodes have the same value
        for index, name in enumerate(names):
            row = rows.get(index) if name is not None else None
            if name is None:
                views.append(View(self.manager.nodes[index].name, False))
            elif row is None:
                views.append(View(name, True))
            else:
                _, value, left, fence, waiters, count, several = row
                if left is None or left > now:
                    held = True
                    if value != seen:
                        seen = value
                        mark, about = read_value(value)
                    views.append(tuple.__new__(View, (name, True, mark, about, left and left - now, fence)))
                else:
                    views.append(View(name, True, fence=fence))
                if count:
                    lines.append(waiters)
                    waiting = max(waiting, count)
                if several:
                    sharers.append(several)
        if not held:
            return None
        lock = judge(slug, self.manager.alias, tuple(views), self.manager.rules, lines)
        if not (waiting or sharers):
            return lock
        return lock._replace(
            waiting=max(waiting, len(lock.waiters)), sharers=agreed(sharers, self.manager.rules.needed)
        )


def agreed(counts: list[int], needed: int) -> int:
    """Return the highest count that at least *needed* nodes reach; 0 if fewer nodes counted anybody."""
    return sorted(counts, reverse=True)[needed - 1] if len(counts) >= needed else 0


def after_ended(cursor: str, time: int) -> str:
    """
    Return where to continue after a page of locks that have all ended: at the first lock that may still be held.

    Names of ended locks stay in an index until later locks push them out. Thousands of them would use up the time of a
    listing.

    Args:
        cursor: Where the node would continue: a moment and a name. Servers count milliseconds, in-memory nodes seconds.
        time: The time on the node's clock, in microseconds.
    """
    try:
        moment = float(cursor.partition(" ")[0])
    except ValueError:
        return cursor
    now = time // 1000 if moment > time / 1e5 else time / 1e6
    return f"{now!r} " if moment < now else cursor


def ask(poll: Poll, questions: Iterator[Survey], seconds: float = MAX_SECONDS, patience: float = math.inf) -> None:
    """
    Send the queries to the nodes, and record the answers in *poll*.

    Args:
        poll: The poll that records the answers.
        questions: The queries of the poll.
        seconds: For about how long to send further queries.
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
    """Query the nodes for the locks with these slugs and return the poll; *silent* nodes are not queried."""
    poll = Poll(manager, silent=silent)
    ask(poll, poll.named(list(slugs), waiters), math.inf)  # bounded by the number of names
    return poll


@lru_cache(maxsize=4096)
def read_value(value: str) -> tuple[str, str]:
    """
    Return the fingerprint of a value and its description of the holder, which is empty if the value is not ours.

    The cache helps because every node has the same value, and so has the next page that somebody loads.
    """
    about = value[value.find("{") :] if "{" in value else ""
    return fingerprint(value), about if any(lease_of(about)) or decode(about) else ""


def since_heartbeat(value: str, left: float | None) -> float:
    """Return the seconds since a process sent a heartbeat, from its key and the time that the key has left."""
    if left == ABSENT:
        return math.inf
    return max(0.0, lease_of(read_value(value)[1])[0] - (left or 0.0))


def _present(row: Row) -> bool:
    return row.left is None or row.left >= 0


LIVE = (State.HELD, State.DEGRADED)


def judge(slug: str, alias: str, views: tuple[View, ...], rules: Rules, lines: list[tuple[str, ...]]) -> HeldLock:
    """
    Return the lock that the views of all nodes describe together.

    Args:
        slug: The form of the lock's name in the keys.
        alias: The lock's alias in ``REDLOCK``.
        views: The view of each node.
        rules: The rules of the alias.
        lines: The waiters on each node, in that node's order.
    """
    groups, needed = by_holder(views), rules.needed
    if SHARED_MARK in groups:
        views = _with_current_mark(views, max([view.fence for view in groups[SHARED_MARK]]))
        groups = by_holder(views)
    leader = _leader(list(groups.values()))
    votes = len(leader)
    won = votes >= needed
    about = leader[0].about or next((view.about for view in leader if view.about), "")
    ttl, _ = lease_of(about)
    if not 0 < ttl < LAST_SECOND:
        ttl = 0.0
    left = _granted(leader, needed) if won else None
    drift = rules.drift(ttl or rules.ttl)
    return HeldLock(
        slug,
        alias,
        _state(votes, len(views), len(groups), won, left),
        None if left is None else max(0.0, left - drift),
        votes,
        leader[0].fingerprint,
        about,
        ttl or None,
        _fencing_token(leader),
        views,
        _in_queue(lines) if lines else (),
    )


def is_suspicious(lock: HeldLock) -> bool:
    """
    Return whether to look up if the holder's process is alive.

    A process sends its first heartbeat soon after it takes a lock, and repeats it. If the nodes' clocks show that the
    process has neither taken nor extended the lock for a while, a heartbeat must have arrived by now. If somebody else
    changed the expiry of the keys, the nodes cannot tell when the holder last extended the lock.
    """
    ttl = lock.ttl or 0.0
    return bool(process_behind(lock)) and not ttl - SILENCE <= _longest_left(lock) <= ttl


def process_behind(lock: HeldLock) -> str:
    """Return the holder's process; empty if it is unknown, or the lock does not depend on one."""
    return lease_of(lock.about)[1]


def is_shared(lock: HeldLock) -> bool:
    """Return whether several holders may share a lock."""
    return lock.fingerprint == fingerprint_of_sharers(max([view.fence for view in leaders(lock)], default=0))


def silent_for(lock: HeldLock) -> float:
    """
    Return the seconds since the holder last took or extended the lock, by the nodes' clocks; 0 if unknown.
    """
    return max(0.0, lock.ttl - _longest_left(lock)) if lock.ttl else 0.0


def with_process(lock: HeldLock, life: Life, now: float) -> HeldLock:
    """
    Return a suspicious lock in the state that follows from the heartbeats of its process.

    Args:
        lock: The lock.
        life: The state of the holder's process, as the nodes report it.
        now: The time, in seconds since the epoch.
    """
    state = lock.state
    if state in LIVE and life is Life.LIVING and silent_for(lock) > (lock.ttl or 0) / 2:
        state = State.UNRENEWED
    elif state in LIVE and life in (Life.SILENT, Life.GONE):
        # A process may not have sent a heartbeat yet in the first seconds of its hold.
        heard = silent_for(lock) > SILENCE or now - (lock.since or now) > SILENCE
        state = State.ORPHANED if heard else state
    return lock._replace(state=state, life=life)


def with_counts(lock: HeldLock, later: HeldLock | None) -> HeldLock:
    """
    Return a lock with the number of its waiters and the number of holders that share it.

    Args:
        lock: The lock.
        later: The same lock, as a later query by name found it; None if it was gone.
    """
    if later is None:
        return lock._replace(waiting=0)
    sharers = later.sharers if later.fingerprint == lock.fingerprint else 0  # otherwise, others hold it by now
    return lock._replace(waiting=later.waiting, sharers=sharers)


def _longest_left(lock: HeldLock) -> float:
    """Return the longest time left on any of the holder's nodes; infinite if a node keeps the key for ever."""
    mark = lock.fingerprint
    return max([math.inf if view.left is None else view.left for view in lock.views if view.fingerprint == mark])


def _leader(groups: list[list[View]]) -> list[View]:
    """Return the views of the holder that the most nodes report."""
    return groups[0] if len(groups) == 1 else max(groups, key=lambda group: (len(group), _weight(group)))


def _with_current_mark(views: tuple[View, ...], last: int) -> tuple[View, ...]:
    """Return the views with a fingerprint of the current sharers, which changes when another holder joins."""
    mark = fingerprint_of_sharers(last)
    return tuple([view._replace(fingerprint=mark) if view.fingerprint == SHARED_MARK else view for view in views])


def _state(votes: int, nodes: int, holders: int, won: bool, left: float | None) -> State:
    if not won:
        return State.SPLIT if holders > 1 else State.PARTIAL
    if left is None:
        return State.NO_EXPIRY
    return State.HELD if votes == nodes else State.DEGRADED


def _granted(group: list[View], needed: int) -> float | None:
    """Return how long a quorum grants the lock: the *needed*-th longest time left. None means for ever."""
    left = sorted([math.inf if view.left is None else view.left for view in group])[-needed]
    return None if left == math.inf else left


def _weight(group: list[View]) -> float:
    return sum(math.inf if view.left is None else view.left for view in group)


def _fencing_token(group: list[View]) -> int:
    """Return the token that most of the holder's nodes accepted; a node may have seen a higher one that failed."""
    fences = [view.fence for view in group]
    if fences.count(fences[0]) == len(fences):
        return fences[0]
    return max(fences, key=lambda fence: (fences.count(fence), fence))


def _in_queue(queues: Iterable[tuple[str, ...]]) -> tuple[Waiting, ...]:
    """Return the waiters of all nodes in one order: by best position, as one that is first anywhere may be next."""
    positions: dict[str, list[int]] = {}
    for queue in queues:
        for position, name in enumerate(queue):
            positions.setdefault(name, []).append(position)
    in_order = sorted(positions, key=lambda name: (min(positions[name]), sum(positions[name]), name))
    return tuple(_waiting(name, len(positions[name])) for name in in_order)


def _waiting(name: str, nodes: int) -> Waiting:
    """Parse a waiter's name, ``host:pid.random|number``; accept any text, because anybody can write to a node."""
    process, _, number = name.rpartition("|")
    host, _, rest = process.rpartition(":")
    pid = rest.partition(".")[0]
    return Waiting(host or process, int(pid) if pid.isdecimal() else 0, int(number) if number.isdecimal() else 0, nodes)


def soonest_first(lock: HeldLock) -> tuple[float, str]:
    """Return the sort key of a listing: locks that end soonest come first."""
    return (math.inf if lock.remaining is None else lock.remaining, lock.slug)
