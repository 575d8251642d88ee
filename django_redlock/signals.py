"""
Django signals about locks, sent with ``send_robust``: a failing receiver disturbs no lock.

The sender is the alias's :class:`~django_redlock.engine.manager.LockManager`. Receivers run in the thread that took,
released or lost the lock: the caller's, the watchdog's, or the event loop's. They must be quick and must not wait for
locks.
"""

from typing import Any

from django.dispatch import Signal

lock_acquired = Signal()
"""A lock was taken. Arguments: ``lease``."""
lock_released = Signal()
"""A lock was given up. Arguments: ``lease``, ``outcome`` (see :meth:`~django_redlock.engine.lease.Lease.release`)."""
lock_taken = Signal()
"""Somebody gave up waiting. Arguments: ``name``, ``error``."""
lock_extended = Signal()
"""A lease was extended. Arguments: ``lease``."""
lock_lost = Signal()
"""A lease ended without a release. Arguments: ``lease``, ``reason``."""
lock_forced = Signal()
"""A lock was released by an operator. Arguments: ``name``, ``outcome``."""
node_down = Signal()
"""
A node did not answer, and had before. Arguments: ``node``, its display name; ``reason``, such as ``refused``,
``timeout``, ``WRONGPASS`` or ``is a replica``.
"""
node_up = Signal()
"""A node answers again. Arguments: ``node``, its display name."""

SIGNALS = {
    "lock_acquired": lock_acquired,
    "lock_released": lock_released,
    "lock_taken": lock_taken,
    "lock_extended": lock_extended,
    "lock_lost": lock_lost,
    "lock_forced": lock_forced,
    "node_down": node_down,
    "node_up": node_up,
}


def send(sender: Any, event: str, **about: Any) -> None:
    """Notify the receivers of an event; Django logs their failures (``django.dispatch``), which go no further."""
    SIGNALS[event].send_robust(sender=sender, **about)
