"""A counter that is incremented by reading and writing, and the record of each committed increment."""

from django.core.management import call_command
from django.db import connections


def prepare(alias: str) -> None:
    call_command("migrate", "redlock", database=alias, verbosity=0)
    CounterTable(alias).create()


class CounterTable:
    """A counter in a database, in plain SQL, and the order in which holders incremented it."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def create(self) -> None:
        self._execute("CREATE TABLE counter (value BIGINT NOT NULL)")
        self._execute("CREATE TABLE history (value BIGINT NOT NULL, token BIGINT NOT NULL, owner VARCHAR(32) NOT NULL)")
        self.clear()

    def clear(self) -> None:
        for statement in ("DELETE FROM counter", "DELETE FROM history", "INSERT INTO counter VALUES (0)"):
            self._execute(statement)

    def read(self) -> int:
        return self._execute("SELECT value FROM counter")[0][0]

    def write(self, value: int, token: int = 0, owner: str = "") -> None:
        self._execute("UPDATE counter SET value = %s", [value])
        self._execute("INSERT INTO history VALUES (%s, %s, %s)", [value, token, owner])

    def history(self) -> list[tuple[int, int, str]]:
        """Return value, token and owner of each committed increment, in the order of the values."""
        return self._execute("SELECT value, token, owner FROM history ORDER BY value")

    def _execute(self, statement: str, values: object = None) -> list[tuple]:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(statement, values)
            return list(cursor.fetchall()) if cursor.description else []
