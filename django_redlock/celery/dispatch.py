"""
Send a call: take the slot and publish the message, or answer the caller according to ``on_duplicate`` (internal).
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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

from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from ..singleton.options import SingletonOptions
from ..singleton.slots import HEADER, OURS, RUNNING, Claim, Holder, SlotState, Ticket, once_confirmed, peek
from .execution import Execution
from .signals import DUPLICATE, report_holder

R = TypeVar("R", covariant=True)
log = logging.getLogger("django_redlock")
_beat = 0  # the thread in which beat runs; 0 if beat does not run in this process
_unanswered: set[str] = set()
"""Aliases about whose nodes a producer has warned, and which have not answered since."""

STORED = 10.0  # seconds from the end of a run until its result is stored, including the difference between clocks
JOINS = "sends nothing, and has the result of that task"
OVER = frozenset({states.SUCCESS, states.FAILURE, states.REVOKED})
ANSWER_FIELDS = ("duplicate", "reason", "holder_id", "accepted")


if TYPE_CHECKING:
    from .task import SingletonTask

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

    def get(self, *args: Any, **options: Any) -> R:
        """
        Wait for the result, and return it; takes all options of Celery's.

        Raises:
            RuntimeError: The call was made in the run that has the slot, so the run would wait for its own end.
            Exception: As in :meth:`celery.result.AsyncResult.get`.
        """
        running = get_current_task()
        if self.duplicate and running and self.holder_id and self.holder_id == running.request.id:
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


@dataclass
class Call:
    """
    One call on its way to the broker.

    Args:
        task: The task.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: Celery's options of the call.
        rules: The task's options, with those of this call.
        ticket: The information about the slot that its message carries.
        claimed: The slot that was claimed for its message.
    """

    task: "SingletonTask[..., Any]"
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: dict[str, Any]
    rules: SingletonOptions
    ticket: Ticket
    claimed: Claim | None = None

    def send(self) -> SingletonResult[Any]:
        """
        Take the slot and send the message, or answer as a duplicate.

        Raises:
            DuplicateTask: As in :meth:`SingletonTask.apply_async`.
            QuorumUnavailableError: Too few nodes answered, and ``on_unavailable`` is to raise.
        """
        if self.ticket.scope == RUNNING:
            return self.publish(replace(self.ticket, secret=""))
        try:
            return self.take_and_send()
        except QuorumUnavailableError as error:
            if self.rules.without_nodes("enqueue") == "raise":
                raise
            unanswered = error
        # Not inside the handler: an error of the broker would be reported as a consequence of this one. Some nodes may
        # have created the record of a first message, so that message keeps its secret.
        sent = self.publish(self.ticket if self.ticket.number == 1 else replace(self.ticket, secret=""))
        if self.ticket.using not in _unanswered:
            _unanswered.add(self.ticket.using)
            log.warning("singleton tasks are sent without a slot, and workers decide: %s", unanswered)
        return sent

    def send_owned(self) -> SingletonResult[Any]:
        """Send a call whose id is known elsewhere; if it continues a run, it gets the slot of that run."""
        mine = self.task.singleton_run
        if mine and (mine.handed_over or self.ticket.task_id != self.task.request.id):
            mine = None  # its slot belongs to another message, or this message does not continue its work
        if mine and not mine.ticket.name:
            return self.publish(replace(self.ticket, name="", secret=""))
        if not mine and not self.options.get("retries"):
            return self.publish(replace(self.ticket, secret=""))
        try:
            passed = self._pass_on(mine)
        except (LockTakenError, QuorumUnavailableError):
            passed = False
        return self.publish(self.ticket if passed else replace(self.ticket, secret=""))

    def _pass_on(self, mine: Execution | None) -> bool:
        """
        Give the slot of the run to the waiting message, or take a new slot; return whether the message has one.

        Raises:
            LockTakenError: Another holder has the slot.
            QuorumUnavailableError: Too few nodes answered.
        """
        ticket, lease, adopt = self.ticket, mine.lease if mine else None, ""
        if mine and lease and lease.name == ticket.waiting:
            self.claimed = mine.hand_over(ticket, self.ttl)
            return True
        if mine and lease and lease.name == ticket.running:
            mine.end(hold=False)  # before the message is sent, whose run would otherwise find the slot taken
        if not ticket.waiting:
            return False
        if not mine:  # the slot may be kept for this very message, as a worker does for a dead child
            seen = peek(ticket.using, ticket.waiting)
            adopt = seen.secret if seen.holder.waits_as(ticket.task_id) else ""
        return self._claim_once(adopt) is None

    def publish(self, ticket: Ticket) -> SingletonResult[Any]:
        """Send the message with its ticket, and confirm its claim; if sending fails, free the slot."""
        theirs = {name: value for name, value in (self.options.get("headers") or {}).items() if name not in OURS}
        headers = {**theirs, HEADER: ticket.pack()}
        try:
            about = {**self.options, "headers": headers, "task_id": ticket.task_id}
            sent = self.task.singleton_publish(self.args, self.kwargs, **about)
        except BaseException:
            ticket.free()
            raise
        if self.claimed:
            self.claimed.confirm(self.ttl)
        return sent

    @cached_property
    def ttl(self) -> float:
        """The time for which the slot of the waiting message lasts, in seconds."""
        delay = self.options.get("countdown") or self._seconds_until(self.options.get("eta")) or 0.0
        expires = self._seconds_until(self.options.get("expires", self.task.expires))
        ttl = max(0.0, delay) + self.rules.queue_ttl
        return ttl if expires is None else min(ttl, expires)

    def _seconds_until(self, when: Any) -> float | None:
        if when is None or isinstance(when, (int, float)):
            return when
        moment = maybe_make_aware(maybe_iso8601(when) or when, self.task.app.timezone)
        return (moment - datetime.now(UTC)).total_seconds()

    def take_and_send(self) -> SingletonResult[Any]:
        """
        Take the slot and send the message, or answer as a duplicate.

        Raises:
            DuplicateTask: As in :meth:`SingletonTask.apply_async`.
            QuorumUnavailableError: Too few nodes answered.
        """
        holder = self.claim()
        return self.answer(holder) if holder else self.publish(self.ticket)

    def claim(self) -> Holder | None:
        """
        Claim the slot of the waiting message; return the holder if the slot is taken.

        A holder whose message may not have been sent is no holder yet: its caller may have died. So this waits, for a
        second at most, until the message was sent or the slot is free.

        Raises:
            QuorumUnavailableError: Too few nodes answered, or none of this is known in time.
        """

        def look() -> tuple[Holder | None, Holder | None]:
            holder = self._claim_once()
            return holder, holder

        holder = once_confirmed(self.ticket, look)
        if holder is None:
            _unanswered.discard(self.ticket.using)
        return holder

    def _claim_once(self, adopt: str = "") -> Holder | None:
        """
        Claim the slot of the waiting message, also from the holder with the secret *adopt*; return the holder if taken.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        found = self.ticket.claim(self.ttl, self.task.name, adopt, self.call)
        if isinstance(found, Holder):
            return found
        self.claimed = found
        return None

    @property
    def linked(self) -> bool:
        """Whether the call has links, callbacks or a chord, which would be lost if another message replaced its own."""
        return bool(self.options.get("link") or self.options.get("link_error"))

    @property
    def call(self) -> str:
        """What the slot says about a pending call; empty for any other call."""
        return ""

    def noted(self, holder: Holder, consequence: str) -> "Call":
        """Report that the call is a duplicate, and the consequence for it; return the call."""
        strategy, effect = self.rules.on_duplicate, f"this call {consequence}"
        # hold_for is there to stop the ticks of a second beat: nobody needs a line about each.
        expected = self.from_beat and time() - holder.since < self.rules.hold_for
        event = DUPLICATE._replace(level=logging.DEBUG) if expected else DUPLICATE
        report_holder(self.task, event, self.ticket, holder, strategy, effect)
        return self

    @property
    def from_beat(self) -> bool:
        """Whether beat makes the call."""
        headers = self.options.get("headers") or {}
        return bool(headers.get("celery_beat_task")) or threading.get_ident() == _beat

    # A duplicate

    def answer(self, holder: Holder) -> SingletonResult[Any]:
        """
        Answer the caller of a duplicate according to ``on_duplicate``.

        Raises:
            DuplicateTask: As in :meth:`SingletonTask.apply_async`.
        """
        if self.is_over(holder) and self._take_from(holder):
            return self.publish(self.ticket)
        how = self.rules.on_duplicate
        # Beat cannot catch the error and would log a traceback at every tick. The log line is enough.
        # The holder would not run the links of this call, and they would be lost without notice.
        if (how == "raise" and not self.from_beat) or self.linked:
            self.noted(holder, "raises an error")
            raise holder.error(self.task.singleton_error, self.ticket.name) from None
        if how != "skip" and holder.task_id and not self._is_gone(holder):
            self.noted(holder, JOINS)
            return self.task.AsyncResult(holder.task_id).about(holder, accepted=False)
        self.noted(holder, "is skipped")
        wanted = not self.options.get("ignore_result", self.task.ignore_result)
        reason = f"Skipped: {printable(self.ticket.name)} is {holder}."
        store_revoked(self.task, self.ticket.task_id, reason, wanted)
        skipped = self.task.AsyncResult(self.ticket.task_id).about(holder, accepted=False)
        # With results in a database, what was stored is part of the caller's transaction, and may be rolled back.
        skipped._cache = {"status": states.REVOKED, "result": TaskRevokedError(reason)}  # type: ignore[attr-defined]
        return skipped

    def is_over(self, holder: Holder) -> bool:
        """
        Return whether a holder that waits for its countdown has already ended because it was revoked.

        Other holders are not checked, because their slot is freed as soon as a worker gets the message.
        """
        waits = holder.state is SlotState.QUEUED and (holder.retry_after or 0.0) > self.rules.queue_ttl
        return bool(waits and holder.task_id and self._state(holder.task_id) in OVER)

    def _is_gone(self, holder: Holder) -> bool:
        """
        Return whether a task whose slot is still held has ended and its result no longer exists.

        The slot is held from before the result is stored, so a missing result counts as gone only after some time.
        """
        if holder.state is not SlotState.HELD or self.task.ignore_result or time() - holder.since < STORED:
            return False
        return self._state(str(holder.task_id)) == states.PENDING

    def _state(self, task_id: str) -> str:
        """Return the state of a task; empty if there is no result backend or it does not answer."""
        try:
            return str(self.task.backend.get_state(task_id))
        except Exception:
            return ""

    def _take_from(self, holder: Holder) -> bool:
        """Take the slot from a waiting holder; return whether the holder was still waiting."""
        seen = peek(self.ticket.using, self.ticket.waiting)
        return seen.holder.waits_as(holder.task_id) and self._claim_once(seen.secret) is None


def _note_beat(**about: Any) -> None:
    """Remember the thread in which beat runs: before Celery 5.6, nothing else shows that a call is from beat."""
    global _beat
    _beat = threading.get_ident()


signals.beat_init.connect(_note_beat, dispatch_uid="django_redlock.beat")


def eager_result(result: Any) -> SingletonResult[Any]:
    """Add our attributes to a result of Celery's eager mode, in which no other call waits or runs."""
    if not isinstance(result, SingletonResult):
        for name in ANSWER_FIELDS:
            setattr(result, name, getattr(SingletonResult, name))
    return cast("SingletonResult[Any]", result)


def store_revoked(task: Any, task_id: str, reason: str, wanted: bool) -> None:
    """Store that a call was revoked. If the backend cannot, as ``rpc://`` outside a worker, only log that."""
    try:
        task.backend.mark_as_revoked(task_id, reason, store_result=wanted)
    except Exception:
        log.exception("the result backend did not store that task %s was revoked (%s)", printable(task_id), reason)
