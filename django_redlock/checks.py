"""
System checks of the settings, the databases and the routers; only ``check --deploy`` connects to the nodes.

One id has one cause. Errors mean that locks cannot work, warnings that they will surprise. The same errors are raised
as :class:`~django_redlock.conf.InvalidRedlockError` when the alias is used.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.apps import apps
from django.conf import settings
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections
from django.urls import LocalePrefixPattern, get_resolver
from django.utils.module_loading import import_string

from .conf import (
    EXAMPLE,
    REDIS_CACHES,
    AliasConfig,
    InvalidRedlockError,
    UnknownAliasError,
    aliases,
    databases_of,
    is_test_run,
    nodes_named,
    read_alias,
    servers_of,
)
from .core.admission import Admission
from .engine.lock import decorators
from .nodes import NodeSpec
from .nodes.backends import open_node
from .nodes.base import LinkError
from .routers import read_elsewhere
from .runtime.clock import steady

TAG = "redlock"
CONNECT_TIMEOUT = 1.0  # seconds to connect to a node
FOUND_ROWS = 2  # the value of CLIENT_FOUND_ROWS in MySQL's protocol
MYSQL = "django.db.backends.mysql"
POSTGRESQL = "django.db.backends.postgresql"
QUESTIONS = 20  # to routers, some of which choose a replica at random


@register(TAG)
def check_settings(**kwargs: Any) -> list[CheckMessage]:
    """Report every alias of ``REDLOCK`` that cannot be used, and what may surprise about the others."""
    try:
        names = aliases()
    except InvalidRedlockError as error:
        return [_error(error)]
    return [message for alias in names for message in _check_alias(alias)]


@register(TAG, deploy=True)
def check_deployment(**kwargs: Any) -> list[CheckMessage]:
    """Report what a project should not do in production; only ``check --deploy`` runs this check."""
    try:
        return [message for alias in aliases() for message in _check_deployed(alias)]
    except InvalidRedlockError:
        return []  # check_settings reports the error


def check_decorators() -> Iterator[CheckMessage]:
    """Report the locks of decorated functions and views that the settings do not allow."""
    if getattr(settings, "ROOT_URLCONF", None):
        get_resolver().url_patterns  # noqa: B018  (imports the views)
    for lock in sorted(decorators, key=lambda lock: lock.names):
        try:
            lock.description()
        except (InvalidRedlockError, ValueError) as error:
            if isinstance(error, InvalidRedlockError) and not isinstance(error, UnknownAliasError):
                continue  # check_settings reports the alias
            yield Error(
                f"A function or view is decorated with the lock {lock.name!r}, which cannot be taken: {error}",
                id="redlock.E011",
            )


@register(Tags.urls)
def check_translated_paths(**kwargs: Any) -> list[CheckMessage]:
    """Report paths of ``locked_paths`` that ``i18n_patterns`` serves under the prefix of a language as well."""
    messages: list[CheckMessage] = []
    for name in getattr(settings, "MIDDLEWARE", ()) if getattr(settings, "ROOT_URLCONF", None) else ():
        try:
            locks_path: Any = getattr(import_string(name), "locks_path", None)
        except ImportError:
            continue  # Django raises it when the server starts
        for language, path in _translated_paths() if locks_path else ():
            if locks_path(path) and not locks_path(f"/{language}{path}"):
                messages.append(
                    Warning(
                        f"{name} locks {path!r}, but not '/{language}{path}', which i18n_patterns serves as well.",
                        hint=f"List re.compile(r'^/([a-z-]+/)?{path[1:]}') instead.",
                        id="redlock.W013",
                    )
                )
                break
    return messages


def _translated_paths() -> Iterator[tuple[str, str]]:
    """Yield the prefix of a language, and the beginning of each path that ``i18n_patterns`` serves under it."""
    for resolver in get_resolver().url_patterns:
        pattern = resolver.pattern
        if isinstance(pattern, LocalePrefixPattern):
            plain = "" if pattern.prefix_default_language else settings.LANGUAGE_CODE
            prefixes = [code for code, _ in settings.LANGUAGES if code != plain]
            yield from ((prefixes[0], f"/{path}") for path in _beginnings(resolver) if prefixes and path)


def _beginnings(resolver: Any) -> Iterator[str]:
    """Yield the text with which each path of a resolver begins, up to its first argument."""
    for pattern in resolver.url_patterns:
        text, *arguments = re.split(r"[<(\[\\$]", str(pattern.pattern).removeprefix("^"), maxsplit=1)
        if hasattr(pattern, "url_patterns") and not arguments:
            yield from (text + rest for rest in _beginnings(pattern))
        else:
            yield text


@register(TAG)
def check_databases(**kwargs: Any) -> list[CheckMessage]:
    """Report the problems that the database settings show, without a connection."""
    return [message for alias in connections for message in _check_entry(alias, connections.settings[alias])]


@register(TAG)
def check_routers(**kwargs: Any) -> list[CheckMessage]:
    """Report routers that send reads and writes of a model to different databases, even in a fenced block."""
    aliases = list(connections)
    try:
        found = next(filter(None, (read_elsewhere(aliases) for _ in range(QUESTIONS))), None)
    except (ImportError, TypeError):
        return []  # a router that cannot be imported, or no list: Django raises it at the first query
    if found is None:
        return []
    model, written, read = found
    return [
        Warning(
            f"DATABASE_ROUTERS sends writes of {model._meta.label} to {written!r}, but reads to {read!r}, which may "
            "lag behind: fenced() and lock_for_update() refuse to begin, and views under @locked_view may read old "
            "rows.",
            hint="Put 'django_redlock.routers.FencedRouter' first in DATABASE_ROUTERS. It changes only where such "
            "blocks and views read.",
            id="redlock.W032",
        )
    ]


@register(TAG, Tags.database)
def check_fence_tables(databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Report fence tables that support no transactions; query only the databases that the check runs on."""
    return [message for alias in databases or () for message in _check_storage(alias)]


