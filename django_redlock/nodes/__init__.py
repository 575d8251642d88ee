"""
The nodes, which have one vote each, and what somebody needs who writes a kind of node.

A node is anything that can compare and set a named record that expires. The majority logic never knows of which kind it
is; :mod:`.backends` does.
"""

from ..core.admission import Greeting
from ..core.protocol import Failure
from .base import LinkError, Node, NodeSpec

__all__ = ["Failure", "Greeting", "LinkError", "Node", "NodeSpec"]
