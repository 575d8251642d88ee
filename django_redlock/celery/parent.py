"""
Free the slots of messages that never run and of children that died, in a worker's parent process (internal).

This module is imported in workers only.
"""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Literal, TypeVar

from billiard.einfo import ExceptionWithTraceback  # type: ignore[attr-defined]
from celery import signals
from celery.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery.utils.imports import symbol_by_name
from celery.worker.request import Request
from celery.worker.state import revoked as revoked_tasks
from kombu.exceptions import DecodeError

from ..engine.manager import fresh_secret
from ..exceptions import printable
from ..runtime.clock import steady
from ..singleton.arrival import expire
from ..singleton.driver import give_up
from ..singleton.ending import free_dead, shorten
from ..singleton.options import SingletonOptions
from ..singleton.pending import discard
from ..singleton.questions import Steps
from ..singleton.ticket import Ticket
from .dispatch import CONTENT_HEADER, HEADER, RECEIVED_HEADER, RUN_HEADER
from .worker import nodes_of

T = TypeVar("T")
log = logging.getLogger("django_redlock")


class SingletonRequest(Request):
    """
    A mixin for the request class of a singleton task.

    The parent draws a secret of the run for each delivery. A redelivered message has the same id and headers as the
    copy that may still run, so only the secret distinguishes the two. With it, the parent can free the slot of a child
    that died. It also notes how the message is written, for a child that puts it back.
    """

    task: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.request_dict[RUN_HEADER] = fresh_secret()
        self.request_dict[RECEIVED_HEADER] = steady()
        self.request_dict[CONTENT_HEADER] = self.message.content_type

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> None:
        """Free the slot of a dead child. For other failures, the child frees the slot."""
        error: Any = exc_info.exception
        if isinstance(error, ExceptionWithTraceback):
            error = error.exc
        if isinstance(error, (WorkerLostError, Terminated)):
            comes_back = self._comes_back(error)
            self._decide(lambda ticket, rules: free_dead(ticket, self._run_secret, rules, comes_back))
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
        if self.time_start:
            self._decide(discard)
        super().terminate(pool, signal)

    def reject(self, requeue: bool = False) -> None:
        """Free the slot of a message that Celery refuses before a child gets it, such as one with an impossible eta."""
        if not requeue and not self.time_start:
            self._decide(discard)
        super().reject(requeue)

    def maybe_expire(self) -> Literal[True] | None:
        """
        Let the message expire, unless its id belongs to another message that counts or to a run that is alive.

        Celery revokes the id of an expired message.
        """
        was_revoked = self.id in revoked_tasks
        expired = super().maybe_expire()
        if expired and not was_revoked and self._decide(expire) is False:
            revoked_tasks.discard(self.id)
            return None
        return expired

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        """Free the slot of a message that was revoked or has expired, before its result shows that."""
        # Not if it was terminated: that is announced before the child is dead, and the body may outlive the signal.
        if not terminated:
            self._decide(discard)
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

    @property
    def _run_secret(self) -> str:
        return str(self.request_dict[RUN_HEADER])

    def _shorten(self) -> None:
        """Let the slot end soon: Celery reports a hard limit before the child is dead."""
        self._decide(lambda ticket, rules: shorten(ticket, self._run_secret, rules))

    def _decide(self, decision: Callable[[Ticket, SingletonOptions], Steps[T]]) -> T | None:
        """Carry out a decision about the message, whose ticket may have to be made from its arguments."""
        task = self.task
        try:
            found = Ticket.unpack(self.request_dict.get(HEADER), self.id)
            ticket: Ticket = found or task.singleton_ticket(self.id, self.args, self.kwargs)
            nodes = nodes_of(task, ticket.using)  # of an alias that the settings of the worker may lack
        except Exception:
            log.exception("the slot of task %s could not be freed; it ends with its time", printable(str(self.id)))
            return None
        return nodes.run(decision(ticket, task.singleton_options))


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
    """Free the slot and the place of a message that this worker rejects: its task is unknown, or it cannot be read."""
    headers = getattr(message, "headers", None) or {}
    ticket = Ticket.unpack(headers.get(HEADER), headers.get("id"))
    if ticket:
        give_up(ticket)


signals.task_unknown.connect(_free_refused, weak=False, dispatch_uid="django_redlock.unknown")
signals.task_rejected.connect(_free_refused, weak=False, dispatch_uid="django_redlock.rejected")
