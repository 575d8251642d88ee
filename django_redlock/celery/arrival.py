"""
What a worker does with a message before the body: take the slot, or end the message as ``on_overlap`` says.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, TaskRevokedError, WorkerShutdown, WorkerTerminate

from ..engine.acquirer import fresh_nonce
from ..engine.lease import Lease
from ..exceptions import LockTakenError, QuorumUnavailableError
from ..nodes.clock import steady
from .dispatch import Call
from .execution import EXECUTION, Execution, begun_name, done_name, leave_queue, moved_on
from .interrupt import SlotLostError
from .options import Return, SingletonOptions
from .pauses import FIRST_WAIT, LONGEST_PAUSE, LONGEST_WAIT, backoff, pause_without_nodes
from .pending import began_name, begin, has_begun, is_superseded, keep, turn
from .sightings import Seen, look, peek
from .signals import tell
from .slots import (
    HEADER,
    LABEL,
    NOTE,
    RECEIVED_HEADER,
    RUN_HEADER,
    RUNNING,
    Holder,
    Ticket,
    free,
    is_token,
    take_note,
    take_running,
)

PREFETCHED = 1.0  # seconds in a worker's hands after which the broker may have given the message to another one
DONE = frozenset({states.SUCCESS, states.REVOKED})  # a task that failed is left to Celery's rules for redelivery

log = logging.getLogger("django_redlock")


class Answered(Exception):
    """The task has a result without running; the first argument is the result."""


class Skipped(Ignore):
    """An eager call ended without running; *holder* is who has its slot, None if it is not about that."""

    def __init__(self, reason: str, holder: Holder | None) -> None:
        super().__init__(reason)
        self.holder = holder


class Arrival:
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
        self.ticket, self._ticket_lost = ticket_of(task, request, args, kwargs)
        self._put_back = False
        self._came_before = False  # and began, though it is the message of a pending call
        self._refused = False  # because its equal is known to run

    @property
    def redelivered(self) -> bool:
        """Whether the broker says that it delivers the message again."""
        return bool((self.request.delivery_info or {}).get("redelivered"))

    @property
    def kept(self) -> bool:
        """Whether it has been in this worker's hands for so long that another one may have got a copy, and run it."""
        received = self.request.get(RECEIVED_HEADER)
        return not isinstance(received, float) or steady() - received > PREFETCHED

    def start(self) -> Execution:
        """
        Take the slot for a run. A message that ends without one gives its place in the queue up.

        Raises:
            Answered: The task has a result without running.
            Ignore: It is not to run, and its caller has been told what there is to tell.
            Retry: It was put back into the queue, because the nodes do not answer.
            DuplicateTask: Its equal has the slot, and ``on_overlap="fail"``.
            QuorumUnavailableError: The nodes do not answer, and ``on_unavailable`` says to fail.
        """
        if not self.ticket.name:
            return Execution(self.task, self.ticket, self.rules, None)
        try:
            return self._start()
        except Exception:  # a process that is stopped keeps the place for its message
            if not self._put_back:
                free(self.ticket.using, self.ticket.waiting, self.ticket.token)
                self._free_watch()
            raise

    def _start(self) -> Execution:
        was_pending = self.ticket.trailing
        try:
            self._look_at_notes()
            lease = self._take_pending() if self.ticket.trailing else self._take()
        except QuorumUnavailableError as error:
            return self._without_nodes(error)
        execution = Execution(self.task, self.ticket, self.rules, lease)
        try:
            self._leave_queue()
            if self._came_before or not was_pending:
                self._leave_if_done(self.kept)  # it may have ended since it was looked at
                self._leave_if_begun()
        except BaseException:
            execution.end(hold=False)
            raise
        self._free_watch()
        return execution

    def _take(self) -> Lease | None:
        """Take the slot, if runs have one, or leave by what is to become of the message instead."""
        ticket = self.ticket
        if not ticket.running:
            retry = bool(self.request.retries)  # what only waits is no reason not to go on with work that has begun
            if not ticket.token and not retry and (waiting := peek(ticket.using, ticket.waiting)).value:
                self._give_way(waiting.holder)
            return None
        token = self.request.get(RUN_HEADER)
        token = token if is_token(token) else ""
        try:
            return take_running(ticket, self.rules.lease, self.task.name, token, self.request.is_eager)
        except LockTakenError as refusal:
            holder, self._refused = Holder.of(refusal), True
        if (self._ticket_lost or self._left_behind(holder)) and (lease := self._take_own(token)):
            return lease
        self._give_way(holder)

    def _take_pending(self) -> Lease | None:
        """Take the slot for the message of a pending call, or leave it to the one that counts; see :mod:`.pending`."""
        ticket = self.ticket
        self._look_at_pending()  # most older messages end here; and nodes that are away are not waited for
        with turn(ticket):
            record, began = self._look_at_pending()
            self._came_before = has_begun(ticket, began)
            if self._came_before:
                self._leave_if_done()
                if self.rules.redelivery == "drop":
                    self._drop()
            try:
                lease = self._take_begun()
            except LockTakenError as refusal:
                holder, self._refused = Holder.of(refusal), True
                if not self._came_before:
                    keep(ticket, self.rules.queue_ttl, record)
            else:
                self._begin(lease, record, began)
                return lease
        if not self._came_before and holder.task_id == ticket.task_id:  # a run with older arguments: no copy of it
            holder = Holder(None, holder.state, holder.retry_after)
        self._give_way(holder)

    def _look_at_pending(self) -> tuple[Seen, Seen]:
        """Return the record of the pending call, and the note of what began; leave if another message counts."""
        ticket = self.ticket
        record, began = look(ticket.using, ticket.following, began_name(ticket.task_id))
        if is_superseded(ticket, record, began):
            raise Ignore(f"Another message of {ticket.task_id} has newer arguments.")
        return record, began

    def _take_begun(self) -> Lease | None:
        """Take the slot of the run of a pending call, if runs have one."""
        token = self.request.get(RUN_HEADER)
        token = token if is_token(token) else ""
        ticket = self.ticket.begun
        return take_running(ticket, self.rules.lease, self.task.name, token) if ticket.running else None

    def _begin(self, lease: Lease | None, record: Seen, began: Seen) -> None:
        try:
            begin(self.ticket, max(LONGEST_PAUSE, self.rules.queue_ttl), self.task.name, record, began)
        except BaseException:
            if lease:
                lease.release()
            raise
        self.ticket = self.ticket.begun

    def _left_behind(self, holder: Holder) -> bool:
        """
        Return whether the slot waits for a retry of this message that was never sent, as its worker died before.

        A copy that comes for the first time cannot tell, because the retry may be about to be sent.
        """
        if not self.ticket.watch or holder.task_id != self.request.id or holder.state != "queued":
            return False
        try:
            return bool(self.task.backend.get_state(self.request.id) != states.RETRY)
        except NotImplementedError:  # there is no result backend, but a note, which has been looked at
            return True

    def _take_own(self, token: str) -> Lease | None:
        """Take the slot that waits for this message, if only the token for it has been lost."""
        seen = peek(self.ticket.using, self.ticket.begun.waiting)
        if seen.holder.task_id != self.request.id or seen.holder.state != "queued":
            return None
        self.ticket = replace(self.ticket, token=seen.token)
        with suppress(LockTakenError):
            return take_running(self.ticket, self.rules.lease, self.task.name, token)
        return None

    def _leave_queue(self) -> None:
        """Free the lock that the message had while it waited, if that is not the one it has now."""
        ticket = self.ticket
        if ticket.waiting != ticket.running and ticket.token:
            leave_queue(ticket, 0.0 if ticket.running else self.rules.hold_for, self.task.name)

    # Its equal has the slot

    def _give_way(self, holder: Holder) -> NoReturn:
        if holder.task_id == self.request.id and not self.request.is_eager:
            self._watch(holder)
        ticket, how = self.ticket, "wait" if self.ticket.trailing else self.rules.overlap
        about = {"task_id": ticket.task_id, "name": ticket.name, "holder_id": holder.task_id, "state": holder.state}
        if not ticket.waited and not ticket.trailing:  # what is pending is expected to wait
            tell(
                self.task,
                "singleton_overlap",
                f"{ticket.name} is {holder}",
                **about,
                strategy="return" if isinstance(how, Return) else how,
            )
        if how == "fail":
            error = self.task.singleton_error
            raise error.found(holder.task_id, holder.state, holder.retry_after, ticket.name) from None
        if isinstance(how, Return):
            raise Answered(how.value)
        if how in ("wait", "follow") and not self.request.is_eager:
            self._wait(holder, follow=how == "follow")
        self._skip(f"Skipped: {ticket.name} is {holder}.", holder)

    def _skip(self, reason: str, holder: Holder | None = None) -> NoReturn:
        """
        End the task unrun, as revoked.

        Ignore alone leaves everybody waiting who has its id: callers, the rest of a chain, the body of a chord.
        """
        if (request := self.request).is_eager:
            raise Skipped(reason, holder) from None
        self.task.backend.mark_as_failure(
            request.id,
            TaskRevokedError(reason),
            request=request,
            store_result=not self._result_ignored(),
            state=states.REVOKED,
        )
        raise Ignore(reason) from None  # Celery's own: it is pickled on its way to the parent process

    def _wait(self, holder: Holder, follow: bool) -> NoReturn:
        """Put the message back until its equal is done; uses up no retry."""
        ticket = self.ticket
        if follow and holder.task_id and not isinstance(self.task.backend, DisabledBackend):
            ticket = replace(ticket, joined=ticket.joined or holder.task_id)
            self._answer_with(ticket.joined)
        pause = backoff(FIRST_WAIT, LONGEST_WAIT, ticket.tries)
        limit = self.rules.wait_for
        if limit is not None:
            left = limit - ticket.waited
            pause = min(pause, max(left, FIRST_WAIT))
            if left <= 0:
                self._skip(f"Skipped: {ticket.name} is {holder}, after {ticket.waited:.1f} s.", holder)
        self._send_again(replace(ticket, waited=ticket.waited + pause), pause)
        raise Ignore(f"{self.request.id} waits for its equal; it is tried again in {pause:.1f} s.") from None

    def _answer_with(self, task_id: str) -> None:
        """End the task with another one's result, if that is there."""
        result = self.task.AsyncResult(task_id)
        state = result.state
        if state == states.SUCCESS:
            raise Answered(result.result)
        if state in states.PROPAGATE_STATES:
            raise result.result

    # The message itself came before

    def _look_at_notes(self) -> None:
        """Leave if the message was answered meanwhile, or must not run a second time."""
        ticket = self.ticket
        if not ticket.trailing:  # or see there: messages with newer arguments have the same id
            self._leave_if_done()  # before it takes the slot, or two copies could keep each other waiting for ever
        if ticket.joined:
            self._answer_with(ticket.joined)
        if self.rules.redelivery == "drop" and self.redelivered and self._has_begun():
            self._drop()

    def _watch(self, holder: Holder) -> NoReturn:
        """
        Look again later: the holder is a run of this very message, which the broker has delivered twice.

        It may be alive or dead, and only the end of its lease will tell. Dropping this copy would take from a run
        that is alive its second chance: on Redis, both copies are one to the broker. One copy is enough, however.
        """
        lease = self.rules.lease
        pause = max(FIRST_WAIT, min(lease, holder.retry_after or lease) + 0.1)
        ticket, token = self.ticket, fresh_nonce()
        about = (ticket.using, self._watch_name, pause + self.rules.queue_ttl, token, ticket.task_id)
        try:
            take_note(*about, self.task.name[:LABEL] + NOTE, adopt=ticket.watch)
        except LockTakenError:
            raise Ignore(f"{ticket.task_id} came once more; another copy of it waits already.") from None
        try:
            self._send_again(replace(ticket, watch=token), pause)
        except Exception as error:
            # No failure, which would be stored for the run that is alive.
            free(ticket.using, self._watch_name, token)
            log.warning("a copy of %s could not be put back: %s", ticket.task_id, error)
            if self.task.acks_late:
                raise Reject(error, requeue=True) from error
            raise Ignore(f"A copy of {ticket.task_id} could not be put back.") from error
        raise Ignore(f"{ticket.task_id} came a second time; it is looked at again in {pause:.1f} s.") from None

    def _free_watch(self) -> None:
        if self.ticket.watch:
            free(self.ticket.using, self._watch_name, self.ticket.watch)

    @property
    def _watch_name(self) -> str:
        return f"watch:{self.ticket.task_id}"

    def _leave_if_done(self, kept: bool = False) -> None:
        if self._is_done(kept):
            raise Ignore(f"{self.request.id} came a second time, and had been done.")

    def _is_done(self, kept: bool = False) -> bool:
        """Return whether this is a copy of a message whose work is done; one that was *kept* may have become one."""
        copy = self.redelivered or bool(self.ticket.watch)
        if not (copy or self.ticket.tries or kept) or self.request.is_eager:
            return False
        owner = peek(self.ticket.using, done_name(self.ticket.task_id, self.request.retries or 0)).owner
        if owner and (moved_on(owner) or not self._stores_results()):
            return True
        # The backend goes by the id. A message that is no copy is judged by it alone only if the id was drawn for it.
        if not (owner or copy or (kept and self.ticket.token)):
            return False
        try:
            done = self.task.backend.get_state(self.request.id) in DONE
        except NotImplementedError:  # there is no result backend
            return bool(owner)
        if owner and not done:
            self._await_result()
        return done

    def _await_result(self) -> NoReturn:
        """
        Look again later: the work is done, and its result has not been stored.

        Its worker is about to, or died before it could. Then the note's time will be over, and it is all done again.
        """
        pause = self.rules.lease
        self._send_again(self.ticket, pause)
        raise Ignore(f"{self.request.id} has been done, without a result; it is looked at again in {pause:.1f} s.")

    def _stores_results(self) -> bool:
        return not self._result_ignored() and not isinstance(self.task.backend, DisabledBackend)

    def note_done(self, execution: Execution, goes_on: bool = False) -> None:
        """
        Leave a note for later copies of a message that the broker may deliver again though it is done.

        Args:
            execution: The run.
            goes_on: Whether another message goes on with the work, and the result is not that of this run.
        """
        if self.request.is_eager or not self.ticket.name or (execution.goes_on and not goes_on):
            return
        delayed = self.request.eta and not self.ticket.tries  # it may have waited for longer than the broker does
        if self.task.acks_late or delayed or self.redelivered or self.ticket.watch:
            execution.note_done(self._stores_results(), goes_on)

    # A message that is never run twice

    def _leave_if_begun(self) -> None:
        """Note that the run begins, for ``redelivery="drop"``; leave if it had begun before."""
        ticket = self.ticket
        if self.rules.redelivery != "drop" or self.request.is_eager:
            return
        try:
            about = (fresh_nonce(), ticket.task_id, self.task.name[:LABEL] + NOTE)
            take_note(ticket.using, self._begun_name, max(LONGEST_PAUSE, self.rules.queue_ttl), *about)
        except LockTakenError:
            self._drop()

    def _has_begun(self) -> bool:
        return self._came_before or bool(peek(self.ticket.using, self._begun_name).value)

    @property
    def _begun_name(self) -> str:
        return begun_name(self.ticket.task_id, self.request.retries or 0)

    def _drop(self) -> NoReturn:
        """Leave a message that has come a second time, and tell who waits for its result if no run will store one."""
        reason = f"{self.ticket.task_id} came a second time, and is dropped."
        alive = self.ticket.running and peek(self.ticket.using, self.ticket.running).holder
        with suppress(NotImplementedError):  # there is no result backend
            over = self.task.backend.get_state(self.request.id) in states.READY_STATES
            if not over and not (alive and alive.task_id == self.request.id and alive.state == "running"):
                self._skip(reason)
        raise Ignore(reason)

    # Putting it back

    def _without_nodes(self, error: QuorumUnavailableError) -> Execution:
        how = self.rules.without_nodes("run")
        if how != "retry" and self.ticket.trailing and self._has_result():
            raise Ignore(f"{self.request.id} has a result, and this message may be an older one.")
        if how == "run" and not self._refused:
            log.warning("%s runs without a slot: %s", self.ticket.name, error)
            return Execution(self.task, self.ticket, self.rules, None, in_queue=True)
        if how == "fail" or self.request.is_eager:
            raise error
        # Uses up no retry: without an answer from the nodes the body must not run.
        pause = pause_without_nodes(error, self.ticket.tries)
        self._send_again(self.ticket, pause)
        if self.ticket.trailing:  # the state RETRY would be stored over what another message of the call has stored
            raise Ignore(f"The lock nodes do not answer: {error}") from error
        raise Retry(f"The lock nodes do not answer: {error}", exc=error, when=pause) from error  # type: ignore[arg-type]

    def _has_result(self) -> bool:
        try:
            return bool(self.task.backend.get_state(self.request.id) in states.READY_STATES)
        except Exception:  # there is no result backend, or it cannot be asked
            return False

    def _send_again(self, ticket: Ticket, pause: float) -> None:
        request, ticket = self.request, replace(ticket, tries=ticket.tries + 1)
        # What the logs show of the arguments is the sender's choice; Celery would show them anew.
        shown = {name: said for name in ("argsrepr", "kwargsrepr") if (said := request.get(name)) is not None}
        message = self.task.signature_from_request(request, countdown=pause, retries=request.retries, **shown)
        Call(self.task, message.args, message.kwargs, message.options, self.rules, ticket).publish(ticket)
        self._put_back = True

    def _result_ignored(self) -> bool:
        ignored = vars(self.request).get("ignore_result")
        return bool(self.task.ignore_result if ignored is None else ignored)


