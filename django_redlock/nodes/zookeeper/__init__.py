"""
A ZooKeeper ensemble as a node (internal).

All members together are one node with one vote. ``client`` connects to one member by means of kazoo, ``table`` reads
and writes records and keeps the time, and ``watch`` receives notifications.
"""
