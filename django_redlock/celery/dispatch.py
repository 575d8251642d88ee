"""
Send a call: carry out with Celery what :mod:`django_redlock.singleton.call` decides (internal).
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, cached_property
from time import time
from types import GenericAlias
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from celery import signals, states
from celery._state import get_current_task
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from celery.utils.time import maybe_iso8601, maybe_make_aware
from django.utils.crypto import salted_hmac

from ..engine.manager import fresh_secret
from ..exceptions import printable
from ..singleton import questions as ask
from ..singleton.call import Call, Joined, Refused, Sent, Skipped, Verdict, send, send_owned
from ..singleton.driver import Nodes, free
from ..singleton.options import SingletonOptions
from ..singleton.questions import Result, ResultState
from ..singleton.slot import Holder
from ..singleton.ticket import Ticket
from .signals import DUPLICATE, report_holder

HEADER = "django_redlock"
RUN_HEADER = "django_redlock_run"
RECEIVED_HEADER = "django_redlock_received"  # when the worker got the message, on the steady clock
CONTENT_HEADER = "django_redlock_content_type"  # of the message that the worker got; a request does not have it
OURS = (HEADER, RUN_HEADER, RECEIVED_HEADER, CONTENT_HEADER)
DIGEST = 10  # hexadecimal digits that distinguish the arguments of pending calls
ANSWER_FIELDS = ("duplicate", "reason", "holder_id", "accepted")
RESULTS = {
    states.PENDING: ResultState.ABSENT,
    states.SUCCESS: ResultState.SUCCESS,
    states.FAILURE: ResultState.FAILURE,
    states.REVOKED: ResultState.REVOKED,
}

R = TypeVar("R", covariant=True)
log = logging.getLogger("django_redlock")
_beat = 0  # the thread in which beat runs; 0 if beat does not run in this process
_unanswered: set[str] = set()
"""Aliases about whose nodes a producer has warned, and which have not answered since."""
_renaming: set[str] = set()
"""Tasks that choose the ids of their messages themselves, and about which a producer has warned."""


if TYPE_CHECKING:
    BaseResult = AsyncResult
else:

    class BaseResult(AsyncResult):
        """Celery's result class, which before Celery 5.7 is not generic when the code runs."""

        __class_getitem__ = classmethod(GenericAlias)


class SingletonResult(BaseResult[R]):
    """
    An :class:`~celery.result.AsyncResult` that knows whether the call was a duplicate.

    For a joined duplicate it is the result of the holder: ``get()`` waits for that task, and ``revoke()`` revokes it.
    ``bool()`` is true for every result, including that of a duplicate.
    """

    duplicate: bool = False
    """Whether another call had the slot."""
    reason: str = ""
    """The state of that call (``queued``, ``running``, or ``held`` if it is no task); empty without a duplicate."""
    holder_id: str | None = None
    """The id of that call; None without a duplicate, or if it is not a task."""
    accepted: bool = True
    """Whether this call sent a message."""

    has_own_id: bool = False
    """Whether the caller has chosen the id, so that no other result has the same one."""

    @property
    def supports_native_join(self) -> bool:
        """Whether Celery may join several results by their ids: a joined one has the id of another."""
        return self.has_own_id and bool(super().supports_native_join)

    def get(self, *args: Any, **options: Any) -> R:
        """
        Wait for the result, and return it; takes all options of Celery's.

        Raises:
            RuntimeError: The call was made in the run that has the slot, so the run would wait for its own end.
            Exception: As in :meth:`celery.result.AsyncResult.get`.
        """
        running = get_current_task()
        waits = self.duplicate and not self.ignored
        if waits and running and self.holder_id and self.holder_id == running.request.id:
            raise RuntimeError(
                f"Task {printable(self.holder_id)} would wait for ever: get() waits for the end of this same run, "
                "which has the slot of the call. Call it with other arguments, or do the work in this run."
            )
        return super().get(*args, **options)

    def __copy__(self) -> Self:
        copy = cast(Self, super().__copy__())
        copy.__dict__.update(self._answer_fields)
        return copy

    def __reduce__(self) -> Any:
        _, args = cast(tuple[Any, Any], super().__reduce__())
        return _rebuilt, (type(self).__bases__[-1], args), self._answer_fields

    def __setstate__(self, given: dict[str, Any]) -> None:
        self.__dict__.update(given)  # nothing else: Celery recreates the rest

    @property
    def _answer_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ANSWER_FIELDS}

    def about(self, holder: Holder, *, accepted: bool) -> Self:
        """Note that the call was a duplicate, and of which holder."""
        self.duplicate, self.accepted = True, accepted
        self.reason, self.holder_id = str(holder.state), holder.task_id
        return self


