"""
The task class: takes the slot when a call is sent, and again when a worker runs it.

``apply_async`` and ``__call__`` are the two places that every call passes: ``delay``, ``retry``, signatures and
``delay_on_commit`` end in the first, and the second surrounds the body so closely that the slot is free before the
result can be seen. Celery's handlers and signals do neither.
"""

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache, cached_property
from typing import Any, NoReturn, cast

from celery import states
from celery.exceptions import Ignore, Retry, TaskRevokedError
from celery.utils import uuid
from celery.utils.time import maybe_iso8601, maybe_make_aware

from ..exceptions import LockTakenError, QuorumUnavailableError
from ..handler import locks
from ..locks import fresh_nonce
from ._compat import BaseTask, P, R
from .exceptions import DuplicateTask
from .handle import Singleton
from .keys import check_key, lock_name
from .options import SingletonOptions
from .result import SingletonResult, eager_result, result_of
from .slots import HEADER, RUN_HEADER, Execution, Holder, Ticket, free, is_token, take_queued, take_running

EXECUTION = "django_redlock_execution"  # where the request of a run keeps its slot
LONGEST_PAUSE = 60.0  # seconds until a message whose slot could not be looked up is tried again
DONE = frozenset({states.SUCCESS, states.REVOKED})  # a task that failed is left to Celery's rules for redelivery

log = logging.getLogger("django_redlock")


