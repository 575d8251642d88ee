"""
Keep held leases alive, and tell their holders when they ended.

One thread per process and one timer per event loop look after all leases, whatever their number; those that are due
at about the same time are extended in one round. Lateness is normal (a busy interpreter delays any thread), so
nothing here decides whether a lease is valid: that, a lease asks its clock. A lease that its holder dropped without
a release is no longer looked after and ends by itself.
"""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from .forks import process
from .loops import PerLoop
from .nodes import green
from .nodes.gather import steady

LINGER = 5.0  # seconds for which the thread waits for a next lease before it ends
TICK = 1.0  # seconds between two looks at most, so that a new lease seldom has to wake the thread
NEVER = float("inf")

log = logging.getLogger("django_redlock")


class Keeper(Protocol):
    """Who extends leases."""

    def extend(self, leases: Any) -> int:
        """Extend leases; may block for one node timeout for each hundred of them."""

    async def aextend(self, leases: Any) -> int:
        """The same without blocking."""


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
    """Which leases are due when. Keeps none of them alive."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._leases: WeakKeyDictionary[Tended, int] = WeakKeyDictionary()  # with the newest entry of each
        self._heap: list[tuple[float, int, ref[Tended]]] = []

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Tended]:
        return iter(self._leases)

    def add(self, lease: Tended) -> float:
        """Put a lease on the agenda, or in its new place; returns when it is due, infinity if it has ended."""
        when = lease.due()
        if when == NEVER:
            self.drop(lease)
        else:
            number = self._leases[lease] = next(self._numbers)
            heapq.heappush(self._heap, (when, number, ref(lease)))
            self._tidy()
        return when

    def put_back(self, lease: Tended) -> None:
        """Add a lease that was taken, unless it has been dropped meanwhile."""
        if lease in self._leases:
            self.add(lease)

    def drop(self, lease: Tended) -> None:
        """Take a lease off."""
        self._leases.pop(lease, None)
        self._tidy()

    def next(self) -> float:
        """Return when something is due; infinity if there is nothing."""
        return self._heap[0][0] if self._heap else NEVER

    def take(self, now: float) -> list[Tended]:
        """Return the leases that are due by now, and with them those that soon will be; each is to be put back."""
        due: list[Tended] = []
        while self._heap:
            when, number, found = self._heap[0]
            lease = found()
            if when > now and not (due and lease and when - lease.slack <= now):
                break
            heapq.heappop(self._heap)
            if lease is None or self._leases.get(lease) != number:
                continue
            if lease.due() <= max(now, when):
                due.append(lease)
            else:
                self.add(lease)
        return due

    def _tidy(self) -> None:
        """Drop the entries of leases that are gone or have a newer one, if they have piled up until they are due."""
        if len(self._heap) > 64 and len(self._heap) > 2 * len(self._leases) + 64:
            self._heap = [entry for entry in self._heap if self._newest(entry)]
            heapq.heapify(self._heap)

    def _newest(self, entry: tuple[float, int, "ref[Tended]"]) -> bool:
        lease = entry[2]()
        return lease is not None and self._leases.get(lease) == entry[1]


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

    Args:
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._clock = clock
        self.start_over()

    def start_over(self) -> None:
        """Look after nothing; in a forked child, where the thread did not survive and no lease is ours."""
        self._agenda = Agenda()
        self._changed = green.condition()
        self._thread: Any = None
        self._wake_at = 0.0

    def watch(self, lease: Tended) -> None:
        """Look after *lease* until it ends; starts the thread if there is none."""
        with self._changed:
            when = self._agenda.add(lease)
            if self._thread is None or not self._thread.is_alive():
                self._start()
            elif when < self._wake_at:
                self._changed.notify()

    def _start(self) -> None:
        """Start the thread; without one, leases end by themselves, and the next one tries again."""
        # A greenlet would not get its turn while a task computes.
        self._thread = green.thread(self._run, "django_redlock watchdog")
        try:
            self._thread.start()
        except RuntimeError as error:  # there are too many, or the interpreter is about to end
            self._thread = None
            log.error("no thread to extend leases, which will end by themselves: %s", error)

    def forget(self, lease: Tended) -> None:
        """Stop looking after *lease*, which has ended."""
        with self._changed:
            self._agenda.drop(lease)

    def tends(self, keeper: Keeper) -> bool:
        """Return whether it looks after leases of *keeper*."""
        with self._changed:
            return any(lease.keeper is keeper for lease in self._agenda)

    def rest(self) -> None:
        """End the thread now if there is nothing to look after; otherwise it ends a while after the last lease."""
        with self._changed:
            thread = self._thread
            if thread is None or self._agenda:
                return
            self._thread = None
            self._changed.notify()
        if thread.ident != green.real_ident():
            thread.join(1.0)

    def _run(self) -> None:
        while self._tend(self._sleep()):
            pass

    def _tend(self, leases: list[Tended] | None) -> bool:
        """Look after leases; a function of its own, so that none of them is kept alive while the thread sleeps."""
        try:
            for keeper, some in by_keeper(leases or ()).items():
                try:
                    keeper.extend(some)
                except Exception:  # whatever goes wrong with some must not end the watch over the others
                    log.exception("extending %d leases failed", len(some))
        except BaseException:  # a callback that is told of a loss may even call sys.exit(), which ends no process here
            log.exception("looking after %d leases failed", len(leases or ()))
        with self._changed:
            for lease in leases or ():
                self._agenda.put_back(lease)
        return leases is not None

    def _sleep(self) -> list[Tended] | None:
        """Sleep until leases are due; returns them, or None when there has been none for a while."""
        with self._changed:
            idle = self._clock()  # since when there has been nothing to look after
            while not (due := self._agenda.take(self._clock())):
                now = self._clock()
                idle = now if len(self._agenda) else idle
                # Told to rest, and perhaps replaced since.
                if self._thread is None or self._thread.ident != green.real_ident():
                    return None
                if now - idle > LINGER:
                    self._thread = None
                    return None
                self._wake_at = min(now + TICK, self._agenda.next())
                self._changed.wait(max(0.0, self._wake_at - now))
            return due


class AsyncWatchdog:
    """A timer that looks after all leases of an event loop, and a task while some are extended; none when idle."""

    def __init__(self, clock: Callable[[], float] = steady) -> None:
        self._clock = clock
        self._agenda = Agenda()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._wake_at = NEVER

    def watch(self, lease: Tended) -> None:
        """Look after *lease* until it ends."""
        if self._agenda.add(lease) < self._wake_at:
            self._set_timer()

    def forget(self, lease: Tended) -> None:
        """Stop looking after *lease*, which has ended."""
        self._agenda.drop(lease)

    def tends(self, keeper: Keeper) -> bool:
        """Return whether it looks after leases of *keeper*."""
        return any(lease.keeper is keeper for lease in self._agenda)

    def rest(self) -> None:
        """Drop the timer if there is nothing to look after; otherwise it goes when it has found nothing."""
        if self._timer is not None and not self._agenda:
            self._timer.cancel()
            self._timer, self._wake_at = None, NEVER

    def _set_timer(self, earliest: float = 0.0) -> None:
        if self._timer is not None:
            self._timer.cancel()
        now = self._clock()
        self._wake_at = max(now + earliest, min(now + TICK, self._agenda.next()))
        self._timer = asyncio.get_running_loop().call_later(max(0.0, self._wake_at - now), self._look)

    def _look(self) -> None:
        """See what is due; look again when something may be, unless there is nothing to look after."""
        self._timer = None
        leases = self._agenda.take(self._clock())
        if leases:
            self._wake_at = 0.0  # no timer until these are done with
            self._task = asyncio.get_running_loop().create_task(self._tend(leases), name="django_redlock watchdog")
            self._task.add_done_callback(self._tended)
        elif self._agenda:
            self._set_timer()
        else:
            self._wake_at = NEVER

    def _tended(self, task: asyncio.Task[None]) -> None:
        self._task, self._wake_at = None, NEVER
        if not task.cancelled():
            self._look()
        elif self._agenda:
            # The loop is about to end, as a rule, and a new task would be left over; but others may have time yet.
            self._set_timer(TICK)

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
