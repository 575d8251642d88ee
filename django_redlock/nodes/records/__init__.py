"""
Records that change by compare and set, for stores that cannot run a script of ours.

A store keeps one JSON record for each name. A request reads the records that it concerns, the reference semantics of
one node (:mod:`~django_redlock.core.node_state`) decide, and the records are written back if nobody has changed them
since they were read. Databases share all of this with the stores of :mod:`django_redlock.contrib.consensus`, and with
the kinds of node that others write.

``record`` decides, ``table`` repeats what another process overtook, and ``worker`` and ``node`` connect a table with
the callers of a process.
"""

from .node import RecordNode
from .record import Change, Decision, Moment, Stored, needed_until
from .table import RecordTable, UntouchedError

__all__ = ["Change", "Decision", "Moment", "RecordNode", "RecordTable", "Stored", "UntouchedError", "needed_until"]
