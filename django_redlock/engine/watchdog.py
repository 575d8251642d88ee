"""
Extend held leases, and notify their holders when they end (internal).

One thread per process and one timer per event loop look after all leases, whatever their number; those that are due
at about the same time are extended in one round. Lateness is normal (a busy interpreter delays any thread), so
nothing here decides whether a lease is valid; a lease decides that by the clock. A lease that its holder dropped
without a release is no longer extended and ends by itself. Whatever else has to be done in time is a :class:`Chore`.

:class:`Runtime` is what a simulation replaces: these watchdogs, and the clocks and pauses of the engine.
"""

import asyncio
import atexit
import logging
import random
import time
import warnings
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from ..core.hold import HoldState
from ..core.names import named
from ..core.protocol import Instant
from ..runtime.background import Background, Bell, Errands
from ..runtime.clock import Clock, steady
from ..runtime.gevent import forget_threads, join_threads
from ..runtime.process import process
from ..runtime.threads import exiting, threads
from .connections import PerLoop

LINGER = 5.0  # seconds for which the thread waits for another lease before it ends
TICK = 1.0  # longest time between two checks, in seconds, so that a new lease seldom has to wake the thread
SLOW = 0.1  # seconds after which an extension has blocked the thread for long, as silent nodes make it
LAST_WORK = 2.0  # seconds that threads under gevent have to finish their work when the process ends
NEVER = float("inf")

log = logging.getLogger("django_redlock")


abandoned: deque[Any] = deque()
"""Leases whose blocks were left without a release; the first watchdog to run calls their ``abandon()``."""


def release_abandoned() -> None:
    """Have the leases in ``abandoned`` released in the background."""
    while abandoned:
        with suppress(IndexError):  # another thread was quicker
            abandoned.popleft().abandon()


class Chore:
    """Something besides leases that the watchdog does from time to time."""

    slack = 0.0
    """Seconds before it is due from which it may be done with leases; by default, it is done after them."""

    def valid(self) -> bool:
        """Return whether there will be something to do."""
        return True

    def due(self) -> float:
        """Return when to look at it next, on the steady clock; infinity if there is nothing to do."""
        raise NotImplementedError

    def do(self) -> object:
        """Do what is due; this may block for one node timeout."""
        raise NotImplementedError

    async def ado(self) -> object:
        """Do nothing: as a rule, only the watchdog of the threads has chores."""


class TendedLease(Protocol):
    """A lease, which a watchdog has extended by its manager."""

    @property
    def hold(self) -> Any:
        """The object that knows when the lease is due (``due()``, ``slack``), and its manager (``keeper``)."""

    def valid(self) -> bool:
        """Return whether the lease is still held; if it is not, notify its holder."""


Tended = TendedLease | Chore
"""What a watchdog looks after."""


def due(tended: Tended) -> float:
    """Return when the watchdog has to see to a lease or a chore, on the steady clock; infinity if it has ended."""
    when: float = tended.due() if isinstance(tended, Chore) else tended.hold.due()
    return when


def slack(tended: Tended) -> float:
    """Return how many seconds earlier than that it may be done together with others."""
    seconds: float = tended.slack if isinstance(tended, Chore) else tended.hold.slack
    return seconds


def belongs_to(tended: Tended, keeper: object) -> bool:
    """Return whether it is a lease of a manager."""
    return not isinstance(tended, Chore) and tended.hold.keeper is keeper


class Dog(Protocol):
    """A watchdog that looks after leases: the thread of a process, the timers of an event loop, or a simulation."""

    def watch(self, lease: Tended, /) -> None:
        """Look after *lease* until it ends."""

    def forget(self, lease: Tended, /) -> None:
        """Stop looking after *lease*."""

    def tends(self, keeper: Any, /) -> bool:
        """Return whether this watchdog looks after leases of *keeper*."""

    def apart(self, function: Callable[[], object], /) -> bool:
        """If the calling thread is the watchdog's own, let another one call *function*; return whether it is."""

    def rest(self) -> None:
        """End what runs in the background, unless there is a lease to look after."""


