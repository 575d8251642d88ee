"""
Keep held leases alive, and tell their holders when they ended.

One thread per process and one timer per event loop look after all leases, whatever their number; those that are due
at about the same time are extended in one round. Lateness is normal (a busy interpreter delays any thread), so
nothing here decides whether a lease is valid: that, a lease asks its clock. A lease that its holder dropped without
a release is no longer looked after and ends by itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from operator import itemgetter
from typing import Any, Protocol
from weakref import ref

from ..nodes.clock import steady
from ..nodes.gevent import real_lock
from ..nodes.threads import Background, Bell, Errands
from .drops import note_drops
from .per_loop import PerLoop
from .process import process

LINGER = 5.0  # seconds for which the thread waits for a next lease before it ends
TICK = 1.0  # seconds between two looks at most, so that a new lease seldom has to wake the thread
NEVER = float("inf")

log = logging.getLogger("django_redlock")


abandoned: deque[Any] = deque()
"""What was not released when it was left, with a method ``abandon()``; whichever watchdog is first calls it."""


def release_abandoned() -> None:
    """Have what was not released when it was left released in the background."""
    while abandoned:
        with suppress(IndexError):  # another thread was quicker
            abandoned.popleft().abandon()


class Keeper(Protocol):
    """Who extends leases."""

    def extend(self, leases: Any) -> int:
        """Extend leases; may block for one node timeout for each hundred of them."""

    async def aextend(self, leases: Any) -> int:
        """Do what :meth:`extend` does without blocking."""


class Tended(Protocol):
    """What the watchdog looks after."""

    @property
    def keeper(self) -> Keeper:
        """Who extends it."""

    @property
    def renewed(self) -> bool:
        """Whether it is extended; if not, it is told when its time is over."""

    @property
    def slack(self) -> float:
        """By how many seconds it may be looked at early, if others are due: to be extended with them."""

    def due(self) -> float:
        """Return when to look at it next, on the steady clock; infinity when it ended."""

    def valid(self) -> bool:
        """Return whether its time is not over; its holder is told if it is."""


class Agenda:
    """
    Which leases are due when. Keeps none of them alive.

    One dictionary without an order: it is never half changed, whenever an exception arrives, and to look through ten
    thousand leases takes less than a millisecond.
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
        """Put a lease on the agenda, or in its new place; returns when it is due, infinity if it has ended."""
        when = lease.due()
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
        """Take a lease off."""
        self._leases.pop(ref(lease), None)

    def next(self) -> float:
        """Return when something is due; infinity if there is nothing."""
        return min(self._leases.values(), default=NEVER)

    def take(self, now: float) -> list[Tended]:
        """
        Return the leases that are due by now, and with them those that soon will be; each is to be put back.

        If an exception keeps the caller from that, they are due again soon.
        """
        due: list[Tended] = []
        if self.next() > now:
            return due
        for key, when in sorted(self._leases.items(), key=itemgetter(1)):
            lease = key()
            if when > now and not (due and lease and when - lease.slack <= now):
                break
            if lease is None:
                self._leases.pop(key, None)
            elif lease.due() <= max(now, when):
                self._leases[key] = now + TICK
                due.append(lease)
            else:
                self.add(lease)
        return due

    def _goes_on(self, key: "ref[Tended]") -> bool:
        """Return whether a lease has neither been dropped nor ended; forget it if it has."""
        lease = key()
        if lease is None or lease.due() == NEVER:
            self._leases.pop(key, None)
            return False
        return True


def by_keeper(leases: Iterable[Tended]) -> dict[Keeper, list[Tended]]:
    """Return the leases that are to be extended, by who does it, and notice the end of the others."""
    found: dict[Keeper, list[Tended]] = {}
    for lease in leases:
        if lease.valid() and lease.renewed:
            found.setdefault(lease.keeper, []).append(lease)
    return found


