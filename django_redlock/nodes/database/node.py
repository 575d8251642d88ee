"""
A database of ``DATABASES`` as a node: SQLite, PostgreSQL, MySQL or MariaDB (internal).

:mod:`.table` reads and writes the rows; see :mod:`~django_redlock.nodes.records` for everything else.
"""

import os
import re
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from ...core.protocol import Acquire, Failure, Request
from ..base import NodeSpec
from ..records.node import RecordNode
from .table import CLOCKS, LockTable, in_own_transaction


class DatabaseNode(RecordNode):
    """
    A database of ``DATABASES``.

    Args:
        spec: The node's URL, ``database://alias``.
        prefix: The beginning of every key.

    Attributes:
        file: The path of a SQLite file, which has one writer at a time; empty for a server.

    Raises:
        ValueError: There is no such database, or it cannot be a node.
    """

    kind = "database"

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        if "@" in spec.url:
            raise ValueError("its URL names an alias of DATABASES, such as database://default, and no address")
        _, slashes, self.alias = spec.url.partition("://")
        if not slashes or re.search("[/?#]", self.alias):
            raise ValueError("its URL has only the name of an alias of DATABASES; write database://default")
        connection = self._known()
        super().__init__(spec.name or f"database:{self.alias}", address(connection, self.alias))
        self.file = os.path.realpath(connection.settings_dict["NAME"]) if connection.vendor == "sqlite" else ""
        if spec.options:
            raise ValueError("a database takes no OPTIONS: set them in its entry in DATABASES")
        self._prefix = prefix

    def _known(self) -> Any:
        if self.alias not in connections:
            known = ", ".join(map(repr, connections))
            raise ValueError(f"DATABASES has no alias {self.alias!r}, it has {known}; write database://default")
        try:
            connection = connections.create_connection(self.alias)
        except ImproperlyConfigured as error:
            raise ValueError(f"Django cannot use the database {self.alias!r} ({type(error).__name__})") from None
        if connection.vendor not in CLOCKS:
            raise ValueError(f"the database {self.alias!r} is not SQLite, PostgreSQL, MySQL or MariaDB")
        return connection

    def table(self, patience: float) -> LockTable:
        """Return the node's table, not yet connected."""
        return LockTable(self.alias, self._prefix, patience)

    def refused(self, request: Request) -> Failure | None:
        """
        Refuse an acquisition in a thread whose own transaction blocks writes to the file.

        Other requests are not refused: a release is delivered again later.
        """
        if self.file and isinstance(request, Acquire) and in_own_transaction(self.file):
            return Failure.OWN_TRANSACTION
        return None


def address(connection: Any, alias: str) -> str:
    """Return the address of a database; one server, or one file, has one vote."""
    entry = connection.settings_dict
    if connection.vendor != "sqlite":
        return f"{connection.vendor}:{entry.get('HOST') or alias}:{entry.get('PORT', '')}"
    return f"sqlite:{entry['NAME'] if connection.is_in_memory_db() else os.path.realpath(entry['NAME'])}"
