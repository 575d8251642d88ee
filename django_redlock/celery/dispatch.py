"""
What a call does before its message is on its way: take the slot, or answer its caller as ``on_duplicate`` says.
"""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from celery import signals, states
from celery.utils.time import maybe_iso8601, maybe_make_aware
from django.utils.crypto import salted_hmac

from ..engine.manager import fresh_nonce
from ..exceptions import LockTakenError, QuorumUnavailableError
from .execution import Execution
from .keys import canonical
from .options import SingletonOptions
from .result import SingletonResult
from .signals import tell
from .slots import (
    HEADER,
    LABEL,
    NOTE,
    QUEUED,
    RECEIVED_HEADER,
    RUN_HEADER,
    RUNNING,
    Holder,
    Seen,
    Ticket,
    claim_waiting,
    free,
    peek,
    take_note,
    take_waiting,
)

OURS = (HEADER, RUN_HEADER, RECEIVED_HEADER)
DIGEST = 10  # hexadecimal digits that tell the arguments of trailing calls apart
ATTEMPTS = 5  # at the note of the call that comes next, which others may be changing too
OVER = frozenset({states.SUCCESS, states.FAILURE, states.REVOKED})

log = logging.getLogger("django_redlock")

_beat = 0  # the thread that beat runs in; 0 for none in this process

_unanswered: set[str] = set()
"""Aliases about whose nodes a producer has warned, and which have not answered since."""


