"""What the caller of an acquisition asks for (internal)."""

from typing import NamedTuple

from . import owner as owners

MAX_LIMIT = 1000  # holders of one lock at once


class Wanted(NamedTuple):
    """
    What a caller asks for.

    Args:
        names: The names to lock, sorted.
        ttl: Length of the lease, in seconds.
        wait: How long to try, in seconds; 0 is one attempt, None is for ever.
        owner: Who will hold it, and for how long.
        nonce: The token to hold it with; empty draws a fresh one for every attempt. A node that did not answer an
            attempt in time refuses the same token for one ttl more: it could not tell another attempt from that one.
        adopt: The token of a holder whose lock may be taken over.
        strict: Whether it must be taken over, from *adopt* or from an earlier hold with the same *nonce*; a free one is
            refused like a taken one, of whose holder nothing is known.
        detached: Whether it is left to itself: neither renewed nor watched.
        limit: How many may hold it at once, each with a permit of its own.
        shared: Whether other shared holders may have it too.
        barge: Whether to ignore those that wait.
        heartbeat: After how many seconds without a sign of life it is no longer extended; None needs none.
        max_hold: Longest time that renewal keeps it, in seconds; None is as the rules say.
    """

    names: tuple[str, ...]
    ttl: float
    wait: float | None
    owner: owners.Owner
    nonce: str = ""
    adopt: str = ""
    detached: bool = False
    limit: int = 1
    shared: bool = False
    barge: bool = False
    heartbeat: float | None = None
    max_hold: float | None = None
    strict: bool = False


def check_limit(limit: int, names: tuple[str, ...], shared: bool) -> None:
    """
    Raise ValueError unless *limit* holders can have the lock at once.

    Raises:
        ValueError: It is no whole number from 1 to 1000, or is combined with several names or with *shared*.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"limit must be a whole number from 1 to {MAX_LIMIT}, not {limit!r}.")
    if limit > 1 and (shared or len(names) > 1):
        other = "shared=True" if shared else "several names"
        raise ValueError(f"limit={limit} and {other} cannot be combined; take two locks.")
