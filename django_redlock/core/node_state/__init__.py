"""
What one node decides: the record of each name, its queue, and the reply to each request (internal).

This is the reference that the Lua scripts are compared with. It is also what the nodes in memory and in databases run.
It reads no clock but the one that it is given.

``records`` has what a node stores, and ``queues`` its waiters. ``decisions`` replies to each request.
"""

from .decisions import NodeState

__all__ = ["NodeState"]
