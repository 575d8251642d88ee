"""
A ZooKeeper ensemble as a node (internal).

All members together are one node with one vote. ``client`` uses kazoo for a connection to one member, ``table`` reads
and writes records and keeps the time, and ``watch`` brings notifications.
"""
