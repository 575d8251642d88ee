"""Managers over real servers, over memory, and in virtual time, in both flavours."""

import asyncio
import gc
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import pytest
from django.core.management import call_command
from django.db import connections

from django_redlock import LockTakenError
from django_redlock.core.admission import Greeting
from django_redlock.core.protocol import Kind
from django_redlock.core.rules import Rules
from django_redlock.engine.connections import PerLoop
from django_redlock.engine.lease import AsyncLease, Lease
from django_redlock.engine.lock import Lock
from django_redlock.engine.manager import LockManager
from django_redlock.engine.watchdog import AsyncWatchdog, Dog, loop_watchdog, watchdog
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.nodes.database import table
from django_redlock.nodes.memory import MemoryNode
from django_redlock.testing import Server, Servers, Simulation
from tests import consensus
from tests.clusters import Cluster, single_masters
from tests.services import Database, SQLite, django_database
from tests.waiting import eventually as eventually
from tests.waiting import wait_until as wait_until

Manager = Callable[..., LockManager]


def rules(nodes: int = 5, **options: Any) -> Rules:
    """Rules for tests: short leases, and servers that may vote although they have just started."""
    return Rules(nodes, **{"ttl": 10.0, "restart_guard": False, "node_timeout": 2.0, **options})


made: list[LockManager] = []  # the managers of the running test


def manager_over(nodes: list[Any], **options: Any) -> LockManager:
    """Return a manager of some nodes; it is closed at the end of the test."""
    notify = options.pop("notify", None)
    manager = LockManager(nodes, rules(len(nodes), **options))
    made.append(manager)
    manager.notify = notify or manager.notify
    return manager


def real_manager(urls: list[str], prefix: str = "t:", sentinels: tuple[str, ...] = (), **options: Any) -> LockManager:
    """Return a manager of real nodes, or of a service of *sentinels*; it is closed at the end of the test."""
    return manager_over([open_node(NodeSpec(url, sentinels=sentinels), prefix) for url in urls], **options)


@pytest.fixture(autouse=True)
def leftovers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Close the managers that a test made, and let it fail if it leaves a socket open, instead of a later test."""
    yield
    while made:
        made.pop().close()
    if not request.node.get_closest_marker("unit"):
        gc.collect()


def pytest_collection_finish() -> None:
    """Take what has been imported out of the garbage collector's way, because it runs after most tests."""
    gc.collect()
    gc.freeze()


