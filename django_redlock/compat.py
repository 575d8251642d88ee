"""
redis-py's ``Lock`` over the nodes of ``REDLOCK``, for code that was written for it.

:class:`Lock` has the arguments, methods and errors of ``redis.lock.Lock``, and :class:`AsyncLock` those of
``redis.asyncio.lock.Lock`` (both of redis-py 8.1). What they do differently, and why, is listed in the docs. New code
is better off with :func:`django_redlock.lock`.
"""

import asyncio
import logging
import math
import threading
from collections import Counter
from collections.abc import Coroutine, Mapping
from hashlib import blake2b
from types import TracebackType
from typing import Any, Literal, NamedTuple, NoReturn, Self
from weakref import WeakKeyDictionary

from .conf import DEFAULT_ALIAS
from .core.messages import Ballot, Kind, Release, Reply, Row, count
from .core.names import check_name, slug
from .core.owner import decode, nonce_of
from .core.rules import MIN_TTL, Rules, number, seconds
from .core.tenure import release_outcome
from .exceptions import EXPLANATIONS, LockTakenError, QuorumUnavailableError, RedlockError
from .handler import locks
from .locks import Lease, LockManager
from .locks import Lock as EngineLock
from .nodes.gather import steady
from .nodes.redis import RedisLockError, RedisLockNotOwnedError
from .watchdog import loop_watchdog, watchdog

SLACK = 0.001  # seconds; less is a rounding error, and nodes count in milliseconds

Name = str | bytes | memoryview

log = logging.getLogger("django_redlock")


class LockError(RedlockError, RedisLockError):
    """
    The lock was not acquired, or is not held; also a ``redis.exceptions.LockError``.

    Args:
        message: What happened.
        lock_name: Name of the lock.
    """

    def __init__(self, message: str | None = None, lock_name: str | None = None) -> None:
        super().__init__(message, lock_name)
        self.args = (message, lock_name)
        self.message = message
        self.lock_name = lock_name

    def __str__(self) -> str:
        return f"Lock {self.lock_name!r}: {self.message}." if self.lock_name else str(self.message)


class LockNotOwnedError(LockError, RedisLockNotOwnedError):
    """The lock was held and is no longer; also a ``redis.exceptions.LockNotOwnedError``."""


class Term:
    """
    How long a lock with a ``timeout`` is held.

    No lease is longer than ``max_ttl``, for which a restarted node gives no vote. A longer term is covered by leases
    of ``OPTIONS["ttl"]``, one after the other, of which the last ends with the term.

    Args:
        lease: The lease to extend; nobody else extends it.
        rules: The numbers of its alias.
        until: When the term ends, on the steady clock.
    """

    def __init__(self, lease: Lease, rules: Rules, until: float) -> None:
        self.until = until
        self._lease = lease
        self._tenure = lease._tenure
        self._rules = rules
        self._covered = self._tenure.since + self._tenure.ttl
        # A lease that is extended twice at once, by different times, would not know its deadline.
        self._mutex = threading.Lock()
        self._amutex = asyncio.Lock()

    def due(self) -> float:
        """Return when the watchdog extends the lease next; infinity when it reaches the end of the term."""
        if self._lease.reason or self._covered >= self.until - SLACK:
            return math.inf
        return self._tenure.due(renewing=True)

    def tend(self) -> None:
        """Extend the lease towards the end of the term."""
        with self._mutex:
            if self.due() <= steady():
                self._extend(self.until)

    async def atend(self) -> None:
        """Do what :meth:`tend` does without blocking."""
        async with self._amutex:
            if self.due() <= steady():
                await self._aextend(self.until)

    def end_at(self, until: float) -> bool:
        """End the term then rather than before; returns whether a quorum agreed."""
        with self._mutex:
            agreed = self._extend(until)
        watchdog.watch(self._lease)  # its end may have come nearer
        watchdog.watch(self)
        return agreed

    async def aend_at(self, until: float) -> bool:
        """Do what :meth:`end_at` does without blocking."""
        async with self._amutex:
            agreed = await self._aextend(until)
        loop_watchdog().watch(self._lease)
        loop_watchdog().watch(self)
        return agreed

    def _extend(self, until: float) -> bool:
        reach = self._aim(until)
        return self._settle(self._lease.extend(), until, reach)

    async def _aextend(self, until: float) -> bool:
        reach = self._aim(until)
        return self._settle(await self._lease.aextend(), until, reach)

    def _aim(self, until: float) -> float:
        """Choose the length of the next lease towards *until*; returns when it will end."""
        now = steady()
        self._tenure.ttl = piece(until - now, self._rules)
        reach = now + self._tenure.ttl
        # What is shorter counts before the nodes know of it: their answer may not come.
        self.until = min(self.until, until)
        if reach < self._covered:
            self._tenure.deadline = min(self._tenure.deadline, self._rules.deadline(now, self._tenure.ttl))
        return reach

    def _settle(self, agreed: bool, until: float, reach: float) -> bool:
        """Take what the nodes agreed to."""
        if agreed:
            self.until, self._covered = until, reach
        return agreed


