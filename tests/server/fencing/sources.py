"""Leases for the tests of the fence: as good as real ones, and from sources that are broken on purpose."""

import itertools

from django.conf import settings

from django_redlock import Lease, fenced, locks

_numbers = itertools.count()
_aliases: list[str] = []


def lease_of(name: str | list[str], fencing_token: int = 0, **options) -> Lease:
    """Return a lease that nobody else respects, because nobody else uses its node: no lock at all."""
    given = {"ttl": 60.0, "renew": False, "wait": 30} | options
    alias = f"nobody-else-{next(_numbers)}"
    rules = {"restart_guard": False, "node_timeout": min(5.0, given["ttl"] / 6)}
    settings.REDLOCK[alias] = {"NODES": f"memory://{alias}", "OPTIONS": rules}
    _aliases.append(alias)
    lease = locks[alias].lock(name, **given).acquire()
    if fencing_token:
        lease.hold.fencing_token = fencing_token
    return lease


def claim(lease: Lease, alias: str) -> None:
    """Claim the fence of a lease in a transaction that does nothing else."""
    with fenced(lease, using=alias):
        pass


def forget() -> None:
    while _aliases:
        locks[_aliases[-1]].close()
        settings.REDLOCK.pop(_aliases.pop(), None)
