"""
What an operator can do to a lock that somebody else holds: ask its holder to stop, give it more time, take it away.
"""

import logging
from collections.abc import Iterable

from ..conf import DEFAULT_ALIAS
from ..core.messages import SHARED, Ballot, Extend, Kind, Release, Term
from ..core.names import queue_of
from ..core.names import slug as slug_of
from ..core.owner import fingerprint as fingerprint_of
from ..core.owner import nonce_of
from ..core.rules import Rules
from ..handler import locks
from ..locks import LockManager
from .model import name_of, owner_of
from .poll import Poll, ask_for, read_value

log = logging.getLogger("django_redlock")


def force_release(name: str, fingerprint: str, using: str = DEFAULT_ALIAS, *, slug: str = "", reason: str = "") -> str:
    """
    Release a lock whoever holds it, if the holder is still the one with this fingerprint.

    The holder learns of it at its next renewal, which is refused: its lease is lost with the reason ``revoked``, and
    the lock stays free for others. Sends the signal ``lock_forced``.

    Args:
        name: The lock's name.
        fingerprint: Which holder it was when somebody decided to release it.
        using: The alias in ``REDLOCK``.
        slug: The lock's slug, for a long name of which only the beginning is known.
        reason: Why, for the log.

    Returns:
        ``released``; ``changed`` if somebody else holds it now; ``gone`` if nobody does; ``unknown`` if too few
        nodes answered to tell.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    manager, slug = locks[using], slug or slug_of(name)
    poll = ask_for([slug], manager)
    ballot = delete(poll, slug, fingerprint, bury=burial(poll, slug, fingerprint))
    if ballot is None:
        return _absence(poll, slug)
    outcome = _outcome(ballot, manager.rules)
    _tell(manager, "released by force", "lock_forced", slug, outcome, reason)
    return outcome


def ask_to_stop(name: str, fingerprint: str, using: str = DEFAULT_ALIAS, *, slug: str = "") -> str:
    """
    Ask the holder of a lock to stop: its next renewal is refused, and its lease is lost with the reason ``revoked``.

    Nobody else gets in until the holder has released it, or its lease has ended. A holder that does not renew its
    lease never hears of it; its lease ends by itself. Sends the signal ``lock_forced`` with the outcome ``asked``.

    Args:
        name: The lock's name.
        fingerprint: Which holder it was when somebody decided to ask it.
        using: The alias in ``REDLOCK``.
        slug: The lock's slug, for a long name of which only the beginning is known.

    Returns:
        ``asked``; ``changed``, ``gone`` or ``unknown`` as :func:`force_release`; ``shared`` if several hold it, who
        cannot be asked one by one.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    manager, slug = locks[using], slug or slug_of(name)
    poll = ask_for([slug], manager)
    nonce = nonce_with(poll, slug, fingerprint)
    if nonce is None:
        return _absence(poll, slug)
    if nonce == SHARED:
        return "shared"
    # Long enough for the next renewal of even the longest lease.
    bury = burial(poll, slug, fingerprint) or manager.rules.guard
    ballot = _everywhere(manager, Release((), nonce, bury, revoke=True))
    outcome = "asked" if ballot.count(Kind.GONE) >= manager.rules.needed else "unknown"
    _tell(manager, "revoked, so that its holder stops", "lock_forced", slug, outcome)
    return outcome


