"""
Act on locks that others hold: ask a holder to stop, release a lock by force, delete stale keys (internal).

Every action names the holder that the caller saw, by its fingerprint. The nodes are asked again for that holder's
secret, and a later holder keeps the lock.
"""

import logging
from collections.abc import Collection, Iterable, Iterator
from enum import StrEnum

from ..core.names import SECRET_SIZE, Owner, is_cut, is_kept, lease_of, queue_of
from ..core.names import slug as slug_of
from ..core.protocol import SHARED, Failure, Kind, Release, Repair
from ..core.round import Round
from ..core.rules import DEFAULT_ALIAS, Rules
from ..core.votes import is_gone, is_quorum, prevents_quorum
from ..engine.manager import LockManager
from ..exceptions import printable
from ..handler import locks
from .model import NO_STRING, Life, LockReport, Snapshot, StaleKey, Staleness, State, View, name_of
from .survey import MAX_NAMES, MAX_SECONDS, Poll, Vote, ask_nodes, run, tell_nodes

MICROSECONDS = 1e6  # in a second
MAX_RELEASE = 20  # locks in one action of a person: as many as one can read

log = logging.getLogger("django_redlock")


class ActionResult(StrEnum):
    """
    The result of an action on a lock that somebody else holds, or on a stale key.

    Members are strings, so that users' code, logs and commands compare and show them as text.
    """

    RELEASED = "released"
    ASKED = "asked"  # the holder learns of the request to stop at its next renewal
    SHARED = "shared"  # several holders share the lock; they cannot be asked one by one
    UNRENEWED = (
        "unrenewed"  # nobody renews the lock, or its work is over, so that nobody would learn of a request to stop
    )
    FOREIGN = "foreign"  # another program holds the lock, and cannot be asked to stop
    WRONG_TYPE = "wrong_type"  # another program wrote the key, which is not a string: only a DEL on the nodes helps
    CHANGED = "changed"  # somebody else holds the lock now, or the key is no longer stale
    GONE = "gone"  # nobody holds the lock
    UNKNOWN = "unknown"  # too few nodes answered
    REMOVED = "removed"  # a stale key
    FAILED = "failed"  # a node that has the stale key may still have it


def force_release(
    name: str | LockReport, fingerprint: str, using: str = DEFAULT_ALIAS, *, slug: str = "", reason: str = ""
) -> ActionResult:
    """
    Take a lock away from its holder, if the holder still has this fingerprint.

    The holder learns of the release at its next renewal, which is refused: its lease is lost with the reason
    ``revoked``, and the lock stays free for others. The signal ``lock_forced`` is sent.

    Args:
        name: The lock as returned by a listing, or its whole name.
        fingerprint: The fingerprint of the holder that the caller means; a later holder keeps the lock.
        using: The alias in ``REDLOCK``, if *name* is a str.
        slug: The lock's slug, instead of its name.
        reason: The reason for the release, for the log.

    Returns:
        ``released``; ``changed`` if another owner holds the lock now; ``gone`` if nobody holds it; ``unknown`` if too
        few nodes answered to tell; ``wrong_type`` if the key is not a string, so that no command of this library can
        delete it.

    Raises:
        ValueError: The name is cut short, as listings show long names.
        InvalidRedlockError: The alias cannot be used.
    """
    manager, slug, vote = _look_up(name, fingerprint, using, slug)
    if isinstance(vote, ActionResult):
        return vote
    round = _delete(manager, slug, vote, tombstone=_refused_for(manager, vote))
    outcome = _outcome(round, manager.rules, vote.secret == SHARED)
    if outcome is ActionResult.CHANGED and vote.fingerprint == NO_STRING:
        outcome = ActionResult.WRONG_TYPE
    _report(manager, "released by force", slug, outcome, reason)
    return outcome


