"""
An etcd cluster as a node (internal).

All members together are one node with one vote. ``client`` speaks the JSON gateway of the v3 API with one member;
``node`` reads and writes records, uses one member after the other, keeps the time, and receives notifications.
"""
