"""
An etcd cluster as a node (internal).

All members together are one node with one vote. ``place`` reads the settings, ``client`` speaks the JSON gateway of the
v3 API, ``table`` reads and writes records and keeps the time, ``watch`` brings notifications, and ``inspect`` asks for
what the doctor reports.
"""
