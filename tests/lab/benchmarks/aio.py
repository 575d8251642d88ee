"""
A free lock from an event loop, alone and with a hundred tasks.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from . import floors, peers
from .bench import Bench, manager_of
from .free import figure
from .measure import AsyncContender, Contender, ainterleave, per_second
from .report import OURS, Figure, Section, Target

SHARES = {"pottery AIORedlock": 0.2}
TASKS = 100
BLOCKING_FLOOR = "raw blocking sockets, the same scripts"
ASYNC_FLOOR = "asyncio protocols, the same scripts"


def run(bench: Bench) -> Iterator[Section]:
    """Measure one node and five, then many tasks on both."""
    for nodes in (1, 5):
        yield asyncio.run(_on(bench, nodes))
    for nodes in (1, 5):
        yield tasks_on(bench, nodes)


def tasks_on(bench: Bench, nodes: int) -> Section:
    """Measure many tasks of one event loop on this number of nodes."""
    return asyncio.run(_tasks(bench, nodes))


async def _on(bench: Bench, nodes: int) -> Section:
    section = Section(f"asyncio-n{nodes}", f"acquire + release of a free lock, N = {nodes}, asyncio")
    urls = bench.urls(nodes)
    pair = await asyncio.to_thread(floors.same, urls)
    rounds = bench.rounds(200, 40)
    takers = await _takers(section, urls, nodes)
    async with floors.without_blocking(ASYNC_FLOOR, urls, pair) as (floor,):
        with floors.blocking(BLOCKING_FLOOR, urls, pair) as blocking:
            contenders = [_in_a_loop(blocking), floor, *(_contender(name, take) for name, take in takers.items())]
            times = await ainterleave(contenders, rounds)
    section.figures = [figure(name, each) for name, each in times.items()]
    section.compare("against raw blocking sockets", BLOCKING_FLOOR, {1: 2.7, 5: 1.7}[nodes])
    if nodes == 5:
        section.compare("against aioredlock", "aioredlock", 2, faster=True, floor=ASYNC_FLOOR)
    await _leave(bench)
    return section


async def _takers(section: Section, urls: list[str], nodes: int) -> dict[str, peers.AsyncTaker]:
    takers = {}
    for name in peers.ASYNCIO:
        take = await peers.try_asyncio(name, urls)
        if isinstance(take, str):
            section.left_out.append(take)
        else:
            takers[f"{name}, on one node" if nodes > 1 and name == "redis.asyncio Lock" else name] = take
    return takers


def _once(name: str, take: peers.AsyncTaker) -> Callable[[], Awaitable[object]]:
    async def once() -> None:
        await (await take(name))()

    return once


def _in_a_loop(blocking: Contender) -> AsyncContender:
    async def once() -> None:
        blocking.once()

    return AsyncContender(blocking.name, once)


def _contender(name: str, take: peers.AsyncTaker) -> AsyncContender:
    return AsyncContender(name, _once(f"aio:{name}", take), SHARES.get(name, 1.0))


async def _tasks(bench: Bench, nodes: int) -> Section:
    section = Section(f"tasks-n{nodes}", f"free locks per second, N = {nodes}, {TASKS} tasks with a name each")
    urls, rounds = bench.urls(nodes), bench.rounds(50, 10)
    pair = await asyncio.to_thread(floors.same, urls)
    async with floors.without_blocking(ASYNC_FLOOR, urls, pair, TASKS) as contenders:
        floor = await per_second([each.once for each in contenders], rounds)
    for name, take in (await _takers(section, urls, nodes)).items():
        once = [_once(f"task:{place}", take) for place in range(TASKS)]
        try:
            rate = await per_second(once, 2 if name in SHARES else rounds)
        except Exception as error:  # such as a client that runs out of connections
            section.left_out.append(f"{name}: {type(error).__name__} with {TASKS} tasks")
        else:
            section.figures.append(Figure(name, rate, "/s"))
    section.figures.append(Figure(ASYNC_FLOOR, floor, "/s"))
    best, factor = {1: ("redis.asyncio Lock", 8), 5: ("pottery AIORedlock", 6)}[nodes]
    mine, theirs = section.value(OURS), section.value(best)
    if mine and theirs:
        case = f"against {best}"
        section.targets.append(Target(case, mine / theirs, factor, "× as many", least=True, floor=floor / theirs))
    await _leave(bench)
    return section


async def _leave(bench: Bench) -> None:
    """Close our connections of this event loop; those of the other libraries end with the process."""
    for nodes in (1, 5):
        await manager_of(bench.urls(nodes)).aclose()