class Watchdog:
    """
    One thread that looks after all leases of blocking code in this process.

    It alone changes the agenda. The others send it messages, each by one call into C, because an exception may arrive
    in them at any moment.

    Args:
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._clock = clock
        self._errands = Errands("django_redlock on_lost")
        self.start_over()

    def start_over(self) -> None:
        """Look after nothing; in a forked child, where the thread did not survive and no lease is ours."""
        self._agenda = Agenda()
        self._inbox: deque[tuple[ref[Tended], bool]] = deque()  # what to look after, and what to do so no longer
        self._bell = Bell(real_lock())
        # A greenlet would not get its turn while a task computes.
        self._thread = Background(self._run, self._busy, "django_redlock watchdog", real=True)
        self._wake_at = NEVER  # until when the thread sleeps; while it is awake, every message rings
        self._resting = False
        self._errands.start_over()

    @property
    def running(self) -> bool:
        """Whether there is a thread."""
        return self._thread.running

    def watch(self, lease: Tended) -> None:
        """Look after *lease* until it ends; starts the thread if there is none."""
        self._inbox.append((ref(lease), True))
        if lease.due() < self._wake_at:
            self._bell.ring()
        if why := self._thread.start():
            log.error("no thread to extend leases, which will end by themselves: %s", why)

    def forget(self, lease: Tended) -> None:
        """Stop looking after *lease*; of one that has ended, the thread finds that by itself."""
        if lease.due() != NEVER:
            self._inbox.append((ref(lease), False))

    def tends(self, keeper: Keeper) -> bool:
        """Return whether it looks after leases of *keeper*."""
        # What has just come first: a message is on the agenda before it is taken out of the box.
        coming = [lease for key, added in self._inbox.copy() if added and (lease := key()) is not None]
        return any(lease.keeper is keeper and lease.due() != NEVER for lease in (*coming, *self._agenda))

    def rest(self) -> None:
        """End the thread now if there is nothing to look after; otherwise it ends a while after the last lease."""
        self._resting = True
        self._bell.ring()
        if not self._agenda:
            self._thread.join(1.0)

    def apart(self, function: Callable[[], object]) -> bool:
        """Have another thread call *function*, which may block, if this is the thread that renews; returns whether."""
        if not self._thread.here:
            return False
        self._errands.run(function)
        return True

    def _busy(self) -> bool:
        return bool(self._inbox or self._agenda)

    def _run(self) -> None:
        self._resting, idle = False, self._clock()
        while True:
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
            if not self._inbox:  # what comes from now on rings if it is due before that
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
        """Look after leases; a function of its own, so that none of them is kept alive while the thread sleeps."""
        try:
            for keeper, some in by_keeper(leases).items():
                try:
                    keeper.extend(some)
                except Exception:  # whatever goes wrong with some must not end the watch over the others
                    log.exception("extending %d leases failed", len(some))
        except BaseException:  # a receiver of a signal may even call sys.exit(), which ends no process here
            log.exception("looking after %d leases failed", len(leases))
        self._read_inbox()  # what was forgotten meanwhile is not put back
        for lease in leases:
            self._agenda.put_back(lease)
        return bool(leases)


class AsyncWatchdog:
    """
    A timer that looks after all leases of an event loop, and a task while some are extended; none when idle.

    Behind the timer there is always a second one. An exception from a signal handler may end a callback before its
    first line, or have the event loop itself lose a timer that it has just taken.
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

    def tends(self, keeper: Keeper) -> bool:
        """Return whether it looks after leases of *keeper*."""
        return any(lease.keeper is keeper for lease in self._agenda)

    def rest(self) -> None:
        """Drop the timers if there is nothing to look after; otherwise they go when they have found nothing."""
        if not self._agenda:
            self._wake_at = NEVER
            self._drop_timers(self._timers)

    def apart(self, function: Callable[[], object]) -> bool:
        """Return False: what a lease of asyncio reports, it reports in its event loop."""
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
        """See what is due; look again when something may be, unless there is nothing to look after."""
        if self._task is not None and not self._task.done():
            self._set_timers(TICK)
            self._wake_at = 0.0  # no sooner
            return
        release_abandoned()
        note_drops()
        leases = self._agenda.take(self._clock())
        if leases:
            self._task = asyncio.get_running_loop().create_task(self._tend(leases), name="django_redlock watchdog")
            self._task.add_done_callback(self._tended)
            self._set_timers(TICK)
            self._wake_at = 0.0  # no timer is wanted before these are done with
        elif self._agenda:
            self._set_timers()
        else:
            self.rest()

    def _tended(self, task: asyncio.Task[None]) -> None:
        self._task, self._wake_at = None, NEVER
        failed = None if task.cancelled() else task.exception()
        if failed is not None:
            log.error("looking after leases failed", exc_info=failed)
        if failed is None and not task.cancelled():
            self._look()
        elif self._agenda:
            # The loop is about to end, as a rule, and a new task would be left over; but others may have time yet.
            self._set_timers(TICK)

    async def _tend(self, leases: list[Tended]) -> None:
        try:
            for keeper, some in by_keeper(leases).items():
                try:
                    await keeper.aextend(some)
                except Exception:
                    log.exception("extending %d leases failed", len(some))
        finally:
            for lease in leases:
                self._agenda.put_back(lease)


watchdog = Watchdog()
"""The one of this process."""

process.starts.append(watchdog.start_over)

_per_loop = PerLoop(AsyncWatchdog)


def loop_watchdog() -> AsyncWatchdog:
    """Return the one of the running event loop."""
    return _per_loop.get()
