"""One run of a singleton task in this process, and its slot (internal)."""

import logging
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
from ..exceptions import LockTakenError, QuorumUnavailableError
from ..handler import locks
from ..singleton.slots import CLAIM, Claim, Holder, Ticket
from .signals import LOST, STOLEN, report

EXECUTION = "django_redlock_execution"  # where the request of a run keeps its slot

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
        self._clock = locks[ticket.using].runtime.clock
        self._since = self._clock()
        if lease:
            log_loss_with(lease, self._report_loss)

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
