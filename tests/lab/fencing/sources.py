"""Leases for the tests of the fence: as good as real ones, and from sources that are broken on purpose."""

import itertools

from django_redlock.core.rules import Rules
from django_redlock.engine.lease import Lease
from django_redlock.engine.manager import LockManager
from django_redlock.nodes import NodeSpec, open_node

_numbers = itertools.count()
_managers: list[LockManager] = []


def lease_of(name: str | list[str], fencing_token: int = 0, **options) -> Lease:
    """
    Return a lease that nobody else respects, because nobody else uses its node: no lock at all.

    Args:
        name: Name of the lock.
        fencing_token: Its fencing token, whatever the node granted; 0 keeps the granted one.
        options: For the lock.
    """
    node = open_node(NodeSpec(f"memory://nobody-else-{next(_numbers)}"), "redlock:")
    given = {"ttl": 60.0, "renew": False, "wait": 30} | options
    manager = LockManager([node], Rules(nodes=1, restart_guard=False, node_timeout=min(5.0, given["ttl"] / 6)))
    _managers.append(manager)
    lease = manager.lock(name, **given).acquire()
    if fencing_token:
        lease.hold.fencing_token = fencing_token
    return lease


def forget() -> None:
    """Close the connections of all managers made so far."""
    while _managers:
        _managers.pop().close()
