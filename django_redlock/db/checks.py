"""System checks for what a fenced transaction needs from its database (internal)."""

from collections.abc import Iterable, Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import connections

from ..checks import TAG
from ..models import Fence
from ..routers import read_elsewhere

FOUND_ROWS = 2  # the value of CLIENT_FOUND_ROWS in MySQL's protocol
MYSQL = "django.db.backends.mysql"
POSTGRESQL = "django.db.backends.postgresql"
QUESTIONS = 20  # to routers, some of which choose a replica at random


@register(TAG)
def check_databases(**kwargs: Any) -> list[CheckMessage]:
    """Report the problems that the database settings show, without a connection."""
    entries = {alias: connections.settings[alias] for alias in connections}
    return [message for alias, entry in entries.items() for message in _check_entry(alias, entry)]


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
    connection = connections[alias]
    if connection.vendor != "mysql":
        return
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT engine FROM information_schema.tables WHERE table_schema = database() AND table_name = %s",
            [Fence._meta.db_table],
        )
        row = cursor.fetchone()
    if row and row[0] in ("MyISAM", "Aria", "MEMORY"):
        yield Error(
            f"The table {Fence._meta.db_table} of database {alias!r} is stored by {row[0]}, which has no "
            "transactions: its fences protect nothing.",
            hint=f"ALTER TABLE {Fence._meta.db_table} ENGINE = InnoDB, and the same for the tables that it protects.",
            id="redlock.E032",
        )
