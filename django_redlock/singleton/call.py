"""
Decide about a call: it takes the slot and sends a message, or it is a duplicate (internal).

:func:`send` is for a call that Celery can still refuse, :func:`send_owned` for one whose id others know already, and
:func:`store` for a row, whose id is known only when it is stored.
"""

from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple

from ..core.names import MAX_LABEL
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from .ending import Execution, end, give_over, note_sending
from .options import SingletonOptions
from .pending import LONGEST_LINE, discard_seen, settled, write
from .questions import Claim, Digest, InTurn, Look, Now, Result, ResultOf, ResultState, Send, Sleep, Steps, StoredHere
from .slot import FREE, Holder, Record, Seen, SlotState
from .ticket import BOTH, RUNNING, WAITING, Ticket

UNCONFIRMED = 1.0  # seconds for which a call waits until another caller has sent its message
FIRST_LOOK, LONGEST_LOOK = 0.01, 0.1  # seconds of the pauses meanwhile
STORED = 10.0  # seconds from the end of a run until its result is stored
JOINS = "sends nothing, and has the result of that task"
FOLLOWS = "is sent, and runs afterwards"


@dataclass(slots=True)
class Call:
    """
    A call, and the slot that it has so far.

    Args:
        task: The task's name.
        ticket: The information about the slot that its message carries.
        rules: The task's options, with those of this call.
        ttl: For how long the slot of its message lasts, in seconds.
        linked: Whether it has links, callbacks or a chord, which would be lost if another message replaced its own.
        quiet: Whether nobody can catch an error that it raises, as in a schedule.
        keeps_results: Whether the results of the task are kept.
        claim: The slot that was claimed for its message.
    """

    task: str
    ticket: Ticket
    rules: SingletonOptions
    ttl: float
    linked: bool = False
    quiet: bool = False
    keeps_results: bool = True
    claim: Any = None

    @property
    def takes_part(self) -> bool:
        """Whether it may share the pending call of its key with others."""
        return self.rules.trails and not self.linked


# How a call ends


class Sent(NamedTuple):
    """
    Its message was sent.

    Args:
        answer: What the framework returned.
        holder: The holder of which the call is a duplicate, and after which it runs; None if it is no duplicate.
        effect: What happens to it, for people.
        unanswered: Why it was sent without a slot; None if it has one, or needs none.
    """

    answer: Any
    holder: Holder | None = None
    effect: str = ""
    unanswered: Exception | None = None


class Joined(NamedTuple):
    """
    It sends nothing, and has the result of another task.

    Args:
        task_id: That task.
        holder: The holder of which the call is a duplicate.
        effect: What happens to it, for people.
        result: The stored result of that task, where it was looked for.
    """

    task_id: str
    holder: Holder
    effect: str = JOINS
    result: Result | None = None


class Skipped(NamedTuple):
    """It sends nothing, and ends as revoked, because of *holder* and for this reason."""

    holder: Holder
    reason: str
    effect: str = "is skipped"


class Refused(NamedTuple):
    """Its caller gets an error about *holder*."""

    holder: Holder
    effect: str = "raises an error"


Verdict = Sent | Joined | Skipped | Refused


# A call that may be refused


def send(call: Call) -> Steps[Verdict]:
    """
    Take the slot and send the message, or answer as a duplicate.

    Raises:
        QuorumUnavailableError: Too few nodes answered, and ``on_unavailable`` is to raise.
    """
    if call.ticket.scope == RUNNING:
        return Sent((yield Send(call.ticket.without_slot)))
    try:
        if call.rules.trails:
            return (yield from _take_or_follow(call))
        holder = yield from _claim(call)
        return (yield from _answer(call, holder)) if holder else Sent((yield Send(call.ticket, call.claim)))
    except QuorumUnavailableError as error:
        if call.rules.without_nodes("enqueue") == "raise":
            raise
        unanswered = error
    # Not inside the handler: an error of the broker would be reported as a consequence of this one. Some nodes may
    # have created the record of a first message, so that message keeps its secret.
    ticket = call.ticket if call.ticket.number == 1 else call.ticket.without_slot
    return Sent((yield Send(ticket, call.claim)), unanswered=unanswered)