def piece(length: float, rules: Rules) -> float:
    """Return how long a lease to ask for when the lock is to be held for *length* seconds more."""
    return length if length <= rules.max_ttl else rules.ttl


class Hold:
    """
    What one thread or task holds.

    Args:
        token: What redis-py would have written to the node.
        lease: The proof; None for a token that came from elsewhere, until something is asked of the lock.
        term: When it ends; None if it does not.
    """

    def __init__(self, token: bytes, lease: Lease | None = None, term: Term | None = None) -> None:
        self.token = token
        self.lease = lease
        self.term = term


class Slot:
    """Where a hold is kept. ``token`` can be read, and set to one that another process handed over."""

    hold: Hold | None = None

    @property
    def token(self) -> bytes | None:
        """The token of the lock that is held, or None."""
        return self.hold.token if self.hold else None

    @token.setter
    def token(self, token: str | bytes | None) -> None:
        self.hold = None if token is None else Hold(as_bytes(token))


class ThreadSlot(threading.local, Slot):
    """A slot for each thread."""


class TaskSlot:
    """A slot for each asyncio task. A task that ends takes its hold with it, as a thread does."""

    def __init__(self) -> None:
        self._slots: WeakKeyDictionary[asyncio.Task[Any], Slot] = WeakKeyDictionary()
        self._outside = Slot()

    def mine(self) -> Slot:
        """Return the slot of the task that runs now."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs here
            task = None
        return self._outside if task is None else self._slots.setdefault(task, Slot())

    @property
    def token(self) -> bytes | None:
        """The token of the lock that is held, or None."""
        return self.mine().token

    @token.setter
    def token(self, token: str | bytes | None) -> None:
        self.mine().token = token


class Found(NamedTuple):
    """A hold as the nodes see it: its nonce and the seconds that are left."""

    nonce: str
    left: float


class Sight:
    """
    What the nodes say of one name.

    A holder counts as present as long as it may have a quorum, with the nodes that did not answer.

    Args:
        name: The lock's name, for errors.
        manager: The manager that was asked.
        replies: The replies to a survey.
    """

    def __init__(self, name: str, manager: LockManager, replies: Mapping[int, Reply]) -> None:
        rows = [reply.rows[0] for reply in replies.values() if reply.kind is Kind.LISTED and reply.rows]
        self._name = name
        self._rules = manager.rules
        self._said = {node.name: str(replies.get(place, "timeout")) for place, node in enumerate(manager.nodes)}
        self._silent = manager.rules.nodes - len(rows)
        self._rows = [row for row in rows if row.left is None or row.left >= 0]

    def locked(self) -> bool:
        """Return whether somebody holds the lock."""
        self._check_quorum()
        votes = Counter(nonce_of(row.value) for row in self._rows)
        return any(map(self._may_have_quorum, votes.values()))

    def holds(self, nonce: str) -> bool:
        """Return whether the holder with this nonce may still have a quorum."""
        votes = sum(nonce_of(row.value) == nonce for row in self._rows)
        return votes + self._silent >= self._rules.needed

    def find(self, token: bytes) -> Found | None:
        """Return the hold that a token stands for, or None if it is not there."""
        self._check_quorum()
        rows = [row for row in self._rows if stands_for(row, token)]
        if not rows or not self._may_have_quorum(len(rows)):
            return None
        return Found(nonce_of(rows[0].value), min(math.inf if row.left is None else row.left for row in rows))

    def _may_have_quorum(self, votes: int) -> bool:
        return votes > 0 and votes + self._silent >= self._rules.needed

    def _check_quorum(self) -> None:
        if self._silent > self._rules.spare:
            raise QuorumUnavailableError(self._name, nodes=self._said, needed=self._rules.needed)


def stands_for(row: Row, token: bytes) -> bool:
    """Return whether a key is held with this token: its nonce, or one that was chosen or handed over."""
    owner = decode(row.value)
    return nonce_of(row.value).encode() == token or (owner is not None and owner.ref == reference(token))


def reference(token: bytes) -> str:
    """
    Return what a key says of the token that its holder chose or was given.

    The token is not used as nonce: two callers who chose the same one would both be the holder.
    """
    return f"token {blake2b(token, digest_size=8, person=b'redlock compat').hexdigest()}"


def as_bytes(token: str | bytes) -> bytes:
    """Return a token as redis-py keeps it."""
    return token.encode() if isinstance(token, str) else bytes(token)


def as_text(name: Name) -> str:
    """
    Return a name as text.

    Raises:
        TypeError: It is neither a string nor bytes.
        ValueError: It cannot name a lock.
    """
    return check_name(bytes(name).decode() if isinstance(name, (bytes, memoryview)) else name)


def check_timeout(timeout: float | None) -> float | None:
    """
    Return *timeout* if it is None or a number of seconds that a lease can last.

    Raises:
        ValueError: It is not; in redis-py 0 stood for ever, and less than a millisecond was an error of the server.
    """
    if timeout is not None and seconds("timeout", timeout) < MIN_TTL:
        raise ValueError(
            f"timeout must be at least {MIN_TTL} seconds, not {timeout!r}; None holds the lock until it is released."
        )
    return timeout


class BaseLock:
    """What both flavours have: the arguments, and the words for the engine."""

    local: Any

    def __init__(
        self,
        redis: object,
        name: Name,
        timeout: float | None = None,
        sleep: float = 0.1,
        blocking: bool = True,
        blocking_timeout: float | None = None,
        thread_local: bool = True,
        raise_on_release_error: bool = True,
        *,
        using: str = DEFAULT_ALIAS,
    ) -> None:
        """
        Describe a lock; asks no node until it is acquired.

        Args:
            redis: Ignored, so None will do: the nodes are those of ``REDLOCK[using]``.
            name: What to lock; bytes are taken for UTF-8.
            timeout: How long the lock is held at most, in seconds; None is until it is released, or its process ends.
            sleep: Ignored: the engine chooses its pauses.
            blocking: Whether ``acquire()`` waits for another holder.
            blocking_timeout: How long it waits, in seconds; None is for ever.
            thread_local: Whether the lock is held by a thread or task, rather than by this object.
            raise_on_release_error: Whether leaving a ``with`` block raises if the lock is no longer held.
            using: Alias in ``REDLOCK``.

        Raises:
            TypeError: The name is neither a string nor bytes.
            ValueError: The name or the timeout cannot work.
        """
        self._key = as_text(name)
        self.redis = redis
        self.name = name
        self.timeout = check_timeout(timeout)
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self.using = using
        self.local = self._new_local()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._key!r}>"

    @property
    def _manager(self) -> LockManager:
        return locks[self.using]

    @property
    def _slugs(self) -> tuple[str]:
        return (slug(self._key),)

    def _new_local(self) -> Any:
        raise NotImplementedError

    def _slot(self) -> Slot:
        raise NotImplementedError

    @property
    def lease(self) -> Lease | None:
        """The lease behind the lock, with its fencing token; None if the lock is not held here."""
        hold = self._slot().hold
        return hold.lease if hold else None

    def _wait(self, blocking: bool | None, blocking_timeout: float | None) -> float | None:
        """Return how long to try in the words of the engine."""
        if not (self.blocking if blocking is None else blocking):
            return 0.0
        timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        if timeout is None or timeout == math.inf:
            return None
        return max(0.0, number("blocking_timeout", timeout))

    def _wanted(self, wait: float | None, token: bytes | None) -> EngineLock:
        """Return the lock to acquire."""
        rules, timeout = self._manager.rules, check_timeout(self.timeout)
        ref = "" if token is None else reference(token)
        if timeout is None:
            return self._manager.lock(self._key, wait=wait, renew=True, ref=ref)
        if timeout > rules.max_hold:
            raise ValueError(
                f"timeout must be at most {rules.max_hold:g} seconds (OPTIONS['max_hold']), not {timeout!r}."
            )
        return self._manager.lock(self._key, ttl=piece(timeout, rules), wait=wait, renew=False, ref=ref)

    def _hold(self, lease: Lease, token: bytes | None) -> Hold:
        """Return what an acquired lease amounts to."""
        own = lease.token.encode() if token is None else token
        if self.timeout is None:
            return Hold(own, lease)
        return Hold(own, lease, Term(lease, self._manager.rules, lease._tenure.since + self.timeout))

    def _takeover(self, found: Found, token: bytes, left: float) -> EngineLock:
        """Return a lock that is acquired from the holder that handed its token over, and *left* seconds long."""
        ttl, ref = piece(left, self._manager.rules), reference(token)
        return self._manager.lock(self._key, ttl=ttl, wait=0, renew=False, adopt=found.nonce, ref=ref)

    def _taken_over(self, token: bytes, lease: Lease, left: float) -> Hold:
        return Hold(token, lease, Term(lease, self._manager.rules, lease._tenure.since + left))

    def _sight(self, replies: Mapping[int, Reply]) -> Sight:
        return Sight(self._key, self._manager, replies)

    def _farewell(self, nonce: str) -> Ballot:
        """Return the release of a lock by its nonce; a holder that still renews it is refused, and so told."""
        rules = self._manager.rules
        return Ballot(
            requests=dict.fromkeys(range(rules.nodes), Release(self._slugs, nonce, bury=rules.guard)),
            decided=lambda replies: count(replies, Kind.RELEASED) >= rules.needed,
            timeout=rules.timeout(rules.ttl),
            farewell=True,
        )

    # What is said when it is not as it should be

    def _held(self, slot: Slot, to_do: str) -> Hold:
        """Return what is held here, or raise that nothing is."""
        if slot.hold is None:
            raise LockError(f"cannot {to_do} a lock that is not held here", self._key)
        return slot.hold

    def _timed(self, slot: Slot, to_do: str) -> tuple[Hold, float]:
        """Return what is held here and its timeout, or raise that there is none."""
        hold = self._held(slot, to_do)
        if self.timeout is None:
            raise LockError(f"cannot {to_do} a lock without timeout; it is held until it is released", self._key)
        return hold, self.timeout

    def _not_owned(self, to_do: str, reason: str | None = None) -> NoReturn:
        why = f": {EXPLANATIONS[reason]}" if reason in EXPLANATIONS and reason != "released" else ""
        raise LockNotOwnedError(f"cannot {to_do} a lock that is no longer owned{why}", self._key)

    def _check_length(self, left: float, held: float) -> float:
        """Return the seconds that a lock is to be held from now on, if it may."""
        if number("additional_time", left) < MIN_TTL:
            raise ValueError(f"A lock must be left at least {MIN_TTL} seconds, not {left:g}; release() ends it now.")
        longest = self._manager.rules.max_hold
        if held + left > longest + SLACK:
            raise LockError(f"cannot be held for more than {longest:g} seconds (OPTIONS['max_hold'])", self._key)
        return left

    def _check_released(self, outcome: str, reason: str | None = None) -> None:
        if outcome in ("expired", "taken") or reason == "forked":
            self._not_owned("release", reason)
        if outcome == "unknown":
            log.warning(
                "too few nodes answered to a release: %s", self._key, extra={"event": "no_quorum", "lock": self._key}
            )

    def _check_extended(self, agreed: bool, lease: Lease, started: float) -> Literal[True]:
        if agreed:
            return True
        rules = self._manager.rules
        if not lease.valid():
            self._not_owned("extend", lease.reason)
        if rules.max_extensions is not None and lease.extensions >= rules.max_extensions:
            raise LockError(f"cannot be extended more than {rules.max_extensions} times", self._key)
        raise QuorumUnavailableError(self._key, steady() - started)

    def _not_acquired(self) -> LockError:
        return LockError("was not acquired within the time specified", self._key)

    def _swallow(self, error: LockError, body_failed: bool) -> None:
        """Raise a failed release at the end of a ``with`` block, unless the body raised: then its exception counts."""
        if self.raise_on_release_error and not body_failed:
            raise error
        log.warning("%s", error, extra={"event": "lock_lost", "lock": self._key})


class Lock(BaseLock):
    """
    ``redis.lock.Lock`` over the nodes of ``REDLOCK``.

    ``with Lock(client, "report", timeout=60):`` holds the lock during its body and raises :exc:`LockError` without it.
    """

    local: Slot

    def _new_local(self) -> Slot:
        return ThreadSlot() if self.thread_local else Slot()

    def _slot(self) -> Slot:
        return self.local

    def __enter__(self) -> Self:
        if not self.acquire():
            raise self._not_acquired()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.release()
        except LockError as failed:
            self._swallow(failed, body_failed=kind is not None)

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """
        Take the lock; returns whether it is held now.

        Args:
            sleep: Ignored: the engine chooses its pauses.
            blocking: Whether to wait for another holder; None is as the lock was made.
            blocking_timeout: How long to wait, in seconds; None is as the lock was made.
            token: What identifies this hold in ``local.token``; None draws it at random.

        Raises:
            QuorumUnavailableError: Too few nodes answered to say whether the lock is free.
        """
        chosen = None if token is None else as_bytes(token)
        try:
            lease = self._wanted(self._wait(blocking, blocking_timeout), chosen).acquire()
        except LockTakenError:
            return False
        self.local.hold = hold = self._hold(lease, chosen)
        if hold.term:
            watchdog.watch(hold.term)
        return True

    def release(self) -> None:
        """
        Give the lock up.

        Raises:
            LockNotOwnedError: It was held and is no longer.
            LockError: It is not held here.
        """
        hold = self._held(self.local, "release")
        # If this is interrupted, the token can still release it.
        self.local.hold = Hold(hold.token)
        lease = hold.lease
        if hold.term:
            watchdog.forget(hold.term)
        outcome = lease.release() if lease else self._release_token(hold.token)
        self.local.hold = None
        self._check_released(outcome, lease.reason if lease else None)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """
        Hold the lock longer.

        Args:
            additional_time: How much longer, in seconds.
            replace_ttl: Whether that is counted from now, rather than from the end of the present timeout.

        Raises:
            LockNotOwnedError: It was held and is no longer.
            LockError: It is not held here, or may not be held that long.
            QuorumUnavailableError: Too few nodes answered; the lock is held as long as before.
        """
        hold, _ = self._timed(self.local, "extend")
        return self._prolong(hold, additional_time, from_now=replace_ttl)

    def reacquire(self) -> Literal[True]:
        """
        Hold the lock for a whole ``timeout`` from now.

        Raises:
            LockNotOwnedError: It was held and is no longer.
            LockError: It is not held here, or may not be held that long.
            QuorumUnavailableError: Too few nodes answered; the lock is held as long as before.
        """
        hold, timeout = self._timed(self.local, "reacquire")
        return self._prolong(hold, timeout, from_now=True)

    def locked(self) -> bool:
        """
        Ask the nodes whether anybody holds the lock.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        return self._look().locked()

    def owned(self) -> bool:
        """Return whether the lock is held here, by the local clock and by the nodes that answer."""
        hold = self.local.hold
        if hold is None:
            return False
        if hold.lease is None:
            return self._look().find(hold.token) is not None
        return hold.lease.valid() and self._look().holds(hold.lease.token)

    def _look(self) -> Sight:
        return self._sight(self._manager.survey(slugs=self._slugs))

    def _release_token(self, token: bytes) -> str:
        found = self._look().find(token)
        if found is None:
            return "expired"
        ballot = self._farewell(found.nonce)
        self._manager.ask(ballot)
        return release_outcome(ballot, self._manager.rules)

    def _prolong(self, hold: Hold, additional: float, *, from_now: bool) -> Literal[True]:
        started = steady()
        if hold.lease is None or hold.term is None:
            return self._take_over(hold.token, additional, from_now=from_now)
        if not hold.lease.valid():
            self._not_owned("extend", hold.lease.reason)
        left = self._check_length(additional + (0.0 if from_now else hold.term.until - started), started - since(hold))
        return self._check_extended(hold.term.end_at(started + left), hold.lease, started)

    def _take_over(self, token: bytes, additional: float, *, from_now: bool) -> Literal[True]:
        found = self._look().find(token)
        if found is None:
            self._not_owned("extend")
        left = self._check_length(additional + (0.0 if from_now else found.left), 0.0)
        try:
            lease = self._takeover(found, token, left).acquire()
        except LockTakenError:
            self._not_owned("extend", "superseded")
        self.local.hold = hold = self._taken_over(token, lease, left)
        if hold.term:
            watchdog.watch(hold.term)
        return True


