"""
The arrival of a message in a worker: take the slot for its run, or let it end without a run (internal).
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NoReturn

from celery import states
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, TaskRevokedError
from kombu.exceptions import EncodeError

from ..core.names import GOES_ON, NOTE, slug
from ..engine.lease import Lease
from ..engine.manager import fresh_secret
from ..exceptions import LockLostError, LockTakenError, QuorumUnavailableError, printable
from ..handler import locks
from ..inventory import find_locks
from ..runtime.clock import steady
from ..singleton.options import Return, SingletonOptions
from ..singleton.slots import (
    BOTH,
    RECEIVED_HEADER,
    RUN_HEADER,
    RUNNING,
    Claim,
    Holder,
    SlotState,
    Ticket,
    free,
    is_secret,
    look,
    peek,
)
from .dispatch import Call
from .execution import EXECUTION, Execution, last_length, note_length
from .pending import LONGEST_PAUSE, PendingMessage, discard, turn
from .signals import OVERLAP, report_holder

# Seconds for which a message that waits for its slot is put back. Celery's delayed delivery over quorum queues counts
# whole seconds, and fails with 0.
FIRST_WAIT, SPREAD, LONGEST_WAIT = 1.0, 3.0, 10.0
PART = 4  # a message is put back for at most this part of the time that it has waited, unless that is very short
SHORT, SOON = 0.25, 0.5  # the longest run that is worth waiting for in a process, and the longest wait, in seconds
PREFETCHED = 1.0  # seconds after which the broker may have delivered a message that this worker keeps to another worker
PATIENCE = 10  # how often a message is put back, for five minutes in all, before it runs without the result backend
LONG_KEPT = 60.0  # seconds after which it may well have done so: few brokers have a shorter visibility timeout
REMEMBERED = 60.0  # seconds for which a note records that a message is done, if the result backend records it too
CONSEQUENCES = {
    "wait": "is put back to wait for its slot",
    "follow": "is put back to wait for the result of that task",
    "drop": "is dropped",
    "fail": "fails",
    "return": "ends with a given value, without a run",
}
DONE = frozenset({states.SUCCESS, states.REVOKED})  # the redelivery of a failed task is left to Celery's rules

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
        found = Ticket.of(request)
        self.ticket = found or task.singleton_ticket(request.id, args, kwargs)
        self._ticket_lost = found is None
        self._put_back = False  # into the queue
        self._refused = False  # because another run is known to have the slot
        self._superseded = False  # by a message of the same pending call with newer arguments
        self._received = received if isinstance(received := request.get(RECEIVED_HEADER), float) else None
        # At the beginning of the run, because most messages are acknowledged then, and not delivered again.
        self._long_kept = self._received is not None and steady() - self._received > LONG_KEPT
        self._began = False  # whether this is the message of a pending call of which a copy has begun a run
        secret = request.get(RUN_HEADER)  # which the worker drew for the run
        self._secret: str = secret if is_secret(secret) else ""

    @property
    def came_again(self) -> bool:
        """Whether the broker has marked the message as delivered again, now or before it was put back."""
        return self.ticket.redelivered or bool((self.request.delivery_info or {}).get("redelivered"))

    @property
    def unfinished(self) -> bool:
        """Whether a run of it may have begun and not ended; then it is never dropped because of another run."""
        return bool(self.came_again or self.ticket.watch or self.request.retries) and not self.request.is_eager

    # The slot

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
        if not self.ticket.name:
            return self._execution(None)
        try:
            return self._start()
        except BaseException as error:
            if not self._put_back and not self.task.singleton_stays(error, self.ticket):
                if self._superseded:  # a newer message counts, so nothing is to be noted, and no turn is needed
                    self.ticket.free()
                else:
                    discard(self.ticket, self.task)
                self._stop_watching()
            raise

    def _start(self) -> Execution:
        was_pending = self.ticket.trailing
        try:
            self._look_at_notes()
            lease = self._take_pending() if was_pending else self._take()
        except QuorumUnavailableError as error:
            return self._without_nodes(error)
        execution = self._execution(lease)
        try:
            if self._began or not was_pending:
                self._leave_if_done(self._kept)  # the run may have ended since the last look
                self._leave_if_begun()
            execution.ensure()  # the questions may have taken longer than the lease
            if not was_pending:
                self._leave_queue()
        except (QuorumUnavailableError, LockLostError) as error:
            return self._without_nodes(error, execution)
        except BaseException as error:
            if self.task.singleton_stays(error, self.ticket):
                execution.give_back()
            execution.end(hold=False)
            raise
        self._stop_watching()
        return execution

    def _execution(self, lease: Lease | None, in_queue: bool = False) -> Execution:
        return Execution(self.task, self.ticket, lease, in_queue, self._stores_results)

    def _look_at_notes(self) -> None:
        """End the message if it was answered meanwhile or must not run a second time."""
        ticket = self.ticket
        if not ticket.trailing:  # else messages with newer arguments have the same id, so it is asked in their turn
            # Check before taking the slot. Otherwise two copies could wait for each other for ever.
            self._leave_if_done()
        if ticket.joined and not self.unfinished:
            try:
                self._answer_with(ticket.joined)
            except NoResultsError as error:
                self._without_results(error)
        may_have_begun = self.rules.redelivery == "drop" and (self.came_again or ticket.watch)
        if may_have_begun and peek(ticket.using, self._note("begun")).value:
            self._drop()

    def _take(self) -> Lease | None:
        """Take the slot, if runs have one; if another task has it, end the message or put it back."""
        ticket = self.ticket
        if not ticket.running:
            if not ticket.secret and not self.unfinished:  # else it continues even if another call is waiting
                for waiting in look(ticket.using, *ticket.places(self.rules.trails)):
                    if waiting.value:
                        self._give_way(waiting.holder)
            return None
        try:
            return self._take_running(ticket)
        except LockTakenError as taken:
            holder, self._refused = self._holder(taken), True
        if self._ticket_lost:  # the slot that waits may be its own
            seen = peek(ticket.using, ticket.waiting)
            if seen.holder.waits_as(self.request.id):
                self.ticket = replace(ticket, secret=seen.secret)
                with suppress(LockTakenError):
                    return self._take_running(self.ticket)
        if self._is_worth_waiting(holder):
            try:
                return self._take_running(ticket, SOON)
            except LockTakenError:
                note_length(self.task, ticket.using, SOON)
        self._give_way(holder)

    def _holder(self, taken: LockTakenError) -> Holder:
        """
        Return the holder in the way.

        While a slot changes hands, the nodes name several. A message that waits in any case need not know for whom.

        Raises:
            QuorumUnavailableError: It depends on the holder what happens, and the nodes do not agree on one.
        """
        waits = self.ticket.trailing or self.unfinished or self.rules.overlap_of(self.ticket.scope) == "wait"
        if waits and not taken.agreed and not self.request.is_eager:
            return Holder(None, SlotState.CLAIMED, taken.retry_after)
        return Holder.of(taken)

    def _is_worth_waiting(self, holder: Holder) -> bool:
        """
        Return whether to wait in this process for the end of another task's run.

        That is so if runs come one after the other, and are short. One process waits for a slot, so that the next run
        follows at once, and the others go on with other messages. A message that was put back before waits behind
        others, so that it is not put back often.
        """
        ticket, rules = self.ticket, self.rules
        serial = ticket.scope in (RUNNING, BOTH) and not rules.trails and rules.overlap_of(ticket.scope) == "wait"
        if not serial or holder.state is SlotState.HELD or holder.task_id == self.request.id or self.request.is_eager:
            return False
        length = last_length(self.task, ticket.using)
        if length is not None and length > SHORT:
            return False
        if ticket.tries:
            return True
        if length is None:
            return False
        held = find_locks((slug(ticket.running),), ticket.using, waiters=0).locks
        return not any(lock.waiting for lock in held)

    def _take_running(self, ticket: Ticket, wait: float = 0.0) -> Lease:
        """
        Take the slot for the run.

        Only the slots of runs exclude each other. So a waiting message whose slot no quorum of the nodes has keeps
        nobody from running: the entries of that slot are freed. If that message still comes, it runs as well.
        """
        about = (self.rules.times, self.task.name, self._secret, self.request.is_eager, wait)
        try:
            return ticket.take_running(*about)
        except QuorumUnavailableError:
            remains = peek(ticket.using, ticket.running).split
            if not remains or not all(seen.holder.waits for seen in remains):
                raise
            for seen in remains:
                free(ticket.using, ticket.running, seen.secret)
            return ticket.take_running(*about)

    def _take_pending(self) -> Lease | None:
        """Take the slot for the message of a pending call, or leave it to the one that counts; see :mod:`.pending`."""
        ticket = self.ticket
        # Most older messages end here, without waiting for nodes that are away.
        self._end_if_superseded(PendingMessage.look_up(ticket, self.task))
        with turn(ticket):
            message = PendingMessage.look_up(ticket, self.task)
            self._end_if_superseded(message)
            self._began = began = message.has_begun()
            if began:
                self.ticket = ticket = replace(ticket, redelivered=True)  # though the broker may not have marked it
                self._leave_if_done(kept=True)  # another worker ran it, or discarded it without a run
                if self.rules.redelivery == "drop":
                    self._drop()
            lease, holder = self._take_begun()
            if not holder:
                try:
                    message.begin()  # from here on, no later call takes it over
                except BaseException:
                    if lease:
                        lease.release()
                    raise
                self.ticket = ticket.begun
                if not ticket.running and self.rules.hold_for:
                    self._leave_queue()  # so that its slot is held before the turn ends
                return lease
            self._refused = True
            if not began:
                message.keep(self._lifetime)
        if not began and holder.task_id == ticket.task_id:  # a run with older arguments, not a copy of this one
            holder = Holder(None, holder.state, holder.retry_after)
        self._give_way(holder)

    def _end_if_superseded(self, message: PendingMessage) -> None:
        if message.is_superseded():
            self._superseded = True
            raise Ignore(f"Another message of {self.ticket.task_id} has newer arguments.")

    def _take_begun(self) -> tuple[Lease | None, Holder | None]:
        """Take the slot of the run of a pending call, if runs have one; or return the holder that comes first."""
        ticket = self.ticket.begun
        if ticket.queue != ticket.running and not self._began:
            first = peek(ticket.using, ticket.queue)  # a retry, a call that has links, or a run that is over but held
            if first.value:
                return None, first.holder
        if not ticket.running:
            return None, None
        if not self._began:
            # Nobody can have left the slot of a run to this message yet. If it named its secret all the same, a node
            # that does not know of the present run would grant the slot in place of that secret, and remember it as
            # replaced. Then it would refuse the record, which has the same secret, and an older message would run.
            ticket = replace(ticket, secret="")
        try:
            return self._take_running(ticket), None
        except LockTakenError as taken:
            return None, self._holder(taken)

    def _leave_queue(self) -> None:
        """Free the lock that the message held while it waited, unless it is the lock of the run or is to be held."""
        ticket = self.ticket
        if ticket.waiting == ticket.running or not ticket.secret:
            return
        if not ticket.running and self.rules.hold_for and ticket.waiting == ticket.queue:
            with suppress(LockTakenError, QuorumUnavailableError):
                hold = self.rules.hold_for
                ticket.take(ticket.waiting, hold, self.task.name, SlotState.HELD, adopt=ticket.secret)
        else:
            ticket.free()

    def _without_nodes(
        self, error: QuorumUnavailableError | LockLostError, execution: Execution | None = None
    ) -> Execution:
        """Do what ``on_unavailable`` says for a run: the nodes do not answer, or not any more since it got its slot."""
        ticket = self.ticket
        how = self.rules.without_nodes("run")
        if execution and how == "run" and isinstance(error, QuorumUnavailableError):
            log.warning("%s runs without further questions about its slot: %s", printable(ticket.name), error)
            self._leave_queue()
            self._stop_watching()
            return execution
        claimed = None
        if execution:
            claimed = execution.give_back() if how == "retry" else None
            execution.end(hold=False)
        if how != "retry" and ticket.trailing and self._has_result():
            raise Ignore(f"{self.request.id} has a result, and this message may be an older one.")
        if how == "run" and not self._refused and not execution:
            log.warning("%s runs without a slot: %s", printable(ticket.name), error)
            return self._execution(None, in_queue=True)
        if how == "fail" or self.request.is_eager:
            raise error
        # This uses up no retry: without an answer from the nodes, the body must not run.
        pause = pause_after(error, ticket.tries)
        self._send_again(ticket, pause, claimed)
        if ticket.trailing:  # the state RETRY would overwrite the result of another message of the call
            raise Ignore(f"The lock nodes do not answer: {error}") from error
        raise Retry(f"The lock nodes do not answer: {error}", exc=error, when=pause) from error  # type: ignore[arg-type]

    # Another task has the slot

    def _give_way(self, holder: Holder) -> NoReturn:
        """
        End the message or put it back into the queue, because *holder* has its slot.

        A message whose run may have begun and not ended waits, whatever ``on_overlap`` and ``wait_for`` say: its caller
        was promised the run, and only the death of a process kept that from its end.

        Raises:
            Answered: The task has a result without running.
            Ignore: It does not run, or not now.
            DuplicateTask: ``on_overlap="fail"``.
        """
        if holder.task_id == self.request.id and not self.request.is_eager:
            self._watch(holder)
        # A holder whose message may not have been sent is no reason to drop this one: it lapses in a moment.
        waits = self.ticket.trailing or self.unfinished or holder.state is SlotState.CLAIMED
        ticket, how = self.ticket, "wait" if waits else self.rules.overlap_of(self.ticket.scope)
        if not ticket.waited and not ticket.trailing:  # a pending call is expected to wait
            strategy = str(how)
            what = CONSEQUENCES["drop" if self.request.is_eager and strategy in ("wait", "follow") else strategy]
            report_holder(self.task, OVERLAP, ticket, holder, strategy, f"task {ticket.task_id} {what}")
        if how == "fail":
            error = holder.error(self.task.singleton_error, ticket.name)
            self._store(error, states.FAILURE)
            raise error from None
        if isinstance(how, Return):
            self._store(how.value, states.SUCCESS)
            raise Answered(how.value)
        if how in ("wait", "follow") and not self.request.is_eager:
            self._wait(holder, follow=how == "follow")
        self._skip(f"Skipped: {printable(ticket.name)} is {holder}.", holder)

    def _wait(self, holder: Holder, follow: bool) -> NoReturn:
        """Put the message back into the queue until the holder is done; this uses up no retry."""
        ticket = self.ticket
        if follow and holder.task_id and self._stores_results:
            ticket = replace(ticket, joined=ticket.joined or holder.task_id)
            with suppress(NoResultsError):  # it waits anyway
                self._answer_with(ticket.joined)
        # At random: otherwise the messages of a burst would come back together, and the slot be free in between.
        longest = min(max(SPREAD, ticket.waited / PART), LONGEST_WAIT)
        pause = FIRST_WAIT + (longest - FIRST_WAIT) * locks[ticket.using].runtime.random()
        limit = None if self.unfinished or holder.state is SlotState.CLAIMED else self.rules.wait_for
        if limit is not None:
            left = limit - ticket.waited
            pause = min(pause, max(left, FIRST_WAIT))
            if left <= 0:
                reason = f"Skipped: {printable(ticket.name)} is {holder}, after {ticket.waited:.1f} s."
                log.info("task %s is dropped. %s", printable(ticket.task_id), reason)
                self._skip(reason, holder)
        self._send_again(replace(ticket, waited=ticket.waited + pause), pause)
        raise Ignore(f"{self.request.id} waits for its slot; it is tried again in {pause:.1f} s.") from None

    def _watch(self, holder: Holder) -> NoReturn:
        """
        Put the message back, because the holder is a run of this same message, which the broker has delivered twice.

        The run may be alive or dead; only the end of its lease will show that. If this copy were dropped and the run
        died, the message would be lost, because on Redis the broker takes both copies for one. One waiting copy is
        enough.

        Raises:
            Ignore: This copy was put back, or another copy is already waiting.
            Reject: The broker did not accept the copy, and must deliver the message again.
        """
        ticket, secret, lease = self.ticket, fresh_secret(), self.rules.lease
        pause = max(FIRST_WAIT, min(lease, holder.retry_after or lease) + 0.1)
        name, ttl = f"watch:{ticket.task_id}", pause + self.rules.queue_ttl
        try:
            ticket.take(name, ttl, self.task.name, NOTE, secret, adopt=ticket.watch)
        except LockTakenError:
            raise Ignore(f"{ticket.task_id} was delivered again; another copy is already waiting.") from None
        try:
            self._send_again(replace(ticket, watch=secret), pause)
        except Exception as error:
            free(ticket.using, name, secret)
            log.warning("a copy of task %s could not be put back: %s", printable(ticket.task_id), error)
            if isinstance(error, Reject):
                raise
            # Not a failure, which would be stored as the result of the live run.
            raise Ignore(f"A copy of {ticket.task_id} could not be put back.") from error
        raise Ignore(f"{ticket.task_id} was delivered a second time; it is checked again in {pause:.1f} s.") from None

    def _stop_watching(self) -> None:
        """Let other copies watch a run of this message."""
        if self.ticket.watch:
            free(self.ticket.using, f"watch:{self.ticket.task_id}", self.ticket.watch)

    # Earlier deliveries: the broker may deliver a message more than once

    def _note(self, what: str) -> str:
        """Return the name of the note that one attempt of the task is ``done``, or has ``begun``."""
        return f"{what}:{self.ticket.task_id}:{self.request.retries or 0}"

    @property
    def _kept(self) -> bool:
        """Whether this worker received it so long ago that another worker may have received and run a copy."""
        return self._received is None or steady() - self._received > PREFETCHED

    def _leave_if_done(self, kept: bool = False) -> None:
        """
        End a message whose work is done.

        Args:
            kept: Whether another worker may have received a copy of it while this one kept it.

        Raises:
            Ignore: It is done, or it was put back to wait for a result.
        """
        if self._is_done(kept):
            raise Ignore(f"{self.request.id} was delivered a second time, and is already done.")

    def _is_done(self, kept: bool) -> bool:
        """Return whether this is a copy of a message whose work is done; a message that was *kept* may be one, too."""
        ticket = self.ticket
        copy = self.came_again or bool(ticket.watch)
        if not (copy or ticket.tries or kept) or self.request.is_eager:
            return False
        owner = peek(ticket.using, self._note("done")).owner
        if not self._stores_results or (owner and owner.state == GOES_ON):
            return bool(owner)
        # The backend knows only the id. About a message that is not a copy, this is proof only if the id is its alone.
        if not (owner or copy or (kept and ticket.secret)):
            return False
        try:
            stored = self.stored(self.request.id)
        except NoResultsError as error:
            if owner:
                self._await_result()
            if copy:  # else nothing suggests that it is done: a worker that runs a copy leaves a note
                self._without_results(error)
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
        pause = self.rules.lease
        self._send_again(self.ticket, pause)
        raise Ignore(f"{self.request.id} is done, but its result is not stored; it is checked again in {pause:.1f} s.")

    def note_done(self, execution: Execution, goes_on: bool = False) -> None:
        """
        Leave a note for later copies of a message that the broker may deliver again although it is done.

        Args:
            execution: The run.
            goes_on: Whether another message continues the work and will have the result.
        """
        ticket = self.ticket
        if self.request.is_eager or not ticket.name or (execution.goes_on and not goes_on):
            return
        # A delayed message may have waited for longer than the broker's visibility timeout, and so may one that the
        # worker kept behind other runs.
        waited = (self.request.eta and not ticket.tries) or (self._long_kept and not self._stores_results)
        if not (self.task.acks_late or waited or self.came_again or ticket.watch):
            return
        ttl = REMEMBERED if self._stores_results else max(REMEMBERED, self.rules.queue_ttl)
        try:
            ticket.take(self._note("done"), ttl, self.task.name, GOES_ON if goes_on else NOTE)
        except LockTakenError:  # it has been done before
            pass
        except QuorumUnavailableError as error:
            log.warning("could not note that task %s is done; a copy may run: %s", printable(ticket.task_id), error)

    def _leave_if_begun(self) -> None:
        """
        Note that the run begins, for ``redelivery="drop"``; end the message if it had begun before.

        Raises:
            Ignore: It had begun before.
        """
        if self.rules.redelivery != "drop" or self.request.is_eager:
            return
        try:
            ttl = max(LONGEST_PAUSE, self.rules.queue_ttl)
            self.ticket.take(self._note("begun"), ttl, self.task.name, NOTE)
        except LockTakenError:
            self._end_without_a_run()  # this message has the slot now, so no other run of it is alive

    def _drop(self) -> NoReturn:
        """
        End a message that was delivered a second time, once no run of it can be alive.

        Raises:
            Ignore: Always.
        """
        if holder := self.ticket.live_run():
            self._watch(holder)
        self._end_without_a_run()

    def _end_without_a_run(self) -> NoReturn:
        """Revoke the task if no run has stored a result; raise Ignore."""
        reason = f"Task {printable(self.ticket.task_id)} was delivered a second time, and is dropped."
        try:
            stored = self.stored(self.request.id)
        except NoResultsError as error:
            self._put_off(error)
        if stored.get("status") not in states.READY_STATES:
            log.info("%s", reason)
            with suppress(NotImplementedError):  # there is no result backend
                self._skip(reason)
        raise Ignore(reason)

    # The result backend is asked here alone, and never keeps an accepted call from running

    @property
    def _stores_results(self) -> bool:
        """Whether the result of its run is stored."""
        return not result_ignored(self.task) and not isinstance(self.task.backend, DisabledBackend)

    def stored(self, task_id: str) -> dict[str, Any]:
        """
        Return what is stored about a task; ``{}`` if results are ignored, or if this backend cannot be asked.

        Raises:
            NoResultsError: The result backend does not answer.
        """
        if not self._stores_results:
            return {}
        try:
            meta: dict[str, Any] = self.task.backend.get_task_meta(task_id)
            return meta
        except NotImplementedError:
            return {}
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            raise NoResultsError(f"{type(error).__name__}: {error}") from error

    def _has_result(self) -> bool:
        """Return whether a result is stored under its id; False if the result backend does not answer."""
        try:
            return self.stored(self.request.id).get("status") in states.READY_STATES
        except NoResultsError:
            return False

    def _without_results(self, error: NoResultsError) -> None:
        """
        Put the message back, because the result backend would have to say whether it is to run.

        It runs nevertheless with ``on_unavailable={"run": "run"}``, and when it has been put back often: no run needs
        the result backend.

        Raises:
            Ignore: It was put back.
        """
        if self.rules.without_nodes("run") != "run" and self.ticket.tries < PATIENCE:
            self._put_off(error)
        log.warning("task %s runs, though the result backend does not answer: %s", printable(self.request.id), error)

    def _put_off(self, error: Exception) -> NoReturn:
        """Put the message back until the result backend answers again; raise Ignore."""
        pause = pause_after(error, self.ticket.tries)
        self._send_again(self.ticket, pause)
        raise Ignore(f"The result backend does not answer: {error}; the message is tried again in {pause:.1f} s.")

    def _skip(self, reason: str, holder: Holder | None = None) -> NoReturn:
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
        about = {"request": request, "store_result": not result_ignored(self.task), "state": states.REVOKED}
        try:
            self.task.backend.mark_as_failure(request.id, TaskRevokedError(reason), **about)
        except (SoftTimeLimitExceeded, NotImplementedError):
            raise
        except Exception as error:  # of the backend, or of an errback, which is called after the result was stored
            if self._stores_results and not self._has_result():
                self._put_off(error)
            log.exception("task %s has ended, but one of its callbacks failed", printable(request.id))
        # Celery's own class, because the exception is pickled on its way to the parent process
        raise Ignore(reason) from None

    def _answer_with(self, task_id: str) -> None:
        """
        End the task with the result of another task, if that result is stored.

        Raises:
            Answered: That task succeeded.
            Exception: The error with which that task failed.
            NoResultsError: The result backend does not answer.
        """
        meta = self.stored(task_id)
        if meta.get("status") == states.SUCCESS:
            self._store(meta["result"], states.SUCCESS)
            raise Answered(meta["result"])
        if meta.get("status") in states.PROPAGATE_STATES:
            self._store(meta["result"], states.FAILURE)
            raise meta["result"]

    def _store(self, result: Any, state: str) -> None:
        """
        Store the result with which the task is about to end without a run; Celery stores it again.

        If Celery could not store it, nobody would learn that the task has ended, and nothing would have run.

        Raises:
            Ignore: The result backend does not store it, so the message was put back.
        """
        if not self._stores_results or self.request.is_eager:
            return
        try:
            self.task.backend.store_result(self.request.id, result, state, request=self.request)
        except NotImplementedError:
            return
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:
            self._put_off(error)

    # Back into the queue

    @property
    def _lifetime(self) -> float:
        """The seconds for which its slot is kept while it waits: ``queue_ttl``, but no longer than until it expires."""
        options = {"expires": self.request.expires}
        return Call(self.task, self.request.args, self.request.kwargs, options, self.rules, self.ticket).ttl

    def _send_again(self, ticket: Ticket, pause: float, claimed: Claim | None = None) -> None:
        """
        Put the message back into the queue for *pause* seconds, with *ticket*, and confirm its claim if it has one.

        Raises:
            Reject: The broker did not accept it, and must deliver the message again.
            Exception: The broker did not accept it, and the message is acknowledged already.
        """
        request, ticket = self.request, replace(ticket, tries=ticket.tries + 1, redelivered=self.came_again)
        # The sender chose how logs show the arguments; Celery would derive that again from the arguments.
        shown = {name: given for name in ("argsrepr", "kwargsrepr") if (given := request.get(name)) is not None}
        message = self.task.signature_from_request(request, countdown=pause, retries=request.retries, **shown)
        # Nobody here waits for the result. Otherwise, Celery subscribes to it first, and fails if the backend is away.
        headers = {**(message.options.get("headers") or {}), "ignore_result": result_ignored(self.task)}
        options = {**message.options, "headers": headers, "ignore_result": True}
        try:
            Call(self.task, message.args, message.kwargs, options, self.rules, ticket, claimed).publish(ticket)
        except EncodeError:
            raise
        except Exception as error:
            self._put_back = bool(self.task.acks_late) and not request.is_eager
            if not self._put_back:
                raise
            raise Reject(error, requeue=True) from error
        self._put_back = True


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
        lease = ticket.take_running(rules.times, task.name, "", inline=True)
    except QuorumUnavailableError as unanswered:
        if rules.without_nodes("run") != "run":
            raise
        log.warning("%s runs without a slot: %s", printable(ticket.name), unanswered)
    except LockTakenError as taken:
        raise Holder.of(taken).error(task.singleton_error, ticket.name) from None
    execution = Execution(task, ticket, lease)
    task.push_request(**{EXECUTION: execution})
    try:
        yield
    finally:
        execution.end()
        task.pop_request()


def result_ignored(task: Any) -> bool:
    """Return whether the present call of a task, or the task itself, declares that its result is ignored."""
    ignored = vars(task.request).get("ignore_result")
    return bool(task.ignore_result if ignored is None else ignored)


def pause_after(error: Exception, tries: int) -> float:
    """Return the pause, in seconds, of a message that cannot be run because a part that it needs does not answer."""
    if isinstance(error, QuorumUnavailableError) and error.retry_after is not None:
        # A little longer, so that the nodes vote again when the message arrives.
        return min(LONGEST_PAUSE, error.retry_after + 0.5)
    return min(LONGEST_PAUSE, FIRST_WAIT * 2.0 ** min(tries, 32))
