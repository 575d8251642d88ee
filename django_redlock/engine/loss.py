"""
Report that a lease was lost: once, in full, and whichever thread notices the loss (internal).

An exception may interrupt the report between any two bytecodes. The watchdog then finishes the report, because a lease
with an unfinished report is due at once.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Protocol

from ..core.protocol import EndReason
from ..exceptions import printable
from ..nodes.threads import new_event
from .lease import LeaseHold

log = logging.getLogger("django_redlock")


class Lost(Protocol):
    """The part of a :class:`~.lease.Lease` that is used here."""

    hold: LeaseHold

    @property
    def name(self) -> str:
        """The lock's name."""

    @property
    def reason(self) -> EndReason | None:
        """Why the lease ended."""

    def valid(self) -> bool:
        """Return whether the lock is still held."""


class Loss:
    """
    Reports the loss of one lease: to the log, to the signal, to the callbacks and to those that wait for the event.

    The lease owns this object, and its hold refers to it weakly: a callback may refer to the lease, and a lease that
    nobody uses any more must be freed.
    """

    __slots__ = ("__weakref__", "_callbacks", "_event", "_known", "_mutex", "_teller")

    def __init__(self) -> None:
        self._known = False
        self._callbacks: list[Callable[[Any], object]] = []
        self._event: Any = None  # made on first use
        self._mutex = threading.Lock()
        self._teller: object = None  # stands for the call of report() that runs the callbacks

    @property
    def pending(self) -> bool:
        """Whether somebody is still to be notified, and no thread is doing that."""
        return self._teller is None and bool(self._callbacks or not self._known)

    def event(self) -> Any:
        """Return the event that is set when the lease is lost."""
        if self._event is None:
            with self._mutex:
                self._event = self._event or self._new_event()
            if self._known:
                self._set_event()
        return self._event

    def add(self, lease: Lost, callback: Callable[[Any], object]) -> None:
        """Call *callback* with *lease* when the lease is lost; at once if it already was."""
        check_callback(callback)
        self._callbacks.append(callback)
        if self._known:
            self.report(lease)

    def report(self, lease: Lost) -> None:
        """Report once that *lease* was lost; do nothing if it was released."""
        if lease.hold.ended is EndReason.RELEASED or (self._known and not self._callbacks):
            return
        self._set_event()
        me, fatal = object(), None
        try:
            with self._mutex:
                if self._teller is None:
                    self._begin(me)
            if self._teller is me and not self._apart(lease, partial(self._call_back, lease)):
                fatal = self._call_back(lease)
        except BaseException:
            if self._teller is me:
                self._teller = None
            self._report_later(lease)
            raise
        if fatal is not None:
            raise fatal

    def _begin(self, teller: object) -> None:
        if not self._known:
            self._callbacks[:0] = [log_loss, notify_loss]
            self._known = True
        self._teller = teller

    def _call_back(self, lease: Lost) -> BaseException | None:
        """Call all callbacks; return the first exception that is meant for the program, such as SystemExit."""
        fatal: BaseException | None = None
        with suppress(IndexError):
            # Taken and called without a bytecode in between, so that none is lost and none is called twice.
            for callback in iter(partial(self._callbacks.pop, 0), None):
                try:
                    callback(lease)
                except BaseException as error:
                    log.exception("a callback of lock %s failed", printable(lease.name))
                    fatal = fatal or (None if isinstance(error, Exception) else error)
        self._teller = None
        if self._callbacks:  # added by another thread while this one was calling
            self.report(lease)
        return fatal

    def _apart(self, lease: Lost, function: Callable[[], object]) -> bool:
        return lease.hold.keeper.runtime.watchdog.apart(function)

    def _report_later(self, lease: Lost) -> None:
        lease.hold.keeper.runtime.watchdog.watch(lease)

    def _new_event(self) -> Any:
        return new_event()

    def _set_event(self) -> None:
        if self._event is not None:
            self._event.set()


class AsyncLoss(Loss):
    """The report of a lease that belongs to the running event loop: its event is an asyncio event, set in that loop."""

    __slots__ = ("_loop",)

    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()

    def _apart(self, lease: Lost, function: Callable[[], object]) -> bool:
        return False

    def _call_back(self, lease: Lost) -> None:
        super()._call_back(lease)  # returns nothing: an exit would end the event loop for everything in it

    def _report_later(self, lease: Lost) -> None:
        with suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(lambda: lease.hold.keeper.runtime.loop_watchdog().watch(lease))

    def _new_event(self) -> Any:
        return asyncio.Event()

    def _set_event(self) -> None:
        with suppress(RuntimeError):  # the loop has been closed: nobody waits for the event any more
            if asyncio._get_running_loop() is self._loop or not self._loop.is_running():
                super()._set_event()
            else:  # another thread noticed the loss, and may not wake the loop's tasks itself
                self._loop.call_soon_threadsafe(super()._set_event)


def check_callback(callback: object) -> None:
    """
    Make sure that *callback* can be called when a lock is lost.

    Raises:
        TypeError: It cannot, or nothing would await what it returns.
    """
    if not callable(callback):
        raise TypeError(f"on_lost() needs a function that takes the lease, not {repr(callback)[:40]}.")
    if iscoroutinefunction(callback):
        raise TypeError(
            "on_lost() needs a plain function, because nothing awaits its result. In a task, await lease.lost.wait()."
        )


def log_loss(lease: Lost) -> None:
    """Log the loss, before the callbacks of users are called."""
    about = {"event": "lock_lost", "lock": lease.name}
    log.error("lock lost: %s (%s)", printable(lease.name), lease.reason, extra=about)


def notify_loss(lease: Lost) -> None:
    """Send the signal ``lock_lost``."""
    lease.hold.keeper.notify("lock_lost", lease=lease, reason=lease.reason)
