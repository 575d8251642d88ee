"""
What one node decides: the record of each name, its queue, and the reply to each request (internal).

This is the reference that the Lua scripts are compared with. It is also what the nodes in memory and in databases run.
It reads no clock but the one that it is given.

``records`` is what a node stores, ``queues`` who waits, ``decisions`` the requests of locks, ``survey`` the listings,
``dump`` the form in which a database keeps the record of a name, and ``state`` the node as its callers see it.
"""

from .state import NodeState

__all__ = ["NodeState"]
