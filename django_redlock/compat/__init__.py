"""
redis-py's ``Lock`` over the nodes of ``REDLOCK``, for code that was written for redis-py.

:class:`Lock` has the arguments, methods and errors of ``redis.lock.Lock``, and :class:`AsyncLock` those of
``redis.asyncio.lock.Lock`` (both of redis-py 8.1). The documentation lists the differences and the reasons. New code
is better off with :func:`django_redlock.lock`.

The code of both is written once, as coroutines of :class:`BaseLock`. The coroutines of a :class:`Lock` call blocking
functions, so they never suspend, and :func:`run` completes them in one step.
"""

import logging
import math
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, Literal, NoReturn, ParamSpec, Self

from ..core.names import check_name, slug
from ..core.protocol import LOST, SHARED, EndReason, Outcome, Release
from ..core.round import Round
from ..core.rules import DEFAULT_ALIAS, MIN_TTL, number, seconds
from ..core.votes import is_gone, prevents_quorum, release_outcome
from ..engine.lease import Lease
from ..engine.manager import LockManager, owner_here
from ..engine.twins import Awaiting, Blocking, Flavour
from ..exceptions import EXPLANATIONS, LockTakenError, QuorumUnavailableError, RedlockError, printable
from ..handler import locks
from ..inventory.survey import Poll, Vote, aask_nodes, ask_nodes
from ..nodes.base import run
from ..nodes.redis.node import RedisLockError, RedisLockNotOwnedError
from .holds import SLACK, Ownership, OwnerSlot, TaskSlot, ThreadSlot, TimedLease, as_bytes, piece, reference

try:
    from valkey.exceptions import LockError as ValkeyLockError
    from valkey.exceptions import LockNotOwnedError as ValkeyLockNotOwnedError
except ImportError:  # code that does not use valkey-py catches no such errors
    ValkeyLockError = ValkeyLockNotOwnedError = Exception  # type: ignore[misc, assignment]


log = logging.getLogger("django_redlock")


P = ParamSpec("P")
Name = str | bytes | memoryview | int

INTERNALS = {
    *("register_scripts", "lua_release", "lua_extend", "lua_reacquire"),
    *("do_acquire", "do_release", "do_extend", "do_reacquire"),
    *("LUA_RELEASE_SCRIPT", "LUA_EXTEND_SCRIPT", "LUA_REACQUIRE_SCRIPT"),
}
"""What programs replace in redis-py's locks."""


class LockError(RedlockError, RedisLockError, ValkeyLockError):
    """
    The lock was not acquired, or is not held; also a ``LockError`` of ``redis.exceptions`` and ``valkey.exceptions``.

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


class LockNotOwnedError(LockError, RedisLockNotOwnedError, ValkeyLockNotOwnedError):
    """The lock was held, but is not any more; also the ``LockNotOwnedError`` of redis-py and of valkey-py."""


def without_misunderstanding(init: Callable[P, None]) -> Callable[P, None]:
    """Make the arguments of django-redis' ``cache.lock()`` that mean something else raise a TypeError."""

    @wraps(init)
    def checked(*args: P.args, **options: P.kwargs) -> None:
        kind = type(args[0]).__name__
        if len(args) > 3 and hasattr(args[1], "make_key"):  # a cache
            raise TypeError(
                f"{kind}() of a cache takes only the name without a keyword, because the third argument of "
                "cache.lock() was the version; write timeout= and the others."
            )
        init(*args, **options)

    return checked


class WithoutInternals(type):
    """The class of both locks, which refuses a replacement of what they do not have, as ``Lock.lua_release = None``."""

    def __setattr__(cls, name: str, value: object) -> None:
        if name in INTERNALS:
            raise AttributeError(_replaced(cls.__name__, name))
        super().__setattr__(name, value)