class SingletonTask(BaseTask[P, R]):
    """
    A task of which one per arguments is waiting or running at any time.

    :func:`~django_redlock.celery.singleton_task` mixes it into the project's own task class. A task that is written
    as a class can derive from it, and set ``singleton_options``.
    """

    abstract = True
    singleton_options: SingletonOptions = SingletonOptions()

    @property
    def singleton(self) -> Singleton:
        """What can be known and done about the slots of this task."""
        return Singleton(self)

    @property
    def execution(self) -> Execution | None:
        """The run under way in this thread, if it is one of this task's."""
        return getattr(self.request, EXECUTION, None)

    @cached_property
    def parameters(self) -> inspect.Signature:
        """The parameters of the body, without ``self``."""
        signature = inspect.signature(self.run)
        check_key(self.singleton_options.key, signature)
        return signature

    def ticket(self, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Ticket:
        """
        Return what the message of a call says of its slot, without a token.

        Raises:
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        options = self.singleton_options
        name = lock_name(self.name, options, self.parameters, args, kwargs)
        return Ticket(name, options.using, task_id)

    def AsyncResult(self, task_id: str, **options: Any) -> SingletonResult[R]:
        """Return the result of one of this task's messages."""
        return result_of(self, task_id, **options)

    def start_strategy(self, app: Any, consumer: Any, **options: Any) -> Any:
        """Mix our part into the request class that the task has, whoever chose it; workers call this."""
        from .request import mixed_request  # only here: it needs Celery's worker

        self.Request = mixed_request(self.Request)
        return super().start_strategy(app, consumer, **options)

    # Sending

    def apply_async(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        task_id: str | None = None,
        producer: Any = None,
        link: Any = None,
        link_error: Any = None,
        shadow: str | None = None,
        **options: Any,
    ) -> SingletonResult[R]:
        """
        Send the call, unless its equal is waiting or running; takes all options of Celery's.

        A call whose id is given belongs to a chain, a chord, a group or somebody who waits for it, and is always
        sent: a worker decides. So is a retry.

        Returns:
            A :class:`~django_redlock.celery.SingletonResult`.

        Raises:
            DuplicateTask: Its equal is waiting or running, and ``on_duplicate="raise"``, or this call has links,
                which the other one would not follow.
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
            ValueError: The settings do not allow such a lease, or an argument is a model instance not yet saved.
            InvalidRedlockError: The settings cannot be used.
        """
        options |= {"producer": producer, "link": link, "link_error": link_error, "shadow": shadow}
        if self.app.conf.task_always_eager:
            done = super().apply_async(args, kwargs, task_id=task_id, **options)  # type: ignore[arg-type]
            return cast(SingletonResult[R], eager_result(done))
        args, kwargs = args or (), kwargs or {}
        self._check_arguments(args, kwargs)
        ticket = replace(self.ticket(task_id or uuid(), args, kwargs), token=fresh_nonce())
        if task_id is not None:
            ticket = self._pass_on(ticket, options)
        else:
            try:
                ticket = self._queue(ticket, options)
            except LockTakenError as refusal:
                return self._answer_duplicate(ticket, Holder.of(refusal), args, kwargs, options)
        return self._publish(ticket, args, kwargs, options)

    def _check_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Let Celery check the arguments before a slot is taken; it would do it afterwards."""
        options = self.singleton_options
        try:
            locks[options.using].rules.check_ttl(options.lease)
        except ValueError as error:
            raise ValueError(f"lease={options.lease!r} of the singleton {self.name}: {error}") from None
        check = getattr(self, "__header__", None)
        if self.typing and check:
            check(*args, **kwargs)

    def _queue(self, ticket: Ticket, options: Mapping[str, Any]) -> Ticket:
        """
        Take the slot; returns a ticket without a token if the nodes do not answer: the worker will ask again.

        Raises:
            LockTakenError: Its equal is waiting or running.
        """
        try:
            take_queued(ticket, self._queue_ttl(options), self.name)
        except QuorumUnavailableError as error:
            _warn_once(ticket.using, error)
            return replace(ticket, token="")
        _unanswered.discard(ticket.using)
        return ticket

    def _pass_on(self, ticket: Ticket, options: Mapping[str, Any]) -> Ticket:
        """Return the ticket of a call whose id is given: with a token if it goes on with a run that had a slot."""
        execution = self.execution
        mine = execution if execution and ticket.task_id == self.request.id and not execution.handed_over else None
        if not mine and not options.get("retries"):
            return replace(ticket, token="")
        try:
            if mine and mine.lease.name == ticket.name:
                mine.hand_over(ticket, self._queue_ttl(options))
            else:
                take_queued(ticket, self._queue_ttl(options), self.name)
        except (LockTakenError, QuorumUnavailableError):
            return replace(ticket, token="")
        return ticket

    def _queue_ttl(self, options: Mapping[str, Any]) -> float:
        """Return how long the slot of a waiting message lasts, in seconds."""
        delay = options.get("countdown") or self._seconds_until(options.get("eta")) or 0.0
        expires = self._seconds_until(options.get("expires", self.expires))
        ttl = max(0.0, delay) + self.singleton_options.queue_ttl
        return ttl if expires is None else min(ttl, expires)

    def _seconds_until(self, when: Any) -> float | None:
        if when is None or isinstance(when, (int, float)):
            return when
        moment = maybe_make_aware(maybe_iso8601(when) or when, self.app.timezone)
        return (moment - datetime.now(UTC)).total_seconds()

    def _publish(
        self, ticket: Ticket, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
    ) -> SingletonResult[R]:
        """Send the message with its ticket; frees its slot if it could not be sent."""
        theirs = {name: value for name, value in (options.get("headers") or {}).items() if name not in OURS}
        options = {**options, "headers": {**theirs, HEADER: ticket.pack()}, "task_id": ticket.task_id}
        try:
            return cast(SingletonResult[R], super().apply_async(args, kwargs, **options))  # type: ignore[arg-type]
        except BaseException:
            free(ticket, ticket.token)
            raise

    def _answer_duplicate(
        self,
        ticket: Ticket,
        holder: Holder,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> SingletonResult[R]:
        mode = self.singleton_options.on_duplicate
        log.info("%s is %s", ticket.name, holder, extra={"event": "singleton_duplicate", "lock": ticket.name})
        if mode == "enqueue":
            sent = self._publish(replace(ticket, token=""), args, kwargs, options)
            return sent.about(holder, accepted=True)
        # The holder would not follow the links of this call, and nobody would notice that they are lost.
        if mode == "raise" or options["link"] or options["link_error"]:
            raise DuplicateTask(holder.task_id, holder.state, holder.retry_after, ticket.name) from None
        if mode == "join" and holder.task_id:
            return self.AsyncResult(holder.task_id).about(holder, accepted=False)
        wanted = not options.get("ignore_result", self.ignore_result)
        self.backend.mark_as_revoked(ticket.task_id, _skipped(ticket, holder), store_result=wanted)
        return self.AsyncResult(ticket.task_id).about(holder, accepted=False)

    # Running

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the body, in a worker under the slot; a direct call touches no lock."""
        request = self.request
        # In a body, self(...) finds the request of the run around it.
        if request.called_directly or self.execution:
            return super().__call__(*args, **kwargs)
        execution = self._start(request, args, kwargs)
        setattr(request, EXECUTION, execution)
        try:
            return super().__call__(*args, **kwargs)
        finally:
            execution.end()

    def _start(self, request: Any, args: Any, kwargs: Any) -> Execution:
        """Take the slot for this run, or leave by the exception that tells Celery what to do instead."""
        ticket = Ticket.unpack(request.get(HEADER) or (request.headers or {}).get(HEADER), request.id)
        ticket = ticket or self.ticket(request.id, args, kwargs)
        token = request.get(RUN_HEADER)
        try:
            lease = take_running(ticket, self.singleton_options.lease, self.name, token if is_token(token) else "")
        except LockTakenError as refusal:
            self._give_way(request, ticket, Holder.of(refusal))
        except QuorumUnavailableError as error:
            self._try_later(request, ticket, error)
        execution = Execution(lease, self.name)
        if self._is_done(request, ticket):
            execution.end()
            raise Ignore(f"{request.id} came a second time, and had been done.")
        return execution

    def _give_way(self, request: Any, ticket: Ticket, holder: Holder) -> NoReturn:
        if holder.task_id == request.id and not request.is_eager:
            self._watch(request, ticket, holder)
        log.info("%s is %s", ticket.name, holder, extra={"event": "singleton_overlap", "lock": ticket.name})
        if self.singleton_options.on_overlap == "raise":
            raise DuplicateTask(holder.task_id, holder.state, holder.retry_after, ticket.name) from None
        self._skip(request, _skipped(ticket, holder))

    def _skip(self, request: Any, reason: str) -> NoReturn:
        """
        End the task unrun, as revoked.

        Ignore alone leaves everybody waiting who has its id: callers, the rest of a chain, the body of a chord.
        """
        if not request.is_eager:
            ignored = vars(request).get("ignore_result")
            wanted = not (self.ignore_result if ignored is None else ignored)
            self.backend.mark_as_failure(
                request.id, TaskRevokedError(reason), request=request, store_result=wanted, state=states.REVOKED
            )
        raise Ignore(reason) from None

    def _watch(self, request: Any, ticket: Ticket, holder: Holder) -> NoReturn:
        """
        Look again later: the holder is a run of this very message, which the broker has delivered twice.

        It may be alive or dead, and only the end of its lease will tell. Dropping this copy would take from a run
        that is alive its second chance: on Redis, both copies are one to the broker.
        """
        lease = self.singleton_options.lease
        pause = min(lease, holder.retry_after or lease) + 0.1
        self._send_again(request, ticket, pause)
        raise Ignore(f"{request.id} came a second time; it is looked at again in {pause:.1f} s.") from None

    def _try_later(self, request: Any, ticket: Ticket, error: QuorumUnavailableError) -> NoReturn:
        """Put the message back, without using up a retry: without an answer from the nodes the body must not run."""
        if request.is_eager:
            raise error
        pause = min(LONGEST_PAUSE, 2.0**ticket.tries)
        self._send_again(request, ticket, pause)
        raise Retry(f"The lock nodes do not answer: {error}", exc=error, when=pause) from error  # type: ignore[arg-type]

    def _send_again(self, request: Any, ticket: Ticket, pause: float) -> None:
        message = self.signature_from_request(request, countdown=pause, retries=request.retries)
        self._publish(replace(ticket, tries=ticket.tries + 1), message.args, message.kwargs, message.options)

    def _is_done(self, request: Any, ticket: Ticket) -> bool:
        """Return whether this is a late copy of a message whose work is done."""
        redelivered = (request.delivery_info or {}).get("redelivered")
        if not (redelivered or ticket.tries) or request.is_eager:
            return False
        try:
            return self.backend.get_state(request.id) in DONE
        except NotImplementedError:  # there is no result backend
            return False


OURS = (HEADER, RUN_HEADER)

_unanswered: set[str] = set()
"""Aliases about whose nodes a producer has warned, and which have not answered since."""


def _warn_once(alias: str, error: QuorumUnavailableError) -> None:
    if alias not in _unanswered:
        _unanswered.add(alias)
        log.warning("singleton tasks are sent without a slot, and workers decide: %s", error)


def _skipped(ticket: Ticket, holder: Holder) -> str:
    return f"Skipped: {ticket.name} is {holder}."


@cache
def mixed_with(base: Any) -> Any:
    """Return the task class *base* with :class:`SingletonTask` mixed in."""
    if issubclass(base, SingletonTask):
        return base
    return type(f"Singleton{base.__name__}", (SingletonTask, base), {"__module__": __name__, "abstract": True})