def on_each(nodes: Iterable[Server], *command: object) -> None:
    """Have each server execute a command."""
    for node in nodes:
        with node.client() as client:
            client.execute_command(*command)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Call *work* in as many threads at the same moment, with the number of each; raise what one of them raises."""
    together = threading.Barrier(count)
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(lambda number: (together.wait(), work(number)), range(count)))


def unwatched(manager: LockManager) -> LockManager:
    """Leave its leases to the threads that hold them: otherwise the watchdog may notice a loss before they do."""
    nobody = Mock(Dog, apart=Mock(return_value=False))
    manager.runtime = replace(manager.runtime, watchdog=nobody)
    return manager


def stop_time(manager: LockManager) -> None:
    """Let no time pass for a manager and its nodes in memory, however slow the machine is."""
    now = time.time()
    manager.runtime = replace(manager.runtime, clock=lambda: now, wall=lambda: now)
    for node in manager.nodes:
        assert isinstance(node, MemoryNode)
        node.store._clock = lambda: now


def patient_manager(urls: list[str], **options: Any) -> LockManager:
    """Return a manager whose leases outlast every wait of a test: no key that is left behind expires unnoticed."""
    return real_manager(urls, **{"ttl": 600.0, "max_ttl": 600.0, "node_timeout": 10.0, **options})


@pytest.fixture
def real(nodes: Servers) -> Manager:
    """Make managers over five real servers."""

    def make(count: int = 5, **options: Any) -> LockManager:
        return real_manager(nodes.urls[:count], **options)

    return make


@pytest.fixture
def memory() -> Manager:
    """Make managers over five nodes in memory; the managers of one test share the nodes."""
    nodes = [MemoryNode(f"m{place}") for place in range(5)]

    def make(count: int = 5, **options: Any) -> LockManager:
        return manager_over(nodes[:count], **options)

    return make


CARELESS = "PRAGMA synchronous = OFF"  # like the servers of the tests: no power is cut here


class Tables:
    """Five databases of one kind that are nodes, each under an alias of its own."""

    def __init__(self, server: SQLite | Database, blocker: Any) -> None:
        self.scheme = server.scheme
        self.aliases = [f"{server.scheme}{place}" for place in range(5)]
        self.urls = [f"database://{alias}" for alias in self.aliases]
        self._server = server
        self._blocker = blocker
        self._open = ExitStack()

    def __enter__(self) -> "Tables":
        with self._blocker.unblock():
            for alias in self.aliases:
                name = self._open.enter_context(self._server.database())
                entry = self._server.settings(name)
                if self.scheme == "sqlite":
                    entry["OPTIONS"] |= {"init_command": CARELESS}
                self._open.enter_context(django_database(alias, entry))
                call_command("migrate", "redlock", database=alias, verbosity=0, skip_checks=True)
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._blocker.unblock():
            self._open.close()

    def entry(self) -> dict[str, Any]:
        """Return the entry in ``DATABASES`` of the first of them, for another process."""
        entry = connections.settings[self.aliases[0]]
        return {key: entry[key] for key in ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT", "OPTIONS")}

    def query(self, statement: str, place: int = 0) -> list[Any]:
        """Execute a statement in one of the databases."""
        with self._blocker.unblock(), connections[self.aliases[place]].cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall()) if cursor.description else []

    def empty(self) -> None:
        """Forget all locks."""
        for place in range(5):
            with self._blocker.unblock():
                connections[self.aliases[place]].close()  # its server may have been killed
            self.query(f"DELETE FROM {table.TABLE}", place)


@pytest.fixture(scope="session")
def sqlite_tables(tmp_path_factory: pytest.TempPathFactory, django_db_blocker: Any) -> Iterator[Tables]:
    with Tables(SQLite(tmp_path_factory.mktemp("nodes")), django_db_blocker) as tables:
        yield tables


@pytest.fixture(scope="session")
def postgresql_tables(postgresql_server: Database, django_db_blocker: Any) -> Iterator[Tables]:
    with Tables(postgresql_server, django_db_blocker) as tables:
        yield tables


@pytest.fixture(scope="session")
def mariadb_tables(mariadb_server: Database, django_db_blocker: Any) -> Iterator[Tables]:
    with Tables(mariadb_server, django_db_blocker) as tables:
        yield tables


DATABASES = ["sqlite", "postgresql", "mariadb"]
# A manager does the same with all three databases. Tests that use `tables` cover the differences.
SLOW_DATABASES = [pytest.param(kind, marks=pytest.mark.endurance) for kind in DATABASES[1:]]


def connect(manager: LockManager) -> None:
    """Connect to all nodes: for a database that takes longer than short leases last."""
    listed = [Kind.LISTED] * len(manager.nodes)
    wait_until(lambda: [reply.kind for reply in manager.survey(count=1).values()] == listed, pause=0.0)


@pytest.fixture
def unblocked(django_db_blocker: Any) -> Iterator[None]:
    """Let our threads use databases, which pytest-django forbids."""
    with django_db_blocker.unblock():
        yield


def empty_tables(request: pytest.FixtureRequest, kind: str) -> Tables:
    """Return five empty databases of a kind, which count as five servers."""
    if kind != "sqlite":
        request.getfixturevalue(kind)  # it runs, whatever the last test did to it
    vendor = {"mariadb": "mysql"}.get(kind, kind)
    patch = request.getfixturevalue("monkeypatch")
    if kind == "sqlite":
        prepare = table.PREPARE["sqlite"]

        def prepare_carelessly(query: Any, *args: Any) -> None:
            prepare(query, *args)
            query(CARELESS)

        patch.setitem(table.PREPARE, "sqlite", prepare_carelessly)
    greet = table.GREET[vendor]

    def greet_as_itself(query: Any, connection: Any) -> Any:
        greeting = greet(query, connection)
        return replace(greeting, run_id=f"{greeting.run_id} {connection.alias}")

    request.getfixturevalue("unblocked")
    patch.setitem(table.GREET, vendor, greet_as_itself)
    found: Tables = request.getfixturevalue(f"{kind}_tables")
    found.empty()
    return found


@pytest.fixture(params=DATABASES)
def tables(request: pytest.FixtureRequest) -> Tables:
    """Five empty databases of each kind in turn."""
    return empty_tables(request, request.param)


@pytest.fixture(scope="session")
def five_clusters() -> Iterator[list[Cluster]]:
    """Five clusters of one master each, shared by all tests of this process."""
    with single_masters(5) as five:
        yield five


@pytest.fixture
def clusters(five_clusters: list[Cluster]) -> list[Cluster]:
    """Five empty clusters."""
    for one in five_clusters:
        one.clear()
    return five_clusters


Opened = Callable[[int], list[Any]]


def nodes_at(urls: list[str]) -> Opened:
    """Return what opens the first of some nodes."""
    return lambda count: [open_node(NodeSpec(url), "t:") for url in urls[:count]]


def five_nodes_in_one(url: str, table: type[Any], monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Return what opens nodes in one store, which count as several stores."""
    opened = table.open

    def open_as_itself(table: Any) -> Greeting:
        greeting = opened(table)
        return replace(greeting, run_id=f"{greeting.run_id} {table.key('h', '')}")

    def open_some(count: int) -> list[Any]:
        nodes = [open_node(NodeSpec(url, f"node{place}"), f"t{place}:") for place in range(count)]
        for place, node in enumerate(nodes):
            node.address += f" {place}"
        return nodes

    monkeypatch.setattr(table, "open", open_as_itself)
    return open_some