class BaseLock(metaclass=WithoutInternals):
    """The common part of both locks: everything but the public methods."""

    _flavour: Flavour
    _own_slot: type[OwnerSlot]

    def __init_subclass__(cls) -> None:
        for name in sorted(INTERNALS & vars(cls).keys()):
            raise TypeError(_replaced(cls.__name__, name))

    def __setattr__(self, name: str, value: object) -> None:
        if name in INTERNALS:
            raise AttributeError(_replaced(type(self).__name__, name))
        if name == "name":
            self._key = as_text(value)  # type: ignore[arg-type]
        super().__setattr__(name, value)

    @without_misunderstanding
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
        Describe a lock; no network call is made until the lock is acquired.

        Args:
            redis: Ignored, so None will do: the nodes are those of ``REDLOCK[using]``.
            name: What to lock; bytes are read as UTF-8, and a whole number as its digits.
            timeout: How long the lock is held at most, in seconds; None means until the lock is released or its
                process ends.
            sleep: Ignored: the engine chooses its pauses.
            blocking: Whether ``acquire()`` waits for another holder.
            blocking_timeout: How long ``acquire()`` waits, in seconds; None means for ever.
            thread_local: Whether the lock is held by a thread or task, rather than by this object.
            raise_on_release_error: Whether leaving a ``with`` block raises if the lock is no longer held.
            using: Alias in ``REDLOCK``.

        Raises:
            TypeError: The name is neither a string nor bytes nor a whole number.
            ValueError: The name or the timeout cannot work.
        """
        self.redis = redis
        self.name = name
        # In redis-py, a timeout of 0 meant for ever, and less than a millisecond was a server error.
        if timeout is not None and seconds("timeout", timeout) < MIN_TTL:
            text = f"timeout must be at least {MIN_TTL} seconds, not {timeout!r}"
            raise ValueError(f"{text}; None holds the lock until it is released.")
        self.timeout = timeout
        self.sleep = sleep
        self.blocking = blocking
        self.blocking_timeout = blocking_timeout
        self.thread_local = bool(thread_local)
        self.raise_on_release_error = raise_on_release_error
        self.using = using
        self.local = self._own_slot() if self.thread_local else OwnerSlot()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} {self._key!r} cannot be pickled or copied: create another one where it is needed, "
            "and hand the lock over by its local.token."
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._key!r}>"

    @property
    def lease(self) -> Lease | None:
        """The lease behind the lock, with its fencing token; None if the lock is not held here."""
        hold = self.local.hold
        return hold.lease if hold else None

    # The work of the methods. The slot is looked up at the call, because another task may run the coroutine.

    async def _enter(self) -> Self:
        if not await self._acquire(self.local.mine(), self._wait(None, None), None):
            raise LockError("was not acquired within the time specified", self._key)
        return self

    async def _exit(self, body_failed: bool) -> None:
        """Release the lock at the end of a ``with`` block; an exception of the body takes precedence."""
        lease = self.lease
        try:
            await self._release(self.local.mine())
        except LockError as error:
            if self.raise_on_release_error and not body_failed:
                raise
            told = lease and not lease.hold.late and lease.reason not in (EndReason.RELEASED, EndReason.FORKED)
            if not told:  # the log does not have the loss yet
                log.warning("%s", error, extra={"event": "lock_lost", "lock": self._key})

    async def _acquire(self, slot: OwnerSlot, wait: float | None, token: str | bytes | None) -> bool:
        longest = self._manager.rules.max_hold
        if self.timeout is not None and self.timeout > longest:
            raise ValueError(
                f"timeout must be at most {longest:g} seconds (OPTIONS['max_hold']), not {self.timeout!r}."
            )
        return await self._take(slot, self.timeout, None if token is None else as_bytes(token), wait=wait)

    async def _release(self, slot: OwnerSlot) -> None:
        hold = self._held(slot, "release")
        # If the release is interrupted, the token can still release the lock.
        slot.hold = Ownership(hold.token)
        lease = hold.lease
        if lease:
            outcome = await self._flavour.call(lease.release, lease.arelease)
        elif vote := await self._find(hold.token):  # another process acquired it
            outcome = release_outcome((await self._remove(vote.secret)).replies, self._manager.rules)
        else:
            outcome = Outcome.EXPIRED
        slot.hold = None
        reason = lease.reason if lease else None
        if outcome in LOST or reason is EndReason.FORKED:
            self._not_owned("release", reason)
        if outcome is Outcome.UNKNOWN:
            log.warning(
                "too few nodes answered to the release of lock %s",
                printable(self._key),
                extra={"event": "no_quorum", "lock": self._key},
            )

    async def _reset(self, slot: OwnerSlot) -> None:
        if slot.hold and slot.hold.lease:
            await self._flavour.call(slot.hold.lease.release, slot.hold.lease.arelease)
        slot.hold = None
        rules = self._manager.rules
        for vote in await self._holders():
            round = await self._remove(vote.secret, revoke=True)
            gone = is_gone(round.replies, rules)
            outcome = Outcome.RELEASED if gone else Outcome.UNKNOWN
            about = {"event": "lock_forced", "lock": self._key, "outcome": outcome}
            log.warning("lock released by force: %s (%s)", printable(self._key), outcome, extra=about)
            self._manager.notify("lock_forced", name=self._key, outcome=outcome)
            if not gone:
                nodes = {
                    node.name: str(round.replies.get(index, "not waited for"))
                    for index, node in enumerate(self._manager.nodes)
                }
                raise QuorumUnavailableError(self._key, nodes=nodes, needed=rules.needed)

    async def _locked(self) -> bool:
        return bool(await self._holders())

    async def _owned(self, hold: Ownership | None) -> bool:
        if hold is None:
            return False
        if hold.lease is None:
            return await self._find(hold.token) is not None
        poll = await self._ask()
        votes = poll.tally(slug(self._key)).votes
        mine = sum(vote.nodes for vote in votes if vote.secret == hold.lease.secret)
        against = self._manager.rules.nodes - len(poll.silent) - mine
        return hold.lease.valid() and not prevents_quorum(against, self._manager.rules)

    def _longer(self, to_do: str, additional: float | None, from_now: bool) -> Coroutine[Any, Any, Literal[True]]:
        """Check the arguments, and return the coroutine that extends the lock."""
        slot = self.local.mine()
        hold = self._held(slot, to_do)
        if self.timeout is None:
            raise LockError(f"cannot {to_do} a lock without timeout; it is held until it is released", self._key)
        return self._prolong(slot, hold, self.timeout if additional is None else additional, from_now)

    async def _prolong(self, slot: OwnerSlot, hold: Ownership, additional: float, from_now: bool) -> Literal[True]:
        lease, timed = hold.lease, hold.timed
        if lease is None or timed is None:
            return await self._take_over(slot, hold.token, additional, from_now)
        if not lease.valid():
            self._not_owned("extend", lease.reason)
        now = self._manager.runtime.clock()
        left = self._check_length(additional + (0.0 if from_now else timed.until - now), now - timed.since)
        if await timed.end_at(now + left):
            return True
        if not lease.valid():
            self._not_owned("extend", lease.reason)
        rules = self._manager.rules
        if rules.max_extensions is not None and lease.extensions >= rules.max_extensions:
            raise LockError(f"cannot be extended more than {rules.max_extensions} times", self._key)
        raise QuorumUnavailableError(self._key, self._manager.runtime.clock() - now)

    async def _take_over(self, slot: OwnerSlot, token: bytes, additional: float, from_now: bool) -> Literal[True]:
        """Extend a lock that another process acquired, with a lease of this process."""
        found = await self._find(token)
        if found is None:
            self._not_owned("extend")
        left = self._check_length(additional + (0.0 if from_now else min(found.lefts)), 0.0)
        if not await self._take(slot, left, token, wait=0, adopt=found.secret):
            self._not_owned("extend", EndReason.SUPERSEDED)
        return True

    @property
    def _manager(self) -> LockManager:
        return locks[self.using]

    def _wait(self, blocking: bool | None, blocking_timeout: float | None) -> float | None:
        """Return *blocking* and *blocking_timeout* as seconds to wait."""
        if not (self.blocking if blocking is None else blocking):
            return 0.0
        timeout = self.blocking_timeout if blocking_timeout is None else blocking_timeout
        if timeout is None or timeout == math.inf:
            return None
        return max(0.0, number("blocking_timeout", timeout))

    # The key on the nodes

    async def _take(self, slot: OwnerSlot, length: float | None, token: bytes | None, **wanted: Any) -> bool:
        """Acquire the lock for *length* seconds, or until its release if None; return whether it is held now."""
        rules = self._manager.rules
        ttl = None if length is None else piece(length, rules)
        owner = owner_here("manual", ref="" if token is None else reference(token))
        lock = self._manager.on_behalf(self._key, owner, ttl=ttl, renew=length is None, **wanted)
        try:
            lease = await self._flavour.call(lock.acquire, lock.aacquire)
        except LockTakenError:
            return False
        timed = None if length is None else TimedLease(lease, length, rules, self._flavour)
        slot.hold = Ownership(lease.secret.encode() if token is None else token, lease, timed)
        return True

    async def _ask(self) -> Poll:
        return await self._flavour.call(ask_nodes, aask_nodes, self._manager, [slug(self._key)])

    async def _holders(self) -> tuple[Vote, ...]:
        """
        Return the holders that have a quorum, or may have one if the nodes that did not answer are counted.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        poll = await self._ask()
        poll.require_quorum(self._key)
        return poll.tally(slug(self._key)).possible

    async def _find(self, token: bytes) -> Vote | None:
        """Return the holder whose secret *token* is, or who chose it or was given it; None if there is no such one."""
        ref = reference(token)
        for vote in await self._holders():
            if vote.secret.encode() == token or (vote.owner and vote.owner.ref == ref):
                return vote
        return None

    async def _remove(self, secret: str, *, revoke: bool = False) -> Round:
        """Release a lock by its secret; a holder that still renews the lock is refused, and learns of a *revoke*."""
        manager, rules = self._manager, self._manager.rules
        request = Release((slug(self._key),), secret, tombstone=rules.guard, shared=secret == SHARED, revoke=revoke)
        round = Round.to_release(request, range(rules.nodes), rules.timeout(rules.ttl), rules.needed)
        await self._flavour.call(manager.driver.ask, manager.driver.aask, round)
        return round

    # Errors

    def _held(self, slot: OwnerSlot, to_do: str) -> Ownership:
        """Return the hold of this slot, or raise LockError if there is none."""
        if slot.hold is None:
            sharing = ", or is held by another thread or task: write thread_local=False to share this object's hold"
            raise LockError(f"cannot {to_do} a lock that is not held here{sharing * self.thread_local}", self._key)
        return slot.hold

    def _not_owned(self, to_do: str, reason: EndReason | None = None) -> NoReturn:
        why = f": {EXPLANATIONS[reason]}" if reason and reason is not EndReason.RELEASED else ""
        raise LockNotOwnedError(f"cannot {to_do} a lock that is no longer owned{why}", self._key)

    def _check_length(self, left: float, held: float) -> float:
        """Return *left*, the seconds to hold the lock from now on, if that time is allowed."""
        if number("additional_time", left) < MIN_TTL:
            raise ValueError(
                f"A lock must last for at least {MIN_TTL} seconds from now, not {left:g}; release() ends it."
            )
        longest = self._manager.rules.max_hold
        if held + left > longest + SLACK:
            raise LockError(f"cannot be held for more than {longest:g} seconds (OPTIONS['max_hold'])", self._key)
        return left


