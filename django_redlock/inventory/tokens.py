"""
Fencing tokens that no node can have accepted in earnest (internal).

A listing finds them under the locks that somebody holds. Nobody can take a lock with such a token on too many nodes, so
the servers are searched as well: for operators, never when a lock is taken.
"""

from ..conf import DEFAULT_ALIAS
from ..handler import locks
from .model import Snapshot
from .poll import ask_for

PATIENCE = 1.0  # seconds for each answer of a server


def absurd_tokens(using: str = DEFAULT_ALIAS) -> Snapshot:
    """
    Return the locks with an absurd fencing token on a node.

    Databases are searched, and servers as far as their users may (``+scan``).

    Raises:
        InvalidRedlockError: The alias cannot be used.
    """
    from ..nodes.database import inspect as databases
    from ..nodes.redis import inspect as servers  # only here: listings have no use for redis-py

    nodes = locks[using].nodes
    found = servers.find_absurd_tokens(nodes, PATIENCE) | databases.find_absurd_tokens(nodes, PATIENCE)
    return ask_for(sorted(found), locks[using]).snapshot()
