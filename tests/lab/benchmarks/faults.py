"""
Two of five nodes fail in some way, or too many do: what the caller notices.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

from django_redlock import LockManager, QuorumUnavailableError

from .bench import Bench, ours
from .measure import Contender, Times, interleave
from .proxies import proxies
from .report import Figure, Section, Target

PHASES = 4  # healthy, faulty, healthy, faulty ...
SLOW = 0.05  # seconds more for a round trip
FAR = 0.002  # seconds of a round trip to a distant server
NODE_TIMEOUT = 0.25  # seconds: the default


def run(bench: Bench) -> Iterator[Section]:
    """Measure each fault beside healthy nodes, then too many faults, then a long distance."""
    yield from _two_of_five(bench)
    yield _no_quorum(bench)
    yield _far_away(bench)


Switch = Callable[[], object]


def _two_of_five(bench: Bench) -> Iterator[Section]:
    near, behind = bench.urls(3), bench.urls(5)[3:]
    victims = bench.servers[3:]
    with proxies(behind) as network:
        direct, relayed = ours("faults", [*near, *behind]), ours("faults-relayed", [*near, *network.urls])

        def each(method: str) -> Switch:
            return lambda: [getattr(server, method)() for server in victims]

        yield _fault(bench, "refused", direct, each("kill"), each("start"))
        yield _fault(bench, "frozen", direct, each("freeze"), each("thaw"))
        yield _fault(bench, "slow", relayed, lambda: network.tell("delay", SLOW / 2), lambda: network.tell("heal"))
        yield _fault(
            bench, "resetting", relayed, lambda: None, lambda: None, lambda: network.tell("reset")
        )  # fmt: skip


def _fault(
    bench: Bench, name: str, manager: LockManager, begin: Switch, end: Switch, again: Switch | None = None
) -> Section:
    """Time locks with and without a fault; *again* repeats the fault before every turn, untimed."""
    section = Section(f"fault-{name}", f"acquire + release, N = 5, two nodes {name}")
    healthy, faulty = Times(), Times()
    before = set(threading.enumerate())
    for _ in range(PHASES):
        _time(manager, healthy, bench.rounds(25), None)
        begin()
        _time(manager, faulty, bench.rounds(25), again)
        end()
        time.sleep(0.3)  # nodes that failed are not contacted for a while
    left = _threads_since(before)
    section.figures = [_figure("healthy", healthy), _figure(f"two {name}", faulty)]
    ratio = faulty.median / healthy.median
    section.targets.append(Target("median against healthy", ratio, 1.2))
    section.targets.append(Target(f"worst of {len(faulty.walls):,}", faulty.worst * 1000, NODE_TIMEOUT * 1000, "ms"))
    section.targets.append(Target("threads left behind", left, 1, "(the watchdog)"))
    return section


def _threads_since(before: set[threading.Thread]) -> int:
    """Return how many threads have been started and still run; those that connect to a node have time to end."""
    patience = time.monotonic() + 5
    while len(left := set(threading.enumerate()) - before) > 1 and time.monotonic() < patience:
        time.sleep(0.05)
    return len(left)


def _time(manager: LockManager, times: Times, turns: int, before: Switch | None) -> None:
    def once() -> None:
        manager.lock("fault", wait=0).acquire().release()

    for _ in range(turns):
        if before:
            before()
        took = interleave([Contender("", once)], 1, warm_up=0)[""]  # the first calls after a fault matter most
        times.walls += took.walls
        times.cpus += took.cpus


def _figure(name: str, times: Times) -> Figure:
    return Figure(name, times.median * 1e6, "µs", {"p95": times.percentile(95) * 1e6, "worst": times.worst * 1e6})


def _no_quorum(bench: Bench) -> Section:
    section = Section("no-quorum", "three of five nodes frozen: time until the error")
    manager = ours("no-quorum", bench.urls(5))
    manager.lock("fine", wait=0).acquire().release()
    times = Times()
    with ExitStack() as stack:
        for server in bench.servers[:3]:
            server.freeze()
            stack.callback(server.thaw)
        for _ in range(bench.rounds(20, 5)):
            times.walls.append(_until_error(manager))
    section.figures = [Figure("QuorumUnavailableError", times.median * 1e3, "ms", {"worst": times.worst * 1e3})]
    section.targets = [Target("time until the error", times.worst * 1e3, NODE_TIMEOUT * 1e3 + 10, "ms")]
    return section


def _until_error(manager: LockManager) -> float:
    start = time.perf_counter()
    try:
        manager.lock("none", wait=0).acquire()
    except QuorumUnavailableError:
        return time.perf_counter() - start
    raise AssertionError("a lock was granted by two of five nodes")


def _far_away(bench: Bench) -> Section:
    section = Section("distance", f"acquire + release, N = 5, {FAR * 1000:.0f} ms away, in round trips")
    with proxies(bench.urls(5)) as network:
        manager = ours("far", network.urls)
        manager.lock("far", wait=0).acquire().release()
        network.tell("delay", FAR / 2)
        one = ours("far-one", network.urls[:1])
        once = [
            Contender("round trip", lambda: one.survey(slugs=("{none}",))),
            Contender("acquire + release", lambda: manager.lock("far", wait=0).acquire().release()),
        ]
        times = interleave(once, bench.rounds(30, 10))
    trips = times["acquire + release"].median / times["round trip"].median
    section.figures = [Figure(name, each.median * 1e3, "ms") for name, each in times.items()]
    section.targets = [Target("round trips, release awaited", trips, 2.7, "")]
    return section
