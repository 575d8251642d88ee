"""
Claim and create the rows of fences, and explain errors of the database (internal).
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Q
from django.db.models.functions import Now

from ..engine.lease import Lease, fence_out
from ..exceptions import StaleTokenError
from ..models import MAX_SHOWN, Fence, fence_key

BATCH = 500  # rows in one statement: older versions of SQLite accept at most 999 values

# Errors of a transaction that conflicted with another one and may be run again: PostgreSQL's SQLSTATE, the numbers of
# MySQL and MariaDB (deadlock; row changed since the snapshot), SQLite's BUSY and LOCKED.
CONFLICT_STATES = {"40001", "40P01"}
CONFLICT_NUMBERS = {1213, 1020}
CONFLICT_CODES = {5, 6}

ISOLATION = {
    "postgresql": "SHOW transaction_isolation",
    "mysql": "SELECT @@transaction_isolation",
    "mariadb": "SELECT @@tx_isolation",  # MariaDB knows transaction_isolation only since 11.1
}


def claim(lease: Lease, using: str) -> dict[str, str]:
    """
    Claim the fences of a lease in the open transaction; return those that could not be updated, with their names.

    Args:
        lease: The holder.
        using: Alias in ``DATABASES``.

    Raises:
        StaleTokenError: The database has seen a later holder; the lease is lost now.
    """
    fences = {fence_key(name, permit): shown(name, permit) for name, permit in lease.hold.slots()}
    keys = sorted(fences)
    missing: dict[str, str] = {}
    for first in range(0, len(keys), BATCH):
        some = keys[first : first + BATCH]
        missing |= {key: fences[key] for key in _claim(lease, using, some)}
    return missing


def _claim(lease: Lease, using: str, keys: list[str]) -> list[str]:
    number, owner = lease.fencing_token, lease.hold.owner()
    rows = Fence.objects.using(using).filter(pk__in=keys)
    mine = Q(token=number, owner=owner)
    if rows.filter(Q(token__lt=number) | mine).update(token=number, owner=owner, updated=Now()) == len(keys):
        return []
    overtaken = [
        seen for seen, by in rows.values_list("token", "owner") if (seen, by) != (number, owner) and seen >= number
    ]
    if overtaken:
        fence_out(lease, max(overtaken))
        raise StaleTokenError(lease.name, number)
    # A fence that this query finds but the update did not may be unclaimed, or claimed by this lease in another
    # thread. Either way, this transaction does not hold it.
    found = set(rows.values_list("key", flat=True))
    return [key for key in keys if key not in found] or keys


def create(using: str, rows: Mapping[str, str]) -> None:
    """Create fences that any lease can claim; leave existing fences as they are."""
    fences = [Fence(key=key, name=name, updated=Now()) for key, name in sorted(rows.items())]
    Fence.objects.using(using).bulk_create(fences, batch_size=BATCH // 5, ignore_conflicts=True)


def shown(name: str, permit: str) -> str:
    """Return a lock's name in a form that people can read in the table."""
    text = f"{name} #{permit}" if permit else name
    text = text.replace("\0", "�")  # PostgreSQL cannot store NUL
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def refuse_own_file(lease: Lease, connection: BaseDatabaseWrapper) -> None:
    """
    Make sure that a transaction does not keep its own lease from being renewed.

    Raises:
        RuntimeError: The transaction would write to the SQLite file that the lease needs as a node.
    """
    if connection.vendor != "sqlite" or not lease.hold.renewed:
        return
    file = os.path.realpath(connection.settings_dict["NAME"])
    rules, nodes = lease.hold.keeper.rules, lease.hold.keeper.nodes
    if sum(getattr(node, "file", "") != file for node in nodes) < rules.needed:
        raise RuntimeError(
            f"The transaction of database {connection.alias!r} would keep lock {lease.name!r} from being renewed: its "
            "file is the node of the lock, and SQLite has one writer at a time. Give the locks a database file of "
            "their own in DATABASES and NODES, or use a database server."
        )


def is_conflict(error: BaseException) -> bool:
    """Return whether a database error means that the transaction conflicted with another one and may be run again."""
    cause = error.__cause__ or error
    state = getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
    number = cause.args[0] if cause.args else None
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF  # the low byte is the error; the other bits only refine it
    return state in CONFLICT_STATES or number in CONFLICT_NUMBERS or code in CONFLICT_CODES


@contextmanager
def explained(alias: str) -> Iterator[None]:
    """Raise an error that says what to type if the database has no table of fences."""
    try:
        yield
    except DatabaseError as error:
        if not is_conflict(error) and "redlock_fence" in str(error) and _table_is_missing(alias):
            raise ImproperlyConfigured(
                f"Database {alias!r} has no table {Fence._meta.db_table}: put 'django_redlock' into INSTALLED_APPS and "
                f"type manage.py migrate redlock --database {alias}"
            ) from error
        raise


def _table_is_missing(alias: str) -> bool:
    # Open a separate connection: the one with the failed transaction accepts no query until the rollback.
    connection = connections[alias].copy()
    try:
        with suppress(DatabaseError):
            return Fence._meta.db_table not in connection.introspection.table_names()
    finally:
        connection.close()
    return False


def refuse_snapshots(connection: BaseDatabaseWrapper) -> None:
    """
    Make sure that reads after a claim are no older than the claim, even if the transaction read something before it.

    Raises:
        RuntimeError: The transaction's isolation level does not guarantee this.
    """
    level = isolation_level(connection)
    if level != "read committed":
        raise RuntimeError(
            f"nested=True needs READ COMMITTED, and database {connection.alias!r} is at {level.upper()}: a statement "
            "before the claim fixes what is read after it, so the claim would protect nothing. Move fenced() out of "
            "atomic()."
        )


def isolation_level(connection: BaseDatabaseWrapper) -> str:
    """Return a connection's isolation level, such as "read committed"; for an unknown database, return its vendor."""
    statement = ISOLATION.get("mariadb" if getattr(connection, "mysql_is_mariadb", False) else connection.vendor)
    if statement is None:
        # SQLite refuses a write in a transaction whose reads are out of date, so a claim proves that they are current.
        return "read committed" if connection.vendor == "sqlite" else connection.vendor
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return str(cursor.fetchone()[0]).lower().replace("-", " ")
