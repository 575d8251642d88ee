"""A free lock: near and far, of several rows, and with nodes that fail."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

from django.core.management import call_command

from django_redlock.testing import Server

from . import contenders
from .bench import Bench, Contender, Times, at_a_distance, interleave, ours, take_turn
from .contenders import FLOOR
from .report import OURS, THEIRS, Section

ROUND_TRIPS = {"no delay": 0.0, "0.5 ms": 0.0005, "2 ms": 0.002}  # seconds; the first shows the cost of the proxy


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
            running.append(Contender(name, lambda take=take, name=f"free:{name}": take(name)()))  # type: ignore[misc]
        section.add_times(interleave(running, rounds))


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


def rows(bench: Bench) -> Iterator[Section]:
    """Lock several rows of a database in one fenced transaction."""
    from django.contrib.auth.models import User

    from django_redlock import lock_for_update

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
