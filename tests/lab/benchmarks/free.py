"""
A free lock: acquire and release, blocking, beside the floor and comparable libraries.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from . import floors, peers
from .bench import Bench
from .measure import Contender, Times, interleave
from .report import OURS, Figure, Section, Target

SHARES = {"pottery Redlock": 0.2}  # of the rounds: it takes milliseconds
THREADS = 16


def run(bench: Bench) -> Iterator[Section]:
    """Measure 1, 3 and 5 nodes, and many threads on five."""
    for nodes in (1, 3, 5):
        yield section_on(bench, nodes, 200, 40)
    yield _threads(bench)


@contextmanager
def ping(name: str, url: str) -> Iterator[Contender]:
    """Give one round trip over a raw socket."""
    with floors.connect(url) as sock:

        def once() -> None:
            sock.send(b"PING\r\n")
            floors.check(sock.recv(100))

        yield Contender(name, once)


def section_on(bench: Bench, nodes: int, full: int, quick: int) -> Section:
    """Measure all libraries on this number of nodes, in *full* turns or in a quick run in *quick* ones."""
    section = Section(f"free-n{nodes}", f"acquire + release of a free lock, N = {nodes}, blocking")
    urls = bench.urls(nodes)
    plain, same = floors.plain("floor"), floors.same(urls)
    with ExitStack() as stack:
        lowest = [
            stack.enter_context(floors.blocking(floors.PLAIN, urls, plain)),
            stack.enter_context(floors.blocking(floors.SAME, urls, same)),
            stack.enter_context(floors.blocking(floors.SENT, urls, same, wait=False)),
        ]
        times = interleave([*lowest, *_contenders(section, urls, nodes)], bench.rounds(full, quick))
    section.figures = [figure(name, each) for name, each in times.items()]
    _judge(section, nodes, times)
    return section


def _contenders(section: Section, urls: list[str], nodes: int) -> list[Contender]:
    contenders = []
    for name in peers.BLOCKING:
        if name in peers.ON_ONE_NODE and nodes > 1 and name != "redis-py Lock":
            continue
        take = peers.try_blocking(name, urls)
        if isinstance(take, str):
            section.left_out.append(take)
        else:
            shown = f"{name}, on one node" if name in peers.ON_ONE_NODE and nodes > 1 else name
            contenders.append(_contender(shown, take, SHARES.get(name, 1.0)))
    return contenders


def _contender(name: str, take: peers.Taker, share: float) -> Contender:
    def once() -> None:
        take(f"free:{name}")()

    return Contender(name, once, share)


def figure(name: str, times: Times) -> Figure:
    """Return a contender's median with its CPU time, in microseconds."""
    return Figure(name, times.median * 1e6, "µs", {"p95": times.percentile(95) * 1e6, "CPU": times.cpu * 1e6})


def _judge(section: Section, nodes: int, times: dict[str, Times]) -> None:
    same, ours = times[floors.SAME], times[OURS]
    section.compare("against raw sockets with the same scripts", floors.SAME, {1: 2.0, 3: 1.6, 5: 1.35}[nodes])
    if nodes == 1:
        section.compare("against redis-py's Lock", "redis-py Lock", 1.1, floor=floors.SAME)
        section.compare("against python-redis-lock", "python-redis-lock", 0.85, floor=floors.SAME)
    if nodes == 5:
        section.compare("against redis-py's Lock on one node", "redis-py Lock, on one node", 1.2, floor=floors.SAME)
        section.compare("against redlock-py", "redlock-py", 3.5, faster=True, floor=floors.SAME)
        section.compare("against pottery", "pottery Redlock", 10, faster=True, floor=floors.SAME)
        section.targets.append(Target("CPU of the client, against the floor", ours.cpu / same.cpu, 2.0))


def _threads(bench: Bench) -> Section:
    section = Section("threads", f"free locks per second, N = 5, {THREADS} threads with a name each")
    for name in (OURS, "redlock-py"):
        take = peers.try_blocking(name, bench.urls(5))
        if isinstance(take, str):
            section.left_out.append(take)
        else:
            section.figures.append(Figure(name, _per_second(take, bench.rounds(200, 40)), "/s"))
    mine, theirs = section.value(OURS), section.value("redlock-py")
    if mine and theirs:
        section.targets.append(Target("against redlock-py", mine / theirs, 3, "× as many", least=True))
    return section


def _per_second(take: peers.Taker, times: int) -> float:
    ready = threading.Barrier(THREADS + 1)

    def work(number: int) -> None:
        take(f"thread:{number}")()
        ready.wait()
        for _ in range(times):
            take(f"thread:{number}")()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    ready.wait()
    start = time.perf_counter()
    for thread in threads:
        thread.join()
    return THREADS * times / (time.perf_counter() - start)