# A manager does the same as with etcd, and Java is slow. tests/service/consensus covers the differences.
SLOW_ZOOKEEPER = pytest.param("zookeeper", marks=pytest.mark.endurance)

# A majority of two kinds does the same.
KINDS = [
    "memory",
    "real",
    "cluster",
    "sqlite",
    *SLOW_DATABASES,
    *(["etcd", SLOW_ZOOKEEPER] if consensus.PRESENT else []),
]


def opened(request: pytest.FixtureRequest, kind: str) -> Opened:
    """Return what opens nodes of a kind, which hold nothing yet."""
    patch = request.getfixturevalue("monkeypatch")
    match kind:
        case "memory":
            memory = [MemoryNode(f"m{place}") for place in range(5)]
            return lambda count: memory[:count]
        case "real":
            return nodes_at(request.getfixturevalue("nodes").urls)
        case "cluster":
            return nodes_at([cluster.url for cluster in request.getfixturevalue("clusters")])
        case "etcd":
            from django_redlock.contrib.consensus.etcd.node import EtcdTable

            return five_nodes_in_one(request.getfixturevalue("etcd").url, EtcdTable, patch)
        case "zookeeper":
            url = request.getfixturevalue("zookeeper").url
            from django_redlock.contrib.consensus.zookeeper.node import ZookeeperTable  # needs kazoo

            return five_nodes_in_one(url, ZookeeperTable, patch)
    return nodes_at(empty_tables(request, kind).urls)


class Blocking:
    """The blocking flavour, callable from a test that is a coroutine."""

    async def acquire(self, lock: Lock) -> Lease:
        return lock.acquire()

    async def release(self, lease: Lease) -> str:
        return lease.release()

    async def extend(self, lease: Lease, **options: Any) -> bool:
        return lease.extend(**options)

    @asynccontextmanager
    async def entered(self, lock: Lock) -> AsyncIterator[Lease]:
        with lock as lease:
            yield lease

    async def at_once(self, times: int, work: Callable[["Blocking"], Awaitable[None]]) -> None:
        """Run *work* in as many threads."""
        await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(work(self))) for _ in range(times)))

    async def pass_time(self, sim: Simulation, seconds: float) -> None:
        """Let virtual time pass, in which the simulation replaces the threads of blocking code."""
        sim.advance(seconds)

    async def close(self, manager: LockManager) -> None:
        manager.close()


class Asyncio:
    """The asyncio flavour."""

    async def acquire(self, lock: Lock) -> Lease:
        return await lock.aacquire()

    async def release(self, lease: Lease) -> str:
        return await lease.arelease()

    async def extend(self, lease: Lease, **options: Any) -> bool:
        return await lease.aextend(**options)

    @asynccontextmanager
    async def entered(self, lock: Lock) -> AsyncIterator[Lease]:
        async with lock as lease:
            yield lease

    async def at_once(self, times: int, work: Callable[["Asyncio"], Awaitable[None]]) -> None:
        """Run *work* in as many tasks."""
        await asyncio.gather(*(work(self) for _ in range(times)))

    async def pass_time(self, sim: Simulation, seconds: float) -> None:
        """Let virtual time pass, as that of the event loop."""
        await asyncio.sleep(seconds)

    async def close(self, manager: LockManager) -> None:
        await manager.aclose()


Flavour = Blocking | Asyncio


@pytest.fixture(params=[Blocking, Asyncio], ids=["blocking", "asyncio"])
async def flavour(request: pytest.FixtureRequest) -> AsyncIterator[Flavour]:
    """Each flavour in turn; it closes the managers that the test made."""
    one = request.param()
    yield one
    for manager in made:
        await one.close(manager)