def since(hold: Hold) -> float:
    """Return when a hold began, on the steady clock."""
    return hold.lease._tenure.since if hold.lease else steady()


class AsyncLock(BaseLock):
    """
    ``redis.asyncio.lock.Lock`` over the nodes of ``REDLOCK``.

    ``async with AsyncLock(client, "report", timeout=60):`` holds the lock during its body. The lock belongs to the
    task that called the method, also if the coroutine is then run by another, as ``asyncio.wait_for()`` may do.
    """

    local: TaskSlot | Slot

    def _new_local(self) -> TaskSlot | Slot:
        return TaskSlot() if self.thread_local else Slot()

    def _slot(self) -> Slot:
        return self.local.mine() if isinstance(self.local, TaskSlot) else self.local

    async def __aenter__(self) -> Self:
        if not await self.acquire():
            raise self._not_acquired()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.release()
        except LockError as failed:
            self._swallow(failed, body_failed=kind is not None)

    def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> Coroutine[Any, Any, bool]:
        """Do what :meth:`Lock.acquire` does without blocking; a cancelled call leaves no key behind."""
        return self._acquire(self._slot(), self._wait(blocking, blocking_timeout), token)

    async def _acquire(self, slot: Slot, wait: float | None, token: str | bytes | None) -> bool:
        chosen = None if token is None else as_bytes(token)
        try:
            lease = await self._wanted(wait, chosen).aacquire()
        except LockTakenError:
            return False
        slot.hold = hold = self._hold(lease, chosen)
        if hold.term:
            loop_watchdog().watch(hold.term)
        return True

    def release(self) -> Coroutine[Any, Any, None]:
        """Do what :meth:`Lock.release` does without blocking."""
        return self._release(self._slot())

    async def _release(self, slot: Slot) -> None:
        hold = self._held(slot, "release")
        # If this is cancelled, the token can still release it.
        slot.hold = Hold(hold.token)
        lease = hold.lease
        if hold.term:
            loop_watchdog().forget(hold.term)
        outcome = await (lease.arelease() if lease else self._release_token(hold.token))
        slot.hold = None
        self._check_released(outcome, lease.reason if lease else None)

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Coroutine[Any, Any, Literal[True]]:
        """Do what :meth:`Lock.extend` does without blocking."""
        slot = self._slot()
        hold, _ = self._timed(slot, "extend")
        return self._prolong(slot, hold, additional_time, from_now=replace_ttl)

    def reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Do what :meth:`Lock.reacquire` does without blocking."""
        slot = self._slot()
        hold, timeout = self._timed(slot, "reacquire")
        return self._prolong(slot, hold, timeout, from_now=True)

    async def locked(self) -> bool:
        """Do what :meth:`Lock.locked` does without blocking."""
        return (await self._look()).locked()

    def owned(self) -> Coroutine[Any, Any, bool]:
        """Do what :meth:`Lock.owned` does without blocking."""
        return self._owned(self._slot().hold)

    async def _owned(self, hold: Hold | None) -> bool:
        if hold is None:
            return False
        if hold.lease is None:
            return (await self._look()).find(hold.token) is not None
        return hold.lease.valid() and (await self._look()).holds(hold.lease.token)

    async def _look(self) -> Sight:
        return self._sight(await self._manager.asurvey(slugs=self._slugs))

    async def _release_token(self, token: bytes) -> str:
        found = (await self._look()).find(token)
        if found is None:
            return "expired"
        ballot = self._farewell(found.nonce)
        await self._manager.aask(ballot)
        return release_outcome(ballot, self._manager.rules)

    async def _prolong(self, slot: Slot, hold: Hold, additional: float, *, from_now: bool) -> Literal[True]:
        started = steady()
        if hold.lease is None or hold.term is None:
            return await self._take_over(slot, hold.token, additional, from_now=from_now)
        if not hold.lease.valid():
            self._not_owned("extend", hold.lease.reason)
        left = self._check_length(additional + (0.0 if from_now else hold.term.until - started), started - since(hold))
        return self._check_extended(await hold.term.aend_at(started + left), hold.lease, started)

    async def _take_over(self, slot: Slot, token: bytes, additional: float, *, from_now: bool) -> Literal[True]:
        found = (await self._look()).find(token)
        if found is None:
            self._not_owned("extend")
        left = self._check_length(additional + (0.0 if from_now else found.left), 0.0)
        try:
            lease = await self._takeover(found, token, left).aacquire()
        except LockTakenError:
            self._not_owned("extend", "superseded")
        slot.hold = hold = self._taken_over(token, lease, left)
        if hold.term:
            loop_watchdog().watch(hold.term)
        return True
