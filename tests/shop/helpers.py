"""Actions of the shop's tests beside a request or a transaction: look from outside, take a lock, take the lock away."""

import threading
from collections.abc import Callable
from typing import Any

from django.db import connections

from django_redlock import Lease, LockTakenError, lock, locks
from tests.shop.models import Order
from tests.shop.views import During

PATIENCE = 20.0  # seconds after which a thread that waits for another has failed


def start(action: Callable[[], Any]) -> threading.Thread:
    """Start a thread that closes its connections at its end."""

    def run() -> None:
        try:
            action()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


def in_thread(action: Callable[[], Any]) -> Any:
    """Return the result of *action* in a thread of its own, with connections of its own."""
    results: list[Any] = []
    thread = start(lambda: results.append(action()))
    thread.join(PATIENCE)
    assert not thread.is_alive()
    return results[0]


def paid_as_others_see() -> bool:
    """Return whether order 7 is paid, as another connection reads it."""
    return bool(in_thread(lambda: Order.objects.using("warehouse").get(pk=7).paid))


def lose(lease: Lease) -> None:
    """Let another owner take the lock over, and let the lease find out."""
    locks["default"].release(lease.names, lease.secret)
    rival = lock(lease.names, wait=0).acquire()
    lease.extend()
    rival.release()


def is_free(name: str) -> bool:
    """Return whether a lock is free."""
    try:
        lock(name, wait=0).acquire().release()
    except LockTakenError:
        return False
    return True


def during(action: Callable[[], Any]) -> None:
    """Make the shop's views do something while they handle a request."""
    During.action = staticmethod(action)
