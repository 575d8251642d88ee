"""
Act on a lock that somebody else holds: ask its holder to stop, extend the lock, or release it by force (internal).
"""

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import StrEnum

from ..conf import DEFAULT_ALIAS
from ..core.names import SECRET_SIZE, Owner, fingerprint_of_sharers, is_cut, queue_of, secret_of
from ..core.names import fingerprint as fingerprint_of
from ..core.names import slug as slug_of
from ..core.protocol import SHARED, Extend, Failure, Kind, Release, Repair, Term
from ..core.round import Round
from ..core.rules import Rules
from ..engine.manager import LockManager
from ..exceptions import printable
from ..handler import locks
from .model import NO_STRING, HeldLock, Life, Snapshot, StaleKey, Staleness, State, View, by_holder, name_of, owner_of
from .survey import Poll, ask_for, process_behind, read_value

FORCED = "lock_forced"  # the signal
NOWHERE = -1  # a token with which no node restores a lock that it does not have

log = logging.getLogger("django_redlock")


class ActionResult(StrEnum):
    """
    The result of an action on a lock that somebody else holds, or on a stale key.

    Members are strings, so that users' code, logs and commands compare and show them as text.
    """

    RELEASED = "released"
    ASKED = "asked"  # the holder learns of the request to stop at its next renewal
    EXTENDED = "extended"
    LONGER = "longer"  # a quorum already keeps the lock for longer
    STOPPING = "stopping"  # the holder was asked to stop, so it gets no more time
    SHARED = "shared"  # several holders share the lock; they cannot be asked or extended one by one
    FOREIGN = "foreign"  # another program holds the lock, and cannot be asked to stop
    WRONG_TYPE = (
        "wrong_type"  # another program wrote the key, which is not a string: only a DEL on the nodes deletes it
    )
    CHANGED = "changed"  # somebody else holds the lock now, or the key is no longer stale
    GONE = "gone"  # nobody holds the lock
    UNKNOWN = "unknown"  # too few nodes answered
    REMOVED = "removed"  # a stale key
    FAILED = "failed"  # a node that has the stale key may still have it


