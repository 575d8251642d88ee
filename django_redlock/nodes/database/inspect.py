"""
Search a database for absurd fencing tokens, for the doctor and for ``redlock_clear`` (internal).
"""

import json
import time
from collections.abc import Iterator
from contextlib import closing

from ...core.node_state import NodeState
from ...core.protocol import is_absurd
from ..base import Node
from ..token_search import TokenSearch, search_each
from .node import DatabaseNode
from .table import KEYS, TABLE, LockTable, clock


def find_absurd_tokens(nodes: tuple[Node, ...], timeout: float, seconds: float = 2.0) -> TokenSearch:
    """
    Return the slugs with an absurd fencing token in a database among *nodes*, whether the locks are held or free.

    Each database is searched for *seconds* at most, over a separate connection.
    """
    databases = [node for node in nodes if isinstance(node, DatabaseNode)]
    return search_each(databases, lambda node: _search(node, timeout, seconds))


def _search(node: DatabaseNode, timeout: float, seconds: float) -> Iterator[str]:
    with closing(node.table(timeout)) as table:
        table.open()
        until = time.monotonic() + seconds
        for state, now in _rows(table):
            if (slug := _absurd(state, now)) is not None:
                yield slug
            if time.monotonic() > until:
                raise TimeoutError


def _rows(table: LockTable) -> Iterator[tuple[str, int]]:
    """Yield the record of every row, and the time on the server's clock when the row was read."""
    after = ""
    rows = f"SELECT digest, state, {table.clock} FROM {TABLE} WHERE realm = %s AND digest > %s"
    while page := table.query(f"{rows} ORDER BY digest LIMIT {KEYS}", [table.realm, after]):
        yield from ((state, clock(now)) for _, state, now in page)
        after = page[-1][0]


def _absurd(state: str, now: int) -> str | None:
    """Return the slug of a record if its fencing token is absurd; other programs may have written the record."""
    node = NodeState(lambda: now / 1e6)
    try:
        record = json.loads(state)
        node.load(slug := str(record["slug"]), record)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None  # a tombstone, or a record that another program wrote
    return slug if is_absurd(node.records.fence(slug, node.now()), now) else None