def ask_to_stop(
    name: str | LockReport, fingerprint: str, using: str = DEFAULT_ALIAS, *, slug: str = ""
) -> ActionResult:
    """
    Ask the holder of a lock to stop: its next renewal is refused, and its lease is lost with the reason ``revoked``.

    Nobody else gets the lock until the holder has released it or its lease has ended. The signal ``lock_forced`` is
    sent with the outcome ``asked``, or ``unknown`` if too few nodes answered.

    Args:
        name: The lock as returned by a listing, or its whole name.
        fingerprint: The fingerprint of the holder that the caller means; a later holder is not asked.
        using: The alias in ``REDLOCK``, if *name* is a str.
        slug: The lock's slug, instead of its name.

    Returns:
        ``asked``; ``changed``, ``gone`` or ``unknown`` as in :func:`force_release`; ``shared`` if several holders share
        the lock, because they cannot be asked one by one; ``foreign`` if another program holds it; ``unrenewed`` if
        its work is over or nobody renews it, so that it ends by itself, and nobody would learn of the request.

    Raises:
        ValueError: The name is cut short, as listings show long names.
        InvalidRedlockError: The alias cannot be used.
    """
    manager, slug, vote = _look_up(name, fingerprint, using, slug)
    if isinstance(vote, ActionResult):
        return vote
    if vote.secret == SHARED:
        return ActionResult.SHARED
    if not vote.owners:
        return ActionResult.FOREIGN
    # A holder that is not renewed may call extend() itself, and then learns of the request.
    extended = lease_of(vote.about)[1] or any(owner.extensions for owner in vote.owners)
    if is_kept(vote.about) or not extended:
        return ActionResult.UNRENEWED
    round = tell_nodes(manager, Release((), vote.secret, manager.rules.guard, revoke=True))
    outcome = ActionResult.ASKED if is_quorum(round.count(Kind.GONE), manager.rules.needed) else ActionResult.UNKNOWN
    _report(manager, "revoked, so that its holder stops", slug, outcome)
    return outcome


def still_held(holders: Collection[str], using: str) -> dict[str, tuple[str, ...]]:
    """
    Return the names of the locks that some holders have, by fingerprint, as far as a listing shows them.

    A lock over several names is a lock for each of them on the nodes, and a forced release takes away one.
    """
    poll = Poll(locks[using], waiters=0)
    listed = run(poll, poll.pages(MAX_NAMES, MAX_SECONDS)).snapshot().locks if holders else ()
    theirs = [lock for lock in listed if lock.fingerprint in holders and lock.owner and not lock.is_shared]
    return {
        holder: tuple(sorted(lock.name for lock in theirs if lock.fingerprint == holder))
        for holder in dict.fromkeys(lock.fingerprint for lock in theirs)
    }


def stale_keys(snapshot: Snapshot, now: float | None = None) -> list[StaleKey]:
    """
    Return the keys in *snapshot* that no live holder needs.

    A key is stale when it has no expiry, when it expires later than any lease or minimum hold of its holder could, when
    its value is not ours, or when too few nodes have it and it is older than its lease. A key that a quorum holds, or
    may hold if every node that did not answer is counted, is only stale if it would last longer than that.

    A key that a living process may hold is never stale. If the process renews the lock, it must have given no sign
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
        lock = known.get(slug) or LockReport(slug, snapshot.alias, State.PARTIAL, None, 0, "", "", None, 0, ())
        keys.append(StaleKey(lock, "", Staleness.ABSURD, nodes, None))
    return keys


def remove_stale(key: StaleKey) -> ActionResult:
    """
    Delete a stale key from the nodes that have it, if it is still there and still stale.

    Returns:
        ``removed``, also if an absurd token was replaced; ``changed`` if the key is gone or no longer stale;
        ``failed`` if a node that had the key may still have it.
    """
    slug, manager = key.lock.slug, locks[key.lock.alias]
    poll = Poll(manager)
    run(poll, poll.described([slug]))
    if key.reason is Staleness.ABSURD:
        # The highest token that the other nodes know takes its place, so that nothing is forgotten. Each node decides
        # for itself whether its token is still absurd.
        nodes = poll.absurd.get(slug)
        if not nodes:
            return ActionResult.CHANGED
        kinds = _kinds(tell_nodes(manager, Repair(slug, poll.fence(slug), manager.rules.fence_keep), nodes), nodes)
        return ActionResult.REMOVED if kinds <= DELETED else ActionResult.FAILED
    vote = poll.vote(slug, key.fingerprint)
    if vote is None or all(each.fingerprint != key.fingerprint for each in stale_keys(poll.snapshot())):
        return ActionResult.CHANGED
    # If the process is alive after all, it must not restore the key that it finds missing.
    held = key.reason in (Staleness.NO_EXPIRY, Staleness.TOO_LONG)
    round = _delete(manager, slug, vote, tombstone=_refused_for(manager, vote) if held else 0.0)
    kinds = _kinds(round, vote.rows)
    if kinds <= DELETED:
        return ActionResult.REMOVED
    changed = kinds <= DELETED | {Kind.BUSY} and key.reason is not Staleness.WRONG_TYPE
    return ActionResult.CHANGED if changed else ActionResult.FAILED


DELETED = frozenset({Kind.RELEASED, Kind.GONE})  # the kinds of reply of a node that has no such key any more


def _kinds(round: Round, nodes: Iterable[int]) -> set[Kind]:
    """Return the kinds of the replies of some nodes."""
    return {round.replies[node].kind if node in round.replies else Kind.UNKNOWN for node in nodes}


def _stale(lock: LockReport, rules: Rules, now: float) -> Iterator[StaleKey]:
    silent = sum(not view.answered for view in lock.views)
    for holder, group in lock.holders.items():
        owner = next((view.owner for view in group if view.owner), None)
        longest = max(rules.max_ttl, owner.ttl, owner.hold) if owner else rules.max_ttl
        longest += rules.drift(longest)
        sound = [view.left for view in group if view.left is not None and view.left <= longest]
        may_be_held = is_quorum(len(sound) + silent, rules.needed)
        # A process that has renewed the key a moment ago is alive, whatever the other nodes say.
        renewed = owner is not None and any(left > owner.ttl / 2 for left in sound)
        if may_be_held or renewed or (owner and not _is_over(lock, group, owner, longest, now)):
            continue
        yield StaleKey(lock, holder, _reason(group, owner, longest), tuple(view.node for view in group), owner)


def _is_over(lock: LockReport, group: list[View], owner: Owner, longest: float, now: float) -> bool:
    """Return whether a holder's last lease has certainly ended, and not only as far as anybody can see."""
    # A fencing token is the time at which the nodes accepted it: the clock of the holder's host may be slow.
    taken = max(owner.since, *(view.fence / MICROSECONDS for view in group))
    if not owner.since or now - taken <= longest:
        return False
    if owner.process:
        return lock.life is Life.GONE and owner.process == lock.process
    return not owner.extensions


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


