"""
The table of a database node, and how requests change it (internal).

A node stores everything about a name in one row. A request changes the row by compare and set: read the row and the
server's clock, decide (:mod:`~django_redlock.nodes.records`), and write the row back if its version is still the one
that was read. Otherwise another process was faster, and the request starts again. For one name, this takes one
statement that reads and one that writes, each a transaction of its own. A process that is paused between them therefore
holds no lock of the database, least of all SQLite's only one. Several rows are written in one transaction, in the order
of their keys, so that two writers cannot wait for each other.

A hold ends by the server's clock, as it is read at that moment: in a transaction, PostgreSQL's ``now()`` would be the
time at which the transaction began. SQLite has no server; its clock is that of the machine, which all its processes
share.
"""

import json
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from time import time_ns
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections

from ...core.admission import Greeting
from ...core.protocol import ENDLESS, HIGHEST, Failure, Reply, Survey
from ...runtime.clock import steady
from ..base import LinkError
from ..records.record import Change, Decision, Moment, Stored, digest, needed_until, parsed
from ..records.table import ANSWERING, RecordTable, UntouchedError

TABLE = "redlock_noderecord"

CLEANING = 60.0  # seconds between two searches for rows that are no longer needed; such rows are kept as long

CLEANED = 100  # rows that are deleted at once

KEYS = 500  # rows that are read by one statement

SAME_START = 1.5  # seconds by which two readings of an uptime in whole seconds may disagree on the server's start

FOR_EVER = 2**62  # microseconds since the epoch: a time that never comes


