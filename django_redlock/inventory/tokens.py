"""
Find fencing tokens that no node can have accepted in earnest (internal).

A listing finds such tokens under held locks. If too many nodes have one for the same lock, nobody can take that lock.
Operators can therefore have the servers searched as well; taking a lock never starts a search.
"""

from dataclasses import replace

from ..conf import DEFAULT_ALIAS
from ..handler import locks
from .model import Snapshot
from .survey import ask_for


def absurd_tokens(using: str = DEFAULT_ALIAS, *, timeout: float = 5.0) -> Snapshot:
    """
    Return the locks for which some node has an absurd fencing token.

    Databases are searched, and so are servers whose users have the right ``+scan``; each search takes at most two
    seconds.

    Args:
        using: The alias in ``REDLOCK``.
        timeout: Seconds to wait for each answer of a node. Default: 5.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    from ..nodes.database import inspect as databases
    from ..nodes.redis import inspect as servers  # only here: listings do not need redis-py

    nodes = locks[using].nodes
    searches = [kind.find_absurd_tokens(nodes, timeout) for kind in (servers, databases)]
    snapshot = ask_for(sorted(set().union(*(search.slugs for search in searches))), locks[using]).snapshot()
    return replace(snapshot, unsearched=tuple(name for search in searches for name in search.unsearched))
