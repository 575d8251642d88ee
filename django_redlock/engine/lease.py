"""
Leases: the proof of holding a lock that acquiring it gives, for blocking code and for asyncio (internal).
"""

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from weakref import ref

from ..core.attempt import Granted, HighestToken
from ..core.hold import HoldState
from ..core.names import about_holder, named
from ..core.protocol import LOST, EndReason, Failure, Outcome
from ..core.round import Round
from ..core.rules import Wanted, number
from ..core.votes import as_released, release_outcome
from ..exceptions import LockLostError, printable, who
from ..runtime.process import process
from ..runtime.threads import exiting, new_event, threads
from .functions import makes_coroutine, makes_generator
from .options import explained
from .watchdog import NEVER, TICK, unreleased, watch_drop

if TYPE_CHECKING:
    from .manager import LockManager

log = logging.getLogger("django_redlock")


def log_loss(lease: "Lease") -> None:
    """Log the loss, before the callbacks of users are called."""
    about = {"event": "lock_lost", "lock": lease.name}
    log.error("lock lost: %s (%s)%s", printable(lease.name), lease.reason, successor(lease), extra=about)


def successor(lease: "Lease") -> str:
    """Return who has a lost lock now, as the end of a sentence; empty if a quorum of nodes did not name anybody."""
    known = lease.hold.successor
    return printable(f"; now it is held by {who(about_holder(known))}") if known else ""


