"""
What the answers of the nodes mean together.
"""

import math
from collections.abc import Iterable

from ..core.owner import fingerprint_of_sharers, lease_of
from ..core.rules import Rules
from ..engine.heartbeat import SILENCE
from .model import LAST_SECOND, SHARED_MARK, HeldLock, View, Waiting, by_holder, leaders
from .states import Life, State

LIVE = (State.HELD, State.DEGRADED)


def judge(slug: str, alias: str, views: tuple[View, ...], rules: Rules, lines: list[tuple[str, ...]]) -> HeldLock:
    """
    Return the lock that the views of all nodes make together.

    Args:
        slug: Its name, as it stands in the keys.
        alias: Its alias in ``REDLOCK``.
        views: What each node has.
        rules: The numbers of the alias.
        lines: Who waits, in the order of each node.
    """
    groups, needed = by_holder(views), rules.needed
    if SHARED_MARK in groups:
        views = _told_apart(views, max([view.fence for view in groups[SHARED_MARK]]))
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
        _token(leader),
        views,
        _in_line(lines) if lines else (),
    )


def is_suspicious(lock: HeldLock) -> bool:
    """
    Return whether to look up if the holder's process lives.

    A process shows that it lives soon after it took a lock, and again and again. So a process that neither took nor
    extended the lock for a while, by the nodes' clocks, must have been heard by now. When somebody else changed the
    expiry of the keys, the nodes cannot tell when the holder extended them last.
    """
    return bool(process_behind(lock)) and (silent_for(lock) > SILENCE or _was_changed(lock))


def process_behind(lock: HeldLock) -> str:
    """Return the holder's process; empty if it is unknown, or the lock does not depend on one."""
    return lease_of(lock.about)[1]


def is_shared(lock: HeldLock) -> bool:
    """Return whether several may hold a lock at once."""
    return lock.fingerprint == fingerprint_of_sharers(max([view.fence for view in leaders(lock)], default=0))


def silent_for(lock: HeldLock) -> float:
    """
    Return for how many seconds, by the nodes' clocks, the holder has neither taken nor extended a lock; 0 if unknown.
    """
    lefts = [view.left for view in lock.views if view.fingerprint == lock.fingerprint]
    known = [left for left in lefts if left is not None]
    return max(0.0, lock.ttl - max(known)) if lock.ttl and len(known) == len(lefts) else 0.0


def with_process(lock: HeldLock, life: Life, now: float) -> HeldLock:
    """
    Return a suspicious lock, now that it is known what was heard of its process.

    Args:
        lock: The lock.
        life: The state of its process, as the nodes report it.
        now: The time, in seconds since the epoch.
    """
    state = lock.state
    if state in LIVE and life is Life.LIVING and silent_for(lock) > (lock.ttl or 0) / 2:
        state = State.UNRENEWED
    elif state in LIVE and life in (Life.SILENT, Life.GONE):
        # In its first seconds, a process that holds a lock need not have been heard.
        heard = silent_for(lock) > SILENCE or now - (lock.since or now) > SILENCE
        state = State.ORPHANED if heard else state
    return lock._replace(state=state, life=life)


def with_counts(lock: HeldLock, later: HeldLock | None) -> HeldLock:
    """
    Return a lock with the numbers of those who wait for it and of those who share it.

    Args:
        lock: The lock.
        later: The same lock, as a later request by name found it; None if it was gone.
    """
    if later is None:
        return lock._replace(waiting=0)
    sharers = later.sharers if later.fingerprint == lock.fingerprint else 0  # otherwise others hold it by now
    return lock._replace(waiting=later.waiting, sharers=sharers)


def _was_changed(lock: HeldLock) -> bool:
    return any(view.left is None or view.left > (lock.ttl or 0) for view in leaders(lock))


def _leader(groups: list[list[View]]) -> list[View]:
    """Return the views of the holder that most nodes have."""
    return groups[0] if len(groups) == 1 else max(groups, key=lambda group: (len(group), _weight(group)))


def _told_apart(views: tuple[View, ...], last: int) -> tuple[View, ...]:
    """Return the views with a fingerprint for those who share the lock now; it changes when another one joins."""
    mark = fingerprint_of_sharers(last)
    return tuple([view._replace(fingerprint=mark) if view.fingerprint == SHARED_MARK else view for view in views])


def _state(votes: int, nodes: int, holders: int, won: bool, left: float | None) -> State:
    if not won:
        return State.SPLIT if holders > 1 else State.PARTIAL
    if left is None:
        return State.NO_EXPIRY
    return State.HELD if votes == nodes else State.DEGRADED


def _granted(group: list[View], needed: int) -> float | None:
    """Return for how long a quorum grants the lock, which is its longest time but *needed* - 1; None is for ever."""
    left = sorted([math.inf if view.left is None else view.left for view in group])[-needed]
    return None if left == math.inf else left


def _weight(group: list[View]) -> float:
    return sum(math.inf if view.left is None else view.left for view in group)


def _token(group: list[View]) -> int:
    """Return the number that most nodes of the holder accepted; a node may have seen a higher one that failed."""
    fences = [view.fence for view in group]
    if fences.count(fences[0]) == len(fences):
        return fences[0]
    return max(fences, key=lambda fence: (fences.count(fence), fence))


def _in_line(lines: Iterable[tuple[str, ...]]) -> tuple[Waiting, ...]:
    """Return the waiters of all nodes in one order: by their best place, as one that is first anywhere may be next."""
    places: dict[str, list[int]] = {}
    for line in lines:
        for place, name in enumerate(line):
            places.setdefault(name, []).append(place)
    in_order = sorted(places, key=lambda name: (min(places[name]), sum(places[name]), name))
    return tuple(_waiting(name, len(places[name])) for name in in_order)


def _waiting(name: str, nodes: int) -> Waiting:
    """Return what a waiter's name, ``host:pid.random|number``, says of it; anybody can write to a node."""
    process, _, number = name.rpartition("|")
    host, _, rest = process.rpartition(":")
    pid = rest.partition(".")[0]
    return Waiting(host or process, int(pid) if pid.isdecimal() else 0, int(number) if number.isdecimal() else 0, nodes)


def soonest_first(lock: HeldLock) -> tuple[float, str]:
    """Return the sort key of a listing."""
    return (math.inf if lock.remaining is None else lock.remaining, lock.slug)
