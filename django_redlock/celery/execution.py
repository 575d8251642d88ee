"""One run of a singleton task in this process, and its slot (internal)."""

import ctypes
import logging
import sys
import threading
import time
from contextlib import suppress
from math import inf
from typing import Any
from weakref import WeakKeyDictionary

from ..core.protocol import EndReason
from ..engine.lease import (
    Lease,
    log_loss_with,
    note_late_loss,
    passed_on,
    release_at_end,
    resume_renewal,
    stop_renewal,
    successor,
)
from ..engine.manager import LockManager
from ..exceptions import LockLostError, LockTakenError, QuorumUnavailableError
from ..handler import locks
from ..nodes.clock import steady
from ..nodes.threads import STARTS
from ..singleton.slots import CLAIM, Claim, Holder, Ticket
from .signals import LOST, STOLEN, report

EXECUTION = "django_redlock_execution"  # where the request of a run keeps its slot
PATIENCE = 1.0  # seconds that an interruption waits, on Python 3.11, for a thread that is starting another one

log = logging.getLogger("django_redlock")
FRESH = 5.0  # seconds after which the length of a task's last run no longer counts

_lengths: WeakKeyDictionary[LockManager, dict[str, tuple[float, float]]] = WeakKeyDictionary()
"""The length of the last run of each task in this process, and when it was known, by the locks and the task's name."""


class Execution:
    """
    One run, from its start to its end.

    Args:
        task: The task.
        ticket: The information about the slot that its message carries.
        lease: The slot, RUNNING; None for a run that has none.
        in_queue: Whether the message still holds the slot of a waiting message, because the nodes did not answer.
        kept: Whether somebody may read its result and then expect the slot to be free.
    """

    def __init__(
        self, task: Any, ticket: Ticket, lease: Lease | None, in_queue: bool = False, kept: bool = True
    ) -> None:
        self.task = task
        self.ticket = ticket
        self.lease = lease
        self.handed_over = False  # or given up by the body itself
        self.goes_on = False  # in another message, which has the slot
        self._in_queue = in_queue
        self._kept = kept
        self._interrupt: Interrupt | None = None
        self._clock = locks[ticket.using].runtime.clock
        self._since = self._clock()
        if lease:
            log_loss_with(lease, self._report_loss)
            if task.singleton_options.on_lost == "raise":
                self._interrupt = interrupt = Interrupt()
                lease.on_lost(lambda lease: interrupt.strike())

    def hand_over(self, ticket: Ticket, ttl: float) -> Claim:
        """
        Hand the slot over to a message that is about to be sent and will continue the work; return its claim.

        Raises:
            LockTakenError: It was lost, and another holder has it.
            QuorumUnavailableError: Too few nodes answered.
        """
        assert self.lease
        stop_renewal(self.lease)  # otherwise, an extension in progress would report the slot as lost
        try:
            found = ticket.claim(ttl, self.task.name, adopt=self.lease.secret)
            if isinstance(found, Holder):
                raise LockTakenError(ticket.waiting)
        except BaseException:
            resume_renewal(self.lease)
            raise
        passed_on(self.lease)
        self._disarm()
        self.handed_over = self.goes_on = True
        return found

    def give_back(self) -> Claim | None:
        """
        Return the slot to its own message, which will be delivered again; return the claim, if there was a slot.

        It is only a claim, because the message may be gone: Celery stops a child in the same way for a time limit.
        """
        ticket = self.ticket.begun
        mine = self.lease and ticket.secret and not self.handed_over and ticket.waiting == self.lease.name
        if self.lease and mine and self.lease.valid():
            with suppress(LockTakenError, QuorumUnavailableError):
                return self.hand_over(ticket, CLAIM)
        return None

    def ensure(self) -> None:
        """
        Check that the slot is still there.

        Raises:
            LockLostError: It is not.
        """
        if self.lease:
            self.lease.ensure()

    def end(self, hold: bool = True) -> None:
        """
        End the run: free the slot, or leave it held for the rest of ``hold_for``, unless it was handed over.

        Args:
            hold: Whether ``hold_for`` counts, because the body has ended. Then the release of a run whose result nobody
                sees may still be under way when this returns. In all other cases the slot is free by then.
        """
        self._disarm()
        if self.handed_over:
            return
        self.handed_over = True
        if hold:
            length = self._clock() - self._since
            note_length(self.task, self.ticket.using, length)
            if self._keep_held(self.task.singleton_options.hold_for - length):
                return
        if self.lease:
            outcome = release_at_end(self.lease) if hold and not self._kept else self.lease.release()
            note_late_loss(self.lease, outcome)
        elif self._in_queue:
            self.ticket.free()

    def _keep_held(self, seconds: float) -> bool:
        """Replace the slot by one that is not renewed, if it must stay taken; return whether that worked."""
        if seconds <= 0 or not self.lease or not self.lease.valid():
            return False
        request = self.task.request
        inline = request.is_eager or request.called_directly  # no caller can read the result by its id
        return self.ticket.keep_held(self.lease, seconds, self.task.name, "" if inline else self.ticket.task_id)

    def _disarm(self) -> None:
        if self._interrupt:
            self._interrupt.disarm()

    def _report_loss(self, lease: Lease) -> None:
        reason = lease.reason or EndReason.EXPIRED
        event = STOLEN if reason in (EndReason.SUPERSEDED, EndReason.REVOKED) else LOST
        about = {"task_id": self.ticket.task_id, "name": lease.name, "lease": lease, "reason": reason}
        values = (lease.name, self.ticket.task_id, reason, successor(lease))
        report(self.task, event, "%s was lost by task %s (%s)%s", *values, **about)


