"""Ten thousand held locks among a million other keys: the cost of listing them and of showing them in the admin."""

import logging
import time
from collections.abc import Iterable, Iterator
from functools import partial

from django.contrib.auth import get_user_model
from django.test import Client
from redis import Redis

from django_redlock import LockManager
from django_redlock.inventory import held_locks
from django_redlock.testing import Server, start_servers

from .bench import Bench, ours
from .locking import prepare_rows
from .measure import Contender, Times, interleave
from .report import Section

HELD, OTHERS = 10_000, 1_000_000
TRIES = 5
SLOW = 1000  # microseconds: a server's SLOWLOG records commands that take longer
LIST = "/admin/redlock/heldlock/"
LOADED = ("--enable-debug-command", "local")
KEEPING = {"max_ttl": 3600.0, "ttl": 1800.0, "node_timeout": 2.0}  # long timeouts: a busy machine must not fail it


def run(bench: Bench) -> Iterator[Section]:
    """Fill servers, then list their held locks in several ways."""
    section = Section("listing", f"listing {HELD:,} held locks among {OTHERS:,} other keys, N = 1")
    with Server(args=LOADED) as server:
        _fill(ours("listing", [server.url], **KEEPING), [server])
        listed = interleave([Contender("held_locks()", _list_all)], bench.rounds(10, 3), batch=3)
        section.add_times(listed, "ms")
        section.add("commands in SLOWLOG", _slow([server]))
        with server.client(socket_timeout=60.0) as client:
            by_scan = interleave([Contender("redis-py, SCAN COUNT 1000", partial(_scan, client))], 1, 1, warm_up=0)
        section.add_times(by_scan, "ms")
        section.compare("redis-py, SCAN COUNT 1000", 1.0, ours="held_locks()")
    yield section
    yield _page(bench)


def _page(bench: Bench) -> Section:
    """Time the admin's list: the view with its templates, as a logged-in user gets it, without a web server."""
    section = Section("page", f"the admin's list of {HELD:,} held locks among {OTHERS:,} other keys, N = 5")
    logging.getLogger("django.request").setLevel(logging.CRITICAL)
    with start_servers(5, args=LOADED) as servers:
        _fill(ours("page-taking", servers.urls, prefix="page", **KEEPING), servers)
        ours("page", servers.urls)  # it is shown with the usual settings
        prepare_rows(0)
        client = Client()
        client.force_login(get_user_model().objects.create(username="admin", is_staff=True, is_superuser=True))
        queries = {"first page": "", "a search": "&q=held:99", "by votes": "&o=-4", "last page": "&p=999"}
        running = [Contender(name, partial(_get, client, query)) for name, query in queries.items()]
        section.add_times(interleave(running, bench.rounds(20, 5), batch=3), "ms")
        section.add("commands in SLOWLOG", _slow(servers))
        for server in servers[1::2]:
            server.freeze()
        frozen = Times()
        for _ in range(bench.rounds(20, 5)):
            start = time.perf_counter()
            _get(client, "")
            frozen.walls.append(time.perf_counter() - start)
        for server in servers[1::2]:
            server.thaw()
    section.add_times({"first page, two of five frozen": frozen}, "ms")
    section.add("the longest of them", max(frozen.walls) * 1e3, "ms", 1000)
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
            client.slowlog_reset()


def _slow(servers: Iterable[Server]) -> int:
    """Return how many commands took the servers more than a millisecond, waiting for a processor included."""
    total = 0
    for server in servers:
        with server.client() as client:
            total += client.slowlog_len()
    return total


def _get(client: Client, query: str) -> None:
    """Get a page with locks; on a busy machine most nodes may be late, and then nobody can tell which are held."""
    for _ in range(TRIES):
        response = client.get(f"{LIST}?using=page{query}")
        if response.status_code == 200 and b"redlock-name" in response.content:
            return
    raise RuntimeError(f"the list answered {response.status_code}, or without locks")


def _list_all() -> None:
    found = held_locks("listing", limit=2 * HELD, seconds=10.0)
    assert len(found.locks) == HELD


def _scan(client: Redis) -> int:
    return sum(1 for _ in client.scan_iter("listing:*:h", count=1000))
