"""
Every error about a lock.

All of them can be pickled, because their ``args`` are the arguments of their constructor: Celery and
``multiprocessing`` rebuild an exception as ``cls(*args)``. None of them carries a secret or a URL.
"""

from collections.abc import Mapping
from typing import Any


def missing_extra(error: ModuleNotFoundError, extra: str) -> ModuleNotFoundError:
    """Return an *error* of an import, with the command that installs the *extra* to which the module belongs."""
    return ModuleNotFoundError(f'{error}; pip install "django-redlock[{extra}]"', name=error.name)


class RedlockError(Exception):
    """Base class; catch it to catch every error below."""


class _OneLineError(RedlockError):
    """An error whose text is one line, whatever a label or a node's reply contains: it ends up in logs."""

    def __str__(self) -> str:
        return printable(self._text())

    def _text(self) -> str:
        raise NotImplementedError


class _AttemptError(_OneLineError):
    """An error with the facts of a failed acquisition: the lock, the time, and each node's reply."""

    def __init__(
        self,
        name: str,
        waited: float = 0.0,
        attempts: int = 1,
        nodes: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.waited = waited
        self.attempts = attempts
        self.nodes = dict(nodes or {})
        super().__init__(name, waited, attempts, self.nodes)

    def _effort(self) -> str:
        attempts = "1 attempt" if self.attempts == 1 else f"{self.attempts} attempts"
        outcome = ", ".join(f"{node}: {reported}" for node, reported in self.nodes.items())
        return f"{attempts} in {self.waited:.2f} s" + (f"; {outcome}" if outcome else "")


class LockTakenError(_AttemptError):
    """
    Another owner kept the lock for as long as the caller was willing to wait.

    Args:
        name: The lock's name; several names are joined by commas.
        waited: Time spent trying, in seconds.
        attempts: How often the nodes were asked.
        nodes: What each node replied, or why it gave no vote, by the node's display name.
        retry_after: Seconds until the present hold ends unless its owner extends it; None when unknown.
        holder: The holder: ``kind``, ``label``, ``ref``, ``host``, ``pid``, ``since`` (seconds since the epoch),
            ``ttl`` (seconds) and ``state`` (of a singleton task that does not run); empty when unknown. If other
            holders share the lock, ``kind`` is ``shared``, and ``host``, ``pid`` and ``since`` are None; if they have
            permits, ``label`` is their limit, such as ``limit=3``.
        queued: Whether nobody holds the lock, but earlier waiters are in its queue and are served first.
        agreed: Whether a quorum of the nodes names this holder; otherwise several holders or waiters are in the way.
        ahead: How many others in the queue come before this caller; None if it is in no queue.
    """

    def __init__(
        self,
        name: str,
        waited: float = 0.0,
        attempts: int = 1,
        nodes: Mapping[str, str] | None = None,
        retry_after: float | None = None,
        holder: Mapping[str, Any] | None = None,
        queued: bool = False,
        agreed: bool = True,
        ahead: int | None = None,
    ) -> None:
        super().__init__(name, waited, attempts, nodes)
        self.retry_after = retry_after
        self.holder = dict(holder or {})
        self.queued = queued
        self.agreed = agreed
        self.ahead = ahead
        self.args = (name, waited, attempts, self.nodes, retry_after, self.holder, queued, agreed, ahead)

    def _text(self) -> str:
        if self.queued:
            return f"Lock {self.name!r} is free, but others wait for it and are served first ({self._effort()})."
        return f"Lock {self.name!r} is held by {who(self.holder)} ({self._effort()})."


class QuorumUnavailableError(_AttemptError):
    """
    Too few nodes gave a usable answer in time to say whether the lock is free or taken.

    Args:
        name: The lock's name.
        waited: Time spent trying, in seconds.
        attempts: How often the nodes were asked.
        nodes: What each node replied, or why it gave no vote, by the node's display name.
        needed: How many votes a quorum takes.
        misconfigured: Whether no quorum is possible until servers or settings change; the caller then gives up at once.
        retry_after: Seconds until a quorum votes again, if enough nodes answered and some of them give no vote for a
            while, such as after a restart; None when unknown.
    """

    def __init__(
        self,
        name: str,
        waited: float = 0.0,
        attempts: int = 1,
        nodes: Mapping[str, str] | None = None,
        needed: int = 0,
        misconfigured: bool = False,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(name, waited, attempts, nodes)
        self.needed = needed
        self.misconfigured = misconfigured
        self.retry_after = retry_after
        self.args = (name, waited, attempts, self.nodes, needed, misconfigured, retry_after)

    def _text(self) -> str:
        needed = f"{self.needed} of {len(self.nodes)} nodes" if self.needed else "a majority of the nodes"
        if self.misconfigured:
            why = "must vote, but too few can, and waiting does not change that"
        else:
            why = "must answer in time and agree, and too few did"
        if len(self.nodes) == self.needed == 1:
            needed = "its only node"
            why = "cannot vote, and waiting does not change that" if self.misconfigured else "gave no vote in time"
        soon = f" A quorum will vote in {self.retry_after:.0f} s." if self.retry_after else ""
        return f"Lock {self.name!r}: {needed} {why} ({self._effort()}).{soon}"


class LockLostError(_OneLineError):
    """
    The lease ended while its holder still relied on it; the work may no longer be exclusive.

    Args:
        name: The lock's name.
        reason: ``expired``, ``superseded``, ``forgotten``, ``revoked``, ``fenced``, ``margin``, ``max_hold``,
            ``max_extensions``, ``heartbeat``, ``forked`` or ``released``.
        held: How long the lock was held, in seconds.
    """

    def __init__(self, name: str, reason: str = "expired", held: float = 0.0) -> None:
        reason = str(reason)  # the text of an enum member, so that programs without this package can unpickle it
        super().__init__(name, reason, held)
        self.name = name
        self.reason = reason
        self.held = held

    def _text(self) -> str:
        return f"Lock {self.name!r} was lost after {self.held:.2f} s: {EXPLANATIONS.get(self.reason, self.reason)}."


class StaleTokenError(_OneLineError):
    """
    The database has already seen a later holder of this lock; nothing of the refused transaction was kept.

    Args:
        name: The lock's name.
        fencing_token: The number that was refused.
    """

    def __init__(self, name: str, fencing_token: int = 0) -> None:
        super().__init__(name, fencing_token)
        self.name = name
        self.fencing_token = fencing_token

    def _text(self) -> str:
        return f"Lock {self.name!r}: fencing token {self.fencing_token} has been overtaken by a later holder."


def who(holder: Mapping[str, Any]) -> str:
    """Return whom :attr:`LockTakenError.holder` describes, for people."""
    host = holder.get("host", "")
    if host is None:
        return f"others, who share it ({label})" if (label := holder.get("label")) else "others, who share it"
    about = {part: str(value) for part, value in holder.items() if value}
    state = f"({about['state']})" if "state" in about else None
    parts = (about.get("kind"), about.get("label"), state, about.get("ref"))
    text = " ".join(filter(None, parts)) or "another owner"
    return f"{text} on {host}:{holder['pid']}" if host else text


def printable(text: str) -> str:
    """Return *text* with every character escaped that could move a cursor or be invisible on a page."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


EXPLANATIONS = {
    "expired": "the lease ran out before it could be extended",
    "superseded": "another caller has tried to take it since, and the nodes no longer extend the earlier hold",
    "forgotten": "too many nodes no longer know this holder: they lost its keys, or somebody removed them",
    "revoked": "an operator took it away, or asked its holder to stop",
    "fenced": "a database has seen a later holder",
    "margin": "it was still held, but less of its time was left than the next step needs",
    "max_hold": "it reached max_hold, the longest time one holder may keep it",
    "max_extensions": "it reached max_extensions",
    "heartbeat": "its work gave no sign of life (lease.heartbeat()) for too long",
    "forked": "this process is a fork of the holder, and holds nothing itself",
    "released": "it was already released",
}