class Agenda:
    """
    The leases, by the time when they are due. The agenda keeps no lease alive.

    A plain dictionary is never half changed when an exception arrives, and searching ten thousand leases in it takes
    less than a millisecond.
    """

    def __init__(self) -> None:
        self._leases: dict[ref[Tended], float] = {}

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return any(self._goes_on(key) for key in list(self._leases))

    def __iter__(self) -> Iterator[Tended]:
        return (lease for key in list(self._leases) if (lease := key()) is not None)

    def add(self, lease: Tended) -> float:
        """Put a lease on the agenda, or change when it is due; return that time, infinity if it has ended."""
        when = due(lease)
        if when == NEVER:
            self.drop(lease)
        else:
            self._leases[ref(lease)] = when
        return when

    def put_back(self, lease: Tended) -> None:
        """Add a lease that was taken, unless it has been dropped meanwhile."""
        if ref(lease) in self._leases:
            self.add(lease)

    def drop(self, lease: Tended) -> None:
        """Take a lease off the agenda."""
        self._leases.pop(ref(lease), None)

    def next(self) -> float:
        """Return when the next lease is due; infinity if there is none."""
        return min(self._leases.values(), default=NEVER)

    def take(self, now: float) -> list[Tended]:
        """
        Return the leases that are due, and those that soon will be. The caller puts each of them back.

        If an exception prevents that, the leases are due again soon.
        """
        taken: list[Tended] = []
        if self.next() > now:
            return taken
        for key, when in sorted(self._leases.items(), key=itemgetter(1)):
            lease = key()
            if when > now and not (taken and lease and when - slack(lease) <= now):
                break
            if lease is None:
                self._leases.pop(key, None)
            elif due(lease) <= max(now, when):
                self._leases[key] = now + TICK
                taken.append(lease)
            else:
                self.add(lease)
        return taken

    def _goes_on(self, key: "ref[Tended]") -> bool:
        """Return whether a lease has neither been dropped nor ended; forget it if it has."""
        lease = key()
        if lease is None or due(lease) == NEVER:
            self._leases.pop(key, None)
            return False
        return True


def work_in(tended: Iterable[Tended]) -> dict[Any, list[Any]]:
    """
    Return what is to be done: the leases to extend, by the manager that extends them, and the chores, each by itself.

    The end of the other leases is noticed here.
    """
    work: dict[Any, list[Any]] = {}
    for each in tended:
        if each.valid():
            if isinstance(each, Chore):
                work[each] = [each]
            elif each.hold.renewed:
                work.setdefault(each.hold.keeper, []).append(each)
    return work


def carry_out(who: Any, leases: list[Any]) -> None:
    """Do one piece of that work, blocking."""
    who.do() if isinstance(who, Chore) else who.extend(leases)


async def acarry_out(who: Any, leases: list[Any]) -> None:
    """Do one piece of that work without blocking."""
    await (who.ado() if isinstance(who, Chore) else who.aextend(leases))


