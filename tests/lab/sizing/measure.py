"""Measure memory, requests and connections on one server that nobody else uses."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Barrier, Thread
from time import monotonic, sleep
from typing import Any

import redis
from django.conf import settings

from django_redlock import LockManager
from django_redlock.testing import Server
from tests.lab.benchmarks.bench import ours

Figures = dict[str, int]
NAMES = 10_000
NAME_SIZE = 20  # bytes of a name, as in "orders:0000000000042"
AT_ONCE = 200  # names of one lock: one request
THREADS = 8
TASKS = 100
OURS = ("evalsha", "eval")


def every_figure() -> Iterator[tuple[str, Figures]]:
    """Yield each table's title and figures."""
    yield f"Bytes of memory per name on each node, with {NAMES:,} names of {NAME_SIZE} bytes", memory()
    yield "Requests to each node", requests()
    yield "Connections to each node", connections()


@contextmanager
def one_server(**options: Any) -> Iterator[tuple[LockManager, Any]]:
    """Yield a manager over a fresh server, and a client of that server for questions."""
    with ExitStack() as stack:
        server = stack.enter_context(Server())
        client = stack.enter_context(server.client())
        alias = f"sizing-{server.port}"
        manager = ours(alias, [server.url], prefix="t", **{"ttl": 60.0, "node_timeout": 2.0, **options})
        stack.callback(settings.REDLOCK.pop, alias)
        stack.callback(manager.close)
        yield manager, client


def memory() -> Figures:
    """Return the bytes per name while it is held, and after its release."""
    with one_server() as (manager, client):
        manager.lock("warm-up", wait=0).acquire().release()
        empty = used(client)
        lines = [f"orders:{number:0{NAME_SIZE - 7}}" for number in range(NAMES)]
        parts = [lines[start : start + AT_ONCE] for start in range(0, NAMES, AT_ONCE)]
        leases = [manager.lock(part, wait=0, renew=False).acquire() for part in parts]
        held = used(client)
        for lease in leases:
            lease.release()
        after = used(client)
    return {"while it is held": round((held - empty) / NAMES), "after its release": round((after - empty) / NAMES)}


def used(client: Any) -> int:
    return int(client.info("memory")["used_memory"])


def requests() -> Figures:
    """Return how many requests one node receives for each step of a lock."""
    with one_server() as (manager, client):
        manager.lock("warm-up", wait=0).acquire().release()  # connects, and loads the scripts
        lock = manager.lock("a", wait=0, renew=False)
        taking, lease = counted(client, lock.acquire)
        extending, _ = counted(client, lambda: lease.extend())
        releasing, _ = counted(client, lease.release)
        many = manager.lock([f"n:{number}" for number in range(AT_ONCE)], wait=0)
        several, _ = counted(client, lambda: many.acquire().release())
    return {
        "to take a free lock": taking,
        "to extend it once": extending,
        "to release it": releasing,
        f"to take and release {AT_ONCE} names in one lock": several,
    }


def counted(client: Any, act: Callable[[], Any]) -> tuple[int, Any]:
    """Return how many scripts the server ran for *act*, and what it returned."""
    client.config_resetstat()
    result = act()
    stats = client.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in OURS), result


def connections() -> Figures:
    """Return how many connections one process has to one node, doing one thing more each time."""
    with one_server() as (manager, client):
        before = open_now(client)
        figures = {"before the first lock": 0}
        manager.lock("a", wait=0).acquire().release()
        figures["one thread that takes locks"] = open_now(client) - before
        at_once(manager)
        figures[f"{THREADS} threads that take locks at the same time"] = open_now(client) - before
    with one_server(node_timeout=0.4) as (manager, client):
        before = open_now(client)
        figures["one thread that takes locks while an earlier one is renewed"] = (
            while_renewed(manager, client, before + 2) - before
        )
    with one_server() as (manager, client):
        before = open_now(client)
        figures["a thread that holds a lock, and one that waits for it"] = with_waiter(manager, client) - before
    with one_server() as (manager, client):
        before = open_now(client)
        figures[f"{TASKS} tasks of one event loop that take locks at the same time"] = (
            asyncio.run(in_a_loop(manager, client)) - before
        )
    return figures


def at_once(manager: LockManager) -> None:
    """Have threads take a lock each, all at the same moment, a few times."""
    ready = Barrier(THREADS)

    def take(number: int) -> None:
        for turn in range(20):
            ready.wait()
            manager.lock(f"t:{number}:{turn}", wait=0).acquire().release()

    threads = [Thread(target=take, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def while_renewed(manager: LockManager, client: Any, expected: int) -> int:
    """Take locks until a renewal of another lock has met one of them; return the number of connections."""
    end = monotonic() + 60  # seconds; a renewal is due every second
    lease = manager.lock("renewed", ttl=3.0).acquire()
    while open_now(client) < expected and monotonic() < end:
        manager.lock("a").acquire().release()
    found = open_now(client)
    lease.release()
    return found


def with_waiter(manager: LockManager, client: redis.Redis) -> int:
    """Return the number of connections while one thread holds a lock and another one waits for it."""
    lease = manager.lock("a", wait=0).acquire()
    waiter = Thread(target=lambda: manager.lock("a").acquire().release())
    waiter.start()
    while not any(int(each["sub"]) for each in client.client_list()):
        sleep(0.01)
    found = open_now(client)
    lease.release()
    waiter.join()
    return found


async def in_a_loop(manager: LockManager, client: Any) -> int:
    leases = await asyncio.gather(*(manager.lock(f"a:{number}", wait=0).aacquire() for number in range(TASKS)))
    found = open_now(client)
    await asyncio.gather(*(lease.arelease() for lease in leases))
    await manager.aclose()
    return found


def open_now(client: Any) -> int:
    return len(client.client_list())