def _claim(call: Call) -> Steps[Holder | None]:
    """
    Claim the slot of the waiting message; return the holder if the slot is taken.

    Raises:
        QuorumUnavailableError: Too few nodes answered, or the message of the holder may not have been sent.
    """
    confirmation = ConfirmationWait()
    while (holder := (yield from _claim_once(call))) and holder.state is SlotState.CLAIMED:
        try:
            yield from confirmation.awaited(call.ticket.waiting, holder)
        except QuorumUnavailableError:
            # The slot may be free, and those away for which the nodes keep it. A countdown keeps them out for long.
            if holder.task_id or call.ttl > call.rules.queue_ttl:
                raise
            holder = yield from _claim_once(call, barge=True)
            if holder and holder.state is SlotState.CLAIMED:
                raise
            return holder
    return holder


def _claim_once(call: Call, adopt: str = "", barge: bool = False) -> Steps[Holder | None]:
    """Claim the slot, also from the holder with the secret *adopt*; return the holder if it is taken."""
    ticket = call.ticket
    about = (yield from _described(call)) if ticket.trailing else ""
    found = yield Claim(ticket, call.ttl, adopt, about, barge)
    if isinstance(found, Holder):
        return found
    call.claim = found
    return None


@dataclass(slots=True)
class ConfirmationWait:
    """
    The wait for a holder that has claimed a slot to confirm that its message was sent.

    Such a holder is no holder yet: its caller may have died. So whoever meets it looks again, for a second at most,
    until the message was sent or the slot is free.

    Args:
        until: When the wait ends, on the clock of the locks.
        pause: Seconds until the next look.
    """

    until: float = inf
    pause: float = FIRST_LOOK

    def awaited(self, name: str, holder: Holder) -> Steps[None]:
        """
        Wait before the next look at the lock *name*, which this holder has claimed.

        Raises:
            QuorumUnavailableError: The second is over.
        """
        now = yield Now()
        self.until = min(self.until, now + UNCONFIRMED)
        if now + self.pause > self.until:
            raise QuorumUnavailableError(name, nodes={str(holder): "may not have been sent"})
        yield Sleep(self.pause)
        self.pause = min(2 * self.pause, LONGEST_LOOK)


# A duplicate


def _answer(call: Call, holder: Holder) -> Steps[Verdict]:
    """Answer the caller of a duplicate according to ``on_duplicate``."""
    if (yield from _is_over(call, holder)) and (yield from _take_from(call, holder)):
        return Sent((yield Send(call.ticket, call.claim)))
    how = call.rules.on_duplicate
    # Nobody can catch an error in a schedule, which would log a traceback at every tick. The log line is enough.
    # The holder would not run the links of this call, and they would be lost without notice.
    if (how == "raise" and not call.quiet) or call.linked:
        return Refused(holder)
    if how != "skip" and holder.task_id and not (yield from _is_gone(call, holder)):
        return Joined(holder.task_id, holder)
    return Skipped(holder, f"Skipped: {printable(call.ticket.name)} is {holder}.")


def _is_over(call: Call, holder: Holder, pending: bool = False) -> Steps[bool]:
    """
    Return whether a holder that waits for its countdown has already ended because it was revoked.

    Other holders are not checked, because their slot is freed as soon as a worker gets the message. A *pending* call
    whose message is not confirmed yet may have a countdown; other holders are waited for until it is confirmed.
    """
    waits = holder.state is SlotState.QUEUED and (holder.retry_after or 0.0) > call.rules.queue_ttl
    if not (waits or (pending and holder.state is SlotState.CLAIMED)) or not holder.task_id:
        return False
    result: Result = yield ResultOf(holder.task_id)
    return result.state.final