class Watchdog:
    """
    One thread that looks after all leases of blocking code in this process.

    Only this thread changes the agenda. Other threads send it messages, each with one call into C, because an exception
    may interrupt them at any moment.

    Args:
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._clock = clock
        self._errands = Errands("django_redlock on_lost")
        self.start_over()

    def start_over(self) -> None:
        """Begin with no leases; called in a forked child, which has neither the thread nor the leases of its parent."""
        self._agenda = Agenda()
        self._slow: WeakKeyDictionary[Any, float] = WeakKeyDictionary()  # who was slow, and when
        self._inbox: deque[tuple[ref[Tended], bool]] = deque()  # leases to look after, and leases to forget
        self._bell = Bell(threads().system_lock())
        # A real thread: a greenlet would not get its turn while a task computes.
        self._thread = Background(self._run, self._busy, "django_redlock watchdog", real=True)
        self._wake_at = NEVER  # until when the thread sleeps; NEVER while it is awake, so that every message rings
        self._resting = self._stopped = False
        self._errands.start_over()

    @property
    def running(self) -> bool:
        """Whether the watchdog has a thread."""
        return self._thread.running

    def watch(self, lease: Tended) -> None:
        """Look after *lease* until it ends; start the thread if there is none."""
        self._inbox.append((ref(lease), True))
        if due(lease) < self._wake_at:
            self._bell.ring()
        if why := self._thread.start():
            log.error("no thread to extend the leases of locks, which will end by themselves: %s", why)

    def forget(self, lease: Tended) -> None:
        """Stop looking after *lease*; the thread notices by itself when one has ended."""
        if due(lease) != NEVER:
            self._inbox.append((ref(lease), False))

    def tends(self, keeper: object) -> bool:
        """Return whether this watchdog looks after leases of *keeper*."""
        return any(belongs_to(lease, keeper) for lease in self._all())

    def _all(self) -> Iterator[Tended]:
        """Return what the thread looks after, or is about to."""
        # The inbox first: a lease is put on the agenda before its message is removed from the inbox.
        coming = [lease for key, added in self._inbox.copy() if added and (lease := key()) is not None]
        return (lease for lease in (*coming, *self._agenda) if due(lease) != NEVER)

    def rest(self) -> None:
        """End the thread now if there is no lease; otherwise the thread ends a while after the last lease."""
        self._resting = True
        self._bell.ring()
        if not any(self._all()):  # otherwise the thread goes on, and joining it would be in vain
            self._thread.join(1.0)

    def stop(self) -> None:
        """End the thread soon, whatever leases there are: they end by themselves."""
        self._stopped = True
        self._bell.ring()

    def apart(self, function: Callable[[], object]) -> bool:
        """If the calling thread is the watchdog's own, let another one call *function*; return whether it is."""
        if not self._thread.here:
            return False
        self._errands.run(function)
        return True

    def _busy(self) -> bool:
        return bool(self._inbox or self._agenda) and not self._stopped

    def _run(self) -> None:
        self._resting, idle = False, self._clock()
        while not self._stopped:
            release_abandoned()
            note_drops()
            self._read_inbox()
            if self._tend(self._agenda.take(self._clock())):
                continue
            now = self._clock()
            if self._agenda:
                self._resting, idle = False, now
            elif not self._inbox and (self._resting or now - idle > LINGER):
                return
            self._wake_at = min(now + TICK, self._agenda.next())
            if not self._inbox:  # a message that comes now rings if its lease is due earlier
                self._bell.wait(self._wake_at - now)
            self._wake_at = NEVER

    def _read_inbox(self) -> None:
        while self._inbox:
            key, added = self._inbox[0]
            lease = key()
            if lease is not None:
                (self._agenda.add if added else self._agenda.drop)(lease)
            self._inbox.popleft()

    def _tend(self, leases: list[Tended]) -> bool:
        """
        Extend leases, in a separate function, so that no local variable keeps one alive while the thread sleeps.

        Silent nodes block the thread for a node timeout, in which leases of other managers may become due. So the rest
        then waits for the next turn. The shortest leases come first, and chores after leases; what was slow the last
        time comes last, each in its turn.
        """
        try:
            work = work_in(leases)

            def turn(who: Any) -> tuple[float, float]:
                return self._slow.get(who, 0.0), min(slack(each) or NEVER for each in work[who])

            for who in sorted(work, key=turn):
                if self._carry_out(who, work[who]):
                    break
        except BaseException:  # a signal's receiver may even call sys.exit(), which must not end this thread
            log.exception("looking after the leases of %d locks failed", len(leases))
        self._read_inbox()  # leases that were forgotten meanwhile are not put back
        for lease in leases:
            self._agenda.put_back(lease)
        return bool(leases)

    def _carry_out(self, who: Any, leases: list[Any]) -> bool:
        """Extend leases of one manager, or do a chore; return whether that was slow."""
        began = self._clock()
        self._slow.pop(who, None)
        try:
            carry_out(who, leases)
        except Exception:  # an error with some leases must not end the renewal of the others
            log.exception("extending the leases of %d locks failed", len(leases))
        slow = self._clock() - began > SLOW
        if slow:
            self._slow[who] = began
        return slow


