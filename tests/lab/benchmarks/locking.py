"""A free lock: blocking and asyncio, near and far, alone and from many threads and tasks, and with several names."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial

from django.core.management import call_command

from django_redlock import LockManager

from . import contenders
from .bench import Bench, in_child, manager_of, ours, proxies
from .contenders import FLOOR, MANAGER, PLAIN, PLAIN_PAIR, SLOW, AsyncTaker
from .measure import Contender, interleave, tasks_per_second, threads_per_second
from .report import OURS, THEIRS, Section

THREADS, TASKS = 16, 100
ROUND_TRIPS = {"no delay": 0.0, "0.5 ms": 0.0005, "2 ms": 0.002}  # seconds; the first shows the cost of the proxy
COUNTS = (1, 10, 100, 1000)


def free(bench: Bench) -> Iterator[Section]:
    """Measure 1, 3 and 5 nodes, each in a process of its own, whose default locks are over these nodes."""
    for nodes in (1, 3, 5):
        yield in_child(_free, bench.urls(nodes), bench.rounds(200, 40))


def _free(urls: list[str], rounds: int, far: str = "") -> Section:
    nodes = len(urls)
    section = Section(f"free-n{nodes}", f"acquire + release of a free lock, N = {nodes}, blocking")
    pair = contenders.recorded_pair(urls)
    with ExitStack() as stack:
        running = [
            Contender(OURS, partial(contenders.with_lock(urls), "free:block")),
            Contender(THEIRS, partial(contenders.with_client_lock(urls), "free:client")),
            stack.enter_context(contenders.raw_sockets(PLAIN, urls, PLAIN_PAIR)),
            stack.enter_context(contenders.raw_sockets(FLOOR, urls, pair)),
        ]
        for name, take in contenders.takers(section, urls).items():
            running.append(Contender(name, partial(_take_and_release, take, f"free:{name}"), SLOW.get(name, 1.0)))
        section.add_times(interleave(running, rounds))
    section.compare(THEIRS, 1.1 if nodes == 1 else 1.2)
    section.compare(THEIRS, 1.1 if nodes == 1 else 2.0, cpu=True)
    section.compare(FLOOR, {1: 2.0, 3: 1.6, 5: 1.35}[nodes])
    if nodes > 1:
        section.compare("redlock-py", 0.29)
        section.compare("pottery Redlock", 0.1)
    return section


def _take_and_release(take: contenders.Taker, name: str) -> None:
    take(name)()


def distance(bench: Bench) -> Iterator[Section]:
    """Measure the same through proxies that hold every byte back, as between two machines of one data centre."""
    for nodes in (1, 5):
        whole = Section(f"distance-n{nodes}", f"acquire + release of a free lock, N = {nodes}, at a distance")
        for label, seconds in ROUND_TRIPS.items():
            with proxies(bench.urls(nodes), seconds) as network:
                section = in_child(_free, network.urls, bench.rounds(50, 8))
            for figure in section.figures:
                if figure.more and figure.name not in (PLAIN, "django-redis cache.lock"):
                    whole.add(f"{figure.name}, {label}", figure.value, figure.unit)
        yield whole


def event_loop(bench: Bench) -> Iterator[Section]:
    """Measure one node and five from an event loop, one task and then many."""
    for nodes in (1, 5):
        loop = asyncio.new_event_loop()
        single = Section(f"asyncio-n{nodes}", f"acquire + release of a free lock, N = {nodes}, asyncio")
        many = Section(f"tasks-n{nodes}", f"free locks per second, N = {nodes}, {TASKS} tasks with a name each")
        urls = bench.urls(nodes)
        takers = loop.run_until_complete(contenders.async_takers(single, urls))
        uses = {name: _use(take) for name, take in takers.items()}
        running = [
            Contender(name, partial(use, f"aio:{name}"), SLOW.get(name, 1.0), loop) for name, use in uses.items()
        ]
        with contenders.raw_sockets(FLOOR, urls, contenders.recorded_pair(urls)) as floor:
            single.add_times(interleave([*running, floor], bench.rounds(200, 40)))
        single.compare(FLOOR, {1: 2.7, 5: 1.7}[nodes], ours=MANAGER)
        yield single
        for name, use in uses.items():
            times = 2 if name in SLOW else bench.rounds(50, 10)
            try:
                many.add(name, loop.run_until_complete(tasks_per_second(use, TASKS, times)), "/s")
            except Exception as error:  # such as a client that runs out of connections
                many.left_out.append(f"{name}: {type(error).__name__} with {TASKS} tasks")
        best, factor = {1: ("redis.asyncio Lock", 8), 5: ("pottery AIORedlock", 6)}[nodes]
        many.compare(best, factor, ours=MANAGER)
        yield many
        loop.run_until_complete(manager_of(urls).aclose())
        loop.close()


def _use(take: AsyncTaker) -> Callable[[str], Awaitable[object]]:
    async def once(name: str) -> None:
        await (await take(name))()

    return once


def many(bench: Bench) -> Iterator[Section]:
    """Measure many threads, several names at once, and several rows of a database in one fenced transaction."""
    urls, manager = bench.urls(5), manager_of(bench.urls(5))
    threads = Section("threads", f"free locks per second, N = 5, {THREADS} threads with a name each")
    takers = contenders.takers(threads, urls, MANAGER, "redlock-py")
    for name, take in takers.items():
        use = partial(_take_and_release, take)
        threads.add(name, threads_per_second(use, THREADS, bench.rounds(200, 40)), "/s")
    threads.compare("redlock-py", 3, ours=MANAGER)
    yield threads

    names = Section("names", "acquire + release of several names at once, N = 5")
    running = [
        Contender(
            _counted(count, "name"), partial(_all_at_once, manager, [f"names:{number}" for number in range(count)])
        )
        for count in COUNTS
    ]
    for name, take in takers.items():
        if name != MANAGER:
            each = [f"names:{number}" for number in range(10)]
            running.append(Contender(f"{name}, 10 names", partial(_one_by_one, take, each), 0.2))
    names.add_times(interleave(running, bench.rounds(50, 15), batch=3), "ms")
    names.compare("1 name", 6, ours="100 names")
    yield names

    rows = Section("rows", "lock_for_update() of several rows, N = 5, SQLite in memory")
    ours("rows", urls)
    prepare_rows(100)
    running = [Contender(_counted(count, "row"), partial(_lock_rows, count)) for count in (1, 10, 100)]
    rows.add_times(interleave(running, bench.rounds(50, 15), batch=3), "ms")
    rows.compare("1 row", 6, ours="100 rows")
    yield rows


def _counted(count: int, thing: str) -> str:
    return f"{count:,} {thing}" + "s" * (count > 1)


def _all_at_once(manager: LockManager, names: list[str]) -> None:
    manager.lock(names, wait=0).acquire().release()


def _one_by_one(take: contenders.Taker, names: list[str]) -> None:
    for release in [take(name) for name in names]:
        release()


def prepare_rows(count: int) -> None:
    """Make a database in memory with *count* users."""
    from django.contrib.auth.models import User

    call_command("migrate", verbosity=0)
    User.objects.bulk_create(User(username=str(number)) for number in range(count))


def _lock_rows(count: int) -> None:
    from django.contrib.auth.models import User

    from django_redlock import lock_for_update

    with lock_for_update(User.objects.all()[:count], using="rows") as rows:
        assert len(rows) == count
