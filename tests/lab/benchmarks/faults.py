"""Two of five nodes fail in some way, or too many do: what the caller notices."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from django_redlock import LockManager, QuorumUnavailableError

from .bench import Bench, ours, proxies
from .measure import Times
from .report import Section

PHASES = 4  # healthy, faulty, healthy, faulty ...
SLOW = 0.05  # seconds more for a round trip
NODE_TIMEOUT = 0.25  # seconds: the default

Switch = Callable[[], object]


def run(bench: Bench) -> Iterator[Section]:
    """Measure each fault beside healthy nodes, then too many faults."""
    near, behind, victims = bench.urls(3), bench.urls(5)[3:], bench.servers[3:]
    with proxies(behind) as network:
        direct, relayed = ours("faults", [*near, *behind]), ours("faults-relayed", [*near, *network.urls])

        def all_victims(method: str) -> Switch:
            return lambda: [getattr(server, method)() for server in victims]

        yield _fault(bench, "refused", direct, all_victims("kill"), all_victims("start"))
        yield _fault(bench, "frozen", direct, all_victims("freeze"), all_victims("thaw"))
        yield _fault(bench, "slow", relayed, lambda: network.tell("delay", SLOW / 2), lambda: network.tell("heal"))
        yield _fault(bench, "resetting", relayed, again=lambda: network.tell("reset"))
    yield _no_quorum(bench)


def _nothing() -> None:
    pass


def _fault(
    bench: Bench,
    name: str,
    manager: LockManager,
    begin: Switch = _nothing,
    end: Switch = _nothing,
    again: Switch = _nothing,
) -> Section:
    """Time locks with and without a fault; *again* repeats the fault before every turn, untimed."""
    section = Section(f"fault-{name}", f"acquire + release, N = 5, two nodes {name}")
    healthy, faulty, before = Times(), Times(), threading.active_count()
    for _ in range(PHASES):
        _time(manager, healthy, bench.rounds(25), _nothing)
        begin()
        _time(manager, faulty, bench.rounds(25), again)
        end()
        time.sleep(0.3)  # nodes that failed are not contacted for a while
    patience = time.monotonic() + 5  # threads that connect to a node have time to end
    while threading.active_count() > before + 1 and time.monotonic() < patience:
        time.sleep(0.05)
    section.add_times({"healthy": healthy, f"two {name}": faulty})
    section.compare("healthy", 1.2, ours=f"two {name}")
    section.add(f"worst of {len(faulty.walls):,}", max(faulty.walls) * 1e3, "ms", NODE_TIMEOUT * 1e3)
    section.add("threads left behind, with the watchdog", threading.active_count() - before, limit=1)
    return section


def _time(manager: LockManager, times: Times, turns: int, before: Switch) -> None:
    for _ in range(turns):
        before()
        cpu = time.process_time()
        for _ in range(10):
            start = time.perf_counter()
            manager.lock("fault", wait=0).acquire().release()
            times.walls.append(time.perf_counter() - start)
        times.cpus.append((time.process_time() - cpu) / 10)


def _no_quorum(bench: Bench) -> Section:
    section = Section("no-quorum", "three of five nodes frozen: time until the error")
    manager, times = ours("no-quorum", bench.urls(5)), Times()
    manager.lock("fine", wait=0).acquire().release()
    with ExitStack() as stack:
        for server in bench.servers[:3]:
            server.freeze()
            stack.callback(server.thaw)
        for _ in range(bench.rounds(20, 5)):
            start = time.perf_counter()
            try:
                manager.lock("none", wait=0).acquire()
            except QuorumUnavailableError:
                times.walls.append(time.perf_counter() - start)
            else:
                raise AssertionError("a lock was granted by two of five nodes")
    section.add_times({"QuorumUnavailableError": times}, "ms")
    section.add("the longest of them", max(times.walls) * 1e3, "ms", NODE_TIMEOUT * 1e3 + 10)
    return section