def ticket_of(task: Any, request: Any, args: Any, kwargs: Any) -> tuple[Ticket, bool]:
    """Return what a message says of its slot, or can be made of its arguments, and whether it was made of them."""
    found = Ticket.unpack(request.get(HEADER) or (request.headers or {}).get(HEADER), request.id)
    return found or task.singleton_ticket(request.id, args, kwargs), found is None


@contextmanager
def under_direct_call(task: Any, args: Any, kwargs: Any) -> Iterator[None]:
    """
    Hold the slot while a body runs that was called directly, which knows of it as in a worker.

    Raises:
        DuplicateTask: Its equal has it.
        QuorumUnavailableError: Too few nodes answered, and ``on_unavailable`` does not say to run all the same.
    """
    rules: SingletonOptions = task.singleton_options
    ticket = replace(task.singleton_ticket(f"direct-{fresh_nonce()[:8]}", args, kwargs), scope=RUNNING)
    lease = None
    try:
        lease = take_running(ticket, rules.lease, task.name, "", inline=True)
    except QuorumUnavailableError as unanswered:
        if rules.without_nodes("run") != "run":
            raise
        log.warning("%s runs without a slot: %s", ticket.name, unanswered)
    except LockTakenError as refusal:
        holder = Holder.of(refusal)
        error = task.singleton_error
        raise error.found(holder.task_id, holder.state, holder.retry_after, ticket.name) from None
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


def stays_with_its_message(error: BaseException | None, execution: Execution, request: Any) -> bool:
    """
    Return whether the run ends because its process is being stopped, and its message may go back to the broker.

    Then the slot goes back to the message, so that nothing overtakes it.
    """
    stopped = isinstance(error, (WorkerShutdown, WorkerTerminate)) or (
        # By a signal, as Celery says it in its children. A body that calls sys.exit() has its message acknowledged.
        isinstance(error, SystemExit) and isinstance(error.code, int) and error.code < 0
    )
    late = execution.task.acks_late and execution.options.redelivery != "drop" and not request.is_eager
    return bool(stopped and late and execution.ticket.token)
