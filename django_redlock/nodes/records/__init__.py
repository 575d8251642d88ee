"""
Records that change by compare and set, for stores that cannot run a script of ours (internal).

A store keeps one JSON record for each name. A request reads the records that it concerns, the reference semantics of
one node (:mod:`~django_redlock.core.node_state`) decide, and the records are written back if nobody has changed them
since they were read. Databases, etcd and ZooKeeper share all of this.

``record`` decides, ``clock`` measures time by the clock of a leader that may change, ``table`` repeats what another
process overtook, and ``worker`` and ``node`` connect a table with the callers of a process. For stores with members,
``replicated`` is the node and uses one member after the other, and ``watch`` waits for notifications.
"""