def force_release(
    name: str | HeldLock, fingerprint: str, using: str = DEFAULT_ALIAS, *, slug: str = "", reason: str = ""
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
    manager, slug = _which(name, using, slug)
    poll = ask_for([slug], manager)
    round = delete(poll, slug, fingerprint, tombstone=refused_for(poll, slug, fingerprint))
    if round is None:
        return _absence(poll, slug)
    outcome = _outcome(round, manager.rules, last(poll, slug) > 0)
    _report(manager, "released by force", FORCED, slug, outcome, reason)
    return outcome


def ask_to_stop(name: str | HeldLock, fingerprint: str, using: str = DEFAULT_ALIAS, *, slug: str = "") -> ActionResult:
    """
    Ask the holder of a lock to stop: its next renewal is refused, and its lease is lost with the reason ``revoked``.

    Nobody else gets the lock until the holder has released it or its lease has ended. A holder that does not renew its
    lease does not learn of the request; its lease ends by itself. The signal ``lock_forced`` is sent with the outcome
    ``asked``, or ``unknown`` if too few nodes answered.

    Args:
        name: The lock as returned by a listing, or its whole name.
        fingerprint: The fingerprint of the holder that the caller means; a later holder is not asked.
        using: The alias in ``REDLOCK``, if *name* is a str.
        slug: The lock's slug, instead of its name.

    Returns:
        ``asked``; ``changed``, ``gone`` or ``unknown`` as in :func:`force_release`; ``shared`` if several holders share
        the lock, because they cannot be asked one by one; ``foreign`` if another program holds it.

    Raises:
        ValueError: The name is cut short, as listings show long names.
        InvalidRedlockError: The alias cannot be used.
    """
    manager, slug = _which(name, using, slug)
    poll = ask_for([slug], manager)
    secret = secret_with(poll, slug, fingerprint)
    if secret is None:
        return _absence(poll, slug)
    if secret == SHARED:
        return ActionResult.SHARED
    if not owners_with(poll, slug, fingerprint):
        return ActionResult.FOREIGN
    round = everywhere(manager, Release((), secret, manager.rules.guard, revoke=True))
    outcome = ActionResult.ASKED if round.count(Kind.GONE) >= manager.rules.needed else ActionResult.UNKNOWN
    _report(manager, "revoked, so that its holder stops", FORCED, slug, outcome)
    return outcome


def extend_lock(
    name: str | HeldLock, fingerprint: str, seconds: float, using: str = DEFAULT_ALIAS, *, slug: str = ""
) -> ActionResult:
    """
    Make the nodes keep a lock for at least *seconds* from now, if its holder still has this fingerprint.

    This is for a holder that does not renew its lease and needs more time. The holder does not learn of the extension:
    by its own clock, its lease ends when it would have ended anyway, and the lock does not cover later work. The call
    only keeps others out for longer.

    Returns:
        ``extended``; ``longer`` if a quorum already keeps the lock for longer; ``stopping`` if the holder has been
        asked to stop, and therefore gets no more time; ``changed``, ``gone``, ``unknown`` or ``wrong_type`` as
        in :func:`force_release`; ``shared`` if several holders share the lock.

    Raises:
        ValueError: *seconds* is more than ``max_ttl`` or no length of a lease, or the name is cut short.
        InvalidRedlockError: The alias cannot be used.
    """
    manager, slug = _which(name, using, slug)
    ttl = manager.rules.check_ttl(seconds)
    poll = ask_for([slug], manager)
    secret = secret_with(poll, slug, fingerprint)
    if secret is None:
        return _absence(poll, slug)
    if secret == SHARED:
        return ActionResult.SHARED
    rows = [row for row in poll.seen(slug).values() if secret_of(row.value) == secret]
    if len(rows) < manager.rules.needed:  # no hold, but the remains of one, or a hold that only silent nodes have
        return ActionResult.UNKNOWN if len(rows) + len(poll.silent) >= manager.rules.needed else ActionResult.GONE
    if sorted(math.inf if row.left is None else poll.left(row) for row in rows)[-manager.rules.needed] >= ttl:
        return ActionResult.LONGER
    request = Extend((Term((slug,), secret, rows[0].value, ttl, NOWHERE),), manager.rules.fence_keep)
    round = everywhere(manager, request)
    results = [reply.terms[0][0] for reply in round.replies.values() if reply.terms]
    if _wrong_types(round) > manager.rules.spare:
        return ActionResult.WRONG_TYPE
    if results.count(Kind.REVOKED) > manager.rules.spare:
        return ActionResult.STOPPING
    if results.count(Kind.REFUSED) + results.count(Kind.REVOKED) > manager.rules.spare:
        poll = ask_for([slug], manager)
        return ActionResult.UNKNOWN if secret_with(poll, slug, fingerprint) else _absence(poll, slug)
    outcome = ActionResult.EXTENDED if round.count(Kind.HELD) >= manager.rules.needed else ActionResult.UNKNOWN
    _report(manager, f"extended by an operator to {ttl:g} s", "lock_extended_by_operator", slug, outcome)
    return outcome


def delete(poll: Poll, slug: str, wanted: str, tombstone: float) -> Round | None:
    """Delete the value with the fingerprint *wanted* from every node; return None if no node has it."""
    secret = secret_with(poll, slug, wanted)
    if secret is None:
        return None
    shared = secret == SHARED
    tombstone = tombstone if len(secret) == SECRET_SIZE else 0.0  # another program restores nothing
    release = Release((slug,), secret, tombstone, shared=shared, queue=queue_of(slug), revoke=True)
    return everywhere(poll.manager, release._replace(fencing_token=last(poll, slug)) if shared else release)


def secret_with(poll: Poll, slug: str, wanted: str) -> str | None:
    """Return the secret with the fingerprint *wanted*, or None if no node has it. The secret must never be shown."""
    rows = poll.seen(slug)
    return next((secret_of(rows[node].value) for node, mark in marks(poll, slug).items() if mark == wanted), None)


def marks(poll: Poll, slug: str) -> dict[int, str]:
    """Return the fingerprint of each node's value, by node."""
    sharers = fingerprint_of_sharers(last(poll, slug))
    return {
        node: sharers if secret_of(row.value) == SHARED else fingerprint_of(row.value)
        for node, row in poll.seen(slug).items()
    }


def owners_with(poll: Poll, slug: str, wanted: str) -> list[Owner]:
    """Return the holder that each node with the fingerprint *wanted* describes; none if another program wrote it."""
    rows = poll.seen(slug)
    abouts = [read_value(rows[node].value)[1] for node, mark in marks(poll, slug).items() if mark == wanted]
    return [owner for about in abouts if (owner := owner_of(about))]


def last(poll: Poll, slug: str) -> int:
    """Return the fencing token of the last holder that joined a shared lock; 0 if nobody shares the lock."""
    return max((row.fence for row in poll.seen(slug).values() if secret_of(row.value) == SHARED), default=0)


def refused_for(poll: Poll, slug: str, wanted: str) -> float:
    """
    Return how long the nodes refuse the holder after a forced release, in seconds.

    The next renewal of a living holder would restore the keys that it finds missing. That renewal comes within one
    lease, which may be as long as ``max_ttl``, even if the key was written with a shorter one. A longer lease belongs
    to a pending call. Nobody renews such a lease, and the run that takes it over later must not be refused.
    """
    rules = poll.manager.rules
    ttl = max([owner.ttl for owner in owners_with(poll, slug, wanted)], default=0.0)
    return rules.guard if ttl <= rules.max_ttl else 0.0


def _which(lock: str | HeldLock, using: str, slug: str) -> tuple[LockManager, str]:
    """Return the manager of the lock's alias, and the lock's slug."""
    if isinstance(lock, HeldLock):
        return locks[lock.alias], lock.slug
    if not slug and is_cut(lock):
        raise ValueError(f"The name {lock!r} is cut short, as in listings; pass the lock itself, or its whole name.")
    return locks[using], slug or slug_of(lock)


def everywhere(manager: LockManager, request: Release | Extend | Repair, nodes: Iterable[int] | None = None) -> Round:
    """Send a request to all nodes, or to some of them, and wait for each reply."""
    requests = dict.fromkeys(range(len(manager.nodes)) if nodes is None else nodes, request)
    round = Round(requests, lambda replies: False, manager.rules.timeout(manager.rules.ttl), cleanup=True)
    manager.ask(round)
    return round


def _absence(poll: Poll, slug: str) -> ActionResult:
    if poll.seen(slug):
        return ActionResult.CHANGED
    return ActionResult.GONE if poll.snapshot().has_quorum else ActionResult.UNKNOWN


def _outcome(round: Round, rules: Rules, shared: bool) -> ActionResult:
    if _wrong_types(round) > rules.spare:
        return ActionResult.WRONG_TYPE
    # Once a quorum of nodes reports that this hold is gone, the silent nodes cannot form a quorum.
    if round.count(Kind.RELEASED, Kind.GONE, Kind.BUSY) < rules.needed:
        return ActionResult.UNKNOWN
    # Where another holder has joined a shared lock, all its holders still have it: a new hold does not end theirs.
    if round.count(Kind.RELEASED) and (not shared or round.count(Kind.RELEASED, Kind.GONE) >= rules.needed):
        return ActionResult.RELEASED
    return ActionResult.CHANGED if round.count(Kind.BUSY) else ActionResult.GONE


def _wrong_types(round: Round) -> int:
    """Return on how many nodes the key is not a string."""
    return sum(reply.failure is Failure.WRONGTYPE for reply in round.replies.values())


def _report(manager: LockManager, what: str, event: str, slug: str, outcome: ActionResult, reason: str = "") -> None:
    name = name_of(slug)
    why = f"{outcome}: {printable(reason)}" if reason else outcome
    log.warning(
        "lock %s: %s (%s)", what, printable(name), why, extra={"event": event, "lock": name, "outcome": outcome}
    )
    if event == FORCED:
        manager.notify(FORCED, name=name, outcome=outcome)


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


def absurd_tokens(using: str = DEFAULT_ALIAS, *, timeout: float = 5.0) -> Snapshot:
    """
    Return the locks for which some node has an absurd fencing token.

    Databases are searched, and so are servers whose users have the right ``+scan``; each search takes at most two
    seconds.

    Args:
        using: The alias in ``REDLOCK``.
        timeout: Seconds to wait for each answer of a node. Default: 5.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    from ..nodes.database import inspect as databases
    from ..nodes.redis import inspect as servers  # only here: listings do not need redis-py

    nodes = locks[using].nodes
    searches = [kind.find_absurd_tokens(nodes, timeout) for kind in (servers, databases)]
    snapshot = ask_for(sorted(set().union(*(search.slugs for search in searches))), locks[using]).snapshot()
    return replace(snapshot, unsearched=tuple(name for search in searches for name in search.unsearched))