class Lease:
    """
    Proof that a quorum of nodes granted a lock; it is valid until its deadline.

    ``with lease:``, or ``async with lease:`` in an event loop, releases the lock at the end of the block. The block
    raises LockLostError at the beginning if the lease has ended, and RuntimeError if the lease is in a block already.
    It raises LockLostError at the end if the lock was lost meanwhile, unless the body raised.

    Validity comes from the clock alone: the ttl counts from before the first byte of the request was sent, less the
    allowance for drift ("Distributed Locks with Redis", "The Redlock Algorithm", step 3). A lease that has ended stays
    ended.
    """

    _logger: Callable[[Any], object] = staticmethod(log_loss)

    def __init__(self, hold: "LeaseHold") -> None:
        self.hold = hold
        self._on_lost: list[Callable[[Lease], object]] = []
        self._reported = False  # whether the loss was noticed, and is reported
        if hold.renewed:
            watch_drop(self, hold, hold.clock, hold.keeper.driver.dropped)

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
        ``async with``. The latter is set in its event loop, whichever thread notices the end, and a task can write
        ``await lease.lost``.
        """
        event = self.__dict__.get("_event") or self.__dict__.setdefault("_event", self._new_event())  # one for all
        if self._reported:
            self._set_event()
        return event

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
        self._report()
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
            TypeError: *callback* cannot be called, or makes a coroutine or generator, which nobody would run.
        """
        if not callable(callback):
            raise TypeError(f"on_lost() needs a function that takes the lease, not {repr(callback)[:40]}.")
        if makes_coroutine(callback) or makes_generator(callback):
            raise TypeError(
                "on_lost() needs a plain function, because nothing awaits its result. In a task, await "
                "lease.lost.wait()."
            )
        self._on_lost.append(callback)
        if self._reported:
            self._report()

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
        return self.hold.keeper.extend([self], ttl) == 1

    @explained
    async def aextend(self, ttl: float | None = None) -> bool:
        """Do what :meth:`extend` does without blocking."""
        return await self.hold.keeper.aextend([self], ttl) == 1

    def release(self, wait: bool = True) -> Outcome:
        """
        Release the lock, and return the outcome on the nodes.

        ``released``: the lock was held until then. ``expired``: the lease had ended. ``taken``: another owner has it.
        ``unknown``: too few nodes answered within the node timeout; the lock ends with its ttl at the latest, or with
        its minimum hold. ``held``: the lock was entered more than once, and is still held; or it stays taken for the
        rest of its minimum hold (``hold_for``), without a holder. The call never raises for a lock that is gone, and a
        second call returns the outcome of the first. If a node misses the release, the release is redelivered in the
        background until the lease would have ended. If a connection breaks with the release in flight, blocking code
        notices that when it uses the nodes again.

        Args:
            wait: Whether to wait for the nodes' answers. If False, the outcome is ``unknown`` unless it is known at
                once; the signal ``lock_released`` has it later.
        """
        if exiting():
            return Outcome.UNKNOWN  # the key ends with its ttl; connecting or waiting would make the interpreter hang
        hold = self.hold
        hold.depth -= 1
        hold.by_hand -= 1
        if hold.depth > 0:
            return Outcome.HELD if self.valid() else Outcome.EXPIRED
        try:
            round = hold.begin_release(wait or process.ends or threads().greenlets)
            if round is None:
                return Outcome.UNKNOWN if hold.forked else hold.outcome
            if hold.ended is not EndReason.RELEASED:
                self._report()
            known = True
            if round.unattended:
                known = hold.keeper.driver.leave(round, hold.timeout, self._ended_later)
            else:
                hold.keeper.driver.ask(round)
                if hold.keeps and (again := hold.over_new_links(round)):
                    round = again
                    hold.keeper.driver.ask(round)
            if (hold.takeover or hold.keeps) and (late := hold.afterwards(round)):
                hold.keeper.driver.ask(late)
        except BaseException:
            hold.release_later()
            raise
        return self._ended(round) if known else Outcome.UNKNOWN

    async def arelease(self, wait: bool = True) -> Outcome:
        """Do what :meth:`release` does without blocking; even a cancelled call sends the release."""
        if exiting():
            return Outcome.UNKNOWN
        hold = self.hold
        hold.depth -= 1
        hold.by_hand -= 1
        if hold.depth > 0:
            return Outcome.HELD if self.valid() else Outcome.EXPIRED
        try:
            round = hold.begin_release(wait)
            if round is None:
                return Outcome.UNKNOWN if hold.forked else hold.outcome
            if hold.ended is not EndReason.RELEASED:
                self._report()
            known = True
            hold.keeper.runtime.loop_watchdog().forget(self)
            if round.unattended:  # a cancellation cannot interrupt it
                known = hold.keeper.driver.aleave(round, hold.timeout, self._ended_later)
            else:
                await hold.keeper.driver.aask(round)
                if hold.keeps and (again := hold.over_new_links(round)):
                    round = again
                    await hold.keeper.driver.aask(round)
            if (hold.takeover or hold.keeps) and (late := hold.afterwards(round)):
                await hold.keeper.driver.aask(late)
        except BaseException:
            hold.release_later()
            raise
        return self._ended(round) if known else Outcome.UNKNOWN

    def __enter__(self) -> Self:
        self._begin_block()
        keeper = self.hold.keeper
        try:
            keeper.surroundings.entering(self.names, keeper.rules)
        except BaseException:
            self.hold.by_hand += 1
            self.hold.never_began()
            self.release()  # nothing else would
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold.by_hand += 1
        if kind is not None:
            self.hold.failed()
        over = self.hold.ended is EndReason.RELEASED  # the body released the lock
        outcome = Outcome.RELEASED if over else release_at_end(self)
        if outcome in LOST:
            raise_loss(self, body_failed=kind is not None)

    async def __aenter__(self) -> Self:
        self._begin_block()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hold.by_hand += 1
        if kind is not None:
            self.hold.failed()
        over = self.hold.ended is EndReason.RELEASED
        outcome = Outcome.RELEASED if over else await arelease_at_end(self)
        if outcome in LOST:
            raise_loss(self, body_failed=kind is not None)

    def watch(self) -> None:
        """Have the watchdog look at the lease again, which may be due earlier than it was (internal)."""
        self.hold.keeper.runtime.watchdog.watch(self)

    def _begin_block(self) -> None:
        """
        Note that a block of this lease begins, which releases it at its end.

        Raises:
            LockLostError: The lock is not held.
            RuntimeError: The lease is in a block already, whose end would leave the rest of the outer one without it.
        """
        hold = self.hold
        by_hand = hold.by_hand > hold.kept
        if not self.valid():
            if by_hand:  # no block will give the entry back
                hold.depth -= 1
                hold.by_hand -= 1
            raise loss_of(self)
        if not by_hand:
            raise RuntimeError(
                f"The lease of {self.name!r} is in a block already, which releases it at its end. Use the lease there, "
                "without a block of its own."
            )
        hold.by_hand -= 1

    def _ended_later(self, round: Round) -> None:
        """Report the outcome of a release that nobody waited for; no block can raise a loss then, so it is logged."""
        note_late_loss(self, self._ended(round))

    def _ended(self, round: Round) -> Outcome:
        hold = self.hold
        released, outcome = hold.ended is EndReason.RELEASED, Outcome.RELEASED
        if not (released and round.won):
            outcome = self._ended_badly(round, released)
        hold.outcome = outcome
        if released:
            hold.keeper.notify("lock_released", lease=self, outcome=outcome)
        if hold.late:
            self._report()
        return outcome

    def _ended_badly(self, round: Round, released: bool) -> Outcome:
        """Return the outcome of a release that did not give back the lock, and note why."""
        hold = self.hold
        replies = as_released(round.replies) if round.terms else round.replies
        outcome = Outcome.RELEASED if round.won else release_outcome(replies, hold.keeper.rules)
        if outcome is not Outcome.RELEASED and len(hold.names) > 1:  # the nodes refuse all names if they lost one
            hold.keep_again()
        if outcome is Outcome.TAKEN:
            hold.note_successor(replies)
        elif not released:
            return Outcome.EXPIRED
        elif outcome is Outcome.EXPIRED and hold.abandoned:  # the release in the background came first
            return Outcome.RELEASED
        elif outcome is Outcome.EXPIRED:
            hold.note_operator(replies)
        if released and outcome in LOST:
            hold.release_came_too_late(outcome)
        return Outcome.HELD if round.terms and outcome is Outcome.RELEASED else outcome

    def _report(self) -> None:
        """
        Report the loss, if it is one, to the log, the signal, the callbacks, and to those who wait for the event.

        This happens once, whichever threads notice the loss. If an exception interrupts the report, the watchdog goes
        on with it.
        """
        if self.hold.ended is EndReason.RELEASED or (self._reported and not self._on_lost):
            self.hold.report_at = NEVER
            return
        self.hold.report_at = self.hold.clock() + TICK  # not at once: a callback may take long
        self._set_event()
        me, fatal = object(), None
        try:
            if self.__dict__.setdefault("_reporting", me) is not me:
                return  # another thread calls all callbacks
            if not self._reported:
                if not self.hold.late:  # whose loss its release has told
                    self._on_lost[:0] = [self._logger, notify_loss]
                self._reported = True
                self._set_event()  # once more: the event may have been asked for in between
            if not self._apart(self._call_back):
                fatal = self._call_back()
        except BaseException:
            if self.__dict__.get("_reporting") is me:
                del self.__dict__["_reporting"]
            raise
        if fatal is not None:
            raise fatal

    def _call_back(self) -> BaseException | None:
        """Call all callbacks; return the first exception that is meant for the program, such as SystemExit."""
        fatal: BaseException | None = None
        with suppress(IndexError):
            # Taken and called without a bytecode in between, so that none is lost and none is called twice.
            for callback in iter(partial(self._on_lost.pop, 0), None):
                try:
                    callback(self)
                except BaseException as error:
                    log.exception("a callback of lock %s failed", printable(self.name))
                    fatal = fatal or (None if isinstance(error, Exception) else error)
        self.__dict__.pop("_reporting", None)
        if self._on_lost:  # added by another thread while this one was calling
            self._report()
        else:
            self.hold.report_at = NEVER
        return fatal

    def _apart(self, function: Callable[[], object]) -> bool:
        """Have another thread call *function* if this is the watchdog's, which must not block; return whether it is."""
        return self.hold.keeper.runtime.watchdog.apart(function)

    def _new_event(self) -> Any:
        return new_event()

    def _set_event(self) -> None:
        if (event := self.__dict__.get("_event")) is not None:
            event.set()