@dataclass(slots=True)
class Call:
    """
    One call on its way to the broker.

    Args:
        task: The task.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        options: What Celery is told.
        rules: The task's options, and what this call chose for itself.
        ticket: What its message is to say of the slot.
    """

    task: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    options: dict[str, Any]
    rules: SingletonOptions
    ticket: Ticket

    def send(self) -> SingletonResult[Any]:
        """
        Take the slot and send the message, or answer as a duplicate.

        Raises:
            DuplicateTask: As in :meth:`SingletonTask.apply_async`.
            QuorumUnavailableError: Too few nodes answered, and ``on_redis_error`` says to raise.
        """
        if self.ticket.scope == RUNNING:
            return self.publish(replace(self.ticket, token=""))
        try:
            return self._take_and_send()
        except QuorumUnavailableError as error:
            if self.rules.without_nodes("enqueue") == "raise":
                raise
            _warn_once(self.ticket.using, error)
            return self.publish(replace(self.ticket, token=""))

    def send_owned(self) -> SingletonResult[Any]:
        """Send a call whose id somebody has: with the slot of the run that it goes on with, if there is one."""
        mine = self._own_run()
        if mine and not mine.ticket.name:
            return self.publish(replace(self.ticket, name="", token=""))
        if not mine and not self.options.get("retries"):
            return self.publish(replace(self.ticket, token=""))
        try:
            passed = self._pass_on(mine)
        except (LockTakenError, QuorumUnavailableError):
            passed = False
        return self.publish(self.ticket if passed else replace(self.ticket, token=""))

    def _own_run(self) -> Execution | None:
        """Return the run in this thread if the message goes on with its work, and it still has its slot."""
        execution: Execution | None = self.task.singleton_run
        goes_on = execution and self.ticket.task_id == self.task.request.id and not execution.handed_over
        return execution if goes_on else None

    def _pass_on(self, mine: Execution | None) -> bool:
        """
        Turn the slot of a run into that of the waiting message, or take one; returns whether it has one.

        Raises:
            LockTakenError: Somebody else has it.
            QuorumUnavailableError: Too few nodes answered.
        """
        ticket, lease = self.ticket, mine.lease if mine else None
        if mine and lease and lease.name == ticket.waiting:
            mine.hand_over(ticket, self.ttl)
            return True
        if mine and lease and lease.name == ticket.running:
            mine.end(hold=False)  # before the message is there: its run would find the slot taken
        if ticket.waiting:
            take_waiting(ticket, self.ttl, self.task.name, adopt="" if mine else self._kept())
        return bool(ticket.waiting)

    def _kept(self) -> str:
        """Return the token of the slot if it has been kept for this very message, as a worker does for a dead child."""
        seen = peek(self.ticket.using, self.ticket.waiting)
        mine = seen.holder.task_id == self.ticket.task_id and seen.holder.state == "queued"
        return seen.token if mine else ""

    def publish(self, ticket: Ticket, undo: Callable[[], None] | None = None) -> SingletonResult[Any]:
        """Send the message with its ticket; if it could not be sent, calls *undo* and frees its slot."""
        theirs = {name: value for name, value in (self.options.get("headers") or {}).items() if name not in OURS}
        headers = {**theirs, HEADER: ticket.pack()}
        try:
            sent: SingletonResult[Any] = self.task.singleton_publish(
                self.args, self.kwargs, **{**self.options, "headers": headers, "task_id": ticket.task_id}
            )
        except BaseException:
            if undo:
                undo()
            free(ticket.using, ticket.waiting, ticket.token)
            raise
        return sent

    @property
    def ttl(self) -> float:
        """How long the slot of the waiting message lasts, in seconds."""
        delay = self.options.get("countdown") or self._seconds_until(self.options.get("eta")) or 0.0
        expires = self._seconds_until(self.options.get("expires", self.task.expires))
        ttl = max(0.0, delay) + self.rules.queue_ttl
        return ttl if expires is None else min(ttl, expires)

    def _seconds_until(self, when: Any) -> float | None:
        if when is None or isinstance(when, (int, float)):
            return when
        moment = maybe_make_aware(maybe_iso8601(when) or when, self.task.app.timezone)
        return (moment - datetime.now(UTC)).total_seconds()

    def _take_and_send(self) -> SingletonResult[Any]:
        if self.rules.trails:
            # Whoever comes next takes the place of the one that waits to be next, also while the slot is free.
            next_one = peek(self.ticket.using, self.ticket.following)
            if next_one.value:
                return self._answer(next_one.holder, trailing=True)
        holder = claim_waiting(self.ticket, self.ttl, self.task.name)
        if holder:
            return self._answer(holder)
        _unanswered.discard(self.ticket.using)
        return self.publish(self.ticket)

    def _answer(self, holder: Holder, trailing: bool = False) -> SingletonResult[Any]:
        """Answer the caller: its equal has the slot, or waits to be the next that has it."""
        if self.rules.challenge and not trailing and holder.state == "queued" and self._outlived(holder):
            return self.publish(self.ticket)
        how = self.rules.on_duplicate
        about: dict[str, Any] = {"task_id": self.ticket.task_id, "name": self.ticket.name, "strategy": how}
        about |= {"holder_id": holder.task_id, "state": holder.state}
        tell(self.task, "singleton_duplicate", "%s is %s", self.ticket.name, holder, **about)
        if how == "enqueue":
            return self.publish(replace(self.ticket, token="")).about(holder, accepted=True)
        # Beat can catch nothing, and would log a traceback at every tick. The log line above is enough.
        beat = (self.options.get("headers") or {}).get("celery_beat_task") or threading.get_ident() == _beat
        if how == "replace" and holder.state == "queued" and not trailing and (sent := self._replace(holder)):
            return sent.about(holder, accepted=True)
        # The holder would not follow the links of this call, and nobody would notice that they are lost.
        if (how == "raise" and not beat) or self.options.get("link") or self.options.get("link_error"):
            error = self.task.singleton_error
            raise error(holder.task_id, holder.state, holder.retry_after, self.ticket.name) from None
        if how in ("rerun", "replace"):
            return self._send_after(holder)
        if how != "skip" and holder.task_id:
            return self._result(holder.task_id).about(holder, accepted=False)
        wanted = not self.options.get("ignore_result", self.task.ignore_result)
        reason = f"Skipped: {self.ticket.name} is {holder}."
        self.task.backend.mark_as_revoked(self.ticket.task_id, reason, store_result=wanted)
        return self._result(self.ticket.task_id).about(holder, accepted=False)

    def _result(self, task_id: str) -> SingletonResult[Any]:
        result: SingletonResult[Any] = self.task.AsyncResult(task_id)
        return result

    def _outlived(self, holder: Holder) -> bool:
        """Take the slot from a waiting holder that is over, as its result says; returns whether it is ours."""
        try:
            over = self.task.backend.get_state(holder.task_id) in OVER
        except NotImplementedError:  # there is no result backend
            return False
        return over and self._take_over(holder) is not None

    def _take_over(self, holder: Holder) -> Seen | None:
        """Take the slot from a waiting holder; returns what it had, None if that was no longer the slot."""
        seen = peek(self.ticket.using, self.ticket.waiting)
        if seen.holder.task_id != holder.task_id or seen.holder.state != "queued":
            return None
        try:
            take_waiting(self.ticket, self.ttl, self.task.name, adopt=seen.token)
        except LockTakenError:
            return None
        return seen

    def _replace(self, holder: Holder) -> SingletonResult[Any] | None:
        """Send the message in place of a waiting holder's, which is revoked; returns None if that waits no more."""
        note = replaced_name(str(holder.task_id))
        ttl = (holder.retry_after or 0.0) + self.rules.queue_ttl
        token = fresh_nonce()
        try:
            # First, so that there is no moment at which it could run as well.
            take_note(self.ticket.using, note, ttl, token, self.ticket.task_id, self.task.name[:LABEL] + NOTE)
        except LockTakenError:
            return None  # somebody else is replacing it just now
        seen = self._take_over(holder)
        if seen is None:
            free(self.ticket.using, note, token)
            return None

        def undo() -> None:
            before = replace(self.ticket, task_id=str(holder.task_id), token=seen.token)
            with suppress(LockTakenError, QuorumUnavailableError):
                take_waiting(before, seen.left, self.task.name, adopt=self.ticket.token)
            free(self.ticket.using, note, token)

        sent = self.publish(self.ticket, undo)
        self._note_replaced(str(holder.task_id))
        return sent

    def _note_replaced(self, task_id: str) -> None:
        """Store that a task was replaced. The message is on its way, so nothing that fails here may raise."""
        reason, wanted = f"Replaced by task {self.ticket.task_id}.", not self.task.ignore_result
        try:
            self.task.backend.mark_as_revoked(task_id, reason, store_result=wanted)
        except Exception:
            log.exception("it could not be stored that task %s was replaced", task_id)

    def _send_after(self, holder: Holder) -> SingletonResult[Any]:
        """
        Send the message so that it runs once after the holder; what waits for that already gives way to it.

        All that are sent for one such run have the same id, so every caller's result is that of the run.
        """
        label = f"{self.task.name[: LABEL - DIGEST - 2]} #{self._digest()}{QUEUED}"
        for _ in range(ATTEMPTS):
            seen: Seen = peek(self.ticket.using, self.ticket.following)
            task_id = seen.holder.task_id or self.ticket.task_id
            if seen.owner and seen.owner.label == label:
                return self._result(task_id).about(holder, accepted=False)
            ticket = replace(self.ticket, trailing=True, task_id=task_id)
            try:
                # Strictly: a run that has begun meanwhile has freed it, and this message must not have that one's id.
                about = (ticket.using, ticket.waiting, self.ttl, ticket.token, task_id, label)
                take_note(*about, adopt=seen.token, strict=bool(seen.token))
            except LockTakenError:
                continue
            return self.publish(ticket).about(holder, accepted=True)
        return self.publish(replace(self.ticket, token="")).about(holder, accepted=True)

    def _digest(self) -> str:
        """Return what tells these arguments from others, and tells people nothing of them."""
        try:
            text = canonical(self.task.singleton_parameters, self.args, self.kwargs)
        except (TypeError, ValueError):  # it has no key, so it may be new
            text = fresh_nonce()
        return salted_hmac("django_redlock.celery.next", text, algorithm="sha256").hexdigest()[:DIGEST]


def replaced_name(task_id: str) -> str:
    """Return the name of the note that says that a waiting task was replaced."""
    return f"replaced:{task_id}"


def _note_beat(**about: Any) -> None:
    """Remember in which thread beat runs: before Celery 5.6 its calls do not say whose they are."""
    global _beat
    _beat = threading.get_ident()


signals.beat_init.connect(_note_beat, dispatch_uid="django_redlock.beat")


def _warn_once(alias: str, error: QuorumUnavailableError) -> None:
    if alias not in _unanswered:
        _unanswered.add(alias)
        log.warning("singleton tasks are sent without a slot, and workers decide: %s", error)
