"""
The table of a database node, and how requests change it (internal).

A node stores everything about a name in one row. A request changes the row by compare and set: read the row and the
server's clock, decide (:mod:`~django_redlock.nodes.records`), and write the row back if its version is still the one that
was read. Otherwise another process was faster, and the request starts again. For one name, this takes one statement
that reads and one that writes, each a transaction of its own. A process that is paused between them therefore holds no
lock of the database, least of all SQLite's only one. Several rows are written in one transaction, in the order of their
keys, so that two writers cannot wait for each other.

A hold ends by the server's clock, as it is read at that moment: in a transaction, PostgreSQL's ``now()`` would be the
time at which the transaction began. SQLite has no server; its clock is that of the machine, which all its processes
share.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError

from ...core.admission import Greeting
from ...core.protocol import ENDLESS, HIGHEST, Failure, Reply, Survey
from ..base import LinkError
from ..clock import steady
from ..records.clock import Moment
from ..records.record import Decision, Stored, digest, parsed
from ..records.table import RecordTable, UntouchedError

TABLE = "redlock_noderecord"
CLEANING = 60.0  # seconds between two searches for rows that are no longer needed; such rows are kept as long
CLEANED = 100  # rows that are deleted at once
KEYS = 500  # rows that are read by one statement
SAME_START = 1.5  # seconds by which two readings of an uptime in whole seconds may disagree on the server's start


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
                greeting = GREET[connection.vendor](self.query, connection)
                self._check_table()
            return self._know(greeting)
        except (DatabaseError, ImproperlyConfigured, OSError) as error:
            self.close()
            raise LinkError(failure_of(error) or Failure.REFUSED) from None
        except LinkError:
            self.close()
            raise

    def _know(self, greeting: Greeting) -> Greeting:
        """Compare *greeting* with the server's earlier identity: the owners of links must learn of a restart."""
        before, since = self._greeting, steady() - (greeting.age or 0.0)
        if before and (
            before.run_id != greeting.run_id or (greeting.age != float("inf") and abs(since - self._since) > SAME_START)
        ):
            raise LinkError(Failure.RESTARTED)
        self._greeting, self._since = greeting, since
        return greeting

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
            try:
                self.open()
            except LinkError as error:
                raise UntouchedError(error.failure, error.detail) from None

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
        now = 0
        rows: dict[str, Stored] = {}
        for start in range(0, max(1, len(keys)), KEYS):
            some = keys[start : start + KEYS]
            marks = ", ".join(["%s"] * len(some)) or "''"
            found = self.query(
                f"SELECT {self.clock}, r.digest, r.version, r.state FROM (SELECT 1 AS one) AS one "
                f"LEFT JOIN {TABLE} AS r ON r.digest IN ({marks})",
                some,
            )
            now = now or clock(found[0][0])
            rows |= {key: Stored(version, parsed(state)) for _, key, version, state in found if key}
        return Moment(now / 1e6, now / 1e6), rows

    def write(self, decision: Decision) -> bool:
        """Write all rows or none; return whether nobody had changed them since they were read."""
        rows = [row(change, round(decision.moment.low * 1e6)) for change in decision.changes]
        if len(rows) == 1:
            return self._put(rows)
        self.query(BEGINS[self._connection.vendor])
        written = self._put(rows)
        self.query("COMMIT" if written else "ROLLBACK")
        return written

    def _put(self, rows: Sequence[Row]) -> bool:
        """Write rows in the order of their keys; return whether nobody had changed them since they were read."""
        new = [one for one in rows if one.version is None]
        known = [one for one in rows if one.version is not None]
        insert, otherwise = INSERTS[self._connection.vendor]
        columns = "version, ends, kept, state, digest, realm"
        return self._put_all(
            f"UPDATE {TABLE} SET version = %s, ends = %s, kept = %s, state = %s WHERE digest = %s AND version = %s",
            [(*one.columns, one.version) for one in known],
        ) and self._put_all(
            f"{insert} {TABLE} ({columns}) VALUES (%s, %s, %s, %s, %s, %s) {otherwise}",
            [(*one.columns, self.realm) for one in new],
        )

    def _put_all(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> bool:
        if not counts_together(self._connection):
            return all(self._carry_out(statement, row) == 1 for row in rows)
        return not rows or self._carry_out(statement, *rows) == len(rows)

    def _carry_out(self, statement: str, *rows: tuple[Any, ...]) -> int:
        """Execute a statement once for each set of parameters; return how many rows were changed."""
        with self._connection.wrap_database_errors:
            if len(rows) == 1:
                self._cursor.execute(statement, rows[0])
            else:
                self._cursor.executemany(statement, rows)
        return int(self._cursor.rowcount)

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


def clock(value: Any) -> int:
    """
    Return the server's clock in microseconds.

    Raises:
        LinkError: The time is impossible.
    """
    if not 0 < value <= HIGHEST:
        raise LinkError(Failure.MALFORMED)
    return int(value)
