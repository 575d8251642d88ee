"""
The differences between the databases that can be nodes: their clocks, identities and limits (internal).
"""

import os
import socket
from collections.abc import Callable
from math import ceil
from time import time_ns
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...core.admission import Greeting
from ...core.protocol import Failure
from ..base import LinkError
from ..records.table import ANSWERING

Query = Callable[..., list[tuple[Any, ...]]]

# The server's clock at this moment, in whole microseconds since the epoch.
CLOCKS = {
    "postgresql": "(extract(epoch from clock_timestamp()) * 1000000)::bigint",
    "mysql": "timestampdiff(microsecond, '1970-01-01 00:00:00', utc_timestamp(6))",
    "sqlite": "redlock_clock()",
}
# The beginning and the end of an insertion that does nothing if the row exists.
INSERTS = {
    "postgresql": ("INSERT INTO", "ON CONFLICT DO NOTHING"),
    "mysql": ("INSERT IGNORE INTO", ""),
    "sqlite": ("INSERT INTO", "ON CONFLICT DO NOTHING"),
}
# With a plain BEGIN, SQLite would only read at first, and would fail if another writer came before it.
BEGINS = {"postgresql": "BEGIN", "mysql": "BEGIN", "sqlite": "BEGIN IMMEDIATE"}


def own_connection(alias: str, patience: float) -> Any:
    """
    Return a Django connection that nothing else uses, not yet connected.

    Raises:
        LinkError: The alias or its driver is gone.
    """
    try:
        connection = connections.create_connection(alias)
    except (ImproperlyConfigured, KeyError):
        raise LinkError(Failure.UNKNOWN_ALIAS) from None
    options = dict(connection.settings_dict.get("OPTIONS") or {})
    connection.settings_dict = connection.settings_dict | {"AUTOCOMMIT": True, "OPTIONS": options}
    seconds = max(1, ceil(patience))
    match connection.vendor:
        case "postgresql":
            options.pop("pool", None)
            options["connect_timeout"] = max(2, seconds)  # libpq accepts no less
        case "mysql":
            options |= {"connect_timeout": seconds, "read_timeout": seconds + 1, "write_timeout": seconds + 1}
        case "sqlite":
            options["timeout"] = patience * ANSWERING
    return connection


def prepare_postgresql(query: Query, connection: Any, patience: float) -> None:
    """Limit how long a statement, or a process that is paused between two statements, can keep others waiting."""
    milliseconds = max(1, round(patience * 1000))
    query(
        f"SELECT set_config('statement_timeout', '{milliseconds}', false), "
        f"set_config('idle_in_transaction_session_timeout', '{max(1000, milliseconds)}', false), "
        "set_config('synchronous_commit', coalesce(nullif(current_setting('synchronous_commit'), 'off'), 'on'), false)"
    )


def prepare_mysql(query: Query, connection: Any, patience: float) -> None:
    """Set the same limits as for PostgreSQL; MySQL has none for a paused process."""
    seconds = max(1, ceil(patience))
    bounds = f"SET SESSION innodb_lock_wait_timeout = {seconds}"
    if connection.mysql_is_mariadb:
        bounds += f", SESSION max_statement_time = {patience}, SESSION idle_transaction_timeout = {seconds}"
    query(bounds)