def _is_gone(call: Call, holder: Holder) -> Steps[bool]:
    """
    Return whether a task whose slot is still held has ended and its result no longer exists.

    The slot is held from before the result is stored, so a missing result counts as gone only after some time.
    """
    if holder.state is not SlotState.HELD or not call.keeps_results or holder.over < STORED:
        return False
    result: Result = yield ResultOf(str(holder.task_id))
    return result.state is ResultState.ABSENT


def _take_from(call: Call, holder: Holder) -> Steps[bool]:
    """Take the slot from a waiting holder; return whether the holder was still waiting."""
    (seen,) = yield Look((call.ticket.waiting,))
    return seen.holder.waits_as(holder.task_id) and (yield from _claim_once(call, seen.secret)) is None


# A duplicate that may run after the holder: on_duplicate="rerun" and "replace"; see pending.py


def _take_or_follow(call: Call) -> Steps[Verdict]:
    """Take the slot if it is free and no call is pending; otherwise join the pending call."""
    # A later call would take it over without its links, so a linked call is never replaced.
    if call.rules.pends and not call.linked:
        call.ticket = replace(call.ticket, number=1)
    run, record = yield from _look(call)
    if call.takes_part and (yield from _has_these_arguments(call, record)):
        return _joined(run, record)
    free, holder = not run.value and record.free, run.holder if run.value else record.holder
    if free and not call.ticket.number:  # the slot of a run is not a record, so no turn is needed
        taken_by = yield from _claim(call)
        if not taken_by:
            return Sent((yield Send(call.ticket, call.claim)))
        free, holder = False, taken_by
    if not free and not call.takes_part:
        return (yield from _answer(call, holder))
    found = yield InTurn(call.ticket, _follow(call, None if free else holder), LONGEST_LINE)
    if isinstance(found, Holder):
        return (yield from _answer(call, found))
    return found or Sent((yield Send(call.ticket, call.claim)))


def _follow(call: Call, holder: Holder | None) -> Steps[Verdict | Holder | None]:
    """
    Take the slot, or come after *holder*, in the turn of the key.

    Returns:
        None if the slot was taken; else how the call ends, or the holder that it cannot come after.

    Raises:
        LockTakenError: The slot or the record has changed hands, so nobody knows what counts.
        QuorumUnavailableError: Too few nodes answered.
    """
    if holder is None:
        holder = yield from _claim(call)
    if holder is None or not call.takes_part:
        return holder
    run, record = yield from _look(call)
    record = yield from settled(call.ticket, record)
    if pending := _pending(call, record):
        if (yield from _has_these_arguments(call, record)):
            return _joined(run, record)
        return (yield from _take_over(call, run, record, pending))
    if record.value:  # the holder cannot be taken over, or is not a call of this task, so this call comes after it
        return Sent((yield Send(call.ticket.without_slot)), record.holder, FOLLOWS)
    # The attempt to take the slot decides whether there is a run; a value on single nodes does not.
    before = run.holder if run.value else (yield from _claim(call))
    if before is None:
        return Sent((yield Send(call.ticket, call.claim)))
    if run.value or not call.ticket.number:
        call.ticket = replace(call.ticket, number=1)
        if not (yield from _claim(call)):
            return Sent((yield Send(call.ticket, call.claim)), before, FOLLOWS)
    raise LockTakenError(call.ticket.waiting)


def _take_over(call: Call, run: Seen, seen: Seen, record: Record) -> Steps[Sent]:
    """
    Send the message that counts from now on, under the id of the pending call; only in this call's turn.

    Raises:
        LockTakenError: The record has changed since it was read, or its message was discarded.
        QuorumUnavailableError: Too few nodes answered.
    """
    call.ticket = replace(call.ticket, number=record.number + 1)
    ticket = replace(call.ticket, task_id=record.task_id)
    # First, so that there is always a message that counts: until the next line, the previous one does.
    answer = yield Send(ticket)
    # A delayed message may arrive after the one that counts, so the record lasts as long as the longest-lived one.
    yield write(ticket, max(call.ttl, seen.left), (yield from _described(call)), adopt=seen.secret)
    effect = f"gives its arguments to the waiting task {record.task_id}"
    return Sent(answer, run.holder if run.value else seen.holder, effect)


