"""
Proof of holding a lock: what acquiring one gives, blocking and asyncio.
"""

import asyncio
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import Any, Protocol, Self

from ..core.hold import Hold, release_outcome
from ..core.names import named, printable
from ..core.outcome import LOST, EndReason, Outcome
from ..core.round import Round
from ..core.rules import Rules
from ..exceptions import LockLostError
from ..nodes.base import Node
from ..nodes.clock import steady
from ..nodes.threads import exiting, new_event
from .drops import Drop, unreleased, watch_drop
from .process import process
from .renewal import loop_watchdog, watchdog
from .surroundings import Surroundings

LASTING = 86_400.0  # seconds for which the release of a hold that may last long is redelivered

log = logging.getLogger("django_redlock")


class Manager(Protocol):
    """What extends and releases a lease: a :class:`~.manager.LockManager`."""

    nodes: tuple[Node, ...]
    rules: Rules
    notify: Callable[..., None]
    surroundings: Surroundings
    dropped: deque[float]

    def ask(self, round: Round) -> None:
        """Carry out one round, blocking."""

    async def aask(self, round: Round) -> None:
        """Carry out one round in the running event loop."""

    def bring(self, round: Round) -> None:
        """Bring a release to the nodes that have not answered it, in the background."""

    def extend(self, leases: "Sequence[Lease]", ttl: float | None = None) -> int:
        """Extend leases, blocking; returns how many are longer now."""

    async def aextend(self, leases: "Sequence[Lease]", ttl: float | None = None) -> int:
        """Extend leases in the running event loop; returns how many are longer now."""


