"""Whether this checkout has the nodes of etcd and ZooKeeper: all tests but their own do without."""

from importlib.util import find_spec

PRESENT = find_spec("django_redlock.contrib.consensus") is not None
