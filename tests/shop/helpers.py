"""Actions of the shop's tests beside a request or a transaction: look from outside, take a lock, take the lock away."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from django.db import connections

from django_redlock import Lease, LockTakenError, lock, locks
from tests.shop.models import Order
from tests.shop.views import During

PATIENCE = 20.0  # seconds after which a thread that waits for another has failed


def in_thread(action: Callable[[], Any]) -> Any:
    """Return the result of *action* in a thread of its own, with connections of its own."""

    def run() -> Any:
        try:
            return action()
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result(PATIENCE)


def paid_as_others_see() -> bool:
    return bool(in_thread(lambda: Order.objects.using("warehouse").get(pk=7).paid))


def lose(lease: Lease) -> None:
    """Let another owner take the lock over, and let the lease find out."""
    alias = lease.hold.keeper.alias
    locks[alias].release(lease.names, lease.secret)
    rival = lock(lease.names, wait=0, using=alias).acquire()
    lease.extend()
    rival.release()


def is_free(name: str) -> bool:
    try:
        lock(name, wait=0).acquire().release()
    except LockTakenError:
        return False
    return True


def during(action: Callable[[], Any]) -> None:
    """Make the shop's views do something while they handle a request."""
    During.action = staticmethod(action)
