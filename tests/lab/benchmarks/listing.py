"""
Ten thousand held locks among a million other keys: the cost of listing them and of showing them in the admin.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.test import Client
from redis import Redis

from django_redlock import LockManager
from django_redlock.core.protocol import Reply
from django_redlock.inventory import held_locks
from django_redlock.testing import Server, start_servers

from .bench import Bench, ours
from .measure import Contender, Times, interleave
from .report import Figure, Section, Target

HELD, OTHERS = 10_000, 1_000_000
PAGE = 50
TRIES = 5
SLOW = 1000  # microseconds: a server's SLOWLOG records commands that take longer
LIST = "/admin/redlock/heldlock/"
LOADED = ("--enable-debug-command", "local")


def run(bench: Bench) -> Iterator[Section]:
    """Fill servers, then list their held locks in several ways."""
    yield _inventory(bench)
    yield _page(bench)


def _inventory(bench: Bench) -> Section:
    section = Section("listing", f"listing {HELD:,} held locks among {OTHERS:,} other keys, N = 1")
    with Server(args=LOADED) as server:
        manager = ours("listing", [server.url], renew=False, max_ttl=3600.0, ttl=1800.0, node_timeout=2.0)
        _fill(manager, [server])
        pages: list[int] = []
        contenders = [
            Contender(f"one page of {PAGE}", lambda: manager.survey(count=PAGE)),
            Contender("held_locks()", lambda: pages.append(_list_all())),
        ]
        times = interleave(contenders, bench.rounds(10, 3), batch=3)
        slow, per_call = _slow([server]), _per_call(server)
        dearest = _dearest([server], _list_all, bench.rounds(7, 3))
        section.figures = [
            Figure(name, each.median * 1e3, "ms", {"cpu": each.cpu * 1e3}) for name, each in times.items()
        ]
        with server.client(socket_timeout=60.0) as client:
            by_scan = interleave([Contender("SCAN", lambda: _scan(client))], 1, batch=1)["SCAN"]
        section.figures.append(Figure("redis-py, SCAN COUNT 1000", by_scan.median * 1e3, "ms"))
        section.figures.append(Figure("locks in held_locks()", pages[-1], ""))
        section.figures.append(Figure("a script on the server, on average", per_call, "µs"))
        section.figures += _cost(dearest, slow)
    section.targets = [
        Target("first page", section.value(f"one page of {PAGE}") or 0, 20, "ms"),
        Target("all that held_locks() returns", section.value("held_locks()") or 0, 150, "ms"),
        Target("locks that it returns", pages[-1], HELD, "", least=True),
        Target("requests of more than 1 ms of a server's processor", _over(dearest), 0, ""),
    ]
    return section


def _page(bench: Bench) -> Section:
    """Time the admin's list: the view with its templates, as a logged-in user gets it, without a web server."""
    section = Section("page", f"the admin's list of {HELD:,} held locks among {OTHERS:,} other keys, N = 5")
    logging.getLogger("django.request").setLevel(logging.CRITICAL)
    with start_servers(5, args=LOADED) as servers:
        # Taken with long timeouts, so that a busy machine does not fail it, and shown with the usual settings.
        taking = ours("page-taking", servers.urls, prefix="page", max_ttl=3600.0, ttl=1800.0, node_timeout=2.0)
        _fill(taking, servers)
        ours("page", servers.urls)
        client = _administrator()
        queries = {"first page": "", "a search": "&q=held:99", "by votes": "&o=-4", "last page": "&p=999"}
        contenders = [
            Contender(name, lambda query=query: _get(client, f"{LIST}?using=page{query}"))
            for name, query in queries.items()
        ]
        times = interleave(contenders, bench.rounds(20, 5), batch=3)
        section.figures = [
            Figure(name, each.median * 1e3, "ms", {"cpu": each.cpu * 1e3}) for name, each in times.items()
        ]
        slow = _slow(servers)
        dearest = _dearest(servers, lambda: _get(client, f"{LIST}?using=page"), bench.rounds(7, 3))
        for server in servers[1::2]:
            server.freeze()
        frozen = _timed(lambda: _get(client, f"{LIST}?using=page"), bench.rounds(20, 5))
        for server in servers[1::2]:
            server.thaw()
        section.figures.append(Figure("first page, two of five frozen", median(frozen) * 1e3, "ms"))
        section.figures.append(Figure("the longest of them", max(frozen) * 1e3, "ms"))
        section.figures += _cost(dearest, slow)
    section.targets = [
        Target("the list", section.value("first page") or 0, 150, "ms"),
        Target("the list with two of five nodes frozen, at the worst", max(frozen) * 1e3, 1000, "ms"),
        Target("requests of more than 1 ms of a server's processor", _over(dearest), 0, ""),
    ]
    return section


