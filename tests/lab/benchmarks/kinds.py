"""
Every kind of node that this machine can run: how long a free lock takes, and how many of them a process takes.

All servers run at the same time, on this machine, and the kinds take turns. A kind without its server is left out by
name.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path

from django.core.management import call_command

from django_redlock import LockManager
from django_redlock.testing import ServerNotFoundError
from tests.services import Database, MariaDB, PostgreSQL, ServiceMissingError, SQLite, django_database

from .bench import Bench, ours
from .measure import Contender, interleave, threads_per_second
from .report import Section

THREADS = 8
NODE_TIMEOUT = 5.0  # seconds: a busy machine must not change the number of nodes that are measured

Start = Callable[[Bench], AbstractContextManager[list[str]]]


def run(bench: Bench) -> Iterator[Section]:
    """Measure all kinds in turns, and then many threads on each."""
    latency = Section("kinds", "acquire + release of a free lock, by kind of node, blocking")
    throughput = Section("kinds-throughput", f"free locks per second, {THREADS} threads with a name each")
    with ExitStack() as stack:
        managers: dict[str, LockManager] = {}
        for name, start in kinds():
            try:
                urls = stack.enter_context(start(bench))
            except (ServiceMissingError, ServerNotFoundError, ImportError) as error:
                latency.left_out.append(f"{name}: {error}")
            else:
                managers[name] = ours(f"kinds-{len(managers)}", urls, node_timeout=NODE_TIMEOUT)
        contenders = [Contender(name, partial(_once, manager)) for name, manager in managers.items()]
        latency.add_times(interleave(contenders, bench.rounds(60, 6)), "ms")
        yield latency
        for name, manager in managers.items():
            per_second = threads_per_second(partial(_once, manager), THREADS, bench.rounds(100, 10))
            throughput.add(name, per_second, "/s")
        yield throughput
        for manager in managers.values():
            manager.close()


def kinds() -> Iterator[tuple[str, Start]]:
    """Return the name of each kind, and how to start it."""
    yield "memory, this process only", in_memory
    for count, name in ((1, "one Redis"), (3, "three Redis"), (5, "five Redis")):
        yield name, partial(redis, count)
    yield "Redis Cluster of three masters", redis_cluster
    yield "SQLite", sqlite
    yield "PostgreSQL", partial(database, PostgreSQL)
    yield "MariaDB", partial(database, MariaDB)
    yield "etcd, three members", etcd
    yield "etcd and two Redis", etcd_and_redis
    yield "ZooKeeper, three members", zookeeper


@contextmanager
def in_memory(bench: Bench) -> Iterator[list[str]]:
    """Give a node in this process."""
    yield ["memory://kinds"]


@contextmanager
def redis(count: int, bench: Bench) -> Iterator[list[str]]:
    """Give some of the servers."""
    yield bench.urls(count)


@contextmanager
def redis_cluster(bench: Bench) -> Iterator[list[str]]:
    """Give a cluster."""
    with import_module("tests.clusters").cluster() as cluster:
        yield [cluster.url]


@contextmanager
def sqlite(bench: Bench) -> Iterator[list[str]]:
    """Give a file, on whatever holds temporary files."""
    with tempfile.TemporaryDirectory() as folder, table(SQLite(Path(folder))) as url:
        yield [url]


@contextmanager
def database(kind: type[Database], bench: Bench) -> Iterator[list[str]]:
    """Give a database in a server of its own."""
    with kind() as server, table(server) as url:
        yield [url]


@contextmanager
def table(server: Database | SQLite) -> Iterator[str]:
    """Make the table of the locks in a new database."""
    alias = f"kinds_{server.scheme}"
    with server.database() as name, django_database(alias, server.settings(name)):
        call_command("migrate", "redlock", database=alias, verbosity=0)
        yield f"database://{alias}"


@contextmanager
def etcd(bench: Bench) -> Iterator[list[str]]:
    """Give a cluster whose members all write to the disk of this machine."""
    with import_module("tests.etcd").cluster() as cluster:
        yield [cluster.url]


@contextmanager
def etcd_and_redis(bench: Bench) -> Iterator[list[str]]:
    """Give a majority of three."""
    with etcd(bench) as urls:
        yield [*bench.urls(2), *urls]


@contextmanager
def zookeeper(bench: Bench) -> Iterator[list[str]]:
    """Give an ensemble."""
    with import_module("tests.zookeeper").ensemble() as ensemble:
        yield [ensemble.url]


def _once(manager: LockManager, name: str = "kinds") -> None:
    manager.lock(name, wait=60.0).acquire().release()