class LockTable(RecordTable):
    """
    The table in one database, over one connection; used by one thread at a time.

    Args:
        alias: The database's alias in ``DATABASES``.
        prefix: The beginning of the keys of the lock's alias.
        patience: Seconds that a request may take.
    """

    errors = (DatabaseError, OSError)

    def __init__(self, alias: str, prefix: str, patience: float) -> None:
        super().__init__(patience)
        self.alias = alias
        self.realm = digest(prefix)
        self._prefix = prefix
        self._connection: Any = None
        self._cursor: Any = None
        self._greeting: Greeting | None = None
        self._since = 0.0
        self._served = self.key("served", "")  # the row whose version is the mark of this memory
        self._mark: int | None = None
        self._clean_at = steady() + CLEANING

    def open(self) -> Greeting:
        """
        Connect, and identify the server.

        Raises:
            LinkError: The database cannot be used, now or ever; its server is not the same as before, or has restarted.
        """
        self.close()
        connection = self._connection = own_connection(self.alias, self.patience)
        if connection.vendor == "sqlite" and connection.is_in_memory_db():
            raise LinkError(Failure.IN_MEMORY)
        try:
            with connection.wrap_database_errors:
                connection.connect()
                self._cursor = connection.create_cursor()
                PREPARE[connection.vendor](self.query, connection, self.patience)
                greeting = self._know(GREET[connection.vendor](self.query, connection))
                self._check_table()
                return self._serve(greeting)
        except (DatabaseError, ImproperlyConfigured, OSError) as error:
            self.close()
            raise LinkError(failure_of(error) or Failure.REFUSED) from None
        except LinkError:
            self.close()
            raise

    def describe(self) -> Greeting:
        """Describe the server again: its settings may have changed since it was opened."""
        try:
            self.ready()
            return self._serve(self._know(GREET[self._connection.vendor](self.query, self._connection)))
        except (DatabaseError, OSError) as error:
            self.close()
            raise UntouchedError(failure_of(error) or Failure.RESET) from None
        except LinkError as error:
            self.close()
            raise UntouchedError(error.failure, error.detail) from None

    def _know(self, greeting: Greeting) -> Greeting:
        """Compare *greeting* with the server's earlier identity: the owners of links must learn of a restart."""
        before, since = self._greeting, steady() - (greeting.age or 0.0)
        if before and (
            before.run_id != greeting.run_id or (greeting.age != float("inf") and abs(since - self._since) > SAME_START)
        ):
            raise LinkError(Failure.RESTARTED)
        self._greeting, self._since = greeting, since
        return greeting

    def _serve(self, greeting: Greeting) -> Greeting:
        """
        Return *greeting* with the mark of the table's memory, and with the age of that memory if it is younger.

        The mark is the version of a row that names the server and since when it has served these locks. A table that
        was emptied lacks the row, and in one of a promoted standby it names another server: the time begins anew.
        """
        while True:
            ((now, version, state),) = self.query(
                f"SELECT {self.clock}, r.version, r.state FROM (SELECT 1 AS one) AS one "
                f"LEFT JOIN {TABLE} AS r ON r.digest = %s",
                [self._served],
            )
            known = {} if version is None else parsed(state)
            since = known.get("since")
            if known.get("server") == greeting.run_id and isinstance(since, int) and since <= now:
                break
            written = json.dumps({"server": greeting.run_id, "since": int(now)})
            values = (secrets.randbits(62), 0, FOR_EVER, written, self._served)
            if version is None:
                self._put([(*values, self.realm)], [])
            else:
                self._put([], [(*values, version)])
        if self._mark not in (None, version):
            raise LinkError(Failure.FORGOT)
        self._mark = version
        age = (now - since) / 1e6
        return replace(greeting, age=age if greeting.age is None else min(age, greeting.age), mark=str(version))

    def _check_table(self) -> None:
        try:
            self.query(f"SELECT digest, realm, version, ends, kept, state FROM {TABLE} WHERE digest = ''")
        except DatabaseError as error:
            if known := failure_of(error):
                raise LinkError(known) from None
            remedy = f"{Failure.NO_TABLE.value}: run manage.py migrate redlock --database={self.alias}"
            raise LinkError(Failure.NO_TABLE, remedy) from None

    def query(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Execute a statement and return its rows, but not through Django's cursor, which logs the parameters."""
        with self._connection.wrap_database_errors:
            self._cursor.execute(statement, parameters)
            return list(self._cursor.fetchall()) if self._cursor.description else []

    def close(self) -> None:
        """Drop the connection; the next request makes a new one."""
        connection, self._connection, self._cursor = self._connection, None, None
        if connection is not None and connection.connection is not None:
            with suppress(Exception):  # each driver raises errors of its own if the connection is broken already
                connection.connection.close()  # Django's close() refuses to run in an event loop

    def abort(self) -> None:
        """Make a call that waits for the server fail at once; any thread may do this."""
        with suppress(Exception):  # whatever the driver raises for a connection that is in use or being closed
            raw = self._connection.connection
            if self._connection.vendor == "sqlite":
                raw.interrupt()
            else:
                shut_down(raw)

    # Requests

    def ready(self) -> None:
        """Connect if there is no connection."""
        if self._connection is None:
            self.open()

    def failed(self, error: Exception, *, unclear: bool) -> Failure:
        """Return what an error means; a server that still answers has rolled back."""
        answers = self._connection is not None and self._connection.vendor == "sqlite"
        with suppress(DatabaseError, OSError, AttributeError):
            self.query("ROLLBACK")
            answers = True
        self.close()
        if unclear and not answers:
            raise LinkError(Failure.RESET)
        return (failure_of(error) or Failure.ERROR_REPLY) if answers else Failure.RESET

    def survey(self, request: Survey) -> Reply:
        """Report the named locks, or one page of the held locks, in the order in which they end."""
        slugs, total, cursor = request.slugs, 0, ""
        if request.size > 0:
            held = f"FROM {TABLE} WHERE realm = %s AND ends > {self.clock}"
            total = self.query(f"SELECT count(*) {held}", [self.realm])[0][0]
            ends, _, digest = request.after.partition(" ")
            since = FOR_EVER if request.after == ENDLESS else int(ends or 0)
            behind, values = " AND (ends > %s OR (ends = %s AND digest > %s))", [since, since, digest]
            page = f"SELECT state, ends, digest {held}{behind} ORDER BY ends, digest LIMIT {int(request.size)}"
            rows = list(self.query(page, [self.realm, *values]))
            slugs = tuple(filter(None, (str(parsed(state).get("slug", "")) for state, *_ in rows)))
            cursor = "{1} {2}".format(*rows[-1]) if len(rows) == request.size else ""
        return self.look_up(request._replace(slugs=slugs))._replace(total=total, cursor=cursor)

    @property
    def clock(self) -> str:
        """The SQL expression of the server's clock."""
        return CLOCKS[self._connection.vendor]

    def key(self, kind: str, name: str) -> str:
        """Return the key of a row."""
        return digest(self._prefix, kind, name)

    def read(self, keys: Sequence[str]) -> tuple[Moment, dict[str, Stored]]:
        """Read the rows of names, and the server's clock before any of them."""
        now: Any = None
        rows: dict[str, Stored] = {}
        for start in range(0, max(1, len(keys)), KEYS):
            some = [self._served, *keys[start : start + KEYS]]
            found = self.query(
                f"SELECT {self.clock}, r.digest, r.version, r.state FROM (SELECT 1 AS one) AS one "
                f"LEFT JOIN {TABLE} AS r ON r.digest IN ({', '.join(['%s'] * len(some))})",
                some,
            )
            now = found[0][0] if now is None else now
            rows |= {key: Stored(version, parsed(state)) for _, key, version, state in found if key}
            # A table that was emptied may lack locks, so it decides nothing for those who know the earlier one.
            mark = rows.pop(self._served, None)
            if mark is None or mark.version != self._mark:
                self.close()
                raise LinkError(Failure.FORGOT)
        if not 0 < now <= HIGHEST:
            raise LinkError(Failure.MALFORMED)
        return Moment(int(now) / 1e6, int(now) / 1e6), rows

    def write(self, decision: Decision) -> bool:
        """Write all rows or none; return whether nobody had changed them since they were read."""
        new: list[tuple[Any, ...]] = []
        known: list[tuple[Any, ...]] = []
        for change in decision.changes:  # in the order of their keys, so that two writers do not wait for each other
            values = columns(change, round(decision.moment.low * 1e6))
            if change.version is None:
                new.append((*values, self.realm))
            else:
                known.append((*values, change.version))
        if len(decision.changes) == 1:
            return self._put(new, known)
        # With a plain BEGIN, SQLite would only read at first, and would fail if another writer came before it.
        self.query("BEGIN IMMEDIATE" if self._connection.vendor == "sqlite" else "BEGIN")
        written = self._put(new, known)
        self.query("COMMIT" if written else "ROLLBACK")
        return written

    def _put(self, new: Sequence[tuple[Any, ...]], known: Sequence[tuple[Any, ...]]) -> bool:
        insert, otherwise = INSERTS[self._connection.vendor]
        names = "version, ends, kept, state, digest, realm"
        return self._change(
            f"UPDATE {TABLE} SET version = %s, ends = %s, kept = %s, state = %s WHERE digest = %s AND version = %s",
            known,
        ) and self._change(f"{insert} {TABLE} ({names}) VALUES (%s, %s, %s, %s, %s, %s) {otherwise}", new)

    def _change(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> bool:
        """Execute a statement once for each set of parameters; return whether each time one row was changed."""
        # A row that another process has changed meanwhile is not found, so it is missing from the count. Then the
        # transaction is rolled back: the other rows alone would grant some names of a lock and not the rest.
        together = len(rows) > 1 and counts_together(self._connection)
        with self._connection.wrap_database_errors:
            if together:
                self._cursor.executemany(statement, rows)
                return bool(self._cursor.rowcount == len(rows))
            for row in rows:
                self._cursor.execute(statement, row)
                if self._cursor.rowcount != 1:
                    return False
        return True

    def clean(self) -> None:
        """Delete rows that have not been needed for a while, but not at every call; a failure does no harm."""
        now = steady()
        if self._connection is None or now < self._clean_at:
            return
        self._clean_at = now + CLEANING
        useless = f"kept < {self.clock} - {int(CLEANING * 1e6)}"
        with suppress(DatabaseError):
            found = [key for (key,) in self.query(f"SELECT digest FROM {TABLE} WHERE {useless} LIMIT {CLEANED}")]
            if found:
                marks = ", ".join(["%s"] * len(found))
                self.query(f"DELETE FROM {TABLE} WHERE digest IN ({marks}) AND {useless}", found)
            if len(found) == CLEANED:
                self._clean_at = now


def columns(change: Change, now: int) -> tuple[Any, ...]:
    """
    Return the new version of a row, when its hold ends, until when the row is needed, its JSON, and its key.

    The version comes from the operating system. Programs seed ``random``, and two with one seed would write equal
    versions: a late write would then find the version that it read, although the row has changed twice since. A counter
    would do the same where a row is deleted and inserted again.
    """
    record = change.record
    ends = micros(record["holder"][1]) if "holder" in record else None
    kept = max(now, micros(needed_until(record)))
    return secrets.randbits(62), ends, kept, json.dumps(record, separators=(",", ":")), change.key


def micros(seconds: float | None) -> int:
    """Return seconds since the epoch as the columns store them; None means never."""
    return FOR_EVER if seconds is None else min(FOR_EVER, round(seconds * 1e6))


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


PREPARE = {"postgresql": prepare_postgresql, "mysql": prepare_mysql, "sqlite": prepare_sqlite}


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
    ("disk is full", Failure.DISK_FULL),  # SQLite, MySQL
    ("disk full", Failure.DISK_FULL),
    ("no space left", Failure.DISK_FULL),
    ("disk i/o error", Failure.DISK),
    ("input/output error", Failure.DISK),
    ("disk image is malformed", Failure.DISK),
    ("file is not a database", Failure.DISK),
    ("readonly database", Failure.READONLY),
    ("read-only", Failure.READONLY),
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