class AsyncWatchdog:
    """
    A timer that looks after all leases of an event loop, and a task while some are extended; neither exists when idle.

    A second timer always follows the first. An exception from a signal handler may end a callback before its first
    line, or make the event loop lose a timer that it has just taken.
    """

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._clock = clock
        self._agenda = Agenda()
        self._timers: tuple[asyncio.TimerHandle, ...] = ()
        self._task: asyncio.Task[None] | None = None
        self._wake_at = NEVER

    def watch(self, lease: Tended) -> None:
        """Look after *lease* until it ends."""
        if self._agenda.add(lease) < self._wake_at:
            self._set_timers()

    def forget(self, lease: Tended) -> None:
        """Stop looking after *lease*, which has ended."""
        self._agenda.drop(lease)

    def tends(self, keeper: object) -> bool:
        """Return whether this watchdog looks after leases of *keeper*."""
        return any(belongs_to(lease, keeper) for lease in self._agenda)

    def rest(self) -> None:
        """Drop the timers if there is no lease; otherwise the timers end when they find none."""
        if not self._agenda:
            self._wake_at = NEVER
            self._drop_timers(self._timers)

    def apart(self, function: Callable[[], object]) -> bool:
        """Return False: callbacks of an asyncio lease run in its event loop."""
        return False

    def _set_timers(self, earliest: float = 0.0) -> None:
        loop, before, now = asyncio.get_running_loop(), self._timers, self._clock()
        wake_at = max(now + earliest, min(now + TICK, self._agenda.next()))
        left = max(0.0, wake_at - now)
        self._timers = (loop.call_later(left, self._look), loop.call_later(left + TICK, self._look))
        self._wake_at = wake_at
        self._drop_timers(before)

    def _drop_timers(self, timers: tuple[asyncio.TimerHandle, ...]) -> None:
        for timer in timers:
            timer.cancel()

    def _look(self) -> None:
        """Extend the leases that are due, and set the timers for the next ones, if there are any."""
        if self._task is not None and not self._task.done():
            self._set_timers(TICK)
            self._wake_at = 0.0  # a new lease must not set an earlier timer
            return
        release_abandoned()
        note_drops()
        leases = self._agenda.take(self._clock())
        if leases:
            self._task = asyncio.get_running_loop().create_task(self._tend(leases), name="django_redlock watchdog")
            self._task.add_done_callback(self._tended)
            self._set_timers(TICK)
            self._wake_at = 0.0  # no other timer is needed before these leases are done
        elif self._agenda:
            self._set_timers()
        else:
            self.rest()

    def _tended(self, task: asyncio.Task[None]) -> None:
        self._task, self._wake_at = None, NEVER
        failed = None if task.cancelled() else task.exception()
        if failed is not None:
            log.error("looking after the leases of locks failed", exc_info=failed)
        if failed is None and not task.cancelled():
            self._look()
        elif self._agenda:
            # As a rule the loop is about to end, and a new task would be left over; a timer does no harm.
            self._set_timers(TICK)

    async def _tend(self, leases: list[Tended]) -> None:
        async def extend(who: Any, some: list[Any]) -> None:
            try:
                await acarry_out(who, some)
            except Exception:
                log.exception("extending the leases of %d locks failed", len(some))

        try:
            await asyncio.gather(*(extend(who, some) for who, some in work_in(leases).items()))
        finally:
            for lease in leases:
                self._agenda.put_back(lease)