def _look_up(
    name: str | LockReport, fingerprint: str, using: str, slug: str
) -> tuple[LockManager, str, Vote | ActionResult]:
    """Return the manager of a lock's alias, the lock's slug, and the holder that was meant, or why there is none."""
    if isinstance(name, LockReport):
        manager, slug = locks[name.alias], name.slug
    elif not slug and is_cut(name):
        raise ValueError(f"The name {name!r} is cut short, as in listings; pass the lock itself, or its whole name.")
    else:
        manager, slug = locks[using], slug or slug_of(name)
    poll = ask_nodes(manager, [slug])
    if vote := poll.vote(slug, fingerprint):
        return manager, slug, vote
    if poll.tally(slug).votes:
        return manager, slug, ActionResult.CHANGED
    return manager, slug, ActionResult.GONE if poll.has_quorum else ActionResult.UNKNOWN


def _delete(manager: LockManager, slug: str, vote: Vote, tombstone: float) -> Round:
    """Delete the value of a holder from every node."""
    tombstone = tombstone if len(vote.secret) == SECRET_SIZE else 0.0  # another program restores nothing
    shared = vote.secret == SHARED
    release = Release((slug,), vote.secret, tombstone, shared=shared, queue=queue_of(slug), revoke=True)
    return tell_nodes(manager, release._replace(fencing_token=vote.last) if shared else release)


def _refused_for(manager: LockManager, vote: Vote) -> float:
    """
    Return how long the nodes refuse the holder after a forced release, in seconds.

    The next renewal of a living holder would restore the keys that it finds missing. That renewal comes within one
    lease, which may be as long as ``max_ttl``, even if the key was written with a shorter one. A longer lease belongs
    to a pending call. Nobody renews such a lease, and the run that takes it over later must not be refused.
    """
    ttl = max([owner.ttl for owner in vote.owners], default=0.0)
    return manager.rules.guard if ttl <= manager.rules.max_ttl else 0.0


def _outcome(round: Round, rules: Rules, shared: bool) -> ActionResult:
    """Return the result of the round that deleted a holder's value."""
    if prevents_quorum(sum(reply.failure is Failure.WRONGTYPE for reply in round.replies.values()), rules):
        return ActionResult.WRONG_TYPE
    if not is_gone(round.replies, rules):
        return ActionResult.UNKNOWN
    # Where another holder has joined a shared lock, all its holders still have it: a new hold does not end theirs.
    ended = is_quorum(round.count(Kind.RELEASED, Kind.GONE), rules.needed)
    if round.count(Kind.RELEASED) and (ended or not shared):
        return ActionResult.RELEASED
    return ActionResult.CHANGED if round.count(Kind.BUSY) else ActionResult.GONE


def _report(manager: LockManager, what: str, slug: str, outcome: ActionResult, reason: str = "") -> None:
    """Log an action on a lock, and send the signal."""
    name = name_of(slug)
    why = f"{outcome}: {printable(reason)}" if reason else outcome
    about = {"event": "lock_forced", "lock": name, "outcome": outcome}
    done = {ActionResult.RELEASED: "", ActionResult.ASKED: "", ActionResult.UNKNOWN: "perhaps "}.get(outcome, "not ")
    log.warning("lock %s%s: %s (%s)", done, what, printable(name), why, extra=about)
    manager.notify("lock_forced", name=name, outcome=outcome)