def _joined(run: Seen, record: Seen) -> Joined:
    """Return the answer to a call whose arguments are those of the pending call, so that no message is needed."""
    waiting = str(record.holder.task_id)
    effect = f"sends nothing, and has the result of the waiting task {waiting}"
    return Joined(waiting, run.holder if run.value else record.holder, effect)


def _look(call: Call) -> Steps[tuple[Seen, Seen]]:
    """
    Return the holder of the slot that the pending call comes after, and the pending call.

    A call that was revoked before its time is out of the way: its callers know that, and no longer wait for it.

    Raises:
        QuorumUnavailableError: Too few nodes answered, or the message of the holder may not have been sent.
    """
    names, confirmation = call.ticket.places(trails=True), ConfirmationWait()
    while True:
        slots = []
        for name, seen in zip(names, (yield Look(tuple(names))), strict=True):
            slots.append((yield from _unless_over(call, name, seen)))
        run = next((seen for seen in slots[:-1] if seen.value), FREE)
        if run.holder.state is not SlotState.CLAIMED:
            return run, slots[-1]
        yield from confirmation.awaited(call.ticket.waiting, run.holder)


def _unless_over(call: Call, name: str, seen: Seen) -> Steps[Seen]:
    """Return what was seen under a name; if that was revoked before its time, free it."""
    if not (yield from _is_over(call, seen.holder, pending=name == call.ticket.following)):
        return seen
    yield from discard_seen(name, seen, call.ticket, call.rules)
    return FREE


def _pending(call: Call, record: Seen) -> Record | None:
    """Return the pending call if it is one of this task, so that this call can take it over."""
    found = record.record
    return found if found and found.task == call.task[:MAX_LABEL] else None


def _has_these_arguments(call: Call, record: Seen) -> Steps[bool]:
    """
    Return whether a message with these arguments was sent for the pending call.

    It counts as none with ``replace``, which also moves the time.
    """
    found = _pending(call, record)
    sent = record.holder.state is SlotState.QUEUED
    if not found or not sent or call.rules.on_duplicate == "replace":
        return False
    return bool(found.digest == (yield Digest()))


def _described(call: Call) -> Steps[str]:
    """Return what the record says of a pending call: the number of the message that counts, and its arguments."""
    return f"{call.ticket.number}.{(yield Digest())}"


# A call whose id is known elsewhere: a worker decides


def send_owned(call: Call, run: Execution | None, retries: int) -> Steps[Sent]:
    """
    Send the message of a call whose id was given; if it continues a run, it gets the slot of that run.

    Args:
        call: The call.
        run: The run in progress in this thread; None if there is none.
        retries: How often the task was retried before.
    """
    if run and (run.over or run.ticket.task_id != call.ticket.task_id):
        run = None  # its slot belongs to another message, or this message does not continue its work
    if run and not run.ticket.name:
        return Sent((yield Send(replace(call.ticket, name="", secret=""))))
    if not run and not retries:
        return Sent((yield Send(call.ticket.without_slot)))
    try:
        has_slot = yield from (_take_along(call, run) if run else _take_kept(call))
    except (LockTakenError, QuorumUnavailableError):
        has_slot = False
    return Sent((yield Send(call.ticket if has_slot else call.ticket.without_slot, call.claim)))


def _take_along(call: Call, run: Execution) -> Steps[bool]:
    """Give the slot of the run to the message, or take a new one; return whether the message has one."""
    ticket, slot = call.ticket, run.slot
    if slot and slot.name == ticket.waiting:
        call.claim = yield from give_over(run, ticket, call.ttl)
        return True
    if slot and slot.name == ticket.running:
        # Before the message is sent, whose run would otherwise find the slot taken.
        yield from note_sending(run)
        yield from end(run, hold=False)
    return bool(ticket.waiting) and (yield from _claim_once(call)) is None


