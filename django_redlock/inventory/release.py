"""
Act on a lock that somebody else holds: ask its holder to stop, extend the lock, or release it by force (internal).
"""

import logging
import math
from collections.abc import Iterable

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
from .actions import ActionResult
from .model import HeldLock, name_of, owner_of
from .survey import Poll, ask_for, read_value

FORCED = "lock_forced"  # the signal
NOWHERE = -1  # a token with which no node restores a lock that it does not have

log = logging.getLogger("django_redlock")


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
