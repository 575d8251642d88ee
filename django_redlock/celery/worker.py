"""
A message in a worker: carry out with Celery what :mod:`django_redlock.singleton.arrival` decides (internal).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    TaskRevokedError,
    WorkerShutdown,
    WorkerTerminate,
)
from celery.utils.quorum_queues import detect_quorum_queues
from kombu.exceptions import EncodeError
from kombu.serialization import registry  # type: ignore[attr-defined]

from ..core.protocol import EndReason
from ..engine.lease import Lease, log_loss_with, successor
from ..engine.manager import fresh_secret
from ..exceptions import printable
from ..runtime.clock import steady
from ..singleton import questions as ask
from ..singleton.arrival import Answer, Fail, Leave, Message, PutBack, Revoke, Run, Verdict, arrive, enter, interrupted
from ..singleton.driver import Nodes, give_up
from ..singleton.ending import Execution, end
from ..singleton.questions import NotSent, Result, ResultState
from ..singleton.slot import Holder
from ..singleton.ticket import RUNNING, Ticket, is_secret
from .dispatch import CONTENT_HEADER, HEADER, RECEIVED_HEADER, RESULTS, RUN_HEADER, Sender, lifetime
from .signals import LOST, OVERLAP, STOLEN, report, report_holder

EXECUTION = "django_redlock_execution"  # where the request of a run keeps its slot
DIRECT = "django_redlock_direct"  # whether a run has called its task directly, so that the call has no slot itself

log = logging.getLogger("django_redlock")


class EagerlySkipped(Ignore):
    """An eager call ended without running; *holder* has its slot, or is None if there is another reason."""

    def __init__(self, reason: str, holder: Holder | None) -> None:
        super().__init__(reason)
        self.holder = holder


class Arrival(Nodes):
    """
    Answers the questions of a message that a worker is about to run, and does what was decided.

    Args:
        task: The task.
        request: Celery's request.
        message: The message.
    """

    def __init__(self, task: Any, request: Any, message: Message) -> None:
        super().__init__(message.ticket.using, task.name, task.singleton_options.times)
        self.task = task
        self.request = request
        self.message = message

    def start(self) -> Run | Answer:
        """
        Take the slot for a run. A message that ends without a run leaves the queue.

        Raises:
            Ignore: It does not run, or not now; its outcome has been stored for its caller, if it has one.
            Retry: It was put back into the queue, because the nodes do not answer.
            Reject: It returns to the broker, which did not take it back as a new message.
            DuplicateTask: Another task has the slot, and ``on_overlap="fail"``.
            QuorumUnavailableError: The nodes do not answer, and ``on_unavailable`` is to fail.
        """
        try:
            verdict = self.run(arrive(self.message))
        except BaseException as error:
            self.run(interrupted(self.message, is_stop(error)))
            raise
        return verdict if isinstance(verdict, (Run, Answer)) else self._leave(verdict)

    def _leave(self, verdict: Verdict) -> NoReturn:
        """End the message in the way that Celery has for it."""
        match verdict:
            case Fail(error):
                raise error
            case Revoke(reason, holder) if self.message.inline:
                raise EagerlySkipped(reason, holder) from None
            case PutBack(_, _, _, unsent) if unsent:
                raise Reject(unsent, requeue=True) from unsent
            case PutBack(reason, pause, unanswered) if unanswered:
                raise Retry(reason, exc=unanswered, when=pause) from unanswered  # type: ignore[arg-type]
            case Revoke(reason) | PutBack(reason) | Leave(reason):
                # Celery's own class, because the exception is pickled on its way to the parent process
                raise Ignore(reason) from None
        raise AssertionError(f"a verdict of {self.message.id} is not carried out: {verdict}")

    def take(self, question: ask.Take) -> Lease:
        """Take the slot for the run, and have its loss reported."""
        lease, ticket = super().take(question), question.ticket
        log_loss_with(lease, lambda lost: self._report_loss(lost, ticket.task_id))
        return lease

    def _report_loss(self, lease: Lease, task_id: str) -> None:
        reason = lease.reason or EndReason.EXPIRED
        event = STOLEN if reason in (EndReason.SUPERSEDED, EndReason.REVOKED) else LOST
        about = {"task_id": task_id, "name": lease.name, "lease": lease, "reason": reason}
        values = (lease.name, task_id, reason, successor(lease))
        report(self.task, event, "%s was lost by task %s (%s)%s", *values, **about)

    def kept(self, question: ask.Kept) -> float | None:
        """Return for how long this worker has had the message."""
        received = self.request.get(RECEIVED_HEADER)
        return steady() - received if isinstance(received, float) else None

    def report(self, question: ask.Report) -> None:
        """Report that another task has the slot."""
        report_holder(self.task, OVERLAP, self.message.ticket, question.holder, question.strategy, question.effect)

    def send(self, question: ask.Send) -> NotSent | None:
        """Put the message back into the queue, and confirm its claim if it has one."""
        task, request = self.task, self.request
        # The sender chose how logs show the arguments; Celery would derive that again from the arguments.
        shown = {name: given for name in ("argsrepr", "kwargsrepr") if (given := request.get(name)) is not None}
        try:
            pause = deliverable(task.app, question.pause)
            again = task.signature_from_request(request, countdown=pause, retries=request.retries, **shown)
            # Nobody here waits for the result. Otherwise, Celery subscribes to it first, and fails if the backend is
            # away.
            headers = {**(again.options.get("headers") or {}), "ignore_result": result_ignored(task)}
            written = {
                "serializer": registry.type_to_name.get(request.get(CONTENT_HEADER)),
                "compression": request.get("compression"),
            }
            chosen = {name: how for name, how in written.items() if how}
            options = {**again.options, **chosen, "headers": headers, "ignore_result": True}
            Sender(task, again.args, again.kwargs, options, self.message.rules, question.ticket.using).send(question)
        except Exception as error:
            return NotSent(error, isinstance(error, EncodeError))
        return None

    # The result backend is asked here alone, and never keeps an accepted call from running

    def result_of(self, question: ask.ResultOf) -> Result:
        """Return what is stored about a task; nothing is known if results are ignored."""
        if not self.message.stores:
            return Result(ResultState.UNKNOWN)
        try:
            meta = self.task.backend.get_task_meta(question.task_id)
        except NotImplementedError:
            return Result(ResultState.UNKNOWN)
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            return Result(ResultState.SILENT, error)
        return Result(RESULTS.get(meta["status"], ResultState.UNDERWAY), meta["result"])

    def store_outcome(self, question: ask.StoreOutcome) -> Exception | None:
        """
        Store the outcome with which the task is about to end without a run; return the error if that failed.

        ``Ignore`` alone would leave everybody waiting who has its id: callers, the rest of a chain, a chord's body. Of
        a value or an error Celery stores the same again; if it could not, nobody would learn that the task has ended.
        """
        request, backend = self.request, self.task.backend
        if request.is_eager or not (self.message.stores or isinstance(question.outcome, Revoke)):
            return None
        try:
            match question.outcome:
                case Answer(value):
                    backend.store_result(request.id, value, states.SUCCESS, request=request)
                case Fail(error):
                    backend.store_result(request.id, error, states.FAILURE, request=request)
                case Revoke(reason):
                    about = {"request": request, "store_result": not result_ignored(self.task), "state": states.REVOKED}
                    backend.mark_as_failure(request.id, TaskRevokedError(reason), **about)
        except SoftTimeLimitExceeded:
            raise
        except NotImplementedError:
            if isinstance(question.outcome, Revoke):
                raise
        except Exception as error:  # of the backend, or of an errback, which is called after the result was stored
            if not isinstance(question.outcome, Revoke):
                return error
            if self.message.stores and not self.result_of(ask.ResultOf(request.id)).state.final:
                return error
            log.exception("task %s has ended, but one of its callbacks failed", printable(request.id))
        return None

    answers = Nodes.answers | {
        ask.Take: take,
        ask.Kept: kept,
        ask.Report: report,
        ask.Send: send,
        ask.ResultOf: result_of,
        ask.StoreOutcome: store_outcome,
    }


def arrival(task: Any, request: Any, ticket: Ticket, carried: bool = True) -> Arrival:
    """
    Return a message that a worker is about to run; if there cannot be one, free its slot and its place.

    Args:
        task: The task.
        request: Celery's request.
        ticket: Its ticket.
        carried: Whether the message carried that.
    """
    try:
        return Arrival(task, request, _message(task, request, ticket, carried))
    except Exception:
        give_up(ticket)
        raise


def _message(task: Any, request: Any, ticket: Ticket, carried: bool) -> Message:
    received, secret = request.get(RECEIVED_HEADER), request.get(RUN_HEADER)
    rules = task.singleton_options.of_message(ticket.own)
    return Message(
        ticket,
        rules,
        carried,
        secret if is_secret(secret) else "",  # which the worker drew for the run
        request.retries or 0,
        request.get("replaced_task_nesting") or 0,
        bool((request.delivery_info or {}).get("redelivered")),
        bool(task.acks_late),
        bool(request.eta),
        bool(request.is_eager),
        not result_ignored(task) and not isinstance(task.backend, DisabledBackend),
        lifetime(task, {"expires": request.expires}, rules),
        # At the beginning of the run, because most messages are acknowledged then, and not delivered again.
        steady() - received if isinstance(received, float) else 0.0,
        error=task.singleton_error,
    )


def ticket_of(request: Any) -> Ticket | None:
    """Return the ticket in the request of a task that is about to run, or None as :meth:`Ticket.unpack` does."""
    # In eager mode, Celery keeps headers apart from the other attributes of a request.
    return Ticket.unpack(request.get(HEADER) or (request.headers or {}).get(HEADER), request.id)


def is_stop(error: BaseException | None) -> bool:
    """Return whether an exception tells that its process is stopped, so that its message may return to the broker."""
    return isinstance(error, (WorkerShutdown, WorkerTerminate)) or (
        # Celery's children report a stop by a signal. The message of a body that calls sys.exit() is acknowledged.
        isinstance(error, SystemExit) and isinstance(error.code, int) and error.code < 0
    )


@contextmanager
def under_direct_call(task: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """
    Hold the slot while a body that was called directly runs; the body can use the slot as in a worker.

    Raises:
        DuplicateTask: Another task has it.
        QuorumUnavailableError: Too few nodes answered, and ``on_unavailable`` is not to run anyway.
    """
    ticket = replace(task.singleton_ticket(f"direct-{fresh_secret()[:8]}", args, kwargs), scope=RUNNING)
    rules = task.singleton_options.of_message(ticket.own)
    message = Message(ticket, rules, inline=True, error=task.singleton_error)
    nodes = Arrival(task, task.request, message)
    verdict = nodes.run(enter(message))
    if isinstance(verdict, Fail):
        raise verdict.error from None
    # In the body of a run, the request is that of its message, which this call can neither retry nor replace.
    task.push_request(**{EXECUTION: verdict.execution, DIRECT: False, "called_directly": True})
    try:
        yield
    finally:
        nodes.run(end(verdict.execution))
        task.pop_request()


def end_run(task: Any, run: Execution) -> Any:
    """Free the slot of a run before its end; return the outcome."""
    return nodes_of(task, run.ticket.using).run(end(run, hold=False))


def nodes_of(task: Any, using: str) -> Nodes:
    """Return what answers the questions about the slots of a task."""
    return Nodes(using, task.name, task.singleton_options.times)


def deliverable(app: Any, pause: float) -> float:
    """Return a pause that the broker can keep: Celery fails with less than a second if RabbitMQ delays messages."""
    if pause >= 1.0:
        return pause
    transport = app.producer_pool.connections.connection.transport.driver_type
    return 1.0 if detect_quorum_queues(app, transport)[0] else pause


def result_ignored(task: Any) -> bool:
    """Return whether the present call of a task, or the task itself, declares that its result is ignored."""
    ignored = vars(task.request).get("ignore_result")
    return bool(task.ignore_result if ignored is None else ignored)