@cache
def mixed_result(base: Any) -> type[SingletonResult[Any]]:
    """Return the result class *base* of a task with :class:`SingletonResult` mixed in."""
    parent = base.__mro__[1]
    if (base.__module__, base.__qualname__) == (parent.__module__, parent.__qualname__):
        base = parent  # an app derives a class of the same name, which cannot be pickled, from that of its results
    if issubclass(SingletonResult, base):
        return SingletonResult
    return type(f"Singleton{base.__name__}", (SingletonResult, base), {"__module__": __name__})


def _rebuilt(base: Any, args: tuple[Any, ...]) -> SingletonResult[Any]:
    """Return a result that was pickled, or whose copy was."""
    return mixed_result(base)(*args)


class Sender(Nodes):
    """
    Answers the questions of a call on its way to the broker.

    Args:
        task: The task.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
        options: Celery's options of the call.
        rules: The task's options, with those of this call.
        using: Alias in ``REDLOCK``.
    """

    def __init__(
        self,
        task: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        options: Mapping[str, Any],
        rules: SingletonOptions,
        using: str,
    ) -> None:
        super().__init__(using, task.name)
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.options = options
        self.rules = rules
        self.ttl = lifetime(task, options, rules)

    def call(self, ticket: Ticket, owned: bool) -> SingletonResult[Any]:
        """
        Take the slot and send the message, or answer as a duplicate.

        Args:
            ticket: The ticket of the call.
            owned: Whether its id is known elsewhere.

        Raises:
            DuplicateTask: As in :meth:`SingletonTask.apply_async`.
            QuorumUnavailableError: Too few nodes answered, and ``on_unavailable`` is to raise.
        """
        task, options = self.task, self.options
        linked = bool(options.get("link") or options.get("link_error"))
        # Beat cannot catch an error, and would log a traceback at every tick.
        quiet = bool((options.get("headers") or {}).get("celery_beat_task")) or threading.get_ident() == _beat
        call = Call(task.name, ticket, self.rules, self.ttl, linked, quiet, not task.ignore_result)
        if owned:
            answer = self.answered(call, self.run(send_owned(call, task.singleton_run, options.get("retries") or 0)))
            answer.has_own_id = True
            return answer
        return self.answered(call, self.run(send(call)))

    def send(self, question: ask.Send) -> SingletonResult[Any]:
        """Send the message with its ticket, and confirm its claim; if sending fails, free the slot."""
        ticket = question.ticket
        theirs = {name: value for name, value in (self.options.get("headers") or {}).items() if name not in OURS}
        try:
            about = {**self.options, "headers": {**theirs, HEADER: ticket.pack()}, "task_id": ticket.task_id}
            sent = self.task.singleton_publish(self.args, self.kwargs, **about)
        except BaseException:
            free(ticket.using, ticket.waiting, ticket.secret)
            raise
        if isinstance(sent, AsyncResult) and sent.id != ticket.task_id:
            self._free_renamed(ticket, sent.id)
        elif question.claim:
            self.confirm(question.claim, self.ttl)
        return answer_of(self.task, sent, ticket.task_id)

    def _free_renamed(self, ticket: Ticket, sent_as: str) -> None:
        """Free the slot of a message that was sent under another id, because it would find its slot taken."""
        free(ticket.using, ticket.waiting, ticket.secret)
        if self.task.name not in _renaming:
            _renaming.add(self.task.name)
            log.warning(
                "the class of task %s sent a message as %s, not under its id %s: such messages have no slot while they "
                "wait, so every call is sent. Leave task_id in apply_async() as it is; a caller may choose it, with "
                "apply_async(task_id=...).",
                *map(printable, (self.task.name, sent_as, ticket.task_id)),
            )

    def result_of(self, question: ask.ResultOf) -> Result:
        """Return the state of a task; nobody waits for a result backend that does not answer."""
        try:
            return Result(RESULTS.get(self.task.backend.get_state(question.task_id), ResultState.UNDERWAY))
        except Exception as error:
            return Result(ResultState.SILENT, error)

    def digest(self, question: ask.Digest) -> str:
        """Return a digest of the arguments."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        try:
            text = self.task.singleton_key.canonical(self.args, self.kwargs)
        except (TypeError, ValueError):  # the arguments cannot be compared, so they may be new
            text = fresh_secret()
        return salted_hmac("django_redlock.celery.next", text, algorithm="sha256").hexdigest()[:DIGEST]

    answers = Nodes.answers | {ask.Send: send, ask.ResultOf: result_of, ask.Digest: digest}

    def answered(self, call: Call, verdict: Verdict) -> SingletonResult[Any]:
        """
        Give the caller what was decided.

        Raises:
            DuplicateTask: Its call was refused.
        """
        task, name, using = self.task, call.ticket.name, call.ticket.using
        if verdict.holder:
            self._report(call, verdict.holder, verdict.effect)
        match verdict:
            case Sent(answer, holder, _, unanswered):
                if unanswered and using not in _unanswered:
                    _unanswered.add(using)
                    log.warning("singleton tasks are sent without a slot, and workers decide: %s", unanswered)
                elif call.claim:
                    _unanswered.discard(using)
                if holder:  # the answer may be of the project's own class
                    SingletonResult.about(answer, holder, accepted=True)
                return cast("SingletonResult[Any]", answer)
            case Joined(task_id, holder):
                joined = task.AsyncResult(task_id).about(holder, accepted=False)
                joined.ignored = self.options.get("ignore_result", task.ignore_result)  # nobody stores it then
                return cast("SingletonResult[Any]", joined)
            case Refused(holder):
                raise holder.error(task.singleton_error, name) from None
            case Skipped(holder, reason):
                wanted = not self.options.get("ignore_result", task.ignore_result)
                store_revoked(task, call.ticket.task_id, reason, wanted)
                skipped = task.AsyncResult(call.ticket.task_id).about(holder, accepted=False)
                # With results in a database, what was stored is part of the caller's transaction, which may be undone.
                skipped._cache = {"status": states.REVOKED, "result": TaskRevokedError(reason)}
                return cast("SingletonResult[Any]", skipped)

    def _report(self, call: Call, holder: Holder, effect: str) -> None:
        """Report that the call is a duplicate, and what happens to it."""
        # hold_for is there to stop the ticks of a second beat: nobody needs a line about each.
        expected = call.quiet and time() - holder.since < call.rules.of_message(call.ticket.own).minimum
        event = DUPLICATE._replace(level=logging.DEBUG) if expected else DUPLICATE
        report_holder(self.task, event, call.ticket, holder, self.rules.on_duplicate, f"this call {effect}")


def lifetime(task: Any, options: Mapping[str, Any], rules: SingletonOptions) -> float:
    """Return for how long the slot of a waiting message lasts, in seconds; *options* are Celery's of its call."""
    delay = options.get("countdown") or _seconds_until(task, options.get("eta")) or 0.0
    expires = _seconds_until(task, options.get("expires", task.expires))
    ttl = max(0.0, delay) + rules.queue_ttl
    return ttl if expires is None else min(ttl, expires)