class Virtual:
    """Makes managers over five nodes in memory, in virtual time."""

    def __init__(self, sim: Simulation, flavour: Flavour) -> None:
        self.sim = sim
        self._flavour = flavour
        self.made: list[LockManager] = []

    def __call__(self, **options: Any) -> LockManager:
        notify = options.pop("notify", None)
        manager = self.sim.rival(**options).manager
        manager.notify = notify or manager.notify
        self.made.append(manager)
        return manager

    async def wait(self, seconds: float) -> None:
        """Let time pass."""
        await self._flavour.pass_time(self.sim, seconds)


@pytest.fixture
async def virtual(flavour: Flavour) -> AsyncIterator[Virtual]:
    """Make managers in virtual time, in which blocking code has no threads; other tests run those in real time."""
    with ExitStack() as stack:
        sim = Simulation(nodes=5, ttl=10.0, restart_guard=False, node_timeout=2.0, check=False)
        sim.runtime = replace(sim.runtime, loop_watchdog=PerLoop(lambda: AsyncWatchdog(sim.clock)).get)
        stack.enter_context(sim)
        sim.adopt(asyncio.get_running_loop())
        yield (made := Virtual(sim, flavour))
        for manager in made.made:
            await flavour.close(manager)


def holders(manager: LockManager, slug: str) -> list[str]:
    """Return the secrets that hold *slug*, one per node that has it."""
    replies = manager.survey(slugs=(slug,))
    values = [reply.rows[0].value for reply in replies.values() if reply.rows]
    return [value[:32] for value in values if value]


def held_by(manager: LockManager, slug: str, *tokens: str) -> bool:
    """Wait until exactly *tokens* hold *slug*: the last nodes may execute a release a moment after it ended."""
    return bool(wait_until(lambda: set(holders(manager, slug)) == set(tokens), pause=0.01, seconds=60))


def renew_now(lease: Lease) -> None:
    """Make the watchdog find a lease due for extension."""
    lease.hold._renew_at = 0.0
    (loop_watchdog() if isinstance(lease, AsyncLease) else watchdog).watch(lease)


def start(child: Callable[[], Any]) -> int:
    """Run *child* in a forked process; return its id. It exits with 0 unless *child* raises or returns a true value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it forks a process with threads on purpose
        pid = os.fork()
    if not pid:
        try:
            os._exit(1 if child() else 0)  # not a status of another process, whose lowest byte is 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(99)
    return pid


def fork(child: Callable[[], Any]) -> int:
    """Run *child* in a forked process to its end; return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(start(child), 0)[1])


def fork_and_lock(one: LockManager) -> None:
    """Hold a lock over a fork; check that both processes go on, and that the child ends nothing of its parent."""
    lease = one.lock("a").acquire()

    def child() -> None:
        with pytest.raises(LockTakenError):
            one.lock("a", wait=0).acquire()
        assert one.lock("b", wait=0).acquire().release() == "released"

    assert fork(child) == 0
    assert lease.extend()
    assert lease.release() == "released"


GREENLETS = """
from gevent import monkey
monkey.patch_all()
import json, os, sys
from django.conf import settings
settings.configure(DATABASES=json.loads(sys.argv[1]))
import gevent
from tests.managers import patient_manager
from django_redlock.engine import watchdog

watchdog.LINGER = watchdog.TICK = 0.05
manager = patient_manager(sys.argv[2:])
order, files = [], []

def work(number):
    with manager.lock("a", wait=60):
        order.append(number)

def renew(lease):
    lease.hold._renew_at = 0.0  # due at once
    watchdog.watchdog.watch(lease)
    while not lease.extensions:
        gevent.sleep(0.01)

with gevent.Timeout(60):
    lease = manager.lock("a").acquire()
    jobs = [gevent.spawn(work, number) for number in range(3)]
    renew(lease)
    lease.release()
    gevent.joinall(jobs, raise_error=True)
    for _ in range(3):
        with manager.lock("a") as lease:
            renew(lease)
        while watchdog.watchdog.running:  # its thread ends, and the next one has connections of its own
            gevent.sleep(0.01)
        files.append(len(os.listdir("/proc/self/fd")))
    while len(os.listdir("/proc/self/fd")) > files[0]:  # nothing accumulates
        gevent.sleep(0.01)
print(sorted(order))
manager.close()
"""


def run_greenlets(urls: list[str], databases: dict[str, Any] | None = None) -> None:
    """Have greenlets of another process, which has some DATABASES, wait for a lock that is renewed; nothing is left."""
    if not find_spec("gevent"):
        pytest.skip("needs gevent: pip install gevent")

    ended = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", GREENLETS, json.dumps(databases or {}), *urls],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (0, "[0, 1, 2]\n"), ended.stderr
