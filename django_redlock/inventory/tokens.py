"""
Fencing tokens that no node can have accepted in earnest (internal).

A listing finds them under the locks that somebody holds. Nobody can take a lock with such a token on too many nodes, so
the servers are searched as well: for operators, never when a lock is taken.
"""

from dataclasses import replace

from ..conf import DEFAULT_ALIAS
from ..handler import locks
from .model import Snapshot
from .poll import ask_for


def absurd_tokens(using: str = DEFAULT_ALIAS, *, timeout: float = 5.0) -> Snapshot:
    """
    Return the locks with an absurd fencing token on a node.

    Databases are searched, and servers as far as their users may (``+scan``), each for two seconds at most.

    Args:
        using: The alias in ``REDLOCK``.
        timeout: Seconds to wait for each answer of a node. Default: 5.

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    from ..nodes.database import inspect as databases
    from ..nodes.redis import inspect as servers  # only here: listings have no use for redis-py

    nodes = locks[using].nodes
    searches = [kind.find_absurd_tokens(nodes, timeout) for kind in (servers, databases)]
    snapshot = ask_for(sorted(set().union(*(search.slugs for search in searches))), locks[using]).snapshot()
    return replace(snapshot, unsearched=tuple(name for search in searches for name in search.unsearched))
