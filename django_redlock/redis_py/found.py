"""Find out from the keys of the nodes who holds a lock (internal)."""

import math
from hashlib import blake2b
from typing import NamedTuple

from ..core.names import decode, secret_of
from ..core.protocol import Row


class Found(NamedTuple):
    """A possible holder: its secret, the ``ref`` in its key, and the seconds left."""

    secret: str
    ref: str
    left: float

    def stands_for(self, token: bytes) -> bool:
        """Return whether *token* is this holder's: its secret, or a token that was chosen or handed over."""
        return self.secret.encode() == token or self.ref == reference(token)


def find(rows: list[Row], needed: int) -> list[Found]:
    """Return the holders whose key at least *needed* nodes have."""
    holders: dict[str, list[Row]] = {}
    for row in rows:
        if seconds_left(row) >= 0:
            holders.setdefault(secret_of(row.value), []).append(row)
    return [
        Found(secret, owner.ref if (owner := decode(has[0].value)) else "", min(map(seconds_left, has)))
        for secret, has in holders.items()
        if len(has) >= needed
    ]


def seconds_left(row: Row) -> float:
    """Return how long a node keeps a key: infinity for a key without expiry, a negative number for no key."""
    return math.inf if row.left is None else row.left


def reference(token: bytes) -> str:
    """
    Return the ``ref`` that stands for a token that the holder chose or was given.

    The token is not used as the secret. Otherwise two callers that chose the same token would both hold the lock.
    """
    return f"token {blake2b(token, digest_size=8, person=b'redlock compat').hexdigest()}"