class Lease:
    """
    Proof that a quorum of nodes granted a lock; it is valid until its deadline.

    ``with lease:``, or ``async with lease:`` in an event loop, releases the lock at the end of the block. It raises
    LockLostError at the beginning if the lease has ended, so that the body never runs without the lock, and at the end
    if it was lost meanwhile, unless the body raised.

    Validity comes from the clock alone: the ttl counts from before the first byte of the request was sent, less the
    allowance for drift ("Distributed Locks with Redis", "The Redlock Algorithm", step 3). A lease that ended stays
    ended.
    """

    def __init__(self, manager: Manager, hold: Hold, renew: bool, takeover: Round | None = None) -> None:
        self._manager = manager
        self.hold = hold
        self._renew = renew
        self._lost: Any = None  # made when it is asked for
        self._callbacks: list[Callable[[Lease], object]] = []
        self._mutex = threading.Lock()
        self._pid = process.pid
        self._told = False  # whether its loss is known
        self._teller: object = None  # stands for the thread that calls back
        self._cleanup: Round | None = None  # the round that releases it
        self._drop: Drop | None = watch_drop(self, hold, manager.dropped) if renew else None
        self._depth = 1  # how often its holder has entered it, for a reentrant lock
        self._owner = b""
        self._takeover = takeover  # the round that took the lock over from another holder

    def __repr__(self) -> str:
        return f"<Lease {self.name!r}: {self.hold.ended or f'{self.remaining():.1f} s left'}>"

    def __reduce__(self) -> Any:
        raise TypeError("A Lease cannot be pickled or copied: the lock would have two holders.")

    @property
    def name(self) -> str:
        """The lock's name; several names are joined by commas."""
        return named(self.hold.names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are locked, sorted."""
        return self.hold.names

    @property
    def fencing_token(self) -> int:
        """A number that is greater than that of every earlier holder of any of the names."""
        return self.hold.token

    @property
    def ttl(self) -> float:
        """Length of the lease in seconds, counted from its last extension."""
        return self.hold.ttl

    @property
    def token(self) -> str:
        """The secret that extends and releases this lock, in 32 hexadecimal digits. Never show it."""
        return self.hold.nonce

    @property
    def reason(self) -> EndReason | None:
        """
        Why the lease ended; None while it lasts.

        ``released``, ``expired``, ``superseded`` (another caller has tried to take the lock since),
        ``forgotten`` (the nodes no longer know this holder), ``fenced``, ``revoked`` (an operator asked for it),
        ``max_hold``, ``max_extensions``, ``heartbeat`` or ``forked``.
        """
        return EndReason.FORKED if self._forked() else self.hold.ended

    @property
    def waited(self) -> float:
        """Seconds from the first attempt until the lock was granted."""
        return self.hold.waited

    @property
    def extensions(self) -> int:
        """How often the lease has been extended."""
        return self.hold.extensions

    @property
    def lost(self) -> Any:
        """
        An event that is set when the lease ends without having been released.

        A :class:`threading.Event`, or an :class:`asyncio.Event` for a lease acquired with ``aacquire()`` or
        ``async with``, which is set in its event loop, whichever thread notices the end.
        """
        if self._lost is None:
            with self._mutex:
                self._lost = self._lost or self._new_event()
            if self._told:
                self._set_lost()
        return self._lost

    def held(self) -> float:
        """Return the seconds for which the lock has been held, or was held until it ended."""
        return self.hold.held(steady())

    def remaining(self) -> float:
        """Return the seconds of validity left; 0.0 when it ended."""
        return self.hold.remaining(steady()) if self.valid() else 0.0

    def valid(self) -> bool:
        """Return whether the lock is still held, by the local clock; makes no network call."""
        if self._forked():
            return False
        if self.hold.check(steady()):
            return True
        self._tell_loss()
        return False

    def ensure(self, margin: float = 0.0) -> None:
        """
        Check that the lock is still held, by the local clock; makes no network call.

        Args:
            margin: Seconds of validity that must be left for the next step.

        Raises:
            LockLostError: The lock is not held, or less than *margin* is left.
        """
        if not self.valid():
            raise self._loss()
        if margin and self.remaining() < margin:
            raise LockLostError(self.name, "margin", self.hold.held(steady()))

    def on_lost(self, callback: Callable[["Lease"], object]) -> None:
        """
        Call *callback* with this lease once, when it is lost; at once if it already is.

        The thread that notices the loss calls it: the holder's thread in ``valid()`` or ``ensure()``, the event loop of
        an asyncio lease, or a thread of its own. Callbacks are called in the order in which they were added. If one
        raises, the exception is logged and the next one is called. A callback that blocks does not delay the renewal of
        other leases, unless it runs in an event loop, where it delays everything.
        """
        self._callbacks.append(callback)
        if self._told:
            self._tell_loss()

    def heartbeat(self) -> None:
        """Report progress: a lease taken with ``heartbeat=`` is extended only while this is called."""
        self.hold.beat(steady())

    def extend(self, ttl: float | None = None) -> bool:
        """
        Ask the nodes for a whole ttl from now; returns whether a quorum agreed before the old deadline.

        Only needed with ``renew=False``. Blocks for at most one node timeout.

        Args:
            ttl: Length of the lease from now on, in seconds; None keeps the present length.

        Raises:
            ValueError: The ttl cannot work; the message says what to write.
        """
        return self._manager.extend([self], self._checked(ttl)) == 1

    async def aextend(self, ttl: float | None = None) -> bool:
        """Do what :meth:`extend` does without blocking."""
        return await self._manager.aextend([self], self._checked(ttl)) == 1

    def release(self, wait: bool = True) -> Outcome:
        """
        Release the lock; returns the outcome on the nodes.

        ``released``: the lock was held until now. ``expired``: it had ended. ``taken``: another owner has it.
        ``unknown``: too few nodes answered within the node timeout; the lock ends with its ttl at the latest. ``held``:
        it was entered more than once, and is still held. Never raises for a lock that is gone, and may be called twice.
        If a node misses the release, the release is redelivered in the background until the lease would have ended.
        Blocking code notices a connection that broke with the release in flight when it uses the nodes again.

        Args:
            wait: Whether to wait for the nodes' answers; if False, the outcome is ``unknown``.
        """
        if exiting():
            return Outcome.UNKNOWN  # the key ends with its ttl; to connect or to wait would have the interpreter hang
        if self._still_entered():
            return Outcome.HELD if self.valid() else Outcome.EXPIRED
        try:
            round = self._end(wait)
            if round is None:
                return Outcome.UNKNOWN if self._forked() else Outcome.EXPIRED
            watchdog.forget(self)
            self._manager.ask(round)
            if self._takeover and (late := end_of_earlier_hold(self._takeover)):
                self._manager.ask(late)
        except BaseException:
            self._release_later()
            raise
        return self._ended(round)

    async def arelease(self, wait: bool = True) -> Outcome:
        """Do what :meth:`release` does without blocking; a cancelled call has sent the release all the same."""
        if exiting():
            return Outcome.UNKNOWN
        if self._still_entered():
            return Outcome.HELD if self.valid() else Outcome.EXPIRED
        try:
            round = self._end(wait)
            if round is None:
                return Outcome.UNKNOWN if self._forked() else Outcome.EXPIRED
            loop_watchdog().forget(self)
            await self._manager.aask(round)
            if self._takeover and (late := end_of_earlier_hold(self._takeover)):
                await self._manager.aask(late)
        except BaseException:
            self._release_later()
            raise
        return self._ended(round)

    def abandon(self) -> None:
        """
        Leave it once, and have it released in the background if that was the last time; waits for nothing.

        For a holder that was interrupted before it could release the lock itself.
        """
        if self._forked() or self.hold.ended or exiting() or self._still_entered():
            return
        self.hold.end(EndReason.RELEASED, steady())
        self._forget_drop()
        self._release_later()

    def _forget_drop(self) -> None:
        if self._drop is not None:
            unreleased.discard(self._drop)
            self._drop = None

    def _release_later(self) -> None:
        """Have the release redelivered to the nodes that have not answered it, if the lease has ended."""
        if self.hold.ended:
            round = self._cleanup = self._cleanup or self.hold.release(0.0)
            self._manager.bring(round)

    def __enter__(self) -> Self:
        self.ensure()
        self._manager.surroundings.entering(self.name, self._manager.rules)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over = self.hold.ended is EndReason.RELEASED  # the body released it, and knows the outcome
        self._leave(Outcome.RELEASED if over else self.release(), body_failed=kind is not None)

    async def __aenter__(self) -> Self:
        self.ensure()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over = self.hold.ended is EndReason.RELEASED
        self._leave(Outcome.RELEASED if over else await self.arelease(), body_failed=kind is not None)

    # Used by fences

    @property
    def shared(self) -> bool:
        """Whether other shared holders may hold the lock at the same time."""
        return self.hold.shared

    def slots(self) -> list[tuple[str, str]]:
        """Return each name with the number of its permit, which is empty unless the lock has a ``limit``."""
        return [(name, self.hold.permit()) for name in self.names]

    def owner(self) -> str:
        """
        Return the identifier of this acquisition in a fence: 32 hexadecimal digits, not secret.

        No other acquisition has the same one, not even one with the same secret, or one in a fork of this process.
        """
        with self._mutex:
            self._owner = self._owner or os.urandom(16)
        return blake2b(self._owner, digest_size=16, key=str(os.getpid()).encode()).hexdigest()

    def fenced_out(self, token: int) -> None:
        """End it, because a database has seen *token* of a later holder; the next acquisition proposes a higher one."""
        self.hold.seen(token)
        self.hold.end(EndReason.FENCED, steady())
        self._tell_loss()

    # Used by reentrant locks

    @property
    def entered(self) -> bool:
        """Whether its holder has not yet left it as often as it was entered."""
        return self._depth > 0

    def enter_again(self) -> bool:
        """
        Enter it once more; returns False if it has been released.

        Raises:
            LockLostError: It was lost, and its holder is still inside.
        """
        if not self.entered:
            return False
        self.ensure()
        self._depth += 1
        return True

    # Used by the watchdog

    @property
    def keeper(self) -> Manager:
        """The manager that extends it."""
        return self._manager

    @property
    def renewed(self) -> bool:
        """Whether it is extended without being asked."""
        return self._renew

    @property
    def slack(self) -> float:
        """Seconds by which it may be extended early, together with other leases."""
        return self.hold.ttl / 30 if self._renew else 0.0

    def due(self) -> float:
        """Return when the watchdog looks at it next; at once if it was lost and callbacks are still to be called."""
        ended = self.hold.ended
        if ended and ended is not EndReason.RELEASED and self._teller is None and (self._callbacks or not self._told):
            return self.hold.ended_at
        return self.hold.due(self._renew)

    def _forked(self) -> bool:
        process.notice_fork()
        return self._pid != process.pid

    def _checked(self, ttl: float | None) -> float | None:
        return ttl if ttl is None else self._manager.rules.check_ttl(ttl)

    def _still_entered(self) -> bool:
        """Leave a reentrant lock once; returns whether it has been entered more often."""
        self._depth -= 1
        return self.entered

    def _extended(self, round: Round, number: int, start: float) -> bool:
        longer = self.hold.extended(round, number, start, steady())
        if self.hold.ended:
            self._tell_loss()
        if longer:
            self._manager.notify("lock_extended", lease=self)
        return longer

    def _end(self, wait: bool) -> Round | None:
        """Mark it ended, before the first byte of the release is sent; returns the round to carry out."""
        if self._forked() or self.hold.ended is EndReason.RELEASED:
            return None
        if self.hold.check(steady()):
            self.hold.end(EndReason.RELEASED, steady())
            self._forget_drop()
        else:
            self._tell_loss()
        self._cleanup = self.hold.release(self.hold.timeout if wait else 0.0)
        return self._cleanup

    def _ended(self, round: Round) -> Outcome:
        outcome = release_outcome(round, self._manager.rules)
        if self.hold.ended is EndReason.RELEASED:
            self._manager.notify("lock_released", lease=self, outcome=outcome)
        if self.hold.ended is EndReason.RELEASED or outcome is Outcome.TAKEN:
            return outcome
        return Outcome.EXPIRED

    def _tell_loss(self) -> None:
        """
        Report once that the lease was lost, whichever thread noticed it.

        If an exception interrupts this, the watchdog finishes it, because the lease is due again at once.
        """
        if self.hold.ended is EndReason.RELEASED or (self._told and not self._callbacks):
            return
        self._set_lost()
        me, fatal = object(), None
        try:
            with self._mutex:
                if self._teller is None:
                    self._begin_to_tell(me)
            if self._teller is me and not self._apart(partial(self._call_back, me)):
                fatal = self._call_back(me)
        except BaseException:
            if self._teller is me:
                self._teller = None
            self._tell_later()
            raise
        if fatal is not None:
            raise fatal

    def _begin_to_tell(self, teller: object) -> None:
        if not self._told:
            self._callbacks[:0] = [Lease._log_loss, Lease._notify_loss]
            self._told = True
        self._teller = teller

    def _call_back(self, teller: object) -> BaseException | None:
        """Call all callbacks; returns an exception of theirs that is meant for the program, such as SystemExit."""
        fatal: BaseException | None = None
        with suppress(IndexError):
            # Taken and called without a bytecode in between, so that none is lost and none is called twice.
            for callback in iter(partial(self._callbacks.pop, 0), None):
                try:
                    callback(self)
                except BaseException as error:
                    log.exception("a callback of lock %s failed", printable(self.name))
                    fatal = fatal or (None if isinstance(error, Exception) else error)
        self._teller = None
        if self._callbacks:  # added by another thread while this one was calling
            self._tell_loss()
        return fatal

    def _log_loss(self) -> None:
        about = {"event": "lock_lost", "lock": self.name}
        log.error("lock lost: %s (%s)", printable(self.name), self.reason, extra=about)

    def _notify_loss(self) -> None:
        self._manager.notify("lock_lost", lease=self, reason=self.reason)

    def _apart(self, function: Callable[[], object]) -> bool:
        return watchdog.apart(function)

    def _tell_later(self) -> None:
        watchdog.watch(self)

    def _new_event(self) -> threading.Event | asyncio.Event:
        return new_event()

    def _set_lost(self) -> None:
        if self._lost is not None:
            self._lost.set()

    def _loss(self) -> LockLostError:
        return LockLostError(self.name, self.reason or EndReason.EXPIRED, self.hold.held(steady()))

    def _leave(self, outcome: Outcome, body_failed: bool) -> None:
        """Raise the loss at the end of a ``with`` block, unless the body raised: then its exception counts."""
        if outcome in LOST and not body_failed:
            if self.hold.ended is EndReason.RELEASED:
                self.hold.ended = EndReason.SUPERSEDED if outcome is Outcome.TAKEN else EndReason.FORGOTTEN
            raise self._loss()


def end_of_earlier_hold(takeover: Round) -> Round | None:
    """Return the round that ends the earlier hold on nodes that have not answered the take-over and may yet get it."""
    if not takeover.remedy or not (nodes := takeover.unanswered()):
        return None
    requests = {node: takeover.remedy[node] for node in nodes}
    return Round(requests, lambda replies: False, 0.0, cleanup=True, lasting=LASTING)


def extended(round: Round, leases: Sequence[Lease], start: float) -> int:
    """Note the outcome of the round that began at *start* in each lease; returns how many are longer now."""
    return sum(lease._extended(round, number, start) for number, lease in enumerate(leases))