watchdog = Watchdog()
"""The watchdog of this process."""

process.starts += [watchdog.start_over, forget_threads]


@atexit.register
def _end_threads() -> None:
    """End the threads of the operating system under gevent, after the managers have been closed."""
    if threads().greenlets:
        watchdog.stop()
        join_threads(LAST_WORK)


_per_loop = PerLoop(AsyncWatchdog)


def loop_watchdog() -> AsyncWatchdog:
    """Return the watchdog of the running event loop."""
    return _per_loop.get()


class Drop(ref[Any]):
    """
    A weak reference that notices when a lease is dropped without a release.

    The callback is a C function rather than a ``__del__``, in which an exception from a signal handler would be
    swallowed.
    """

    __slots__ = ("clock", "ends", "hold", "release")
    hold: Any
    clock: Clock
    ends: deque[float]
    release: bool


unreleased: dict[HoldState, Drop] = {}  # keeps alive the drops of leases that have not been released
drops: deque[Drop] = deque()  # the drops whose leases are gone; see note_drops()


def watch_drop(lease: object, hold: HoldState, clock: Clock, ends: deque[float], release: bool = False) -> None:
    """
    Notice the drop of a lease; :func:`note_drops` then adds the end of its lock, by *clock*, to *ends*.

    With *release*, dropping the lease is a way to release it: that is done in the background.
    """
    drop = Drop(lease, drops.append)
    drop.hold, drop.clock, drop.ends, drop.release = hold, clock, ends, release
    unreleased[hold] = drop


def note_drops() -> None:
    """Release or report the leases that were dropped; the watchdogs and :mod:`.presence` call this."""
    with suppress(IndexError):
        for drop in iter(drops.popleft, None):
            unreleased.pop(drop.hold, None)
            if drop.release:
                drop.hold.depth = 1  # nobody is left to leave it
                drop.hold.abandon()
                continue
            left = drop.hold.remaining(drop.clock())
            if left and not drop.hold.ended and not exiting():
                drop.ends.append(drop.hold.deadline)
                warn_of_drop(named(drop.hold.names), left)


def warn_of_drop(name: str, left: float) -> None:
    """Warn about one dropped lease; if a filter turns the warning into an error, log it instead."""
    message = (
        f"Lock {name!r} was dropped without a release. Nobody renews it, and it stays taken for another {left:.1f} s. "
        "Keep the lease until release(), or use a with block."
    )
    try:
        warnings.warn(message, ResourceWarning, stacklevel=2)
    except ResourceWarning:
        log.error("%s", message)


# A forked child does not have the leases of its parent.
process.starts += [unreleased.clear, drops.clear]


@dataclass(frozen=True, slots=True)
class Runtime:
    """
    The clocks, pauses and watchdogs that a manager and its leases use; a simulation passes others.

    Attributes:
        clock: Returns seconds on a steady clock, which leases are measured by.
        wall: Returns the time of day, in seconds since the epoch.
        random: Returns a number from 0 to 1, for the pauses between attempts.
        sleep: Blocks the calling thread for a number of seconds.
        asleep: Suspends an asyncio task for a number of seconds.
        watchdog: Looks after the leases of threads.
        loop_watchdog: Returns what looks after the leases of the running event loop.
    """

    clock: Clock = steady
    wall: Callable[[], float] = time.time
    random: Callable[[], float] = random.random
    sleep: Callable[[float], None] = time.sleep
    asleep: Callable[[float], Coroutine[Any, Any, None]] = asyncio.sleep
    watchdog: Dog = watchdog
    loop_watchdog: Callable[[], Dog] = loop_watchdog

    def instant(self) -> Instant:
        """Read the clocks."""
        return Instant(self.clock(), int(self.wall() * 1_000_000))


REAL = Runtime()
