"""The figures of docs/operate/topologies.md are those that are measured here, on servers that nobody else uses."""

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any

import pytest

from django_redlock import LockManager
from django_redlock.testing import Server
from tests.deployment import CHECKOUT
from tests.managers import in_threads, real_manager, wait_until

PAGE = (CHECKOUT / "docs" / "operate" / "topologies.md").read_text().partition("\n## Sizing\n")[2]
PUBLISHED = {what: int(value) for what, value in re.findall(r"^\| ([^|]+?) \| (\d+) \|$", PAGE, re.MULTILINE)}
NAMES, AT_ONCE = 10_000, 200  # names of 20 bytes, and how many of them one request has


@contextmanager
def one_server(**options: Any) -> Iterator[tuple[LockManager, Any, Callable[[], int]]]:
    """Yield a manager over a fresh server, a client of that server, and what counts the manager's connections."""
    with Server() as server, server.client() as client:
        manager = real_manager([server.url], ttl=60.0, **options)
        before = len(client.client_list())
        yield manager, client, lambda: len(client.client_list()) - before
        manager.close()


def test_requests_are_the_published_ones():
    """Each step of a lock is one request to a node, and so are 200 names at once."""
    with one_server() as (manager, client, _):
        manager.lock("warm-up", wait=0).acquire().release()  # connects, and loads the scripts

        def requests(act: Callable[[], Any]) -> Any:
            client.config_resetstat()
            result = act()
            stats = client.info("commandstats")
            return result, sum(stats.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("eval", "evalsha"))

        lease, taking = requests(manager.lock("a", wait=0, renew=False).acquire)
        many = manager.lock([f"n:{number}" for number in range(AT_ONCE)], wait=0)

        assert taking == PUBLISHED["to take a free lock"]
        assert requests(lease.extend)[1] == PUBLISHED["to extend it once"]
        assert requests(lease.release)[1] == PUBLISHED["to release it"]
        assert requests(lambda: many.acquire().release())[1] == PUBLISHED["to take and release 200 names in one lock"]


def test_connections_are_the_published_ones():
    """Threads that never meet need fewer connections than threads; nobody needs more than published."""
    several = PUBLISHED["8 threads that take locks at the same time"]
    with one_server() as (manager, _, connections):
        assert connections() == PUBLISHED["before the first lock"]
        manager.lock("a", wait=0).acquire().release()
        assert connections() == PUBLISHED["one thread that takes locks"]
        in_threads(8, lambda number: [manager.lock(f"t:{number}").acquire().release() for _ in range(20)])
        assert connections() <= several == 8
    with one_server(node_timeout=0.4) as (manager, _, connections):
        with manager.lock("renewed", ttl=3.0):
            expected = PUBLISHED["one thread that takes locks while an earlier one is renewed"]
            wait_until(lambda: manager.lock("a").acquire().release() and connections() == expected, pause=0.0)
    with one_server() as (manager, client, connections):
        lease = manager.lock("a", wait=0).acquire()
        waiter = Thread(target=lambda: manager.lock("a", wait=60).acquire().release())
        waiter.start()
        wait_until(lambda: any(int(each["sub"]) for each in client.client_list()))
        assert connections() == PUBLISHED["a thread that holds a lock, and one that waits for it"]
        lease.release()
        waiter.join()
    with one_server() as (manager, _, connections):

        async def at_once() -> int:
            leases = await asyncio.gather(*(manager.lock(f"a:{number}", wait=0).aacquire() for number in range(100)))
            found = connections()
            await asyncio.gather(*(lease.arelease() for lease in leases))
            await manager.aclose()
            return found

        assert asyncio.run(at_once()) == PUBLISHED["100 tasks of one event loop that take locks at the same time"]


def test_a_name_costs_about_as_much_memory_as_published():
    """The overhead of the server's tables depends on their sizes, so a quarter more or less is the same figure."""
    with one_server() as (manager, client, _):

        def used() -> int:
            return int(client.info("memory")["used_memory"])

        manager.lock("warm-up", wait=0).acquire().release()
        empty, names = used(), [f"orders:{number:013}" for number in range(NAMES)]
        parts = [names[start : start + AT_ONCE] for start in range(0, NAMES, AT_ONCE)]
        leases = [manager.lock(part, wait=0, renew=False).acquire() for part in parts]
        held = used()
        for lease in leases:
            lease.release()
        after = used()

    assert (held - empty) / NAMES == pytest.approx(PUBLISHED["while it is held"], rel=0.25)
    assert (after - empty) / NAMES == pytest.approx(PUBLISHED["after its release"], rel=0.25)
