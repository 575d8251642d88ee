"""
Find the keys that no live holder needs, and delete them (internal).
"""

from collections.abc import Iterator

from ..core.names import Owner
from ..core.protocol import Kind, Repair
from ..core.rules import Rules
from ..handler import locks
from .actions import ActionResult, delete, everywhere, marks, refused_for
from .model import NO_STRING, HeldLock, Life, Snapshot, StaleKey, Staleness, State, View, by_holder
from .survey import ask_for, process_behind

MICROSECONDS = 1e6  # in a second


def stale_keys(snapshot: Snapshot, now: float | None = None) -> list[StaleKey]:
    """
    Return the keys in *snapshot* that no live holder needs.

    A key is stale when it has no expiry, when it expires later than any lease of its holder could, when its value
    is not ours, or when too few nodes have it and it is older than its lease. A key that a quorum holds, or may hold
    if every node that did not answer is counted, is only stale if it would last longer than a lease.

    A key that a living process may hold is never stale. If the process renews the lock, it must have sent no heartbeat
    for longer than a lease may last. Otherwise the holder's only lease must have ended, by the clocks of the holder's
    host, of the nodes and of this host; if the holder has extended it, nobody can tell. A lock that several holders
    share is never stale: its key does not say who they are. A process that died less than a lease ago looks like a
    paused process, so an orphaned lock is not stale: it ends by itself.

    An absurd fencing token is stale as well, whether somebody holds the lock or not: a node with such a token cannot
    accept a higher one, so it gives no vote on this lock.

    Args:
        snapshot: A listing.
        now: The time in seconds since the epoch; None means the time of the listing.
    """
    moment = snapshot.taken if now is None else now
    keys = [key for lock in snapshot.locks for key in _stale(lock, snapshot.rules, moment)]
    known = {lock.slug: lock for lock in snapshot.locks}
    for slug, nodes in sorted(snapshot.absurd.items()):
        lock = known.get(slug) or HeldLock(slug, snapshot.alias, State.PARTIAL, None, 0, "", "", None, 0, ())
        keys.append(StaleKey(lock, "", Staleness.ABSURD, nodes, None))
    return keys


def remove_stale(key: StaleKey) -> ActionResult:
    """
    Delete a stale key from the nodes that have it, if it is still there and still stale.

    Returns:
        ``removed``, also if an absurd token was replaced; ``changed`` if the key is gone or no longer stale;
        ``failed`` if a node that had the key may still have it.
    """
    slug = key.lock.slug
    if key.reason is Staleness.ABSURD:
        return _repair(key)
    poll = ask_for([slug], locks[key.lock.alias])
    again = [each for each in stale_keys(poll.snapshot()) if each.fingerprint == key.fingerprint]
    # If the process is alive after all, it must not restore the key that it finds missing.
    held = key.reason in (Staleness.NO_EXPIRY, Staleness.TOO_LONG)
    tombstone = refused_for(poll, slug, key.fingerprint) if held else 0.0
    round = delete(poll, slug, key.fingerprint, tombstone) if again else None
    if round is None:
        return ActionResult.CHANGED
    having = [node for node, mark in marks(poll, slug).items() if mark == key.fingerprint]
    kinds = {round.replies[node].kind if node in round.replies else Kind.UNKNOWN for node in having}
    if kinds <= {Kind.RELEASED, Kind.GONE}:
        return ActionResult.REMOVED
    return ActionResult.CHANGED if kinds <= {Kind.RELEASED, Kind.GONE, Kind.BUSY} else ActionResult.FAILED


def _repair(key: StaleKey) -> ActionResult:
    """
    Replace an absurd fencing token with the highest token that the other nodes know, so that nothing is forgotten.

    Each node decides for itself whether its token is still absurd.
    """
    slug, manager = key.lock.slug, locks[key.lock.alias]
    poll = ask_for([slug], manager)
    if not poll.absurd(slug):
        return ActionResult.CHANGED
    repair = Repair(slug, poll.fence(slug), manager.rules.fence_keep)
    round = everywhere(manager, repair, sorted(poll.absurd(slug)))
    kinds = {round.replies[node].kind if node in round.replies else Kind.UNKNOWN for node in round.requests}
    return ActionResult.REMOVED if kinds <= {Kind.RELEASED, Kind.GONE} else ActionResult.FAILED


def _stale(lock: HeldLock, rules: Rules, now: float) -> Iterator[StaleKey]:
    silent = sum(not view.answered for view in lock.views)
    for holder, group in by_holder(lock.views).items():
        owner = next((view.owner for view in group if view.owner), None)
        longest = max(rules.max_ttl, owner.ttl if owner else 0.0)
        longest += rules.drift(longest)
        sound = [view.left for view in group if view.left is not None and view.left <= longest]
        if (
            len(sound) + silent >= rules.needed
            or _renewed(owner, sound)
            or (owner and not _is_over(lock, group, owner, longest, now))
        ):
            continue
        yield StaleKey(lock, holder, _reason(group, owner, longest), tuple(view.node for view in group), owner)


def _is_over(lock: HeldLock, group: list[View], owner: Owner, longest: float, now: float) -> bool:
    """Return whether a holder's last lease has certainly ended, and not only as far as anybody can see."""
    # A fencing token is the time at which the nodes accepted it: the clock of the holder's host may be slow.
    taken = max(owner.since, *(view.fence / MICROSECONDS for view in group))
    if not owner.since or now - taken <= longest:
        return False
    if owner.process:
        return lock.life is Life.GONE and owner.process == process_behind(lock)
    return not owner.extensions


def _renewed(owner: Owner | None, lefts: list[float]) -> bool:
    return owner is not None and any(left > owner.ttl / 2 for left in lefts)


def _reason(group: list[View], owner: Owner | None, longest: float) -> Staleness:
    if group[0].fingerprint == NO_STRING:
        return Staleness.WRONG_TYPE
    if any(view.left is None for view in group):
        return Staleness.NO_EXPIRY
    if any(view.left is not None and view.left > longest for view in group):
        return Staleness.TOO_LONG
    if owner is None:
        return Staleness.FOREIGN
    return Staleness.RESIDUE