def _take_kept(call: Call) -> Steps[bool]:
    """Take the slot that is free, or that a worker has kept for this very message after the death of its child."""
    if not call.ticket.waiting:
        return False
    (seen,) = yield Look((call.ticket.waiting,))
    adopt = seen.secret if seen.holder.waits_as(call.ticket.task_id) else ""
    return (yield from _claim_once(call, adopt)) is None


# A row: its id is known only when it is stored


def store(call: Call) -> Steps[Verdict]:
    """
    Take the slot and store the row, or answer as a duplicate.

    Raises:
        QuorumUnavailableError: Too few nodes answered, and ``on_unavailable`` is to raise.
    """
    if not call.ticket.waiting:  # any number may wait
        return Sent((yield Send(call.ticket)))
    confirmation = ConfirmationWait()
    try:
        while (taken := (yield from _claim_for_row(call))) and taken[0].state is SlotState.CLAIMED:
            yield from confirmation.awaited(call.ticket.waiting, taken[0])
    except QuorumUnavailableError as error:
        if call.rules.without_nodes("enqueue") == "raise":
            raise
        unanswered = error
    else:
        return _answer_with_row(call, *taken) if taken else Sent((yield Send(call.ticket, call.claim)))
    return Sent((yield Send(call.ticket)), unanswered=unanswered)


def _claim_for_row(call: Call) -> Steps[tuple[Holder, Result] | None]:
    """Claim the slot; return the holder and its row if the slot is taken."""
    holder, row = yield from _claim_or_find(call)
    waits = holder and holder.state is SlotState.QUEUED and holder.task_id
    if holder and waits and (yield from _is_row_over(call, holder, row)):
        (seen,) = yield Look((call.ticket.waiting,))
        holder, row = yield from _claim_or_find(call, seen.secret if seen.holder.waits_as(holder.task_id) else "")
    if holder and holder.state is SlotState.CLAIMED:
        holder, row = yield from _claim_or_own(call, holder, row)
    return (holder, row) if holder else None


def _claim_or_find(call: Call, adopt: str = "") -> Steps[tuple[Holder | None, Result]]:
    """Claim the slot, also from the holder with the secret *adopt*; return the holder, and its row."""
    holder = yield from _claim_once(call, adopt)
    row = (yield ResultOf(holder.task_id)) if holder and holder.task_id else Result(ResultState.GONE)
    return holder, row


def _claim_or_own(call: Call, holder: Holder, row: Result) -> Steps[tuple[Holder | None, Result]]:
    """Name the row of the holder if this same transaction stored it; take the slot over if it was rolled back."""
    (seen,) = yield Look((call.ticket.waiting,))
    task_id = yield StoredHere(seen.secret)
    if not task_id:
        return holder, row
    stored: Result = yield ResultOf(task_id)
    if stored.state is ResultState.UNKNOWN:
        return holder, row
    if stored.state is ResultState.GONE:
        return (yield from _claim_or_find(call, seen.secret))
    return replace(holder, task_id=task_id, state=SlotState.QUEUED), stored


def _is_row_over(call: Call, holder: Holder, row: Result) -> Steps[bool]:
    """Return whether a slot waits for a row that is gone, or that has left the queue without the slot."""
    if row.state is not ResultState.UNDERWAY:
        return row.state is ResultState.GONE or row.state.final
    if call.ticket.scope != BOTH:
        return call.ticket.scope == WAITING and not call.rules.hold_for
    # It still waits, in its worker, if a process shows that it has the row, and others have the slot of its run.
    ticket = replace(call.ticket, task_id=str(holder.task_id))
    alive, *runs = yield Look((ticket.alive, *ticket.runs))
    return alive.free or any(run.free or run.holder.task_id == ticket.task_id for run in runs)


def _answer_with_row(call: Call, holder: Holder, row: Result) -> Verdict:
    """Return the answer to a duplicate, which has the row's result if there is one."""
    if call.rules.on_duplicate == "raise":
        return Refused(holder)
    if call.rules.on_duplicate == "join" and holder.task_id and row.state is not ResultState.GONE:
        return Joined(holder.task_id, holder, result=row)
    return Skipped(holder, f"Skipped: {printable(call.ticket.name)} is {holder}.")