def extend_lock(name: str, fingerprint: str, seconds: float, using: str = DEFAULT_ALIAS, *, slug: str = "") -> str:
    """
    Have the nodes keep a lock for *seconds* from now at least, if its holder is still the one with this fingerprint.

    For a holder that does not renew and needs more time. The holder is not told: by its own clock its lease ends when
    it would have, and what it does after that is not covered by the lock. It only keeps others out for longer.

    Returns:
        ``extended``; ``changed``, ``gone`` or ``unknown`` as :func:`force_release`; ``shared`` if several hold it.

    Raises:
        ValueError: *seconds* is more than ``max_ttl`` or no length of a lease.
        InvalidRedlockError: The alias cannot be used.
    """
    manager, slug = locks[using], slug or slug_of(name)
    ttl = manager.rules.check_ttl(seconds)
    poll = ask_for([slug], manager)
    nonce = nonce_with(poll, slug, fingerprint)
    if nonce is None:
        return _absence(poll, slug)
    if nonce == SHARED:
        return "shared"
    having = {place: row for place, row in poll.seen(slug).items() if nonce_of(row.value) == nonce}
    if len(having) + len(poll.silent) < manager.rules.needed:
        return "gone"  # what is left of it on a few nodes holds nothing, and must not become a lock again
    # With token 0 a node that has lost it, or whose holder has just released it, does not get it back.
    value = next(iter(having.values())).value
    request = Extend((Term((slug,), nonce, value, ttl, 0),), manager.rules.fence_keep)
    ballot = _ask(manager, having, request)
    outcome = "extended" if ballot.count(Kind.HELD) >= manager.rules.needed else _why_not(slug, nonce, manager)
    _tell(manager, f"extended by an operator to {ttl:g} s", "lock_extended_by_operator", slug, outcome)
    return outcome


def delete(poll: Poll, slug: str, wanted: str, bury: float) -> Ballot | None:
    """Delete what has the fingerprint *wanted* on every node; None if no node has it."""
    nonce = nonce_with(poll, slug, wanted)
    if nonce is None:
        return None
    shared = nonce == SHARED
    return _everywhere(poll.manager, Release((slug,), nonce, bury, shared=shared, queue=queue_of(slug), revoke=True))


def nonce_with(poll: Poll, slug: str, wanted: str) -> str | None:
    """Return the nonce that has a fingerprint; None if no node has it. Never show it."""
    rows = poll.seen(slug).values()
    return next((nonce_of(row.value) for row in rows if fingerprint_of(row.value) == wanted), None)


def burial(poll: Poll, slug: str, wanted: str) -> float:
    """
    Return for how long the nodes refuse the holder after a release by force, in seconds.

    A living holder's next renewal would put back the keys that it finds missing. It comes within one lease. A lease
    beyond ``max_ttl`` is a place that nobody renews; whoever takes it over later must not be refused.
    """
    rules = poll.manager.rules
    rows = [row for row in poll.seen(slug).values() if fingerprint_of(row.value) == wanted]
    owners = [owner_of(read_value(row.value)[1]) for row in rows]
    ttl = max((owner.ttl for owner in owners if owner), default=0.0) or rules.ttl
    # It may have been extended for longer than it was taken for.
    ttl = max([ttl, *(poll.left(row) for row in rows)])
    return ttl + rules.drift(ttl) if ttl <= rules.max_ttl else 0.0


def _why_not(slug: str, nonce: str, manager: LockManager) -> str:
    poll = ask_for([slug], manager)
    still_there = any(nonce_of(row.value) == nonce for row in poll.seen(slug).values())
    return "unknown" if still_there else _absence(poll, slug)


def _everywhere(manager: LockManager, request: Release | Extend) -> Ballot:
    return _ask(manager, range(len(manager.nodes)), request)


def _ask(manager: LockManager, places: Iterable[int], request: Release | Extend) -> Ballot:
    requests = dict.fromkeys(places, request)
    ballot = Ballot(requests, lambda replies: False, manager.rules.timeout(manager.rules.ttl), farewell=True)
    manager.ask(ballot)
    return ballot


def _absence(poll: Poll, slug: str) -> str:
    if poll.seen(slug):
        return "changed"
    return "gone" if poll.snapshot().has_quorum else "unknown"


def _outcome(ballot: Ballot, rules: Rules) -> str:
    # As many nodes as a quorum say that it is not there any more: the silent ones cannot be a quorum.
    if ballot.count(Kind.RELEASED, Kind.GONE, Kind.BUSY) < rules.needed:
        return "unknown"
    if ballot.count(Kind.RELEASED):
        return "released"
    return "changed" if ballot.count(Kind.BUSY) else "gone"


def _tell(manager: LockManager, what: str, event: str, slug: str, outcome: str, reason: str = "") -> None:
    name = name_of(slug)
    why = f"{outcome}: {reason}" if reason else outcome
    log.warning("lock %s: %s (%s)", what, name, why, extra={"event": event, "lock": name, "outcome": outcome})
    if event == "lock_forced":
        manager.notify("lock_forced", name=name, outcome=outcome)