def note_length(task: Any, using: str, seconds: float) -> None:
    """Note how long a run of a task takes, at least."""
    manager = locks[using]
    _lengths.setdefault(manager, {})[task.name] = (seconds, manager.runtime.clock())


def last_length(task: Any, using: str) -> float | None:
    """Return how long the last run of a task took, in seconds; None if nothing is known from the last five seconds."""
    manager = locks[using]
    seconds, at = _lengths.get(manager, {}).get(task.name, (0.0, -inf))
    return seconds if manager.runtime.clock() - at < FRESH else None


class SlotLostError(LockLostError):
    """The slot of a singleton was lost while its body ran; raised at an arbitrary point in the body."""

    def __init__(self, name: str = "", reason: str = "expired", held: float = 0.0) -> None:
        super().__init__(name, reason, held)


class Interrupt:
    """A means to raise :class:`SlotLostError` in the thread or greenlet that created it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._greenlet = _current_greenlet()
        self._mutex = threading.Lock()
        self._armed = True
        self.struck = False

    def strike(self) -> None:
        """Interrupt the body, unless it has ended."""
        with self._mutex:
            if not self._armed or self.struck:
                return
            self.struck = True
            if self._greenlet is not None:
                hub, greenlet = self._greenlet
                hub.loop.run_callback_threadsafe(greenlet.throw, SlotLostError)
            elif threading.get_ident() != self._thread:  # else the body itself has just checked, and gets the error
                raise_in(self._thread, SlotLostError)

    def disarm(self) -> None:
        """Note, in its thread, that the body has ended; withdraw an exception that has not reached it yet."""
        with self._mutex:
            pending = self._armed and self.struck and self._greenlet is None
            self._armed = False
        if pending:
            # Up to Python 3.12, withdrawing it would leave a mark in the interpreter that slows all threads down and
            # makes ``sys.settrace`` hang. An exception that arrives removes the mark, so it is raised again here, where
            # it is harmless.
            with suppress(SlotLostError):
                raise_in(self._thread, SlotLostError)
                for _ in range(1000):
                    pass


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise *error* in the thread with the given number, before its next instruction."""
    # Up to Python 3.11, a new thread has the number of the thread that started it until it runs. It would
    # get the exception, and a start() that waits for it would never return.
    until = steady() + (PATIENCE if sys.version_info < (3, 12) else 0)
    number, raised = ctypes.c_ulong(thread), ctypes.py_object(error)
    while steady() < until and _starts_another(thread):
        time.sleep(0.001)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, raised)


def _starts_another(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame:
        if frame.f_code in STARTS:
            return True
        frame = frame.f_back
    return False


def _current_greenlet() -> tuple[Any, Any] | None:
    """Return the hub and the greenlet that runs, if tasks are greenlets here."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return None
    gevent: Any = sys.modules["gevent"]
    return gevent.get_hub(), gevent.getcurrent()
