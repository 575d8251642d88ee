"""
Take times: contenders take turns, many times, so that other load on the machine affects all of them alike.
"""

import asyncio
import gc
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

BATCH = 10  # calls in a row, so that caches are as warm as in a loop
WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Contender:
    """
    Something to be timed.

    Args:
        name: Its name in the tables.
        once: Does the work once.
        share: Share of the rounds in which it takes part, for contenders that are very slow.
    """

    name: str
    once: Callable[[], object]
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class AsyncContender:
    """The same for an event loop."""

    name: str
    once: Callable[[], Awaitable[object]]
    share: float = 1.0


@dataclass(slots=True)
class Times:
    """The times of one contender in seconds: wall time of each call, CPU time of this process per batch."""

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """The median of the wall times, in seconds."""
        return statistics.median(self.walls)

    @property
    def cpu(self) -> float:
        """The median of the CPU time of a call, in seconds; it includes the threads that a contender uses."""
        return statistics.median(self.cpus) if self.cpus else 0.0

    @property
    def worst(self) -> float:
        """The longest wall time, in seconds."""
        return max(self.walls)

    def percentile(self, percent: int) -> float:
        """Return the wall time, in seconds, that the given percentage of the calls did not exceed."""
        return percentile(self.walls, percent)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return the value that the given percentage of *values* does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def interleave(
    contenders: Sequence[Contender], rounds: int, batch: int = BATCH, warm_up: int = WARM_UP
) -> dict[str, Times]:
    """
    Time the contenders A B C A B C and so on.

    Args:
        contenders: What to time.
        rounds: How many turns each contender gets.
        batch: Calls per turn.
        warm_up: Calls of each contender before the first one that counts.
    """
    times = {contender.name: Times() for contender in contenders}
    for contender in contenders:
        for _ in range(warm_up):
            contender.once()
    for turn in range(rounds):
        for contender in contenders:
            if takes_part(contender.share, turn):
                _take_turn(contender, times[contender.name], batch)
    return times


def _take_turn(contender: Contender, times: Times, batch: int) -> None:
    once, walls, clock = contender.once, times.walls, time.perf_counter
    gc.collect(0)
    cpu = time.process_time()
    for _ in range(batch):
        start = clock()
        once()
        walls.append(clock() - start)
    times.cpus.append((time.process_time() - cpu) / batch)


async def ainterleave(contenders: Sequence[AsyncContender], rounds: int, batch: int = BATCH) -> dict[str, Times]:
    """Do what :func:`interleave` does in the running event loop."""
    times = {contender.name: Times() for contender in contenders}
    for contender in contenders:
        for _ in range(WARM_UP):
            await contender.once()
    for turn in range(rounds):
        for contender in contenders:
            if takes_part(contender.share, turn):
                await _atake_turn(contender, times[contender.name], batch)
    return times


async def _atake_turn(contender: AsyncContender, times: Times, batch: int) -> None:
    once, walls, clock = contender.once, times.walls, time.perf_counter
    gc.collect(0)
    cpu = time.process_time()
    for _ in range(batch):
        start = clock()
        await once()
        walls.append(clock() - start)
    times.cpus.append((time.process_time() - cpu) / batch)


def takes_part(share: float, turn: int) -> bool:
    """Return whether a contender with this share of the rounds takes part in this one; all do in the first."""
    return int(turn * share) != int((turn - 1) * share) or turn == 0


async def per_second(once: Sequence[Callable[[], Awaitable[object]]], times: int) -> float:
    """
    Return how many calls per second the given number of tasks make together; each calls its own function *times* times.
    """

    async def repeat(function: Callable[[], Awaitable[object]]) -> None:
        for _ in range(times):
            await function()

    await asyncio.gather(*(repeat(function) for function in once))
    start = time.perf_counter()
    await asyncio.gather(*(repeat(function) for function in once))
    return len(once) * times / (time.perf_counter() - start)