def _check_deployed(alias: str) -> Iterator[CheckMessage]:
    try:
        config = read_alias(alias)
    except InvalidRedlockError:
        return
    if "wait" not in settings.REDLOCK[alias].get("OPTIONS", {}):
        yield Warning(
            f"REDLOCK[{alias!r}] does not say how long a lock waits; without wait= it waits for ever, even in a view.",
            hint="Set OPTIONS['wait'] to a number of seconds, such as 10, or to None for ever.",
            id="redlock.W105",
        )
    yield from _without_vote(config)
    nodes: list[Any] = [node for node in config.nodes if getattr(node, "remote", False)]
    for node in nodes:
        if not node.encrypted:
            yield Warning(
                f"REDLOCK[{alias!r}] has no TLS to {node.name!r}: anyone who can listen can forge and end locks.",
                hint="Write rediss://, etcds:// or zookeepers:// and give the server a certificate, or silence this "
                "check on a trusted network.",
                id="redlock.W101",
            )
        elif not node.verified:
            yield Warning(
                f"REDLOCK[{alias!r}] does not verify the certificate of {node.name!r}: whoever can answer in its place "
                "gets the password, and can forge and end locks.",
                hint="Take ssl_cert_reqs and ssl_check_hostname out of its URL and OPTIONS; if its certificate is from "
                "an authority of your own, name that in ssl_ca_certs.",
                id="redlock.W106",
            )
        if not node.authenticated:
            yield Warning(
                f"REDLOCK[{alias!r}] talks to {node.name!r} without a password: anyone who can reach it can end locks.",
                hint="Give the locks a user of their own (ACL SETUSER, etcdctl user add, or a user in the URL of a "
                "ZooKeeper; see the documentation).",
                id="redlock.W102",
            )
    hosts = {node.address.rpartition(":")[0] for node in nodes}
    if len(config.nodes) == len(nodes) > 1 and len(hosts) == 1:
        yield Warning(
            f"REDLOCK[{alias!r}] has all its nodes on {hosts.pop()!r}: they fail together, and so do all locks.",
            hint="Put each node on a machine of its own, or use one node and silence redlock.W001.",
            id="redlock.W103",
        )


def _without_vote(config: AliasConfig) -> Iterator[CheckMessage]:
    """
    Connect to each node, and warn about nodes that answer but can never vote.

    A node that does not answer causes no warning: the checks may run in another network.
    """
    admission = Admission(config.rules, tuple(node.name for node in config.nodes), steady, time.time)

    def why(index: int) -> str:
        try:
            link = config.nodes[index].connect(CONNECT_TIMEOUT)
        except LinkError as error:
            return error.detail if error.failure.perhaps_lasting else ""
        except Exception:  # such as that of a credential provider, whose service this network may not reach
            return ""
        link.close()
        admission.greet(index, link.greeting)
        return admission.exclusion(index)

    with ThreadPoolExecutor(len(config.nodes), thread_name_prefix="django_redlock check") as pool:
        reasons = list(pool.map(why, range(len(config.nodes))))
    for node, reason in zip(config.nodes, reasons, strict=True):
        if reason:
            yield Warning(
                f"REDLOCK[{config.alias!r}] has the node {node.name!r}, which can never vote: {reason}.",
                hint="Correct the server or its entry in NODES; manage.py redlock_doctor says more.",
                id="redlock.W104",
            )


