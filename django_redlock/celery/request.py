"""
Free the slots of messages that never run and of children that died, in a worker's parent process (internal).

This module is imported in workers only.
"""

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, Literal

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from celery import signals
from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from celery.worker.state import revoked as revoked_tasks
from kombu.exceptions import DecodeError

from ..engine.manager import fresh_secret
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from ..runtime.clock import steady
from ..singleton.slots import HEADER, RECEIVED_HEADER, RUN_HEADER, SlotState, Ticket, free, peek
from .pending import PendingMessage, discard

if TYPE_CHECKING:
    from .task import SingletonTask

KILL_TIME = 3.0  # seconds after which a child that exceeded its hard limit is certainly dead: TERM, 0.1 s, KILL

log = logging.getLogger("django_redlock")


class SingletonRequest(Request):
    """
    A mixin for the request class of a singleton task.

    The parent draws a secret of the run for each delivery. A redelivered message has the same id and headers as the
    copy that may still run, so only the secret distinguishes the two. With it, the parent can free the slot of a child
    that died.
    """

    task: "SingletonTask[..., Any]"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_dict[RUN_HEADER] = fresh_secret()
        self.request_dict[RECEIVED_HEADER] = steady()

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        """Free the slot of a dead child. For other failures, the child frees the slot."""
        error: Any = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, (WorkerLostError, Terminated)):
            self._free_dead_child(requeued=self._comes_back(error))
        elif isinstance(error, TimeLimitExceeded):
            self._shorten()
        super().on_failure(exc_info, send_failed_event, return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> None:
        """Shorten the slot of a child that is about to be killed; before Celery 5.7, only this method learns of it."""
        if not soft:
            self._shorten()
        super().on_timeout(soft, timeout)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """
        Free the slot of a message whose body may not have begun, before the child or greenlet is stopped.

        The slot of a body that runs has another secret, and stays until the body has ended.
        """
        if self.time_start and (ticket := self._ticket()):
            discard(ticket, self.task)
        super().terminate(pool, signal)

    def reject(self, requeue: bool = False) -> None:
        """Free the slot of a message that Celery refuses before a child gets it, such as one with an impossible eta."""
        if not requeue and not self.time_start and (ticket := self._ticket()):
            discard(ticket, self.task)
        super().reject(requeue)

    def maybe_expire(self) -> Literal[True] | None:
        """
        Let the message expire, unless its id belongs to another message that counts or to a run that is alive.

        Celery revokes the id of an expired message. The newer messages of a pending call have the same id, and so does
        the run of a message that the broker delivers again.
        """
        was_revoked = self.id in revoked_tasks
        expired = super().maybe_expire()
        if expired and not was_revoked and self._is_alive_elsewhere():
            revoked_tasks.discard(self.id)
            return None
        return expired

    def _is_alive_elsewhere(self) -> bool:
        """Return whether another message counts or a run is alive; True as well if nodes have to be asked again."""
        ticket = self._ticket()
        if not ticket:
            return False
        if ticket.trailing:
            discard(ticket, self.task)  # first, so that a caller can no longer take the call over unnoticed
        try:
            return (ticket.trailing and self._is_superseded(ticket)) or ticket.live_run() is not None
        except QuorumUnavailableError:  # with "retry", the child puts the message back, and it expires later
            return self.task.singleton_options.without_nodes("run") == "retry"

    def _is_superseded(self, ticket: Ticket) -> bool:
        return PendingMessage.look_up(ticket, self.task).is_superseded()

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Free the slot of a message that was revoked or has expired, before its result shows that."""
        # Not if it was terminated: that is announced before the child is dead, and the body may outlive the signal.
        if not terminated and (ticket := self._ticket()):
            discard(ticket, self.task)
        super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]

    def _comes_back(self, error: BaseException) -> bool:
        """Return whether the message of a dead child is delivered again by the broker or retried by Celery."""
        if isinstance(error, WorkerLostError) and getattr(self.task, "retry_on_worker_lost", None):
            longest = self.task.max_retries
            if longest is None or (self.request_dict.get("retries") or 0) < longest:
                return True
        if not self.task.acks_late or self.task.singleton_options.redelivery == "drop":
            return False
        # A worker that must stop at once cancels unacknowledged messages, which return to the broker.
        cancelled = isinstance(error, Terminated) and getattr(self, "_already_cancelled", False)
        return bool(cancelled or (isinstance(error, WorkerLostError) and self.task.reject_on_worker_lost))

    def _free_dead_child(self, requeued: bool) -> None:
        """
        Free the slot of a dead child, or return it to the message for one lease if that is delivered again.

        A slot that the child has left to a retry stays: if the retry was not sent, its claim lapses in a moment.
        """
        ticket = self._ticket()
        if not ticket:
            return
        run, task = self.request_dict[RUN_HEADER], self.task
        if ticket.trailing:  # the child may have died before it freed this lock
            if requeued:
                ticket.free()
            else:
                discard(ticket, task)
            ticket = ticket.begun
        if requeued and ticket.secret and ticket.waiting == ticket.running:
            with suppress(LockTakenError, QuorumUnavailableError):
                lease, options = task.singleton_options.lease, {"adopt": run, "strict": True}
                ticket.take(ticket.waiting, lease, task.name, SlotState.QUEUED, ticket.secret, **options)
                return
        free(ticket.using, ticket.running, run)
        ticket.free()

    def _shorten(self) -> None:
        """
        Let the slot end soon: Celery reports a hard limit before the child is dead, so the body may still be running.

        The slot of a child that dies is not freed otherwise. No child is known to outlive the kill by more than this.
        A body that has not begun has no slot to keep, so the slot of its message is free at once.
        """
        ticket = self._ticket()
        run, task = self.request_dict[RUN_HEADER], self.task
        if ticket:
            discard(ticket, task)
        if not ticket or not ticket.running:
            return
        with suppress(LockTakenError, QuorumUnavailableError):
            if peek(ticket.using, ticket.running).secret == run:
                left = min(KILL_TIME, task.singleton_options.lease)
                # The child does not have this secret, so it can neither renew the slot nor give it to its message.
                ticket.take(ticket.running, left, task.name, "", adopt=run)

    def _ticket(self) -> Ticket | None:
        """Return the ticket of the message, or one made from its arguments."""
        try:
            found = Ticket.unpack(self.request_dict.get(HEADER), self.id)
            return found or self.task.singleton_ticket(self.id, self.args, self.kwargs)
        except Exception:
            log.exception("the slot of task %s could not be freed; it ends with its time", printable(str(self.id)))
            return None


@cache
def mixed_request(base: Any) -> Any:
    """Return the request class of a task, given as a class or a path, with the mixin added."""
    cls = symbol_by_name(base)
    if issubclass(cls, SingletonRequest):
        return cls
    return type(f"Singleton{cls.__name__}", (SingletonRequest, cls), {"__module__": cls.__module__})


def freeing_unreadable(receive: Callable[..., Any]) -> Callable[..., Any]:
    """Return a strategy that frees the slot of a message that cannot be decoded, for which there is no signal."""

    @wraps(receive)
    def receive_or_free(message: Any, *about: Any, **options: Any) -> Any:
        try:
            return receive(message, *about, **options)
        except DecodeError:
            _free_refused(message)
            raise

    return receive_or_free


def _free_refused(message: Any = None, **about: Any) -> None:
    """Free the slot of a message that this worker rejects because its task is unknown or it cannot be read."""
    headers = getattr(message, "headers", None) or {}
    ticket = Ticket.unpack(headers.get(HEADER), headers.get("id"))
    if ticket:
        ticket.free()


signals.task_unknown.connect(_free_refused, weak=False, dispatch_uid="django_redlock.unknown")
signals.task_rejected.connect(_free_refused, weak=False, dispatch_uid="django_redlock.rejected")
