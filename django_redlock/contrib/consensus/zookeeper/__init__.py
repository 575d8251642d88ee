"""
A ZooKeeper ensemble as a node (internal).

All members together are one node with one vote. ``client`` connects to one member by means of kazoo; ``node`` reads and
writes records, keeps the time, and receives notifications.
"""

from importlib.util import find_spec

if find_spec("kazoo") is None:
    raise ImportError('it needs kazoo: pip install "django-redlock[zookeeper]"')
