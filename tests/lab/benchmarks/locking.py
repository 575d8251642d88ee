"""A free lock: near and far, from an event loop, of several rows, and with nodes that fail."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from functools import partial

from django.core.management import call_command

from django_redlock import lock_for_update
from django_redlock.testing import Server

from . import contenders
from .bench import Bench, Contender, Times, at_a_distance, interleave, manager_of, ours, take_turn
from .contenders import FLOOR, MANAGER
from .report import OURS, THEIRS, Section

ROUND_TRIPS = {"no delay": 0.0, "0.5 ms": 0.0005, "2 ms": 0.002}  # seconds; the first shows the cost of the proxy
TASKS = 100


def free(bench: Bench) -> Iterator[Section]:
    """Measure 1, 3 and 5 nodes."""
    for nodes in (1, 3, 5):
        section = Section(f"free-n{nodes}", f"acquire + release of a free lock, N = {nodes}, blocking")
        measure(section, bench.urls(nodes), bench.rounds(200))
        section.compare(THEIRS, 1.1 if nodes == 1 else 1.2)
        section.compare(THEIRS, 1.1 if nodes == 1 else 2.0, cpu=True)
        section.compare(FLOOR, {1: 2.0, 3: 1.6, 5: 1.35}[nodes])
        if nodes > 1:
            section.compare("redlock-py", 0.29)
            section.compare("pottery Redlock", 0.1)
        yield section


def measure(section: Section, urls: list[str], rounds: int) -> None:
    """Add the times of all contenders."""
    with ExitStack() as stack:
        running = [
            Contender(OURS, partial(contenders.with_lock(urls), "free:block")),
            Contender(THEIRS, partial(contenders.with_client_lock(urls), "free:client")),
            stack.enter_context(contenders.raw_sockets(urls)),
        ]
        for name, take in contenders.takers(section, urls).items():
            running.append(Contender(name, partial(take_and_release, take, f"free:{name}")))
        section.add_times(interleave(running, rounds))


def take_and_release(take: contenders.Taker, name: str) -> None:
    take(name)()


def distance(bench: Bench) -> Iterator[Section]:
    """Measure the same through proxies that hold every byte back, as between two machines of one data centre."""
    for nodes in (1, 5):
        whole = Section(f"distance-n{nodes}", f"acquire + release of a free lock, N = {nodes}, at a distance")
        for label, seconds in ROUND_TRIPS.items():
            section = Section("", "")
            with at_a_distance(bench.urls(nodes), seconds) as urls:
                measure(section, urls, bench.rounds(50))
            for figure in section.figures:
                whole.add(f"{figure.name}, {label}", figure.value, figure.unit)
        yield whole


def event_loop(bench: Bench) -> Iterator[Section]:
    """Measure one node and five from an event loop, one task and then many."""
    for nodes in (1, 5):
        loop, urls = asyncio.new_event_loop(), bench.urls(nodes)
        uses = {
            MANAGER: contenders.django_redlock_asyncio(urls),
            "redis.asyncio Lock": contenders.redis_asyncio(urls),
        }
        single = Section(f"asyncio-n{nodes}", f"acquire + release of a free lock, N = {nodes}, asyncio")
        running = [Contender(name, partial(once, f"aio:{name}"), loop) for name, once in uses.items()]
        with contenders.raw_sockets(urls) as floor:
            single.add_times(interleave([*running, floor], bench.rounds(200)))
        single.compare(FLOOR, {1: 2.7, 5: 1.7}[nodes], ours=MANAGER)
        yield single
        many = Section(f"tasks-n{nodes}", f"free locks per second, N = {nodes}, {TASKS} tasks with a name each")
        for name, once in uses.items():
            many.add(name, loop.run_until_complete(tasks_per_second(once, bench.rounds(50))), "/s")
        yield many
        loop.run_until_complete(manager_of(urls).aclose())
        loop.close()


async def tasks_per_second(once: Callable[[str], Awaitable[object]], times: int) -> float:
    """Return how many locks a second many tasks of one event loop take, with a name each."""

    async def repeat(task: int) -> None:
        for _ in range(times):
            await once(f"task:{task}")

    await asyncio.gather(*map(repeat, range(TASKS)))
    start = time.perf_counter()
    await asyncio.gather(*map(repeat, range(TASKS)))
    return TASKS * times / (time.perf_counter() - start)


def rows(bench: Bench) -> Iterator[Section]:
    """Lock several rows of a database in one fenced transaction."""
    from django.contrib.auth.models import User

    section = Section("rows", "lock_for_update() of several rows, N = 5, SQLite in memory")
    ours("rows", bench.urls(5))
    call_command("migrate", verbosity=0)
    User.objects.bulk_create(User(username=str(number)) for number in range(100))

    def lock_rows(count: int) -> None:
        with lock_for_update(User.objects.all()[:count], using="rows") as locked:
            assert len(locked) == count

    running = [Contender(f"{count} row{'s' * (count > 1)}", partial(lock_rows, count)) for count in (1, 10, 100)]
    section.add_times(interleave(running, bench.rounds(50), batch=3), "ms")
    section.compare("1 row", 6, ours="100 rows")
    yield section


def faults(bench: Bench) -> Iterator[Section]:
    """Measure two of five nodes that refuse connections or do not answer, beside healthy ones."""
    manager, victims = ours("faults", bench.urls(5)), bench.servers[3:]
    contender = Contender("", lambda: manager.lock("fault", wait=0).acquire().release())
    for name, begin, end in (("refused", Server.kill, Server.start), ("frozen", Server.freeze, Server.thaw)):
        section = Section(f"fault-{name}", f"acquire + release, N = 5, two nodes {name}")
        healthy, faulty = Times(), Times()
        for _ in range(4):
            take_turn(contender, healthy, bench.rounds(250))
            for server in victims:
                begin(server)
            take_turn(contender, faulty, bench.rounds(250))
            for server in victims:
                end(server)
            time.sleep(0.3)  # nodes that failed are not contacted for a while
        section.add_times({"healthy": healthy, f"two {name}": faulty})
        section.compare("healthy", 1.2, ours=f"two {name}")
        yield section
