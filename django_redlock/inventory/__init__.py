"""
List the locks that are held, partly held or left behind, for the admin, the commands and metrics.

Every node keeps an index of the names it holds, in the order of their expiry. A listing reads the index of all nodes
at once, page by page, and then queries the names that only some nodes reported. It never scans a key space, and it is
bounded in names and in time. A node that does not answer degrades the result but never breaks it.

The secret of a lock never leaves this package and is not kept. A *fingerprint* distinguishes holders. To release a
lock, the nodes are asked again for the value with that fingerprint.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from django.db import connections

from ..conf import InvalidRedlockError
from ..core.names import check_name, is_cut, permit_slug
from ..core.names import slug as slug_of
from ..core.protocol import SHOWN_WAITERS
from ..core.rules import DEFAULT_ALIAS, MAX_LIMIT
from ..handler import locks
from .actions import ActionResult, ask_to_stop, force_release, remove_stale, stale_keys
from .model import LockReport, NodeStatus, Snapshot, StaleKey, Staleness, State, View, Waiting
from .survey import MAX_NAMES, MAX_SECONDS, PAGE, Poll, arun, run

__all__ = [
    "MAX_NAMES",
    "PAGE",
    "ActionResult",
    "LockReport",
    "NodeStatus",
    "Snapshot",
    "StaleKey",
    "Staleness",
    "State",
    "View",
    "Waiting",
    "afind_locks",
    "aheld_locks",
    "ask_to_stop",
    "find_lock",
    "find_locks",
    "force_release",
    "held_locks",
    "remove_stale",
    "slugs_of",
    "stale_keys",
]


def held_locks(
    using: str = DEFAULT_ALIAS, *, limit: int = MAX_NAMES, seconds: float = MAX_SECONDS, also: Iterable[str] = ()
) -> Snapshot:
    """
    Return the locks that are held now, the notes of singleton tasks, and the state of the nodes.

    The call blocks for two seconds at most, even when nodes are silent.

    Args:
        using: The alias in ``REDLOCK``.
        limit: How many locks to ask for at most; the locks that end first are chosen.
        seconds: How long to keep querying the nodes.
        also: Slugs of locks to ask for as well if there are more than that.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    poll = Poll(locks[using], waiters=0)
    return run(poll, poll.pages(limit, seconds, also)).snapshot().parted()


def held_in_each(
    aliases: Iterable[str], *, seconds: float = MAX_SECONDS, also: Iterable[str] = ()
) -> dict[str, Snapshot | InvalidRedlockError]:
    """
    Return what :func:`held_locks` returns or raises for each alias (internal).

    All aliases are asked at once, so that silent nodes are waited for only once.
    """
    names, slugs = list(aliases), list(also)

    def listing(alias: str) -> Snapshot | InvalidRedlockError:
        try:
            poll = Poll(locks[alias], waiters=0)
            return run(poll, poll.pages(MAX_NAMES, seconds, slugs, len(names))).snapshot().parted()
        except InvalidRedlockError as error:
            return error

    def listing_apart(alias: str) -> Snapshot | InvalidRedlockError:
        try:
            return listing(alias)
        finally:
            connections.close_all()  # those of this thread, which a receiver of a signal may have opened

    if len(names) == 1:
        return {names[0]: listing(names[0])}
    with ThreadPoolExecutor(len(names) or 1, thread_name_prefix="django_redlock listing") as pool:
        return dict(zip(names, pool.map(listing_apart, names), strict=True))


async def aheld_locks(using: str = DEFAULT_ALIAS, *, limit: int = MAX_NAMES, seconds: float = MAX_SECONDS) -> Snapshot:
    """Do what :func:`held_locks` does without blocking."""
    poll = Poll(locks[using], waiters=0)
    return (await arun(poll, poll.pages(limit, seconds))).snapshot().parted()


def find_locks(slugs: Iterable[str], using: str = DEFAULT_ALIAS, *, waiters: int = SHOWN_WAITERS) -> Snapshot:
    """
    Return what :func:`held_locks` returns, but only for the locks with these slugs, and with their waiters.

    Args:
        slugs: The forms of the locks' names in the keys.
        using: The alias in ``REDLOCK``.
        waiters: How many waiters to name at most, for all of these locks together; with 0, they are only counted.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    poll = Poll(locks[using], waiters)
    return run(poll, poll.described(slugs)).snapshot()


async def afind_locks(slugs: Iterable[str], using: str = DEFAULT_ALIAS, *, waiters: int = SHOWN_WAITERS) -> Snapshot:
    """Do what :func:`find_locks` does without blocking."""
    poll = Poll(locks[using], waiters)
    return (await arun(poll, poll.described(slugs))).snapshot()


def slugs_of(name: str) -> list[str]:
    """
    Return the slugs of all locks that a name may mean.

    These are the lock itself, its permits if it has a ``limit``, or the one permit that is shown as ``name #1``.

    Raises:
        ValueError: The name is cut short, as listings show long names, or cannot name a lock.
    """
    if is_cut(check_name(name)):
        raise ValueError(f"The name {name!r} is cut short, as listings show it; write the whole name.")
    lock = slug_of(name)
    before, _, number = name.rpartition(" #")
    written = [permit_slug(slug_of(before), int(number))] if before and number in PERMITS else []
    return [lock, *written, *(permit_slug(lock, int(number)) for number in PERMITS)]


PERMITS = tuple(map(str, range(1, MAX_LIMIT + 1)))


def find_lock(name: str, using: str = DEFAULT_ALIAS) -> LockReport | None:
    """
    Return a lock as the nodes see it, with its waiters, or None if it is free.

    For a lock that several callers may hold (``limit=``), return one of the permits that are taken.

    Raises:
        ValueError: The name is cut short, as listings show long names, or cannot name a lock.
        QuorumUnavailableError: Too few nodes answered to tell.
        InvalidRedlockError: The alias cannot be used.
    """
    poll = Poll(locks[using], SHOWN_WAITERS)
    run(poll, poll.described(slugs_of(name))).require_quorum(name)
    return next(iter(poll.snapshot().locks), None)