def _seconds_until(task: Any, when: Any) -> float | None:
    if when is None or isinstance(when, (int, float)):
        return when
    moment = maybe_make_aware(maybe_iso8601(when) or when, task.app.timezone)
    return (moment - datetime.now(UTC)).total_seconds()


def _note_beat(**about: Any) -> None:
    """Remember the thread in which beat runs: before Celery 5.6, nothing else shows that a call is from beat."""
    global _beat
    _beat = threading.get_ident()


signals.beat_init.connect(_note_beat, dispatch_uid="django_redlock.beat")


def answer_of(task: Any, result: Any, task_id: str) -> SingletonResult[Any]:
    """Return what a task class answers, with our attributes; if it cannot have them, as None, the result of that id."""
    if not isinstance(result, SingletonResult):
        try:
            for name in ANSWER_FIELDS:
                setattr(result, name, getattr(SingletonResult, name))
        except (AttributeError, TypeError):
            return cast("SingletonResult[Any]", task.AsyncResult(task_id))
    return cast("SingletonResult[Any]", result)


def store_revoked(task: Any, task_id: str, reason: str, wanted: bool) -> None:
    """Store that a call was revoked. If the backend cannot, as ``rpc://`` outside a worker, only log that."""
    try:
        task.backend.mark_as_revoked(task_id, reason, store_result=wanted)
    except Exception:
        log.exception("the result backend did not store that task %s was revoked (%s)", printable(task_id), reason)
