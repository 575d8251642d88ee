"""
Django signals about locks, sent with ``send_robust``: a failing receiver disturbs no lock.

The sender is the alias's :class:`~django_redlock.engine.manager.LockManager`. Receivers run in the thread that took,
released or lost the lock: the caller's, the watchdog's, or the event loop's. They must be quick and must not wait for
locks.
"""

from typing import Any

from asgiref.sync import iscoroutinefunction
from django.dispatch import Signal


class SyncSignal(Signal):
    """A signal of plain functions: it is also sent in an event loop, where the sender cannot wait for a coroutine."""

    def connect(self, receiver: Any, *args: Any, **options: Any) -> None:
        """
        Connect a receiver, as Django does.

        Raises:
            TypeError: The receiver is a coroutine function.
        """
        if any(map(iscoroutinefunction, (receiver, type(receiver).__call__))):
            raise TypeError(
                f"{receiver!r} is a coroutine function, and the signals of locks are also sent where nothing can wait "
                "for it. Connect a plain function; in an event loop, it can start a task."
            )
        super().connect(receiver, *args, **options)


lock_acquired = SyncSignal()
"""Sent when a lock was taken, with ``lease``."""
lock_released = SyncSignal()
"""
Sent when a lock was given up, with ``lease`` and ``outcome``, the result of :meth:`.Lease.release`.

If nobody waited for the release, the watchdog or the event loop sends the signal when the outcome is known.
"""
lock_taken = SyncSignal()
"""Sent when a caller gave up, with ``name`` and ``error``, a LockTakenError or QuorumUnavailableError."""
lock_extended = SyncSignal()
"""Sent when a lease was extended, with ``lease``."""
lock_lost = SyncSignal()
"""Sent when a lease ended without a release, with ``lease`` and ``reason``."""
lock_forced = SyncSignal()
"""Sent when an operator released a lock, with ``name`` and ``outcome``."""
node_down = SyncSignal()
"""
Sent when a node does not answer or cannot be used, for example because it is a replica; once until it can be used
again.

The signal carries ``node``, the node's display name, and ``reason``, such as ``refused``, ``timeout`` or ``WRONGPASS``.
"""
node_up = SyncSignal()
"""Sent when a node answers again, with ``node``, the node's display name."""

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
    signal = SIGNALS[event]
    if signal.receivers:  # as a rule there are none
        signal.send_robust(sender=sender, **about)