def _error(error: InvalidRedlockError) -> CheckMessage:
    message, _, rest = error.message.partition(" Write, for example:")
    return Error(message, hint=f"Write, for example:\n\n{EXAMPLE}" if rest else None, id=error.code)


def _check_alias(alias: str) -> Iterator[CheckMessage]:
    try:
        config = read_alias(alias)
    except InvalidRedlockError as error:
        yield _error(error)
        return
    # Django's test runner switches DEBUG off before it runs the checks.
    tolerated = settings.DEBUG or is_test_run()
    if not tolerated and any(node.address.startswith("memory:") for node in config.nodes):
        yield Error(
            f"REDLOCK[{config.alias!r}] has nodes in memory: they protect one process from itself and nothing else.",
            hint="List Redis or Valkey masters. Nodes in memory are for tests, and for DEBUG = True.",
            id="redlock.E008",
        )
    yield from _node_count(config)
    yield from _failovers(config)
    yield from _shared_servers(config)
    named = nodes_named(config.alias)
    for cache, entry in settings.CACHES.items():
        if f"cache:{cache}" in named and len(servers_of(entry)) > 1:
            yield Warning(
                f"The cache {cache!r} has several servers; REDLOCK[{config.alias!r}] uses only the first, its primary.",
                hint="Replicas do not vote: list independent masters as nodes of their own.",
                id="redlock.W003",
            )
    yield from _databases_that_are_nodes(config)


def _node_count(config: AliasConfig) -> Iterator[CheckMessage]:
    count = len(config.nodes)
    if count == 1 and databases_of(config.alias):
        return  # it forgets nothing, and the project cannot do without it anyway
    if count == 1 and getattr(config.nodes[0], "replicated", False):
        return  # it forgets nothing, and one of its members may be down
    if count == 1 and (users := [each for _, found in (*_caches(config), *_brokers(config)) for each in found]):
        yield Warning(
            f"REDLOCK[{config.alias!r}] has one node, which is also the server of {' and '.join(users)}: no lock can "
            "be taken while it is down; a restart without its data, eviction, or cache.clear() in the same database "
            "drops held locks; and a long queue slows locks down.",
            hint="List 3 or 5 independent masters with maxmemory-policy noeviction, or silence this check if one "
            "server for everything is what you want.",
            id="redlock.W012",
        )
    elif count < 3:
        yield Warning(
            f"REDLOCK[{config.alias!r}] has {count} node{'s' if count > 1 else ''}: no lock can be taken while one is "
            "down, and one that restarts without its data forgets the locks it held.",
            hint="List 3 or 5 independent masters, or silence this check if one is what you want.",
            id="redlock.W001",
        )
    elif count % 2 == 0:
        yield Warning(
            f"REDLOCK[{config.alias!r}] has {count} nodes, an even number: as many may fail as with {count - 1}.",
            hint=f"Use {count - 1} or {count + 1} nodes, or silence this check: an even number does survive one more "
            "node that forgot its data.",
            id="redlock.W002",
        )


def _failovers(config: AliasConfig) -> Iterator[CheckMessage]:
    instead = "silence this check: for max_ttl seconds after a failover, it gives no vote, and the others decide."
    if len(config.nodes) < 3:
        instead = (
            "set OPTIONS['restart_guard'] = True, so that no lock can be taken for max_ttl seconds after a failover, "
            "and silence this check."
        )
    for node in config.nodes:
        if node.fails_over:
            yield Warning(
                f"REDLOCK[{config.alias!r}] has the node {node.name!r}, whose master can be replaced: a failover "
                "can lose the locks that the replica did not have yet, and with them a vote.",
                hint=f"Use a master without replicas, or {instead}",
                id="redlock.W004",
            )


def _databases_that_are_nodes(config: AliasConfig) -> Iterator[CheckMessage]:
    """Warn about databases of SQLite that are nodes and cannot be: in memory, or in a transaction at each request."""
    for database in databases_of(config.alias):
        connection: Any = connections.create_connection(database)
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            yield Warning(
                f"REDLOCK[{config.alias!r}] uses the database {database!r} as a node, which is SQLite in memory: no "
                "other process would find its locks, so it gives no vote.",
                hint="Use a file or a server. For tests of one process, list memory://a instead.",
                id="redlock.W010",
            )
    files = {getattr(node, "file", "") for node in config.nodes} - {""}
    for database in connections:
        entry = connections.settings[database]
        if entry["ATOMIC_REQUESTS"] and files and os.path.realpath(entry["NAME"]) in files:
            yield Warning(
                f"REDLOCK[{config.alias!r}] uses the SQLite file of the database {database!r} as a node, and "
                "ATOMIC_REQUESTS opens a transaction in it for every request: no lock can be taken inside.",
                hint="Give the locks a database file of their own in DATABASES and NODES, or use a database server.",
                id="redlock.W011",
            )


