"""
Every kind of node that this machine can run: how long a free lock takes, and how many of them a process takes.

All servers run at the same time, on this machine, and the kinds take turns. A kind without its server is left out by
name.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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


def sqlite(bench: Bench, stack: ExitStack) -> list[str]:
    """Use a file, on whatever holds temporary files."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    return [stack.enter_context(table(SQLite(Path(folder))))]


def database(kind: type[Database], bench: Bench, stack: ExitStack) -> list[str]:
    """Use a database in a server of its own."""
    return [stack.enter_context(table(stack.enter_context(kind())))]


@contextmanager
def table(server: Database | SQLite) -> Iterator[str]:
    """Make the table of the locks in a new database."""
    alias = f"kinds_{server.scheme}"
    with server.database() as name, django_database(alias, server.settings(name)):
        call_command("migrate", "redlock", database=alias, verbosity=0)
        yield f"database://{alias}"


def cluster(module: str, function: str, bench: Bench, stack: ExitStack) -> list[str]:
    """Use a cluster, all of whose members write to the disk of this machine."""
    start = getattr(import_module(module), function)
    return [stack.enter_context(start()).url]


etcd = partial(cluster, "tests.etcd", "cluster")
KINDS: dict[str, Callable[[Bench, ExitStack], list[str]]] = {
    "memory, this process only": lambda bench, stack: ["memory://kinds"],
    "one Redis": lambda bench, stack: bench.urls(1),
    "three Redis": lambda bench, stack: bench.urls(3),
    "five Redis": lambda bench, stack: bench.urls(5),
    "Redis Cluster of three masters": partial(cluster, "tests.clusters", "cluster"),
    "SQLite": sqlite,
    "PostgreSQL": partial(database, PostgreSQL),
    "MariaDB": partial(database, MariaDB),
    "etcd, three members": etcd,
    "etcd and two Redis": lambda bench, stack: [*bench.urls(2), *etcd(bench, stack)],
    "ZooKeeper, three members": partial(cluster, "tests.zookeeper", "ensemble"),
}


def run(bench: Bench) -> Iterator[Section]:
    """Measure all kinds in turns, and then many threads on each."""
    latency = Section("kinds", "acquire + release of a free lock, by kind of node, blocking")
    throughput = Section("kinds-throughput", f"free locks per second, {THREADS} threads with a name each")
    with ExitStack() as stack:
        managers: dict[str, LockManager] = {}
        for name, start in KINDS.items():
            try:
                urls = start(bench, stack)
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


def _once(manager: LockManager, name: str = "kinds") -> None:
    manager.lock(name, wait=60.0).acquire().release()
