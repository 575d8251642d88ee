"""The servers and the locks of every group of rows, and the taking of times."""

import asyncio
import gc
import multiprocessing
import selectors
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import django
from django.conf import settings

if TYPE_CHECKING:  # another version of the package may be under test
    from django_redlock import LockManager
    from django_redlock.testing import Servers

TTL = 30.0  # seconds, for every contender


@dataclass(frozen=True, slots=True)
class Bench:
    """One run."""

    servers: "Servers"
    quick: bool

    def rounds(self, full: int) -> int:
        """Return how often to repeat a measurement: in a quick run a tenth as often."""
        return max(3, full // 10) if self.quick else full

    def urls(self, nodes: int) -> list[str]:
        return list(self.servers.urls)[:nodes]


def set_up() -> None:
    """Make this process a Django project."""
    settings.configure(
        SECRET_KEY="for benchmarks only",
        USE_TZ=True,
        INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "django_redlock"],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        REDLOCK={},
    )
    django.setup()


def ours(alias: str, urls: list[str], *, prefix: str = "", **options: Any) -> "LockManager":
    """Return the locks of an alias of ``REDLOCK`` made of these servers, which vote at once after their start."""
    from django_redlock import locks

    if alias not in settings.REDLOCK:
        options = {"ttl": TTL, "restart_guard": False, **options}
        settings.REDLOCK[alias] = {"NODES": urls, "KEY_PREFIX": prefix or alias, "OPTIONS": options}
    return locks[alias]


def manager_of(urls: list[str]) -> "LockManager":
    """Return our locks over these servers; the same object every time, so that only the servers make a difference."""
    return ours(f"on-{len(urls)}-{urls[0].rpartition(':')[2]}", urls)


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to be timed."""

    name: str
    once: Callable[[], object]


@dataclass(slots=True)
class Times:
    """The times of one contender in seconds: wall time of each call, CPU time of this process per call of a batch."""

    walls: list[float] = field(default_factory=list)
    cpus: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.walls)

    @property
    def p95(self) -> float:
        """The wall time that 95 of 100 calls did not exceed."""
        return sorted(self.walls)[len(self.walls) * 95 // 100]

    @property
    def cpu(self) -> float:
        """The median of the CPU time of a call; it includes the threads that a contender uses."""
        return statistics.median(self.cpus)


def interleave(contenders: Sequence[Contender], rounds: int, batch: int = 10) -> dict[str, Times]:
    """Time the contenders A B C A B C and so on, so that other load on the machine affects all of them alike."""
    times = {contender.name: Times() for contender in contenders}
    for contender in contenders:
        take_turn(contender, Times(), batch)
    for _ in range(rounds):
        for contender in contenders:
            take_turn(contender, times[contender.name], batch)
    return times


def take_turn(contender: Contender, times: Times, batch: int) -> None:
    """Time *batch* calls of a contender."""
    once, walls, clock = contender.once, times.walls, time.perf_counter
    gc.collect(0)
    cpu = time.process_time()
    for _ in range(batch):
        start = clock()
        once()
        walls.append(clock() - start)
    times.cpus.append((time.process_time() - cpu) / batch)


@contextmanager
def at_a_distance(urls: list[str], round_trip: float) -> Iterator[list[str]]:
    """Put a proxy before each server, all of them in a child, so that they take no time from the measurement."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there, urls, round_trip), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        here.send("end")
        process.join(10)


def serve(pipe: Connection, urls: list[str], round_trip: float) -> None:
    """Hold every byte back, in both directions."""
    from django_redlock.testing import FaultProxy

    sys.setswitchinterval(0.001)  # two threads of this process take turns for every byte
    # An event loop that waits with ``select`` has a timeout in microseconds, and not in milliseconds.
    asyncio.new_event_loop = lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(url)) for url in urls]
        for proxy in proxies:
            proxy.delay(round_trip / 2)
        pipe.send([proxy.url for proxy in proxies])
        pipe.recv()