def _shared_servers(config: AliasConfig) -> Iterator[CheckMessage]:
    """Warn about nodes that are also the server of a cache or of Celery's broker; the only node has one warning."""
    if len(config.nodes) == 1:
        return
    for node, caches in _caches(config):
        yield Warning(
            f"REDLOCK[{config.alias!r}] has the node {node!r}, which is also the server of {' and '.join(caches)}: "
            "eviction, or cache.clear() in the same database, can drop held locks.",
            hint="Use a server of its own with maxmemory-policy noeviction, or silence this check.",
            id="redlock.W005",
        )
    for node, brokers in _brokers(config):
        yield Warning(
            f"REDLOCK[{config.alias!r}] has the node {node!r}, which is also {' and '.join(brokers)}: "
            "a long queue slows locks down, and one that fills the memory stops them.",
            hint="Use a server of its own, or silence this check if the other nodes are on other servers.",
            id="redlock.W006",
        )


def _caches(config: AliasConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield each node that is the server of caches, with what to call those."""
    named = dict(zip(nodes_named(config.alias), config.nodes, strict=True))
    for node in config.nodes:
        found = [
            f"the cache {cache!r}"
            for cache, entry in settings.CACHES.items()
            if named.get(f"cache:{cache}") is node
            or (entry.get("BACKEND") in REDIS_CACHES and _address(_first(entry)) == _alike(node.address))
        ]
        if found:
            yield node.name, found


def _brokers(config: AliasConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield each node that is Celery's broker, with the settings that name it."""
    for node in config.nodes:
        found = [
            setting
            for setting in ("CELERY_BROKER_URL", "BROKER_URL")
            if _address(getattr(settings, setting, None)) == _alike(node.address)
        ]
        if found:
            yield node.name, [f"Celery's broker ({' and '.join(found)})"]


def _first(cache: Any) -> str:
    return [*servers_of(cache), ""][0]


def _address(url: Any) -> str:
    """Return the address of a Redis URL as nodes write it; empty for anything else."""
    if not isinstance(url, str) or not re.match("(redis|rediss|unix|valkey|valkeys)://", url):
        return ""
    try:
        return _alike(open_node(NodeSpec(url.strip()), "x:").address)
    except ValueError:
        return ""


def _alike(address: str) -> str:
    return re.sub("^localhost:", "127.0.0.1:", address)


def _check_entry(alias: str, entry: dict[str, Any]) -> Iterator[CheckMessage]:
    options = entry.get("OPTIONS") or {}
    engine = entry.get("ENGINE")
    flags = options.get("client_flag", FOUND_ROWS)
    if engine == MYSQL and isinstance(flags, int) and not flags & FOUND_ROWS:
        yield Error(
            f"DATABASES[{alias!r}]['OPTIONS'] has a client_flag without FOUND_ROWS, so the database does not report "
            "how many rows a claim matched: fenced() can refuse the rightful holder.",
            hint="Add it: from MySQLdb.constants import CLIENT; 'client_flag': CLIENT.FOUND_ROWS | ...",
            id="redlock.E031",
        )
    if engine in (MYSQL, POSTGRESQL) and _level(options) not in ("read committed", "read uncommitted"):
        yield Warning(
            f"DATABASES[{alias!r}] is not at READ COMMITTED: fenced() stays safe, but it can conflict with other "
            "transactions, and nested=True is refused.",
            hint="Leave isolation_level out, or use fenced(lease, retries=...).run(function) and silence this check.",
            id="redlock.W031",
        )


def _level(options: dict[str, Any]) -> str:
    """Return the isolation level in a database's options; ignore the bare numbers of psycopg2."""
    level = options.get("isolation_level", "read committed")
    if isinstance(level, int) and not hasattr(level, "name"):
        return "read committed"
    return str(getattr(level, "name", level)).lower().replace("_", " ")


def _check_storage(alias: str) -> Iterator[CheckMessage]:
    connection, table = connections[alias], apps.get_model("redlock", "Fence")._meta.db_table
    if connection.vendor != "mysql":
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT engine FROM information_schema.tables WHERE table_schema = database() AND table_name = %s",
            [table],
        )
        row = cursor.fetchone()
    if row and row[0] in ("MyISAM", "Aria", "MEMORY"):
        yield Error(
            f"The table {table} of database {alias!r} is stored by {row[0]}, which has no "
            "transactions: its fences protect nothing.",
            hint=f"ALTER TABLE {table} ENGINE = InnoDB, and the same for the tables that it protects.",
            id="redlock.E032",
        )
