"""
Prepare the run of a message in a worker: take the slot, or let the message end without a run (internal).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

from celery import states
from celery.exceptions import Ignore, Retry, WorkerShutdown, WorkerTerminate

from ..engine.acquirer import fresh_secret
from ..engine.lease import Lease
from ..exceptions import LockLostError, LockTakenError, QuorumUnavailableError, printable
from .execution import EXECUTION, Execution, SlotLostError, leave_queue
from .options import SingletonOptions
from .pending import began_name, begin, discard, has_begun, is_superseded, keep, pause_after, turn
from .slots import RUN_HEADER, RUNNING, Holder, Seen, Ticket, free, is_secret, look, peek, take_running
from .worker import Message, NoResultsError, Redelivery, give_way

log = logging.getLogger("django_redlock")


class Arrival:
    """
    The start of a message in a worker.

    Args:
        task: The task.
        request: Celery's request.
        args: The positional arguments of the call.
        kwargs: Its keyword arguments.
    """

    def __init__(self, task: Any, request: Any, args: Any, kwargs: Any) -> None:
        self.message = Message(task, request, args, kwargs)
        self.redelivery = Redelivery(self.message)
        self._refused = False  # because another run is known to have the slot
        self._superseded = False  # by a message of the same pending call with newer arguments

    def start(self) -> Execution:
        """
        Take the slot for a run. A message that ends without a run leaves the queue.

        Raises:
            Answered: The task has a result without running.
            Ignore: It does not run, and its outcome has been stored for its caller.
            Retry: It was put back into the queue, because the nodes do not answer.
            DuplicateTask: Another task has the slot, and ``on_overlap="fail"``.
            QuorumUnavailableError: The nodes do not answer, and ``on_unavailable`` is to fail.
        """
        message = self.message
        if not message.ticket.name:
            return self._execution(None)
        try:
            return self._start()
        except BaseException as error:
            if not message.put_back and not self._stays(error):
                if self._superseded:  # a newer message counts, so nothing is to be noted, and no turn is needed
                    free(message.ticket.using, message.ticket.waiting, message.ticket.secret)
                else:
                    discard(message.ticket, message.task)
                self.redelivery.stop_watching()
            raise

    def _start(self) -> Execution:
        message, was_pending = self.message, self.message.ticket.trailing
        try:
            self._look_at_notes()
            lease = self._take_pending() if message.ticket.trailing else self._take()
        except QuorumUnavailableError as error:
            return self._without_nodes(error)
        execution = self._execution(lease)
        try:
            if self.redelivery.began_pending or not was_pending:
                self.redelivery.leave_if_done(message.kept)  # the run may have ended since the last look
                self.redelivery.leave_if_begun()
            execution.ensure()  # the questions may have taken longer than the lease
            if not was_pending:
                self._leave_queue()
        except (QuorumUnavailableError, LockLostError) as error:
            return self._without_nodes(error, execution)
        except BaseException as error:
            if self._stays(error):
                execution.give_back()
            execution.end(hold=False)
            raise
        self.redelivery.stop_watching()
        return execution

    def _stays(self, error: BaseException) -> bool:
        return stays_with_its_message(error, self.message.task, self.message.ticket, self.message.request)

    def _execution(self, lease: Lease | None, in_queue: bool = False) -> Execution:
        message = self.message
        return Execution(
            message.task, message.ticket, message.rules, lease, in_queue=in_queue, kept=message.stores_results
        )

    def _look_at_notes(self) -> None:
        """End the message if it was answered meanwhile or must not run a second time."""
        message, ticket = self.message, self.message.ticket
        if (
            not ticket.trailing
        ):  # messages with newer arguments have the same id, so this is looked up when their turn comes
            # Check before taking the slot. Otherwise two copies could wait for each other for ever.
            self.redelivery.leave_if_done()
        if ticket.joined and not message.unfinished:
            try:
                message.answer_with(ticket.joined)
            except NoResultsError as error:
                message.without_results(error)
        came_again = message.redelivered or ticket.watch
        if message.rules.redelivery == "drop" and came_again and self.redelivery.has_begun():
            self.redelivery.drop()

    def _take(self) -> Lease | None:
        """Take the slot, if runs have one; if another task has it, end the message or put it back."""
        message, ticket = self.message, self.message.ticket
        if not ticket.running:
            if not ticket.secret and not message.unfinished:  # else it continues even if another call is waiting
                for waiting in look(ticket.using, *ticket.places(message.rules.trails)):
                    if waiting.value:
                        self._give_way(waiting.holder)
            return None
        try:
            return self._take_running(ticket)
        except LockTakenError as taken:
            holder, self._refused = Holder.of(taken), True
        if (message.ticket_lost or self._left_behind(holder)) and (lease := self._take_own()):
            return lease
        self._give_way(holder)

    def _take_running(self, ticket: Ticket) -> Lease:
        """
        Take the slot for the run.

        Only the slots of runs exclude each other. So a waiting message whose slot no quorum of the nodes has keeps
        nobody from running: the entries of that slot are freed. If that message still comes, it runs as well.
        """
        message = self.message
        about = (message.rules.times, message.task.name, self._secret, message.request.is_eager)
        try:
            return take_running(ticket, *about)
        except QuorumUnavailableError:
            remains = peek(ticket.using, ticket.running).split
            if not remains or not all(seen.holder.waits for seen in remains):
                raise
            for seen in remains:
                free(ticket.using, ticket.running, seen.secret)
            return take_running(ticket, *about)

    def _take_pending(self) -> Lease | None:
        """Take the slot for the message of a pending call, or leave it to the one that counts; see :mod:`.pending`."""
        message, ticket = self.message, self.message.ticket
        self._look_at_pending()  # most older messages end here, without waiting for nodes that are away
        with turn(ticket):
            record, began = self._look_at_pending()
            self.redelivery.began_pending = came_before = has_begun(ticket, began)
            if came_before:
                message.ticket = ticket = replace(ticket, redelivered=True)  # though the broker may not have marked it
                self.redelivery.leave_if_done(kept=True)  # another worker ran it, or discarded it without a run
                if message.rules.redelivery == "drop":
                    self.redelivery.drop()
            lease, holder = self._take_begun(came_before)
            if not holder:
                self._begin(lease, record, began)
                return lease
            self._refused = True
            if not came_before:
                keep(ticket, message.lifetime, record)
        if not came_before and holder.task_id == ticket.task_id:  # a run with older arguments, not a copy of this one
            holder = Holder(None, holder.state, holder.retry_after)
        self._give_way(holder)

    def _look_at_pending(self) -> tuple[Seen, Seen]:
        """Return the record of the pending call and the note of what began; end the message if another one counts."""
        ticket = self.message.ticket
        record, began = look(ticket.using, ticket.following, began_name(ticket.task_id))
        if is_superseded(ticket, record, began):
            self._superseded = True
            raise Ignore(f"Another message of {ticket.task_id} has newer arguments.")
        return record, began

    @property
    def _secret(self) -> str:
        """The secret that the worker drew for the run; empty if it drew none."""
        secret = self.message.request.get(RUN_HEADER)
        return secret if is_secret(secret) else ""

    def _take_begun(self, came_before: bool) -> tuple[Lease | None, Holder | None]:
        """Take the slot of the run of a pending call, if runs have one; or return the holder that comes first."""
        ticket = self.message.ticket.begun
        if ticket.queue != ticket.running and not came_before:
            first = peek(ticket.using, ticket.queue)  # a retry, a call that has links, or a run that is over but held
            if first.value:
                return None, first.holder
        if not ticket.running:
            return None, None
        try:
            return self._take_running(ticket), None
        except LockTakenError as taken:
            return None, Holder.of(taken)

    def _begin(self, lease: Lease | None, record: Seen, began: Seen) -> None:
        """Let no later call take the message over; with ``hold_for``, its slot is held before the turn ends."""
        message = self.message
        try:
            begin(message.ticket, message.task, record, began)
        except BaseException:
            if lease:
                lease.release()
            raise
        message.ticket = message.ticket.begun
        if not message.ticket.running and message.rules.hold_for:
            self._leave_queue()

    def _left_behind(self, holder: Holder) -> bool:
        """
        Return whether the slot waits for a retry of this message that a dead worker never sent.

        The first copy to arrive cannot know, because the retry may be about to be sent.
        """
        message, task_id = self.message, self.message.request.id
        if not message.ticket.watch or not holder.waits_as(task_id):
            return False
        try:  # without results, the note decides, and it has been read already
            return message.stored(task_id).get("status") != states.RETRY
        except NoResultsError:
            return False

    def _take_own(self) -> Lease | None:
        """Take the slot that waits for this message if the message has merely lost the secret."""
        message = self.message
        seen = peek(message.ticket.using, message.ticket.begun.waiting)
        if not seen.holder.waits_as(message.request.id):
            return None
        message.ticket = replace(message.ticket, secret=seen.secret)
        with suppress(LockTakenError):
            return self._take_running(message.ticket)
        return None

    def _leave_queue(self) -> None:
        """Free the lock that the message held while it waited, unless it is the lock of the run."""
        message, ticket = self.message, self.message.ticket
        if ticket.waiting != ticket.running and ticket.secret:
            leave_queue(ticket, 0.0 if ticket.running else message.rules.hold_for, message.task.name)

    def _give_way(self, holder: Holder) -> NoReturn:
        """End the message or put it back into the queue, because *holder* has the slot."""
        request = self.message.request
        if holder.task_id == request.id and not request.is_eager:
            self.redelivery.watch(holder)
        give_way(self.message, holder)

    def _without_nodes(
        self, error: QuorumUnavailableError | LockLostError, execution: Execution | None = None
    ) -> Execution:
        """Do what ``on_unavailable`` says for a run: the nodes do not answer, or not any more since it got its slot."""
        message, ticket = self.message, self.message.ticket
        how = message.rules.without_nodes("run")
        if execution and how == "run" and isinstance(error, QuorumUnavailableError):
            log.warning("%s runs without further questions: %s", printable(ticket.name), error)
            self._leave_queue()
            self.redelivery.stop_watching()
            return execution
        claimed = None
        if execution:
            claimed = execution.give_back() if how == "retry" else None
            execution.end(hold=False)
        if how != "retry" and ticket.trailing and message.has_result():
            raise Ignore(f"{message.request.id} has a result, and this message may be an older one.")
        if how == "run" and not self._refused and not execution:
            log.warning("%s runs without a slot: %s", printable(ticket.name), error)
            return self._execution(None, in_queue=True)
        if how == "fail" or message.request.is_eager:
            raise error
        # This uses up no retry: without an answer from the nodes, the body must not run.
        pause = pause_after(error, ticket.tries)
        message.send_again(ticket, pause, claimed)
        if ticket.trailing:  # the state RETRY would overwrite the result of another message of the call
            raise Ignore(f"The lock nodes do not answer: {error}") from error
        raise Retry(f"The lock nodes do not answer: {error}", exc=error, when=pause) from error  # type: ignore[arg-type]


@contextmanager
def under_direct_call(task: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """
    Hold the slot while a body that was called directly runs; the body can use the slot as in a worker.

    Raises:
        DuplicateTask: Another task has it.
        QuorumUnavailableError: Too few nodes answered, and ``on_unavailable`` is not to run anyway.
    """
    rules: SingletonOptions = task.singleton_options
    ticket = replace(task.singleton_ticket(f"direct-{fresh_secret()[:8]}", args, kwargs), scope=RUNNING)
    lease = None
    try:
        lease = take_running(ticket, rules.times, task.name, "", inline=True)
    except QuorumUnavailableError as unanswered:
        if rules.without_nodes("run") != "run":
            raise
        log.warning("%s runs without a slot: %s", printable(ticket.name), unanswered)
    except LockTakenError as taken:
        raise Holder.of(taken).error(task.singleton_error, ticket.name) from None
    execution = Execution(task, ticket, rules, lease)
    task.push_request(**{EXECUTION: execution})
    try:
        yield
    except SlotLostError:
        execution.ensure()
        raise
    finally:
        execution.end()
        task.pop_request()


def stays_with_its_message(error: BaseException | None, task: Any, ticket: Ticket, request: Any) -> bool:
    """
    Return whether a message ends because its process is stopped, so that it may return to the broker.

    The slot then stays with the message, or returns to it, so that no other call is served before it.
    """
    stopped = isinstance(error, (WorkerShutdown, WorkerTerminate)) or (
        # Celery's children report a stop by a signal. The message of a body that calls sys.exit() is acknowledged.
        isinstance(error, SystemExit) and isinstance(error.code, int) and error.code < 0
    )
    late = task.acks_late and task.singleton_options.redelivery != "drop" and not request.is_eager
    return bool(stopped and late and ticket.secret)
