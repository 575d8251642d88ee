"""How long a free lock takes on every kind of node that this machine can run; the kinds take turns."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

from django.core.management import call_command

from django_redlock import LockManager
from django_redlock.testing import ServerNotFoundError
from tests import clusters, etcd, zookeeper
from tests.services import Database, MariaDB, PostgreSQL, ServiceMissingError, django_database

from .bench import Bench, Contender, interleave, ours
from .report import Section

NODE_TIMEOUT = 5.0  # seconds: a busy machine must not change the number of nodes that are measured


def run(bench: Bench) -> Iterator[Section]:
    """Measure all kinds in turns."""
    section = Section("kinds", "acquire + release of a free lock, by kind of node, blocking")
    with ExitStack() as stack:
        running: list[Contender] = []
        for name, start in KINDS.items():
            try:
                urls = start(bench, stack)
            except (ServiceMissingError, ServerNotFoundError) as error:
                section.left_out.append(f"{name}: {error}")
            else:
                manager = ours(f"kinds-{len(running)}", urls, node_timeout=NODE_TIMEOUT)
                running.append(Contender(name, partial(once, manager)))
        section.add_times(interleave(running, bench.rounds(60)), "ms")
    yield section


def once(manager: LockManager) -> None:
    manager.lock("kinds", wait=60.0).acquire().release()


def database(kind: type[Database], bench: Bench, stack: ExitStack) -> list[str]:
    """Use a new database in a server of its own."""
    server, alias = stack.enter_context(kind()), f"kinds_{kind.scheme}"
    name = stack.enter_context(server.database())
    stack.enter_context(django_database(alias, server.settings(name)))
    call_command("migrate", "redlock", database=alias, verbosity=0)
    return [f"database://{alias}"]


def etcd_cluster(bench: Bench, stack: ExitStack) -> list[str]:
    return [stack.enter_context(etcd.cluster()).url]


KINDS: dict[str, Callable[[Bench, ExitStack], list[str]]] = {
    "one Redis": lambda bench, stack: bench.urls(1),
    "three Redis": lambda bench, stack: bench.urls(3),
    "five Redis": lambda bench, stack: bench.urls(5),
    "Redis Cluster of three masters": lambda bench, stack: [stack.enter_context(clusters.cluster()).url],
    "PostgreSQL": partial(database, PostgreSQL),
    "MariaDB": partial(database, MariaDB),
    "etcd, three members": etcd_cluster,
    "etcd and two Redis": lambda bench, stack: [*bench.urls(2), *etcd_cluster(bench, stack)],
    "ZooKeeper, three members": lambda bench, stack: [stack.enter_context(zookeeper.ensemble()).url],
}
