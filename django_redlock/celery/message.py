"""
One message that a worker is about to run, and the ways in which it can end without a run (internal).
"""

import logging
from dataclasses import replace
from typing import Any, NoReturn

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded, TaskRevokedError
from kombu.exceptions import EncodeError

from ..exceptions import RedlockError, printable
from ..nodes.clock import steady
from .dispatch import Call
from .options import SingletonOptions
from .pending import pause_after
from .slots import HEADER, RECEIVED_HEADER, Claim, Holder, Ticket

PREFETCHED = 1.0  # seconds after which the broker may have delivered a message that this worker keeps to another worker
PATIENCE = 10  # how often a message is put back, for five minutes in all, before it runs without the result backend

log = logging.getLogger("django_redlock")


class Answered(Exception):
    """The task ends without a run; the first argument is its result."""


class NoResultsError(Exception):
    """The result backend does not answer."""


class Skipped(Ignore):
    """An eager call ended without running; *holder* has its slot, or is None if there is another reason."""

    def __init__(self, reason: str, holder: Holder | None) -> None:
        super().__init__(reason)
        self.holder = holder


class Message:
    """
    One message that a worker is about to run.

    Args:
        task: The task.
        request: Celery's request.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
    """

    def __init__(self, task: Any, request: Any, args: Any, kwargs: Any) -> None:
        self.task = task
        self.request = request
        self.rules: SingletonOptions = task.singleton_options
        self.ticket, self.ticket_lost = ticket_of(task, request, args, kwargs)
        self.put_back = False  # into the queue

    @property
    def redelivered(self) -> bool:
        """Whether the broker has marked the message as delivered again, now or before it was put back."""
        return self.ticket.redelivered or bool((self.request.delivery_info or {}).get("redelivered"))

    @property
    def unfinished(self) -> bool:
        """Whether a run of it may have begun and not ended; then it is never dropped because of another run."""
        request = self.request
        return bool(self.redelivered or self.ticket.watch or request.retries) and not request.is_eager

    @property
    def kept(self) -> bool:
        """Whether this worker received it so long ago that another worker may have received and run a copy."""
        received = self.request.get(RECEIVED_HEADER)
        return not isinstance(received, float) or steady() - received > PREFETCHED

    @property
    def lifetime(self) -> float:
        """The seconds for which its slot is kept while it waits: ``queue_ttl``, but no longer than until it expires."""
        options = {"expires": self.request.expires}
        return Call(self.task, self.request.args, self.request.kwargs, options, self.rules, self.ticket).ttl

    @property
    def result_ignored(self) -> bool:
        """Whether the call or the task declares that its result is ignored."""
        ignored = vars(self.request).get("ignore_result")
        return bool(self.task.ignore_result if ignored is None else ignored)

    @property
    def stores_results(self) -> bool:
        """Whether the result of its run is stored."""
        return not self.result_ignored and not isinstance(self.task.backend, DisabledBackend)

    def stored(self, task_id: str) -> dict[str, Any]:
        """
        Return what is stored about a task; ``{}`` if results are ignored, or if this backend cannot be asked.

        Raises:
            NoResultsError: The result backend does not answer.
        """
        if not self.stores_results:
            return {}
        try:
            meta: dict[str, Any] = self.task.backend.get_task_meta(task_id)
            return meta
        except NotImplementedError:
            return {}
        except (SoftTimeLimitExceeded, RedlockError):  # raised in this thread, whatever it was doing
            raise
        except Exception as error:
            raise NoResultsError(f"{type(error).__name__}: {error}") from error

    def has_result(self) -> bool:
        """Return whether a result is stored under its id; False if the result backend does not answer."""
        try:
            return self.stored(self.request.id).get("status") in states.READY_STATES
        except NoResultsError:
            return False

    def without_results(self, error: NoResultsError) -> None:
        """
        Put the message back, because the result backend would have to say whether it is to run.

        It runs nevertheless with ``on_unavailable={"run": "run"}``, and when it has been put back often: no run needs
        the result backend.

        Raises:
            Ignore: It was put back.
        """
        if self.rules.without_nodes("run") != "run" and self.ticket.tries < PATIENCE:
            self.put_off(error)
        log.warning("%s runs, though the result backend does not answer: %s", printable(self.request.id), error)

    def put_off(self, error: Exception) -> NoReturn:
        """Put the message back until the result backend answers again; raise Ignore."""
        pause = pause_after(error, self.ticket.tries)
        self.send_again(self.ticket, pause)
        raise Ignore(f"The result backend does not answer: {error}; the message is tried again in {pause:.1f} s.")

    def skip(self, reason: str, holder: Holder | None = None) -> NoReturn:
        """
        End the task as revoked, without a run.

        ``Ignore`` alone would leave everybody waiting who has its id: callers, the rest of a chain, a chord's body. So
        if this cannot be stored, the message is put back, and everything is decided anew when it arrives.

        Raises:
            Skipped: The call is eager.
            Ignore: It is not.
        """
        if (request := self.request).is_eager:
            raise Skipped(reason, holder) from None
        about = {"request": request, "store_result": not self.result_ignored, "state": states.REVOKED}
        try:
            self.task.backend.mark_as_failure(request.id, TaskRevokedError(reason), **about)
        except (SoftTimeLimitExceeded, NotImplementedError):
            raise
        except Exception as error:  # of the backend, or of an errback, which is called after the result was stored
            if self.stores_results and not self.has_result():
                self.put_off(error)
            log.exception("%s has ended, but one of its callbacks failed", printable(request.id))
        raise Ignore(
            reason
        ) from None  # Celery's own class, because the exception is pickled on its way to the parent process

    def answer_with(self, task_id: str) -> None:
        """
        End the task with the result of another task, if that result is stored.

        Raises:
            Answered: That task succeeded.
            Exception: The error with which that task failed.
            NoResultsError: The result backend does not answer.
        """
        meta = self.stored(task_id)
        if meta.get("status") == states.SUCCESS:
            self.store(meta["result"], states.SUCCESS)
            raise Answered(meta["result"])
        if meta.get("status") in states.PROPAGATE_STATES:
            self.store(meta["result"], states.FAILURE)
            raise meta["result"]

    def store(self, result: Any, state: str) -> None:
        """
        Store the result with which the task is about to end without a run; Celery stores it again.

        If Celery could not store it, nobody would learn that the task has ended, and nothing would have run.

        Raises:
            Ignore: The result backend does not store it, so the message was put back.
        """
        if not self.stores_results or self.request.is_eager:
            return
        try:
            self.task.backend.store_result(self.request.id, result, state, request=self.request)
        except NotImplementedError:
            return
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            self.put_off(error)

    def send_again(self, ticket: Ticket, pause: float, claimed: Claim | None = None) -> None:
        """
        Put the message back into the queue for *pause* seconds, with *ticket*, and confirm its claim if it has one.

        Raises:
            Reject: The broker did not accept it, and must deliver the message again.
            Exception: The broker did not accept it, and the message is acknowledged already.
        """
        request, ticket = self.request, replace(ticket, tries=ticket.tries + 1, redelivered=self.redelivered)
        # The sender chose how logs show the arguments; Celery would derive that again from the arguments.
        shown = {name: given for name in ("argsrepr", "kwargsrepr") if (given := request.get(name)) is not None}
        message = self.task.signature_from_request(request, countdown=pause, retries=request.retries, **shown)
        # Nobody here waits for the result. Otherwise, Celery subscribes to it first, and fails if the backend is away.
        headers = {**(message.options.get("headers") or {}), "ignore_result": self.result_ignored}
        options = {**message.options, "headers": headers, "ignore_result": True}
        try:
            Call(self.task, message.args, message.kwargs, options, self.rules, ticket, claimed).publish(ticket)
        except EncodeError:
            raise
        except Exception as error:
            self.put_back = bool(self.task.acks_late) and not request.is_eager
            if not self.put_back:
                raise
            raise Reject(error, requeue=True) from error
        self.put_back = True


def ticket_of(task: Any, request: Any, args: Any, kwargs: Any) -> tuple[Ticket, bool]:
    """Return the ticket of a message, and whether it had none and got one made from its arguments."""
    found = Ticket.unpack(request.get(HEADER) or (request.headers or {}).get(HEADER), request.id)
    return found or task.singleton_ticket(request.id, args, kwargs), found is None
