"""
An etcd cluster as a node (internal).

All members together are one node with one vote. ``client`` speaks the JSON gateway of the v3 API, ``connection`` uses
one member after the other, ``table`` reads and writes records and keeps the time, and ``watch`` brings notifications.
"""
