"""
Which keys no live holder needs, and their end.
"""

import time
from collections.abc import Iterator

from ..core.owner import Owner
from ..core.replies import Kind
from ..core.requests import Repair
from ..core.rules import Rules
from ..handler import locks
from .model import HeldLock, Snapshot, StaleKey, Staleness, State, View, by_holder
from .poll import ask_for
from .release import burial, delete, everywhere, marks


def stale_keys(snapshot: Snapshot, now: float | None = None) -> list[StaleKey]:
    """
    Return the keys among *snapshot* that no live holder needs.

    A key is stale when it has no expiry, when it expires later than any lease of its holder could, when its value
    is not ours, when too few nodes have it and it is older than its lease, or when the process that held it died.
    What a quorum holds for a living process is never stale, nor is what a quorum may hold, counting every node that
    did not answer, nor what was renewed in the last half of its lease: its holder lost some nodes and is about to put
    it back. That goes for keys whose expiry somebody else changed or took away as well.

    An absurd fencing token is stale as well, whether somebody holds the lock or not: a node with such a token cannot
    accept a higher one, so it has no vote on this lock.

    Args:
        snapshot: A listing.
        now: The time in seconds since the epoch; None is now.
    """
    moment = time.time() if now is None else now
    keys = [key for lock in snapshot.locks for key in _stale(lock, snapshot.rules, moment)]
    known = {lock.slug: lock for lock in snapshot.locks}
    for slug, nodes in sorted(snapshot.absurd.items()):
        lock = known.get(slug) or HeldLock(slug, snapshot.alias, State.PARTIAL, None, 0, "", "", None, "", 0, ())
        keys.append(StaleKey(lock, "", Staleness.ABSURD, nodes, None))
    return keys


def remove_stale(key: StaleKey) -> str:
    """
    Delete a stale key from the nodes that have it, if it is still there and still stale.

    Returns:
        ``removed``, also of an absurd token that was replaced; ``changed`` if it is gone, or no longer stale;
        ``failed`` if a node that has it may still have it.
    """
    slug = key.lock.slug
    if key.reason is Staleness.ABSURD:
        return _repair(key)
    poll = ask_for([slug], locks[key.lock.alias])
    again = [each for each in stale_keys(poll.snapshot()) if each.fingerprint == key.fingerprint]
    # Should the process live after all, it must not put back what it finds missing.
    held = key.reason in (Staleness.ORPHANED, Staleness.NO_EXPIRY, Staleness.TOO_LONG)
    tombstone = burial(poll, slug, key.fingerprint) if held else 0.0
    round = delete(poll, slug, key.fingerprint, tombstone) if again else None
    if round is None:
        return "changed"
    having = [place for place, mark in marks(poll, slug).items() if mark == key.fingerprint]
    kinds = {round.replies[place].kind if place in round.replies else Kind.UNKNOWN for place in having}
    if kinds <= {Kind.RELEASED, Kind.GONE}:
        return "removed"
    return "changed" if kinds <= {Kind.RELEASED, Kind.GONE, Kind.BUSY} else "failed"


def _repair(key: StaleKey) -> str:
    """
    Replace an absurd fencing token by the highest that the other nodes know, so that the node forgets nothing.

    Each node decides for itself whether its token is still absurd.
    """
    slug, manager = key.lock.slug, locks[key.lock.alias]
    poll = ask_for([slug], manager)
    if not poll.absurd(slug):
        return "changed"
    repair = Repair(slug, poll.fence(slug), manager.rules.fence_keep)
    round = everywhere(manager, repair, sorted(poll.absurd(slug)))
    kinds = {round.replies[node].kind if node in round.replies else Kind.UNKNOWN for node in round.requests}
    return "removed" if kinds <= {Kind.RELEASED, Kind.GONE} else "failed"


def _stale(lock: HeldLock, rules: Rules, now: float) -> Iterator[StaleKey]:
    silent = sum(not view.answered for view in lock.views)
    for holder, group in by_holder(lock.views).items():
        owner = next((view.owner for view in group if view.owner), None)
        if lock.state is State.ORPHANED and holder == lock.fingerprint:
            yield StaleKey(lock, holder, Staleness.ORPHANED, tuple(view.node for view in group), owner)
            continue
        longest = max(rules.max_ttl, owner.ttl if owner else 0.0)
        longest += rules.drift(longest)
        sound = [view.left for view in group if view.left is not None and view.left <= longest]
        lives = lock.alive and holder == lock.fingerprint and len(group) >= rules.needed
        if lives or len(sound) + silent >= rules.needed or _renewed(owner, sound):
            continue
        reason = _reason(group, owner, longest, now)
        if reason:
            yield StaleKey(lock, holder, reason, tuple(view.node for view in group), owner)


def _renewed(owner: Owner | None, lefts: list[float]) -> bool:
    return owner is not None and any(left > owner.ttl / 2 for left in lefts)


def _reason(group: list[View], owner: Owner | None, longest: float, now: float) -> Staleness | None:
    if any(view.left is None for view in group):
        return Staleness.NO_EXPIRY
    if any(view.left is not None and view.left > longest for view in group):
        return Staleness.TOO_LONG
    if owner is None:
        return Staleness.FOREIGN
    return Staleness.RESIDUE if owner.since and now - owner.since > owner.ttl else None
