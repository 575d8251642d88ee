"""The request of a caller that acquires a lock (internal)."""

from typing import NamedTuple

from . import names as owners

MAX_LIMIT = 1000  # holders of one lock at once


class Wanted(NamedTuple):
    """
    The lock that a caller wants, and how the caller wants to hold it.

    Args:
        names: The names to lock, sorted.
        ttl: Length of the lease, in seconds.
        wait: How long to try, in seconds; 0 is one attempt, None is for ever.
        owner: The description of the future holder, with the length of its lease.
        secret: The secret to hold the lock with; empty draws a fresh one for every attempt. A node that did not answer
            an attempt in time refuses the same secret for one more ttl, because it cannot tell the two attempts apart.
        adopt: The secret of a holder whose lock may be taken over.
        strict: Whether the lock must be taken over, from *adopt* or from an earlier hold with the same *secret*; a free
            lock is refused like a taken one with an unknown holder.
        detached: Whether the lock is neither renewed nor watched.
        limit: How many holders the lock may have at once, each with a permit of its own.
        shared: Whether other shared holders may have the lock too.
        barge: Whether to ignore the queue.
        heartbeat: Seconds without a heartbeat after which the lease is no longer extended; None requires no heartbeat.
        max_hold: Longest time that renewal keeps the lock, in seconds; None takes it from the options of the alias.
        sends: Whether the end of its block sends the release without waiting for the replies.
    """

    names: tuple[str, ...]
    ttl: float
    wait: float | None
    owner: owners.Owner
    secret: str = ""
    adopt: str = ""
    detached: bool = False
    limit: int = 1
    shared: bool = False
    barge: bool = False
    heartbeat: float | None = None
    max_hold: float | None = None
    strict: bool = False
    sends: bool = False


def check_limit(limit: int, names: tuple[str, ...], shared: bool) -> None:
    """
    Raise ValueError unless *limit* holders can have the lock at once.

    Raises:
        ValueError: It is not a whole number from 1 to 1000, or is combined with several names or with *shared*.
    """
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MAX_LIMIT:
        raise ValueError(f"limit must be a whole number from 1 to {MAX_LIMIT}, not {limit!r}.")
    if limit > 1 and (shared or len(names) > 1):
        other = "shared=True" if shared else "several names"
        raise ValueError(f"limit={limit} and {other} cannot be combined; take two locks.")
