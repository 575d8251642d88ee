"""
Recognize earlier deliveries of a message, because the broker may deliver it more than once (internal).
"""

import logging
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from celery import states
from celery.exceptions import Ignore, Reject

from ..engine.acquirer import fresh_secret
from ..exceptions import LockTakenError, printable
from .execution import Execution, begun_name, done_name, moved_on
from .pending import FIRST_WAIT, LONGEST_PAUSE
from .slots import LABEL, NOTE, Holder, SlotState, free, peek, take_note
from .worker import Message, NoResultsError

DONE = frozenset({states.SUCCESS, states.REVOKED})  # the redelivery of a failed task is left to Celery's rules

log = logging.getLogger("django_redlock")


class Redelivery:
    """
    What is known about earlier deliveries of a message.

    Args:
        message: The message.
    """

    def __init__(self, message: Message) -> None:
        self.message = message
        self.began_pending = False  # whether this is the message of a pending call of which a copy has begun a run

    # Is it done?

    def leave_if_done(self, kept: bool = False) -> None:
        """
        End a message whose work is done.

        Args:
            kept: Whether another worker may have received a copy of it while this one kept it.

        Raises:
            Ignore: It is done, or it was put back to wait for a result.
        """
        if self._is_done(kept):
            raise Ignore(f"{self.message.request.id} was delivered a second time, and is already done.")

    def _is_done(self, kept: bool) -> bool:
        """Return whether this is a copy of a message whose work is done; a message that was *kept* may be one, too."""
        message, ticket = self.message, self.message.ticket
        copy = message.redelivered or bool(ticket.watch)
        if not (copy or ticket.tries or kept) or message.request.is_eager:
            return False
        owner = peek(ticket.using, done_name(ticket.task_id, message.request.retries or 0)).owner
        if not message.stores_results or (owner and moved_on(owner)):
            return bool(owner)
        # The backend knows only the id. About a message that is not a copy, this is proof only if the id is its alone.
        if not (owner or copy or (kept and ticket.secret)):
            return False
        try:
            stored = message.stored(message.request.id)
        except NoResultsError as error:
            if owner:
                self._await_result()
            if copy:  # else nothing suggests that it is done: a worker that runs a copy leaves a note
                message.without_results(error)
            return False
        if owner and stored and stored["status"] not in DONE:
            self._await_result()
        return stored["status"] in DONE if stored else bool(owner)

    def _await_result(self) -> NoReturn:
        """
        Put the message back, because the work is done but its result is not stored yet.

        The worker is about to store the result, or died first. If it died, the note has expired when the message comes
        back, and the work is repeated.
        """
        pause = self.message.rules.lease
        self.message.send_again(self.message.ticket, pause)
        task_id = self.message.request.id
        raise Ignore(f"{task_id} is done, but its result is not stored; it is checked again in {pause:.1f} s.")

    def note_done(self, execution: Execution, goes_on: bool = False) -> None:
        """
        Leave a note for later copies of a message that the broker may deliver again although it is done.

        Args:
            execution: The run.
            goes_on: Whether another message continues the work and will have the result.
        """
        message, ticket = self.message, self.message.ticket
        if message.request.is_eager or not ticket.name or (execution.goes_on and not goes_on):
            return
        # A delayed message may have waited for longer than the broker's visibility timeout.
        delayed = message.request.eta and not ticket.tries
        if message.task.acks_late or delayed or message.redelivered or ticket.watch:
            execution.note_done(message.stores_results, goes_on)

    # Has it begun? For redelivery="drop".

    def leave_if_begun(self) -> None:
        """
        Note that the run begins, for ``redelivery="drop"``; end the message if it had begun before.

        Raises:
            Ignore: It had begun before.
        """
        message, ticket = self.message, self.message.ticket
        if message.rules.redelivery != "drop" or message.request.is_eager:
            return
        try:
            about = (fresh_secret(), ticket.task_id, message.task.name[:LABEL] + NOTE)
            take_note(ticket.using, self._begun_name, max(LONGEST_PAUSE, message.rules.queue_ttl), *about)
        except LockTakenError:
            self._end_without_a_run()  # this message has the slot now, so no other run of it is alive

    def has_begun(self) -> bool:
        """Return whether a run of the message is known to have begun."""
        return self.began_pending or bool(peek(self.message.ticket.using, self._begun_name).value)

    @property
    def _begun_name(self) -> str:
        return begun_name(self.message.ticket.task_id, self.message.request.retries or 0)

    def drop(self) -> NoReturn:
        """
        End a message that was delivered a second time, once no run of it can be alive.

        Raises:
            Ignore: Always.
        """
        message, ticket = self.message, self.message.ticket
        holder = peek(ticket.using, ticket.running).holder if ticket.running else None
        if holder and holder.task_id == message.request.id and holder.state is SlotState.RUNNING:
            self.watch(holder)
        self._end_without_a_run()

    def _end_without_a_run(self) -> NoReturn:
        """Revoke the task if no run has stored a result; raise Ignore."""
        message = self.message
        reason = f"{message.ticket.task_id} came a second time, and is dropped."
        try:
            stored = message.stored(message.request.id)
        except NoResultsError as error:
            message.put_off(error)
        if stored.get("status") not in states.READY_STATES:
            with suppress(NotImplementedError):  # there is no result backend
                message.skip(reason)
        raise Ignore(reason)

    # Does a copy of it run?

    def watch(self, holder: Holder) -> NoReturn:
        """
        Put the message back, because the holder is a run of this same message, which the broker has delivered twice.

        The run may be alive or dead; only the end of its lease will show that. If this copy were dropped and the run
        died, the message would be lost, because on Redis the broker takes both copies for one. One waiting copy is
        enough.

        Raises:
            Ignore: This copy was put back, or another copy is already waiting.
            Reject: The broker did not accept the copy, and must deliver the message again.
        """
        message, ticket, secret = self.message, self.message.ticket, fresh_secret()
        lease = message.rules.lease
        pause = max(FIRST_WAIT, min(lease, holder.retry_after or lease) + 0.1)
        about = (ticket.using, self._watch_name, pause + message.rules.queue_ttl, secret, ticket.task_id)
        try:
            take_note(*about, message.task.name[:LABEL] + NOTE, adopt=ticket.watch)
        except LockTakenError:
            raise Ignore(f"{ticket.task_id} was delivered again; another copy is already waiting.") from None
        try:
            message.send_again(replace(ticket, watch=secret), pause)
        except Exception as error:
            free(ticket.using, self._watch_name, secret)
            log.warning("a copy of %s could not be put back: %s", printable(ticket.task_id), error)
            if isinstance(error, Reject):
                raise
            # Not a failure, which would be stored as the result of the live run.
            raise Ignore(f"A copy of {ticket.task_id} could not be put back.") from error
        raise Ignore(f"{ticket.task_id} was delivered a second time; it is checked again in {pause:.1f} s.") from None

    def stop_watching(self) -> None:
        """Let other copies watch a run of this message."""
        ticket = self.message.ticket
        if ticket.watch:
            free(ticket.using, self._watch_name, ticket.watch)

    @property
    def _watch_name(self) -> str:
        return f"watch:{self.message.ticket.task_id}"