class AsyncLease(Lease):
    """A lease that belongs to the event loop that acquired it: its event is an asyncio event, set in that loop."""

    def __init__(self, hold: "LeaseHold") -> None:
        super().__init__(hold)
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        raise TypeError(
            f"The lease of {self.name!r} belongs to an event loop; write 'async with lease:' instead of 'with lease:'."
        )

    def watch(self) -> None:
        """Have the watchdog of the event loop look at the lease again, whichever thread calls (internal)."""
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._watch)

    def _watch(self) -> None:
        self.hold.keeper.runtime.loop_watchdog().watch(self)

    def _apart(self, function: Callable[[], object]) -> bool:
        """Have the event loop call *function* if this is another thread; return whether it is."""
        with suppress(RuntimeError):  # the loop has been closed
            if asyncio._get_running_loop() is not self._loop and self._loop.is_running():
                self._loop.call_soon_threadsafe(function)
                return True
        return super()._apart(function)

    def _call_back(self) -> None:
        super()._call_back()  # returns nothing: an exit would end the event loop for everything in it

    def _new_event(self) -> Any:
        return LossEvent()

    def _set_event(self) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody waits for the event any more
            if asyncio._get_running_loop() is self._loop or not self._loop.is_running():
                super()._set_event()
            else:  # another thread noticed the loss, and may not wake the loop's tasks itself
                self._loop.call_soon_threadsafe(super()._set_event)