def _fill(manager: LockManager, servers: Iterable[Server]) -> None:
    """
    Take the locks, add the other keys to every server, and make the server record slow commands.

    The leases are not kept: a client that looks at the locks of others does not have ten thousand of them in memory.
    """
    for number in range(HELD):
        manager.lock(f"held:{number}", wait=0, renew=False).acquire()
    for server in servers:
        with server.client(socket_timeout=60.0) as client:
            client.execute_command("DEBUG", "POPULATE", OTHERS)
            client.config_set("slowlog-log-slower-than", SLOW)
            client.config_resetstat()
            client.slowlog_reset()


def _figures(times: Mapping[str, Times]) -> list[Figure]:
    return [Figure(name, each.median * 1e3, "ms", {"cpu": each.cpu * 1e3}) for name, each in times.items()]


def _dearest(servers: list[Server], once: Callable[[], object], times: int) -> list[float]:
    """
    Return the least cost of each request of *once* to a server's processor, in microseconds, the most expensive first.

    It includes reading the request and writing the reply, but not waiting for a processor, which SLOWLOG counts as
    well. The least of several times leaves out the server's other work, such as looking for expired keys.
    """
    costs: dict[int, float] = {}
    survey = LockManager.survey
    for _ in range(times):
        number = iter(range(10_000))

        def watched(manager: LockManager, number: Iterator[int] = number, **how: Any) -> dict[int, Reply]:
            before = [_processor(server) for server in servers]
            replies = survey(manager, **how)
            spent = max(_processor(server) - each for server, each in zip(servers, before, strict=True))
            place = next(number)
            costs[place] = min(spent, costs.get(place, math.inf))
            return replies

        with mock.patch.object(LockManager, "survey", watched):
            once()
    return sorted(costs.values(), reverse=True)


def _processor(server: Server) -> float:
    """Return for how many microseconds an idle server has had a processor, according to Linux."""
    process = Path(f"/proc/{server.pid}")
    until = time.monotonic() + 10
    while (process / "stat").read_text().rpartition(")")[2].split()[0] != "S" and time.monotonic() < until:
        time.sleep(0.0005)
    return int((process / "schedstat").read_text().split()[0]) / 1000


def _cost(dearest: list[float], slow: int) -> list[Figure]:
    return [
        Figure("the dearest request, of a server's processor", dearest[0], "µs"),
        Figure("commands in SLOWLOG, which counts waiting for a processor", slow, ""),
    ]


def _over(costs: list[float]) -> int:
    return sum(cost > SLOW for cost in costs)


def _slow(servers: Iterable[Server]) -> int:
    """
    Return how many commands took the servers too long; on a busy machine this includes commands without a processor.
    """
    total = 0
    for server in servers:
        with server.client() as client:
            total += client.slowlog_len()
    return total


def _per_call(server: Server) -> float:
    """Return what a script took the server on average, in microseconds."""
    with server.client() as client:
        stats = client.info("commandstats")
    return float(stats["cmdstat_evalsha"]["usec_per_call"])


def _administrator() -> Client:
    """Return a test client in which the administrator is logged in."""
    call_command("migrate", verbosity=0)
    user, _ = get_user_model().objects.get_or_create(username="admin", is_staff=True, is_superuser=True)
    client = Client()
    client.force_login(user)
    return client


def _get(client: Client, url: str) -> None:
    """
    Get a page with locks; on a busy machine most nodes may be late, and then nobody can tell which locks are held.
    """
    for _ in range(TRIES):
        response = client.get(url)
        if response.status_code == 200 and b"redlock-name" in response.content:
            return
    raise RuntimeError(f"{url} answered {response.status_code}, or without locks")


def _timed(once: Callable[[], object], times: int) -> list[float]:
    walls = []
    for _ in range(times):
        start = time.perf_counter()
        once()
        walls.append(time.perf_counter() - start)
    return walls


def _list_all() -> int:
    return len(held_locks("listing", limit=2 * HELD, seconds=10.0).locks)


def _scan(client: Redis) -> int:
    return sum(1 for _ in client.scan_iter("listing:*:h", count=1000))
