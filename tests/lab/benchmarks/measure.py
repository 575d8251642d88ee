"""Take times: contenders take turns, many times, so that other load on the machine affects all of them alike."""

import asyncio
import gc
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be timed."""

    name: str
    once: Callable[[], Any]
    share: float = 1.0
    loop: asyncio.AbstractEventLoop | None = None


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

    def percentile(self, percent: int) -> float:
        """Return the wall time, in seconds, that the given percentage of the calls did not exceed."""
        ordered = sorted(self.walls)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def interleave(contenders: Sequence[Contender], rounds: int, batch: int = 10, warm_up: int = 5) -> dict[str, Times]:
    """Time the contenders A B C A B C and so on."""
    times = {contender.name: Times() for contender in contenders}
    for contender in contenders:
        _take_turn(contender, Times(), warm_up)
    for turn in range(rounds):
        for contender in contenders:
            if turn == 0 or int(turn * contender.share) != int((turn - 1) * contender.share):
                _take_turn(contender, times[contender.name], batch)
    return times


def _take_turn(contender: Contender, times: Times, batch: int) -> None:
    once, walls, clock = contender.once, times.walls, time.perf_counter

    async def in_the_loop() -> None:
        for _ in range(batch):
            start = clock()
            await once()
            walls.append(clock() - start)

    gc.collect(0)
    cpu = time.process_time()
    if contender.loop:
        contender.loop.run_until_complete(in_the_loop())
    else:
        for _ in range(batch):
            start = clock()
            once()
            walls.append(clock() - start)
    times.cpus.append((time.process_time() - cpu) / max(batch, 1))


def threads_per_second(once: Callable[[str], object], threads: int, times: int) -> float:
    """Return how often per second so many threads, with a name each, do something."""
    ready = threading.Barrier(threads + 1)

    def work(name: str) -> None:
        once(name)
        ready.wait()
        for _ in range(times):
            once(name)

    running = [threading.Thread(target=work, args=(f"thread:{number}",)) for number in range(threads)]
    for thread in running:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in running:
        thread.join()
    return threads * times / (time.perf_counter() - start)


async def tasks_per_second(once: Callable[[str], Awaitable[object]], tasks: int, times: int) -> float:
    """Return how often per second so many tasks of one event loop, with a name each, do something."""

    async def repeat(name: str) -> None:
        for _ in range(times):
            await once(name)

    names = [f"task:{number}" for number in range(tasks)]
    await asyncio.gather(*(repeat(name) for name in names))
    start = time.perf_counter()
    await asyncio.gather(*(repeat(name) for name in names))
    return tasks * times / (time.perf_counter() - start)
