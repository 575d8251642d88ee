"""
One message that a worker is about to run, and the ways in which it can end without a run (internal).
"""

from dataclasses import replace
from typing import Any, NoReturn

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, TaskRevokedError

from ..nodes.clock import steady
from .dispatch import Call
from .options import SingletonOptions
from .slots import HEADER, RECEIVED_HEADER, Holder, Ticket

PREFETCHED = 1.0  # seconds after which the broker may have delivered a message that this worker keeps to another worker


class Answered(Exception):
    """The task ends without a run; the first argument is its result."""


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
        """Whether the broker marks the message as delivered again."""
        return bool((self.request.delivery_info or {}).get("redelivered"))

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

    def has_result(self) -> bool:
        """Return whether a result is stored under its id; False if the result backend does not answer."""
        try:
            return bool(self.task.backend.get_state(self.request.id) in states.READY_STATES)
        except Exception:  # there is no result backend, or it does not answer
            return False

    def skip(self, reason: str, holder: Holder | None = None) -> NoReturn:
        """
        End the task as revoked, without a run.

        ``Ignore`` alone would leave everybody waiting who has its id: callers, the rest of a chain, a chord's body.

        Raises:
            Skipped: The call is eager.
            Ignore: It is not.
        """
        if (request := self.request).is_eager:
            raise Skipped(reason, holder) from None
        self.task.backend.mark_as_failure(
            request.id,
            TaskRevokedError(reason),
            request=request,
            store_result=not self.result_ignored,
            state=states.REVOKED,
        )
        raise Ignore(
            reason
        ) from None  # Celery's own class, because the exception is pickled on its way to the parent process

    def answer_with(self, task_id: str) -> None:
        """
        End the task with the result of another task, if that result is stored.

        Raises:
            Answered: That task succeeded.
            Exception: The error with which that task failed.
        """
        result = self.task.AsyncResult(task_id)
        state = result.state
        if state == states.SUCCESS:
            raise Answered(result.result)
        if state in states.PROPAGATE_STATES:
            raise result.result

    def send_again(self, ticket: Ticket, pause: float) -> None:
        """Put the message back into the queue for *pause* seconds, with *ticket*."""
        request, ticket = self.request, replace(ticket, tries=ticket.tries + 1)
        # The sender chose how logs show the arguments; Celery would derive that again from the arguments.
        shown = {name: given for name in ("argsrepr", "kwargsrepr") if (given := request.get(name)) is not None}
        message = self.task.signature_from_request(request, countdown=pause, retries=request.retries, **shown)
        Call(self.task, message.args, message.kwargs, message.options, self.rules, ticket).publish(ticket)
        self.put_back = True


def ticket_of(task: Any, request: Any, args: Any, kwargs: Any) -> tuple[Ticket, bool]:
    """Return the ticket of a message, and whether it had none and got one made from its arguments."""
    found = Ticket.unpack(request.get(HEADER) or (request.headers or {}).get(HEADER), request.id)
    return found or task.singleton_ticket(request.id, args, kwargs), found is None