class Lock(BaseLock):
    """
    ``redis.lock.Lock`` over the nodes of ``REDLOCK``.

    ``with Lock(client, "report", timeout=60):`` holds the lock during its body; it raises :exc:`LockError` if it does
    not get the lock.
    """

    _flavour = Blocking
    _own_slot = ThreadSlot

    def __enter__(self) -> Self:
        return run(self._enter())

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        run(self._exit(body_failed=kind is not None))

    def acquire(
        self,
        sleep: float | None = None,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> bool:
        """
        Take the lock; return whether it is held now.

        Args:
            sleep: Ignored: the engine chooses its pauses.
            blocking: Whether to wait for another holder; None means the lock's own setting.
            blocking_timeout: How long to wait, in seconds; None means the lock's own setting.
            token: The identifier of this hold in ``local.token``; None means a random one.

        Raises:
            QuorumUnavailableError: Too few nodes answered to say whether the lock is free.
        """
        return run(self._acquire(self.local.mine(), self._wait(blocking, blocking_timeout), token))

    def release(self) -> None:
        """
        Release the lock.

        Raises:
            LockNotOwnedError: The lock was held, but is not any more.
            LockError: The lock is not held here.
        """
        run(self._release(self.local.mine()))

    def reset(self) -> None:
        """
        Take the lock away from its holder, as an operator does; use it with care.

        redis-py has no such method, but python-redis-lock has one. The holder is not stopped: it learns of the reset at
        its next renewal or extension, and until then works beside the next holder. Only holds that were acquired before
        the call are released. The signal ``lock_forced`` is sent.

        Raises:
            QuorumUnavailableError: Too few nodes answered; the lock may still be held.
        """
        run(self._reset(self.local.mine()))

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Literal[True]:
        """
        Hold the lock longer.

        Args:
            additional_time: How much longer, in seconds.
            replace_ttl: Whether that time is counted from now, rather than from the end of the present timeout.

        Raises:
            LockNotOwnedError: The lock was held, but is not any more.
            LockError: The lock is not held here, or may not be held that long.
            QuorumUnavailableError: Too few nodes answered; the lock is held as long as before.
        """
        return run(self._longer("extend", additional_time, replace_ttl))

    def reacquire(self) -> Literal[True]:
        """
        Hold the lock for a whole ``timeout`` from now.

        Raises:
            LockNotOwnedError: The lock was held, but is not any more.
            LockError: The lock is not held here, or may not be held that long.
            QuorumUnavailableError: Too few nodes answered; the lock is held as long as before.
        """
        return run(self._longer("reacquire", None, True))

    def locked(self) -> bool:
        """
        Ask the nodes whether anybody holds the lock.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        return run(self._locked())

    def owned(self) -> bool:
        """Return whether the lock is held here, by the local clock and by the nodes that answer."""
        return run(self._owned(self.local.hold))


class AsyncLock(BaseLock):
    """
    ``redis.asyncio.lock.Lock`` over the nodes of ``REDLOCK``.

    ``async with AsyncLock(client, "report", timeout=60):`` holds the lock during its body. The lock belongs to the
    task that called the method, even if another task then runs the coroutine, as with ``asyncio.wait_for()``.
    """

    _flavour = Awaiting
    _own_slot = TaskSlot

    async def __aenter__(self) -> Self:
        return await self._enter()

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        await self._exit(body_failed=kind is not None)

    def acquire(
        self,
        blocking: bool | None = None,
        blocking_timeout: float | None = None,
        token: str | bytes | None = None,
    ) -> Coroutine[Any, Any, bool]:
        """Do what :meth:`Lock.acquire` does without blocking; a cancelled call leaves no key behind."""
        return self._acquire(self.local.mine(), self._wait(blocking, blocking_timeout), token)

    def release(self) -> Coroutine[Any, Any, None]:
        """Do what :meth:`Lock.release` does without blocking."""
        return self._release(self.local.mine())

    def reset(self) -> Coroutine[Any, Any, None]:
        """Do what :meth:`Lock.reset` does without blocking."""
        return self._reset(self.local.mine())

    def extend(self, additional_time: float, replace_ttl: bool = False) -> Coroutine[Any, Any, Literal[True]]:
        """Do what :meth:`Lock.extend` does without blocking."""
        return self._longer("extend", additional_time, replace_ttl)

    def reacquire(self) -> Coroutine[Any, Any, Literal[True]]:
        """Do what :meth:`Lock.reacquire` does without blocking."""
        return self._longer("reacquire", None, True)

    def locked(self) -> Coroutine[Any, Any, bool]:
        """Do what :meth:`Lock.locked` does without blocking."""
        return self._locked()

    def owned(self) -> Coroutine[Any, Any, bool]:
        """Do what :meth:`Lock.owned` does without blocking."""
        return self._owned(self.local.hold)


__all__ = ["AsyncLock", "Lock", "LockError", "LockNotOwnedError"]


def as_text(name: Name) -> str:
    """
    Return a name as text.

    Raises:
        TypeError: The name is neither a string nor bytes nor a whole number.
        ValueError: The name cannot be used for a lock.
    """
    if isinstance(name, int) and not isinstance(name, bool):
        return str(name)
    return check_name(bytes(name).decode() if isinstance(name, (bytes, memoryview)) else name)


def _replaced(kind: str, name: str) -> str:
    return (
        f"{kind} has no {name}: it runs none of redis-py's scripts, so a replacement would have no effect. To set the "
        "time that is left, write extend(t, replace_ttl=True); instead of the lock of redbeat, run beat by redlock_run."
    )
