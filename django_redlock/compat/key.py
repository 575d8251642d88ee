"""
The key of one of redis-py's locks on the nodes: take it, find its holders, remove it (internal).
"""

import logging
import math
from hashlib import blake2b
from typing import Any, NamedTuple

from ..core.names import decode, secret_of, slug
from ..core.protocol import SHARED, Kind, Outcome, Release, Row
from ..core.round import Round, count
from ..engine.manager import LockManager
from ..engine.twins import Flavour
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from .holds import Hold, Slot, Term, piece

log = logging.getLogger("django_redlock")


class KeyOnNodes(NamedTuple):
    """
    The key of a lock.

    Args:
        manager: The manager of the nodes.
        name: The lock's name.
        flavour: How to wait for the nodes.
    """

    manager: LockManager
    name: str
    flavour: Flavour

    async def take(self, slot: Slot, length: float | None, token: bytes | None, **wanted: Any) -> bool:
        """Acquire the lock for *length* seconds, or until its release if None; return whether it is held now."""
        manager, rules = self.manager, self.manager.rules
        ttl = None if length is None else piece(length, rules)
        ref = "" if token is None else reference(token)
        lock = manager.claim(self.name, ttl=ttl, renew=length is None, ref=ref, **wanted)
        try:
            lease = await self.flavour.call(lock.acquire, lock.aacquire)
        except LockTakenError:
            return False
        term = None if length is None else Term(lease, length, rules, self.flavour)
        slot.hold = Hold(lease.secret.encode() if token is None else token, lease, term)
        return True

    async def survey(self) -> tuple[list[Row], dict[str, str]]:
        """Return the key on each node that answered, and the replies of all nodes by name."""
        manager = self.manager
        replies = await self.flavour.call(manager.survey, manager.asurvey, slugs=(slug(self.name),))
        rows = [reply.rows[0] for reply in replies.values() if reply.kind is Kind.LISTED and reply.rows]
        return rows, {node.name: str(replies.get(index, "timeout")) for index, node in enumerate(manager.nodes)}

    async def look(self) -> "list[Found]":
        """
        Return the holders that have a quorum, or may have one if the nodes that did not answer are counted.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        rows, reported = await self.survey()
        rules = self.manager.rules
        silent = rules.nodes - len(rows)
        if silent > rules.spare:
            raise QuorumUnavailableError(self.name, nodes=reported, needed=rules.needed)
        return find(rows, rules.needed - silent)

    async def find(self, token: bytes) -> "Found | None":
        """Return the hold that a token stands for, or None if there is no such hold."""
        return next((found for found in await self.look() if found.stands_for(token)), None)

    async def remove(self, secret: str) -> Round:
        """Release a lock by its secret; a holder that still renews the lock is refused, and notices the loss."""
        manager, rules = self.manager, self.manager.rules
        request = Release((slug(self.name),), secret, tombstone=rules.guard, shared=secret == SHARED)
        round = Round(
            requests=dict.fromkeys(range(rules.nodes), request),
            decided=lambda replies: count(replies, Kind.RELEASED) >= rules.needed,
            timeout=rules.timeout(rules.ttl),
            cleanup=True,
        )
        await self.flavour.call(manager.ask, manager.aask, round)
        return round

    async def remove_by_force(self, secret: str) -> None:
        """
        Release a lock by its secret, as an operator does, and send the signal ``lock_forced``.

        Raises:
            QuorumUnavailableError: Too few nodes answered; the lock may still be held.
        """
        round, needed = await self.remove(secret), self.manager.rules.needed
        # Once a quorum of nodes no longer has the holder, the silent nodes cannot form a quorum.
        gone = round.count(Kind.RELEASED, Kind.GONE, Kind.BUSY) >= needed
        outcome = Outcome.RELEASED if gone else Outcome.UNKNOWN
        about = {"event": "lock_forced", "lock": self.name, "outcome": outcome}
        log.warning("lock released by force: %s (%s)", printable(self.name), outcome, extra=about)
        self.manager.notify("lock_forced", name=self.name, outcome=outcome)
        if not gone:
            raise QuorumUnavailableError(self.name, needed=needed)


class Found(NamedTuple):
    """A possible holder: its secret, the ``ref`` in its key, and the seconds left."""

    secret: str
    ref: str
    left: float

    def stands_for(self, token: bytes) -> bool:
        """Return whether *token* is this holder's: its secret, or a token that was chosen or handed over."""
        return self.secret.encode() == token or self.ref == reference(token)


def find(rows: list[Row], needed: int) -> list[Found]:
    """Return the holders whose key at least *needed* nodes have."""
    holders: dict[str, list[Row]] = {}
    for row in rows:
        if seconds_left(row) >= 0:
            holders.setdefault(secret_of(row.value), []).append(row)
    return [
        Found(secret, owner.ref if (owner := decode(has[0].value)) else "", min(map(seconds_left, has)))
        for secret, has in holders.items()
        if len(has) >= needed
    ]


def seconds_left(row: Row) -> float:
    """Return how long a node keeps a key: infinity for a key without expiry, a negative number for no key."""
    return math.inf if row.left is None else row.left


def reference(token: bytes) -> str:
    """
    Return the ``ref`` that stands for a token that the holder chose or was given.

    The token is not used as the secret. Otherwise two callers that chose the same token would both hold the lock.
    """
    return f"token {blake2b(token, digest_size=8, person=b'redlock compat').hexdigest()}"