class LossEvent(asyncio.Event):
    """The event ``lost`` of an asyncio lease; ``await lease.lost`` waits for it, like ``await lease.lost.wait()``."""

    def __await__(self) -> Generator[Any, Any, Literal[True]]:
        return self.wait().__await__()


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


def raise_loss(lease: Lease, body_failed: bool) -> None:
    """
    Raise the loss at the end of a block, unless the body raised: then its exception counts.

    Raises:
        LockLostError: The lock had been lost, as the outcome of its release shows.
    """
    if not body_failed:
        raise loss_of(lease)


def entered_again(lease: Lease) -> Lease:
    """
    Note that the holder enters the lock once more, so that only its last release ends the hold; return the lease.

    Raises:
        LockLostError: The lock is not held.
    """
    lease.ensure()
    lease.hold.enter_again()
    return lease


def passed_on(lease: Lease) -> None:
    """End the lease without a release, because the caller had the lock taken over under another secret (``adopt``)."""
    hold = lease.hold
    unreleased.pop(hold, None)
    if hold.end(EndReason.RELEASED, hold.clock()):
        hold.outcome = Outcome.RELEASED
        hold.keeper.notify("lock_released", lease=lease, outcome=Outcome.RELEASED)


def stop_renewal(lease: Lease) -> None:
    """Stop extending the lease; the lock stays held until the lease ends."""
    lease.hold.keeper.runtime.watchdog.forget(lease)


def resume_renewal(lease: Lease) -> None:
    """Start extending the lease again."""
    lease.hold.keeper.runtime.watchdog.watch(lease)


def outlive_loop(lease: Lease) -> None:
    """Have the lease extended in a thread of the process, because the running event loop may end before the lease."""
    keeper = lease.hold.keeper
    keeper.runtime.loop_watchdog().forget(lease)
    resume_renewal(lease)
    keeper.driver.heartbeat.join()


def release_when_dropped(lease: Lease) -> None:
    """Have the lock released in the background if the lease is dropped."""
    hold = lease.hold
    watch_drop(lease, hold, hold.clock, hold.keeper.driver.dropped, release=True)


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
        lease.hold.keep_again()
    if longer:
        lease.hold.keeper.notify("lock_extended", lease=lease)
    return longer


LONGEST_REDELIVERY = 86_400.0  # seconds for which the release of a hold that may last long is redelivered


