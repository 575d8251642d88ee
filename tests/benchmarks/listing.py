"""
Ten thousand held locks among a million other keys: what it takes to list them.
"""

from collections.abc import Iterator

from django_redlock.inventory import held_locks
from django_redlock.testing import Server

from .bench import Bench, ours
from .measure import Contender, interleave
from .report import Figure, Section, Target

HELD, OTHERS = 10_000, 1_000_000
PAGE = 50


def run(bench: Bench) -> Iterator[Section]:
    """Fill a server, then list it in several ways."""
    section = Section("listing", f"listing {HELD:,} held locks among {OTHERS:,} other keys, N = 1")
    with Server(args=("--enable-debug-command", "local")) as server:
        manager = ours("listing", [server.url], renew=False, max_ttl=3600.0, ttl=1800.0)
        leases = [manager.lock(f"held:{number}", wait=0).acquire() for number in range(HELD)]
        with server.client(socket_timeout=60.0) as client:
            client.execute_command("DEBUG", "POPULATE", OTHERS)
            client.config_set("slowlog-log-slower-than", 1000)
            client.config_resetstat()
            client.slowlog_reset()
            pages: list[int] = []
            contenders = [
                Contender(f"one page of {PAGE}", lambda: manager.survey(count=PAGE)),
                Contender("held_locks()", lambda: pages.append(_list_all())),
            ]
            times = interleave(contenders, bench.rounds(10, 3), batch=3)
            slow = client.slowlog_len()
            section.figures = [Figure(name, each.median * 1e3, "ms") for name, each in times.items()]
            by_scan = interleave([Contender("SCAN", lambda: _scan(client))], 1, batch=1)["SCAN"]
            section.figures.append(Figure("redis-py, SCAN COUNT 1000", by_scan.median * 1e3, "ms"))
        section.figures.append(Figure("locks in held_locks()", pages[-1], ""))
        del leases
    section.targets = [
        Target("first page", section.value(f"one page of {PAGE}") or 0, 20, "ms"),
        Target("all that held_locks() returns", section.value("held_locks()") or 0, 150, "ms"),
        Target("locks that it returns", pages[-1], HELD, "", least=True),
        Target("commands of more than 1 ms on the server", slow, 0, ""),
    ]
    yield section


def _list_all() -> int:
    return len(held_locks("listing", limit=2 * HELD, seconds=10.0).locks)


def _scan(client: object) -> int:
    return sum(1 for _ in client.scan_iter("listing:*:h", count=1000))  # type: ignore[attr-defined]