def prepare_sqlite(query: Query, connection: Any, patience: float) -> None:
    """Make commits survive a power cut, whatever the project chose for its own connections."""
    query("PRAGMA synchronous = EXTRA")
    connection.connection.create_function("redlock_clock", 0, lambda: time_ns() // 1000)


def greet_postgresql(query: Query, connection: Any) -> Greeting:
    """Identify the cluster and its timeline: a standby that was promoted counts as another server."""
    standby, fsync, uptime = query(
        "SELECT pg_is_in_recovery(), current_setting('fsync') = 'on' AND current_setting('full_page_writes') = 'on', "
        "extract(epoch from clock_timestamp() - pg_postmaster_start_time())"
    )[0]
    if standby:
        raise LinkError(Failure.REPLICA)
    identity, log = query(
        "SELECT (SELECT system_identifier FROM pg_control_system()), pg_walfile_name(pg_current_wal_lsn())"
    )[0]
    return Greeting(run_id=f"postgresql {identity} {log[:8]}", age=float("inf") if fsync else float(uptime))


def greet_mysql(query: Query, connection: Any) -> Greeting:
    """Identify the server; MySQL and MariaDB have different variables for its identity."""
    identity = "server_uid" if connection.mysql_is_mariadb else "server_uuid"
    known = query(f"SHOW GLOBAL VARIABLES LIKE '{identity}'")
    where, read_only, flush = query(
        "SELECT concat_ws(':', @@hostname, @@port, @@datadir), @@read_only, @@innodb_flush_log_at_trx_commit"
    )[0]
    if read_only:
        raise LinkError(Failure.REPLICA)
    uptime = float(query("SHOW GLOBAL STATUS LIKE 'Uptime'")[0][1])
    return Greeting(run_id=f"mysql {known[0][1] if known else where}", age=float("inf") if int(flush) == 1 else uptime)


def greet_sqlite(query: Query, connection: Any) -> Greeting:
    """Identify the file."""
    file = os.stat(query("PRAGMA database_list")[0][2])
    return Greeting(run_id=f"sqlite {file.st_dev} {file.st_ino}", age=float("inf"))


# Phrases in the errors of drivers and servers, in lower case, and the failures that they stand for.
PHRASES = (
    ("password authentication failed", Failure.WRONGPASS),
    ("access denied", Failure.WRONGPASS),
    ("no pg_hba.conf entry", Failure.NOAUTH),
    ("permission denied", Failure.NOPERM),
    ("command denied", Failure.NOPERM),
    ("unknown database", Failure.NO_SUCH_DATABASE),
    ("starting up", Failure.LOADING),
    ("too many", Failure.MAX_CLIENTS),
    ("unable to open database file", Failure.NO_SUCH_FILE),
    ("translate host name", Failure.UNKNOWN_HOST),
    ("is locked", Failure.LOCKED),
    ("max_statement_time", Failure.TIMEOUT),
    ("timeout", Failure.TIMEOUT),
    ("timed out", Failure.TIMEOUT),
)


def failure_of(error: Exception) -> Failure | None:
    """Return the failure that an error stands for, if known; the error's text may name users, hosts and values."""
    text = str(error).lower()
    if 'database "' in text and "does not exist" in text:
        return Failure.NO_SUCH_DATABASE
    return next((failure for phrase, failure in PHRASES if phrase in text), None)


PREPARE = {"postgresql": prepare_postgresql, "mysql": prepare_mysql, "sqlite": prepare_sqlite}
GREET = {"postgresql": greet_postgresql, "mysql": greet_mysql, "sqlite": greet_sqlite}


def counts_together(connection: Any) -> bool:
    """Return whether the driver counts the rows changed by all executions of a statement with many parameters."""
    # psycopg2 counts only those of the last execution; it has no `pgconn`.
    return connection.vendor != "postgresql" or hasattr(connection.connection, "pgconn")


def in_own_transaction(file: str) -> bool:
    """
    Return whether the calling thread has an open Django transaction in the SQLite *file*.

    SQLite has one writer at a time, so a lock in that file and the transaction would wait for each other.
    """
    return any(
        connection.vendor == "sqlite"
        and connection.connection is not None
        and connection.connection.in_transaction
        and os.path.realpath(connection.settings_dict["NAME"]) == file
        for connection in connections.all(initialized_only=True)
    )


def shut_down(raw: Any) -> None:
    """Shut down the socket of a driver's connection; the thread that uses the connection closes it."""
    held = getattr(raw, "_sock", None)  # PyMySQL's
    if held is not None:
        held.shutdown(socket.SHUT_RDWR)
        return
    with socket.socket(fileno=os.dup(raw.fileno())) as copy:
        copy.shutdown(socket.SHUT_RDWR)
