"""
Combine what the nodes report about a lock into its state (internal).
"""

import math
from collections.abc import Iterable

from ..core.names import fingerprint_of_sharers, lease_of
from ..core.rules import Rules
from ..engine.heartbeat import SILENCE
from .model import LAST_SECOND, SHARED_MARK, HeldLock, Life, State, View, Waiting, by_holder, leaders

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
