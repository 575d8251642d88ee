"""
Leases: the proof of holding a lock that acquiring it gives, for blocking code and for asyncio (internal).
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

from ..core.hold import release_outcome
from ..core.names import named
from ..core.protocol import LOST, EndReason, Outcome
from ..core.round import Round
from ..core.rules import number
from ..exceptions import LockLostError
from ..nodes.gevent import uses_gevent
from ..nodes.threads import exiting
from .options import LEASE_ATTRIBUTES, Explained, explained
from .process import process
from .reentrancy import is_in_block


class Lease(Explained, advice=LEASE_ATTRIBUTES):
    """
    Proof that a quorum of nodes granted a lock; it is valid until its deadline.

    ``with lease:``, or ``async with lease:`` in an event loop, releases the lock at the end of the block. The block
    raises LockLostError at the beginning if the lease has ended, and RuntimeError if the lease is in a block already.
    It raises LockLostError at the end if the lock was lost meanwhile, unless the body raised.

    Validity comes from the clock alone: the ttl counts from before the first byte of the request was sent, less the
    allowance for drift ("Distributed Locks with Redis", "The Redlock Algorithm", step 3). A lease that has ended stays
    ended.
    """

    def __init__(self, hold: LeaseHold, loss: Loss | None = None) -> None:
        self.hold = hold
        self._loss = loss or Loss()
        hold.belongs_to(self, self._loss)

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
        return self.hold.fencing_token

    @property
    def ttl(self) -> float:
        """Length of the lease in seconds, counted from its last extension."""
        return self.hold.ttl

    @property
    def secret(self) -> str:
        """The secret that extends and releases this lock, in 32 hexadecimal digits. Never show it."""
        return self.hold.secret

    @property
    def reason(self) -> EndReason | None:
        """
        Why the lease ended; None while it lasts.

        ``released``, ``expired``, ``superseded`` (another caller tried to take the lock), ``forgotten`` (by the nodes),
        ``fenced``, ``revoked`` (an operator asked for it), ``max_hold``, ``max_extensions``, ``heartbeat``, ``forked``.
        """
        return EndReason.FORKED if self.hold.forked else self.hold.ended

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

        It is a :class:`threading.Event`, or an :class:`asyncio.Event` for a lease acquired with ``aacquire()`` or
        ``async with``. The latter is set in its event loop, whichever thread notices the end.
        """
        return self._loss.event()

    def held(self) -> float:
        """Return the seconds for which the lock has been held, or was held until it ended."""
        return self.hold.held(self.hold.clock())

    def remaining(self) -> float:
        """Return the seconds of validity left; 0.0 once the lease has ended."""
        return self.hold.remaining(self.hold.clock()) if self.valid() else 0.0

    def valid(self) -> bool:
        """Return whether the lock is still held, by the local clock, without a network call."""
        if self.hold.forked:
            return False
        if self.hold.check(self.hold.clock()):
            return True
        self._loss.report(self)
        return False

    def ensure(self, margin: float = 0.0) -> None:
        """
        Check that the lock is still held, by the local clock, without a network call.

        Args:
            margin: Seconds of validity that must be left for the next step.

        Raises:
            LockLostError: The lock is not held, or less than *margin* is left.
        """
        if not self.valid():
            raise loss_of(self)
        if margin and self.remaining() < number("margin", margin):
            raise LockLostError(self.name, "margin", self.hold.held(self.hold.clock()))

    def on_lost(self, callback: Callable[["Lease"], object]) -> None:
        """
        Call *callback* with this lease once, when the lock is lost; at once if it already is.

        The thread that notices the loss calls it: the holder's thread in ``valid()`` or ``ensure()``, the event loop of
        an asyncio lease, or a background thread. Callbacks run in the order of their addition; exceptions are logged.

        Raises:
            TypeError: *callback* cannot be called, or is a coroutine function, which nobody would await.
        """
        self._loss.add(self, callback)

    def heartbeat(self) -> None:
        """Report progress: a lease taken with ``heartbeat=`` is extended only while this is called."""
        self.hold.beat(self.hold.clock())

    @explained
    def extend(self, ttl: float | None = None) -> bool:
        """
        Ask the nodes for a whole ttl from now; return whether a quorum agreed before the old deadline.

        This is only needed with ``renew=False``. The call blocks for at most one node timeout.

        Args:
            ttl: Length of the lease from now on, in seconds; None keeps the present length.

        Raises:
            ValueError: The ttl cannot work; the message says what to write.
            SynchronousOnlyOperation: The calling thread runs an event loop, unless DJANGO_ALLOW_ASYNC_UNSAFE is set.
        """
        self.hold.keeper.surroundings.blocking()
        return self.hold.keeper.extend([self], self._checked(ttl)) == 1

    @explained
    async def aextend(self, ttl: float | None = None) -> bool:
        """Do what :meth:`extend` does without blocking."""
        return await self.hold.keeper.aextend([self], self._checked(ttl)) == 1

    def release(self, wait: bool = True) -> Outcome:
        """
        Release the lock, and return the outcome on the nodes.

        ``released``: the lock was held until now. ``expired``: the lease had ended. ``taken``: another owner has it.
        ``unknown``: too few nodes answered within the node timeout; the lock ends with its ttl at the latest. ``held``:
        the lock was entered more than once, and is still held. The call never raises for a lock that is gone, and may
        be repeated. If a node misses the release, the release is redelivered in the background until the lease would
        have ended. If a connection breaks with the release in flight, blocking code notices that when it uses the nodes
        again.

        Args:
            wait: Whether to wait for the nodes' answers. If False, the outcome is ``unknown`` unless it is known at
                once; the signal ``lock_released`` has it later.
        """
        if exiting():
            return Outcome.UNKNOWN  # the key ends with its ttl; connecting or waiting would make the interpreter hang
        hold = self.hold
        if hold.leave():
            return Outcome.HELD if self.valid() else Outcome.EXPIRED
        try:
            round = self._end(wait or process.ends or uses_gevent())
            if round is None:
                return Outcome.UNKNOWN if hold.forked else Outcome.EXPIRED
            hold.keeper.runtime.watchdog.forget(self)
            known = hold.carry_out(round, self._ended_later)
            if hold.takeover and (late := end_of_earlier_hold(hold.takeover)):
                hold.keeper.ask(late)
        except BaseException:
            hold.release_later()
            raise
        return self._ended(round) if known else Outcome.UNKNOWN

    async def arelease(self, wait: bool = True) -> Outcome:
        """Do what :meth:`release` does without blocking; even a cancelled call sends the release."""
        if exiting():
            return Outcome.UNKNOWN
        hold = self.hold
        if hold.leave():
            return Outcome.HELD if self.valid() else Outcome.EXPIRED
        try:
            round = self._end(wait)
            if round is None:
                return Outcome.UNKNOWN if hold.forked else Outcome.EXPIRED
            hold.keeper.runtime.loop_watchdog().forget(self)
            known = await hold.acarry_out(round, self._ended_later)
            if hold.takeover and (late := end_of_earlier_hold(hold.takeover)):
                await hold.keeper.aask(late)
        except BaseException:
            hold.release_later()
            raise
        return self._ended(round) if known else Outcome.UNKNOWN

    def __enter__(self) -> Self:
        begin_block(self)
        refuse_transaction(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over = self.hold.ended is EndReason.RELEASED  # the body released the lock, and knows the outcome
        leave(self, Outcome.RELEASED if over else release_at_end(self), body_failed=kind is not None)

    async def __aenter__(self) -> Self:
        begin_block(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        over = self.hold.ended is EndReason.RELEASED
        leave(self, Outcome.RELEASED if over else await arelease_at_end(self), body_failed=kind is not None)

    def _checked(self, ttl: float | None) -> float | None:
        return ttl if ttl is None else self.hold.keeper.rules.check_ttl(ttl)

    def _end(self, wait: bool) -> Round | None:
        """End the lease, report the loss if it had been lost, and return the round that releases it, if any."""
        round = self.hold.begin_release(wait)
        if round is not None:
            self._loss.report(self)
        return round

    def _ended_later(self, round: Round) -> None:
        """Report the outcome of a release that nobody waited for; no block can raise a loss then, so it is logged."""
        outcome = self._ended(round)
        if outcome in LOST and self.hold.ended is EndReason.RELEASED:
            self.hold.release_came_too_late(outcome)
            log_loss(self)

    def _ended(self, round: Round) -> Outcome:
        outcome, hold = release_outcome(round, self.hold.keeper.rules), self.hold
        if hold.ended is EndReason.RELEASED:
            hold.keeper.notify("lock_released", lease=self, outcome=outcome)
        return outcome if hold.ended is EndReason.RELEASED or outcome is Outcome.TAKEN else Outcome.EXPIRED


class AsyncLease(Lease):
    """A lease whose events belong to the event loop that acquired it."""

    def __init__(self, hold: LeaseHold) -> None:
        super().__init__(hold, AsyncLoss())

    def __enter__(self) -> Self:
        raise TypeError(
            f"The lease of {self.name!r} belongs to an event loop; write 'async with lease:' instead of 'with lease:'."
        )


_in_blocks: WeakSet[Lease] = WeakSet()
"""The leases whose own ``with`` block was entered."""


def begin_block(lease: Lease) -> None:
    """Note that a block of *lease* begins, which releases it at its end; raise if the lock is not held."""
    lease.ensure()
    _refuse_second_block(lease)
    _in_blocks.add(lease)


def refuse_transaction(lease: Lease) -> None:
    """Warn or raise if a transaction is open; release the lock if its block cannot run, because nothing else would."""
    try:
        lease.hold.keeper.surroundings.entering(lease.name, lease.hold.keeper.rules)
    except BaseException:
        lease.release()
        raise


def _refuse_second_block(lease: Lease) -> None:
    """
    Make sure that the end of an inner block does not leave the rest of an outer one without the lock.

    Raises:
        RuntimeError: The lease is in a block already.
    """
    if lease in _in_blocks or is_in_block(lease):
        raise RuntimeError(
            f"The lease of {lease.name!r} is in a block already, which releases it at its end. Use the lease there, "
            "without a block of its own."
        )


def loss_of(lease: Lease) -> LockLostError:
    """Return the error for a lease that ended."""
    return LockLostError(lease.name, lease.reason or EndReason.EXPIRED, lease.held())


def release_at_end(lease: Lease) -> Outcome:
    """
    Release a lock where its block ends: with or without waiting for the replies, as its option ``release`` says.

    The result is that of :meth:`Lease.release`.
    """
    return lease.release(wait=lease.hold.waits_at_end)


async def arelease_at_end(lease: Lease) -> Outcome:
    """Do what :func:`release_at_end` does without blocking."""
    return await lease.arelease(wait=lease.hold.waits_at_end)


def leave(lease: Lease, outcome: Outcome, body_failed: bool) -> None:
    """
    Raise the loss at the end of a ``with`` block, unless the body raised: then its exception counts.

    Raises:
        LockLostError: The *outcome* of the release shows that the lock had been lost.
    """
    if outcome in LOST and not body_failed:
        lease.hold.release_came_too_late(outcome)
        raise loss_of(lease)


def passed_on(lease: Lease) -> None:
    """End the lease without a release, because the caller had the lock taken over under another secret (``adopt``)."""
    hold = lease.hold
    if hold.end(EndReason.RELEASED, hold.clock()):
        hold.keeper.notify("lock_released", lease=lease, outcome=Outcome.RELEASED)


def stop_renewal(lease: Lease) -> None:
    """Stop extending the lease; the lock stays held until the lease ends."""
    lease.hold.keeper.runtime.watchdog.forget(lease)


def resume_renewal(lease: Lease) -> None:
    """Start extending the lease again."""
    lease.hold.keeper.runtime.watchdog.watch(lease)


def fence_out(lease: Lease, fencing_token: int) -> None:
    """End the lease, because a database has seen a later holder's *fencing_token*; the next proposal is higher."""
    lease.hold.fenced_out(fencing_token, lease.hold.clock())
    lease.valid()  # this reports the loss


def note_extension(round: Round, leases: Sequence[Lease], start: float) -> int:
    """Note the outcome of the round that began at *start* in each lease; return how many are longer now."""
    return sum([_is_longer(lease, round, number, start) for number, lease in enumerate(leases)])


def _is_longer(lease: Lease, round: Round, number: int, start: float) -> bool:
    longer = lease.hold.extended(round, number, start, lease.hold.clock())
    if lease.hold.ended:
        lease.valid()  # this reports the loss
    if longer:
        lease.hold.keeper.notify("lock_extended", lease=lease)
    return longer