class LeaseHold(HoldState):
    """
    A hold of this process, with its release and what the watchdog needs to know.

    Args:
        keeper: The manager that extends and releases the hold.
        wanted: The lock that was requested.
        granted: The won acquisition.
        highest: The highest tokens seen in this process.
        renewed: Whether the watchdog extends the hold.
    """

    __slots__ = (
        *("keeper", "clock", "renewed", "tended", "taken_by", "taken_at", "block", "kept", "depth", "by_hand"),
        *("takeover", "report_at", "abandoned", "outcome", "late", "_kept_before", "_hold_on_error", "_sends"),
        *("_pid", "_cleanup"),
        "__dict__",  # made for the identifier in a fence only: see owner()
    )

    def __init__(
        self, keeper: "LockManager", wanted: Wanted, granted: Granted, highest: HighestToken, renewed: bool
    ) -> None:
        super().__init__(wanted, granted, keeper.rules, highest)
        self.keeper = keeper
        self.clock = keeper.runtime.clock
        self.renewed = renewed
        self.tended = not wanted.detached  # whether the watchdog looks after it
        self.taken_by: object = None  # the thread or task
        self.taken_at: tuple[Any, int] = (None, 0)  # the code that took the lock, and its instruction
        self.block: ref[Any] | None = None  # the with statement of the lock that holds it, an OpenBlock
        self.kept = 0  # how many entries the end of the thread's transaction gives back, because their block is over
        self.depth = 1  # how often the holder has entered the lock and not yet left it
        self.by_hand = 1  # how often the holder has entered it without a block, which ``with lease:`` may be
        self.takeover = granted.rounds[0] if wanted.adopt else None  # the round that took the lock over
        self.report_at = 0.0  # when the watchdog looks whether the loss is reported, after it
        self._kept_before = False  # whether there would be a minimum hold without the outermost block that is open
        self._hold_on_error = wanted.hold_on_error
        self._sends = wanted.sends
        self._pid = process.pid
        self.abandoned = False  # whether the release was left to the background
        self.outcome = Outcome.UNKNOWN  # of the release
        self.late = False  # whether only the release showed that the lock had been lost
        self._cleanup: Round | None = None  # the round that releases the lock

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the holder; only the holder has the lock."""
        if not process.mark[0]:
            process.notice_fork()
        return self._pid != process.pid

    @property
    def entered(self) -> bool:
        """Whether the holder is still inside: it has not yet left the lock as often as it has entered it."""
        return self.depth > 0 and not self.forked

    @property
    def in_block(self) -> bool:
        """Whether only the thread or task that took the lock can end the hold, by leaving its block or transaction."""
        block = self.block() if self.block else None
        return self.kept > 0 or (block is not None and not block.over)

    # Used by the watchdog

    @property
    def slack(self) -> float:
        """Seconds by which the hold may be extended early, together with others."""
        return self.ttl / 30 if self.renewed else 0.0

    def due(self) -> float:
        """Return when the watchdog looks at the hold next; infinity once it has ended and its loss is reported."""
        if self.ended and self.ended is not EndReason.RELEASED:
            return self.report_at
        return self.next_event(self.renewed)

    def release_came_too_late(self, outcome: Outcome) -> None:
        """Correct the reason ``released``; the caller reports the loss, so that the watchdog does not."""
        self.report_at = NEVER  # first: the watchdog may look at any moment
        self.late = True
        super().release_came_too_late(outcome)

    # Used by fences

    def slots(self) -> list[tuple[str, str]]:
        """Return each name with the number of its permit, which is empty unless the lock has a ``limit``."""
        return [(name, self.permit()) for name in self.names]

    def owner(self) -> str:
        """
        Return the identifier of this acquisition in a fence: 32 hexadecimal digits, not secret.

        No other acquisition has the same one, not even one with the same secret, or one in a fork of this process.
        """
        # One call into C, so that all threads get the same identifier.
        identifier = self.__dict__.setdefault("_identifier", os.urandom(16))
        return blake2b(identifier, digest_size=16, key=str(os.getpid()).encode()).hexdigest()

    # The release

    @property
    def waits_at_end(self) -> bool:
        """
        Whether the end of the block waits for the replies to the release.

        Even a block that only sends the release waits if the lease may end, by the local clock, before the release
        arrives: the replies then tell whether the block has to raise.
        """
        return not self._sends or self.remaining(self.clock()) <= self.timeout

    def begin_release(self, wait: bool) -> Round | None:
        """
        End the hold before the first byte of its release is sent, and return the round that releases it.

        Return None in a fork, or if the lock was released, unless that was left to the background: then this release
        is sent as well, so that the caller can wait for it. The outcome is then known, or unknown for good.

        Args:
            wait: Whether to wait for the replies.
        """
        if self.forked or self.late or (self.ended is EndReason.RELEASED and not self.abandoned):
            return None
        now = self.clock()
        if self.check(now):
            self.end(EndReason.RELEASED, now)
        unreleased.pop(self, None)
        timeout = self.timeout if wait else 0.0
        self._cleanup = self.keep(now, timeout) if self.keeps and self.holds_on(now) else self.release(timeout)
        return self._cleanup

    def over_new_links(self, round: Round) -> Round | None:
        """Return the *round* of a minimum hold once more, if no quorum kept it and nodes have another memory now."""
        forgot = any(reply.failure is Failure.FORGOT for reply in round.replies.values())
        now = self.clock()
        if not (round.terms and forgot and self.holds_on(now)) or round.decided(round.replies):
            return None
        self._cleanup = self.keep(now, round.timeout)
        return self._cleanup

    def keep_again(self) -> None:
        """
        Have what the nodes still have of the minimum hold described once more as nobody's, in the background.

        An extension that was on its way when the work ended may have undone that, or some of several names were lost.
        A later hold with a secret that the caller chose may be meant as well, and is left alone.
        """
        now = self.clock()
        if self._cleanup and self._cleanup.terms and self._granting is None and self.holds_on(now):
            self.keeper.driver.bring(self.keep(now, 0.0, again=True))

    def afterwards(self, round: Round) -> Round | None:
        """Return what the nodes have to do after the *round* that ended the hold, if anything."""
        if self.keeps and round.terms:
            return self.leave_queue()
        return self.takeover.to_end_earlier() if self.takeover else None

    def keep_for(self, seconds: float) -> None:
        """Give the lock a minimum hold of *seconds* from now: its release leaves the lock taken until then."""
        self.hold_until, self.keeps = self.clock() + seconds, True

    def enter_again(self) -> None:
        """Note that the holder enters the lock once more; an outermost block decides anew about the minimum hold."""
        if self.depth == self.kept:
            self._kept_before, self.keeps = self.keeps, self.hold_until > 0
        self.depth += 1
        self.by_hand += 1

    def never_began(self) -> None:
        """Note that the body will not run, before the lock is left: without another block, there is no minimum hold."""
        if self.depth - self.kept == 1:
            self.keeps = self._kept_before

    def failed(self) -> None:
        """
        Note that the work failed, before the lock is released: its minimum hold may depend on that.

        Of a reentrant lock, the outermost block decides, after which at most the commit has something to give back.
        """
        if not self._hold_on_error and self.depth - self.kept == 1:
            self.keeps = False

    def release_later(self) -> None:
        """Have the release redelivered to the nodes that have not answered it, if the lease has ended."""
        if self.ended:
            now = self.clock()
            round = self._cleanup or (self.keep(now, 0.0) if self.keeps and self.holds_on(now) else self.release(0.0))
            self._cleanup = round
            self.keeper.driver.bring(round)

    def abandon(self) -> None:
        """
        Leave the lock once, and have it released in the background if that was the last time, without waiting.

        This is for a holder that was interrupted before it could release the lock itself.
        """
        if self.forked or self.ended or exiting():
            return
        self.depth -= 1
        if self.depth > 0:
            return
        self.abandoned = True  # first: a thread that sees the end must see this as well
        self.end(EndReason.RELEASED, self.clock())
        self.release_later()


def log_loss_with(lease: Lease, logger: Callable[[Lease], object]) -> None:
    """Have *logger* log the loss of the lock, if it is lost, in place of this module."""
    lease._logger = logger


def note_late_loss(lease: Lease, outcome: Outcome) -> None:
    """Log a loss that only the *outcome* of the release shows, where no block raises it."""
    if outcome in LOST and lease.hold.late:
        lease._logger(lease)


def notify_loss(lease: Lease) -> None:
    """Send the signal ``lock_lost``."""
    lease.hold.keeper.notify("lock_lost", lease=lease, reason=lease.reason)
