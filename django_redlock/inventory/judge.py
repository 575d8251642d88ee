"""
What the answers of the nodes mean together.
"""

import math
from collections.abc import Iterable
from dataclasses import replace

from ..core.messages import SHARED
from ..core.owner import fingerprint, fingerprint_of_sharers
from ..core.rules import Rules
from ..presence import SILENCE
from .model import HeldLock, State, View, Waiting, by_holder

SHARERS = fingerprint(SHARED)  # of whoever they are


def judge(slug: str, alias: str, views: tuple[View, ...], rules: Rules, lines: Iterable[tuple[str, ...]]) -> HeldLock:
    """
    Return the lock that the views of all nodes make together.

    Args:
        slug: Its name, as it stands in the keys.
        alias: Its alias in ``REDLOCK``.
        views: What each node has.
        rules: The numbers of the alias.
        lines: Who waits, in the order of each node.
    """
    groups = by_holder(views)
    if SHARERS in groups:
        views = _told_apart(views, max(view.fence for view in groups[SHARERS]))
        groups = by_holder(views)
    leader = max(groups.values(), key=lambda group: (len(group), _weight(group)))
    votes = len(leader)
    won = votes >= rules.needed
    owner = next((view.owner for view in leader if view.owner), None)
    left = _granted(leader, rules.needed) if won else None
    drift = rules.drift(owner.ttl if owner and owner.ttl else rules.ttl)
    return HeldLock(
        slug=slug,
        alias=alias,
        state=_state(votes, len(views), len(groups), won, left),
        remaining=None if left is None else max(0.0, left - drift),
        votes=votes,
        fingerprint=leader[0].fingerprint,
        owner=owner,
        fencing_token=_token(leader),
        views=views,
        waiters=_in_line(lines),
    )


def is_suspicious(lock: HeldLock) -> bool:
    """
    Return whether to look up if the holder's process lives.

    A process says that it lives soon after it took a lock, and again and again. So one that neither took nor extended
    the lock for a while, by the nodes' clocks, must have said so by now, or be dead.
    """
    live = lock.state in (State.HELD, State.DEGRADED)
    return live and lock.owner is not None and bool(lock.owner.process) and lock.silent_for > SILENCE


def _told_apart(views: tuple[View, ...], last: int) -> tuple[View, ...]:
    """Return the views with a fingerprint for those who share the lock now, be it other ones a moment later."""
    mark = fingerprint_of_sharers(last)
    return tuple([replace(view, fingerprint=mark) if view.fingerprint == SHARERS else view for view in views])


def _state(votes: int, nodes: int, holders: int, won: bool, left: float | None) -> State:
    if not won:
        return State.SPLIT if holders > 1 else State.PARTIAL
    if left is None:
        return State.NO_EXPIRY
    return State.HELD if votes == nodes else State.DEGRADED


def _granted(group: list[View], needed: int) -> float | None:
    """Return for how long a quorum grants the lock, which is its longest time but *needed* - 1; None is for ever."""
    lefts = sorted((math.inf if view.left is None else view.left for view in group), reverse=True)
    return None if math.isinf(lefts[needed - 1]) else lefts[needed - 1]


def _weight(group: list[View]) -> float:
    return sum(math.inf if view.left is None else view.left for view in group)


def _token(group: list[View]) -> int:
    """Return the number that most nodes of the holder accepted; a node may have seen a higher one that failed."""
    fences = [view.fence for view in group]
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
    """Return by what locks are listed."""
    return (math.inf if lock.remaining is None else lock.remaining, lock.slug)
