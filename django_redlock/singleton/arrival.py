"""
Decide about a message in a worker: it runs, ends without a run, or goes back to the broker (internal).

:func:`arrive` decides that for a message of a broker, and :func:`occupy` for a row of Django's tasks, which nobody can
put back. Read from :func:`arrive` downwards: steps 1, 2 and 4 are taken in this order, and each returns a verdict, or
None to go on. From any of them the message may give way to another holder (3), do without somebody that does not answer
(5), or go back to the broker (6). If the broker refuses it, it fails; with late acknowledgement, the broker delivers
this same message again.

A *slot* is a lock. A message's ticket has the names of its slots:

* ``name`` is that of the key; empty if the call was sent to run without a slot, ``singleton=False``.
* ``running`` is that of its run; empty with ``scope="until_executing"``, whose runs have none.
* ``waiting`` is the one that it has held, under ``secret``, since it was sent; it may be the same as ``running``.

:class:`~.questions.Take` asks for the slot ``running``. If that is the slot that the message has held until now, it
passes to the run, under a secret of its own. If it is free, the message takes it: one whose slot has lapsed runs, too.
If another holder has it, or a run of this same message, it is refused, and step 3 decides. A slot ``waiting`` that is
another one than ``running`` keeps no message from its run, whoever has it by now.

A slot is *claimed* for a moment until its message was sent, and *held* when its run is over. A run that retries leaves
the slot to the retry, under a new secret, before it sends it; so the retry does not meet that run. A *trailing* ticket
is that of a pending call, see :mod:`.pending`; once that has begun, its ticket, and that of its retry, is as any other.
A message that waits for its slot has a place in the *line* of that lock, where its ``stamp`` says who came first; see
:mod:`.line`. A place that has lapsed is taken anew, by the same stamp.

A ``Seen`` has the nodes' replies about a lock: its ``value``, ``holder`` and ``owner`` are known to a quorum, its
``sightings`` to some node at least. A result is *silent* if its store does not answer: it is then neither known, final
nor done. It is *known* if the store has answered, *final* if the task has ended, and *done* if it has ended in another
way than by a failure, which its framework might repeat; so a revoked task is done. A run whose message may be delivered
again leaves a note when its body has returned (it is done), or when it has sent a retry or a replacement (another one
goes on); none when it failed.
"""

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple, cast

from ..core.names import GOES_ON, NOTE, SENDS
from ..core.protocol import QUEUE_CAP, Outcome, without_secrets
from ..exceptions import LockLostError, LockTakenError, QuorumUnavailableError, printable
from .ending import Execution, end, free_waiting, give_back
from .line import GRACE, IDLE, PERMITS, SHORTEST, SOON, Expected, Wait
from .options import Return, SingletonOptions
from .pending import LONGEST_LINE, LONGEST_PAUSE, begin, discard, keep, look_up
from .questions import (
    Free,
    InTurn,
    Kept,
    LeaveLine,
    Length,
    Look,
    NotSent,
    Now,
    Put,
    Report,
    Result,
    ResultOf,
    ResultState,
    Send,
    ShowLife,
    Sleep,
    Slot,
    Steps,
    StoreOutcome,
    Take,
    Wall,
)
from .slot import CLAIM, FREE, DuplicateTask, Holder, Seen, SlotState
from .ticket import LIFETIME, Ticket

FIRST_WAIT = 1.0  # seconds for which a message is put back at least, if something does not answer
PREFETCHED = 1.0  # seconds after which the broker may have given a message that this worker keeps to another one, too
LONG_KEPT = 60.0  # seconds after which it may well have done so: few brokers have a shorter visibility timeout
RESULT_TRIES = 10  # how often a message is put back, for five minutes in all, before it does without the result store
REMEMBERED = 60.0  # seconds for which a note records that a message is done, if its stored result records it too
ROW_WAIT = 30.0  # seconds after which a row that waits for its slot looks who has it
KNOWN = 30 * 86_400.0  # seconds after the end of its slot for which a row is known to be cancelled
ROW_PAUSE = 0.5  # seconds between two attempts of a row while the nodes do not answer, on average
CONSEQUENCES = {
    "wait": "is put back to wait for its slot",
    "follow": "is put back to wait for the result of that task",
    "drop": "is dropped",
    "fail": "fails",
    "return": "ends with a given value, without a run",
}

log = logging.getLogger("django_redlock")


@without_secrets
@dataclass(slots=True)
class Message:
    """
    A message in a worker, and what it has so far.

    Args:
        ticket: The information about its slot; made from its arguments if it carried none.
        rules: The options of its task.
        carried: Whether it carried its ticket.
        secret: The secret that the worker has drawn for the run; empty draws one.
        retries: How often the task was retried before.
        replaced: How often the task has replaced itself, each time by a message that has not been retried.
        redelivered: Whether the broker says that it delivers the message again.
        late: Whether it is acknowledged after its run, so that the broker delivers it again if the worker dies.
        delayed: Whether it was to run at a later time.
        inline: Whether it runs in the process of its caller: nothing can be put back, or wait.
        stores: Whether its result is stored.
        lifetime: For how long its slot lasts while it waits, in seconds.
        kept: For how long the worker had it when it arrived here, in seconds.
        error: The class of the error about another holder.
        slot: The slot of its run, once it has that.
        holder_known: Whether another holder is known to have that slot.
        copy_began: Whether it belongs to a pending call, and a copy of it has begun a run.
        is_back: Whether it has gone back to the broker.
        ahead: How many waiters came before it when the slot of its run was refused last; None if it waits in no line.
        free_but_queued: Whether that slot was free then, but for them.
    """

    ticket: Ticket
    rules: SingletonOptions
    carried: bool = True
    secret: str = ""
    retries: int = 0
    replaced: int = 0
    redelivered: bool = False
    late: bool = False
    delayed: bool = False
    inline: bool = False
    stores: bool = True
    lifetime: float = 0.0
    kept: float = 0.0
    error: type[DuplicateTask] = DuplicateTask
    slot: Slot | None = None
    holder_known: bool = False
    copy_began: bool = False
    is_back: bool = False
    ahead: int | None = None
    free_but_queued: bool = False

    @property
    def id(self) -> str:
        """The id of its task."""
        return self.ticket.task_id

    @property
    def attempt(self) -> str:
        """Which attempt of its task it is; a copy of the message is the same one."""
        return f"{self.retries}.{self.replaced}" if self.replaced else str(self.retries)

    @property
    def came_again(self) -> bool:
        """Whether the broker has marked it as delivered again, now or before it was put back."""
        return self.ticket.redelivered or self.redelivered

    @property
    def is_copy(self) -> bool:
        """Whether it is known that another delivery of it came before."""
        return self.came_again or bool(self.ticket.watch)

    @property
    def unfinished(self) -> bool:
        """
        Whether a run of it may have begun and not ended, so that its caller was promised a run.

        Then it waits for another run whatever ``on_overlap`` and ``wait_for`` say, and follows no other task.
        """
        return (self.is_copy or self.retries > 0) and not self.inline

    @property
    def waits_in_line(self) -> bool:
        """Whether it has a place in the queue of its slot."""
        return self.ticket.stamp > 0

    @property
    def returns(self) -> bool:
        """Whether it returns to the broker if its process is stopped."""
        return self.late and self.rules.redelivery != "drop" and not self.inline

    def run(self, still_waiting: bool = False, since: float = 0.0) -> Execution:
        """Return its run; *still_waiting* if the message still holds the slot of a waiting message."""
        ticket, note, remembered = self.ticket, "", REMEMBERED
        # A delayed message may have waited for longer than the broker's visibility timeout, and so may one that the
        # worker kept behind other runs.
        waited = (self.delayed and not ticket.tries) or (self.kept > LONG_KEPT and not self.stores)
        if ticket.name and not self.inline and (self.late or waited or self.is_copy):
            note = ticket.done(self.attempt)
            remembered = REMEMBERED if self.stores else max(REMEMBERED, self.rules.queue_ttl)
        about: Any = {"seen": self.stores, "note": note, "remembered": remembered, "returns": self.returns}
        return Execution(ticket, self.rules, self.slot, since, still_waiting, **about)


# The verdicts


class Run(NamedTuple):
    """Its body runs."""

    execution: Execution


class Answer(NamedTuple):
    """It ends with this value, without a run."""

    value: Any


class Fail(NamedTuple):
    """It fails with this error, without a run."""

    error: BaseException


class Revoke(NamedTuple):
    """It ends as revoked, without a run, for this reason; *holder* has its slot, if that is the reason."""

    reason: str
    holder: Holder | None = None


class PutBack(NamedTuple):
    """
    It is back at the broker.

    Args:
        reason: Why, for people.
        pause: Seconds until it is delivered.
        unanswered: The error of the nodes, if the task is to show that it is tried again.
        unsent: The error of the broker that did not accept it, and so has to deliver this same message again.
    """

    reason: str
    pause: float
    unanswered: Exception | None = None
    unsent: Exception | None = None


class Leave(NamedTuple):
    """
    It ends without a word: its outcome is stored, or is that of another message.

    Args:
        reason: Why, for people.
        newer: Whether another message of the same call has newer arguments.
    """

    reason: str
    newer: bool = False


Verdict = Run | Answer | Fail | Revoke | PutBack | Leave


def arrive(message: Message) -> Steps[Verdict]:
    """Decide what happens to a message of a broker; when this returns, it has its slot, is back, or has none."""
    if not message.ticket.name:  # it was sent to run without a slot
        return Run(message.run())
    verdict = yield from _decide(message)
    if isinstance(verdict, Leave) and verdict.newer:  # nothing is to be noted, and no turn is needed
        yield Free(message.ticket.waiting, message.ticket.secret)
    elif not isinstance(verdict, (Run, PutBack)):
        yield from _leave_nothing(message)
    return verdict


def _decide(message: Message) -> Steps[Verdict]:
    was_pending = message.ticket.trailing
    try:
        verdict = (yield from _look_at_notes(message)) or (
            yield from (_take_pending(message) if was_pending else _take(message))
        )
    except QuorumUnavailableError as error:
        return (yield from _without_nodes_before(message, error))
    if verdict:
        return verdict
    try:
        verdict = yield from _look_once_more(message, was_pending)
    except (QuorumUnavailableError, LockLostError) as error:
        return (yield from _without_nodes_after(message, error))
    if verdict:  # also if it was put back: it takes the slot anew when it arrives again
        yield from end(message.run(), hold=False)
        message.slot = None
        return verdict
    yield from _stop_watching(message)
    return Run(message.run(since=(yield Now())))


# 1. Was it answered meanwhile, or must it not run a second time?


def _look_at_notes(message: Message) -> Steps[Verdict | None]:
    ticket = message.ticket
    verdict = None
    if not ticket.trailing:  # else messages with newer arguments have the same id, so it is asked in their turn
        # Before it takes the slot. Otherwise two copies could wait for each other for ever.
        verdict = yield from _leave_if_done(message)
    if not verdict and ticket.joined and not message.unfinished:
        verdict = yield from _follow(message, (yield ResultOf(ticket.joined)))
    if verdict:
        return verdict
    if message.rules.redelivery == "drop" and message.is_copy:
        (begun,) = yield Look((ticket.begins(message.attempt),))
        if begun.value:
            return (yield from _end_copy(message))
    return None


def _leave_if_done(message: Message, may_be_copy: bool = False) -> Steps[Verdict | None]:
    """
    End a copy of a message whose work is done.

    Only a message that was delivered again, was put back before, or may be a copy is asked about. The store is not
    asked about a message whose result is not stored: then only the note counts.

    ====================  ==========================================  ===========================
    a note says           and the store says                          the message
    ====================  ==========================================  ===========================
    it is done            the same, or nobody stores results          ends
    it is done            nothing yet, a failure, or it is silent     is put back until the note ends
    it sends another one  (it is not asked)                           is put back until the note says more, or ends
    another one goes on   (it is not asked)                           ends
    nothing               it is done                                  ends
    nothing               it is silent                                is put back, if it is a copy
    nothing               nothing, or a failure                       goes on
    ====================  ==========================================  ===========================

    Args:
        message: The message.
        may_be_copy: Whether it may be one although the broker has not marked it: its worker has had it for a while, or
            a run of it has begun.
    """
    ticket, copy = message.ticket, message.is_copy
    done = Leave(f"{message.id} was delivered a second time, and is already done.")
    if not (copy or ticket.tries or may_be_copy) or message.inline:
        return None
    (note,) = yield Look((ticket.done(message.attempt),))
    owner = note.owner
    if owner and owner.state == SENDS:
        return (yield from _await_outcome(message))
    if owner and owner.state == GOES_ON:
        return done
    if not message.stores:
        return done if owner else None
    # The store knows only the id. Of a message that is not a copy, the id is its alone if its ticket has a secret: then
    # this package has sent it.
    if not (owner or copy or (may_be_copy and ticket.secret)):
        return None
    stored: Result = yield ResultOf(message.id)
    if owner:  # it is done
        is_stored = stored.state.done or stored.state is ResultState.UNKNOWN
        return done if is_stored else (yield from _await_outcome(message))
    if stored.state is ResultState.SILENT:
        # Nothing suggests that a message is done that is no copy: a worker that runs a copy leaves a note.
        return (yield from _without_results(message, stored.value)) if copy else None
    return done if stored.state.done else None


def _follow(message: Message, other: Result) -> Steps[Verdict | None]:
    """End a message that waited for the result of another task as that one has ended; without a result, it goes on."""
    if other.state is ResultState.SILENT:
        return (yield from _without_results(message, other.value))
    if other.state is ResultState.SUCCESS:
        return (yield from _store_outcome(message, Answer(other.value)))
    if other.state.final:
        return (yield from _store_outcome(message, Fail(other.value)))
    return None


def _end_copy(message: Message) -> Steps[Verdict]:
    """End a message that was delivered a second time and must not run again, once its run has no slot any more."""
    if holder := (yield from _live_run(message.ticket)):
        message.holder_known = True
        return (yield from _watch(message, holder))
    return (yield from _end_without_a_run(message))


def _live_run(ticket: Ticket, secret: str = "") -> Steps[Holder | None]:
    """Return the run of this same message that has the slot, under another *secret*; None if there is none."""
    if not ticket.running:
        return None
    holders = [seen.holder for seen in (yield Look(ticket.runs)) if not secret or seen.secret != secret]
    mine = [each for each in holders if each.task_id == ticket.task_id and each.state is SlotState.RUNNING]
    return next(iter(mine), None)


def _end_without_a_run(message: Message) -> Steps[Verdict]:
    """Revoke the task if no run has stored a result."""
    reason = f"Task {printable(message.id)} was delivered a second time, and is dropped."
    stored: Result = yield ResultOf(message.id)
    if stored.state is ResultState.SILENT:
        return (yield from _put_off(message, stored.value))
    if not stored.state.final:
        log.info("%s", reason)
        with suppress(NotImplementedError):  # nobody can store it
            return (yield from _store_outcome(message, Revoke(reason)))
    return Leave(reason)


# 2. It takes its slot


def _take(message: Message) -> Steps[Verdict | None]:
    """Take the slot, if runs have one; if another task has it, end the message or put it back."""
    ticket, rules = message.ticket, message.rules
    if not ticket.running:
        if not ticket.secret and not message.unfinished:  # else it continues even if another call is waiting
            for waiting in (yield Look(tuple(ticket.places(rules.trails)))):
                # An eager retry, or a replacement, comes after a run of its own, whose slot may be held.
                goes_on = (message.inline or message.replaced) and waiting.holder.task_id == message.id
                if waiting.value and not goes_on:
                    return (yield from _give_way(message, waiting.holder))
        return None
    yield from _join_line(message)
    ticket = message.ticket
    refusal = yield from _take_running(message, ticket)
    if not refusal:
        return None
    holder, message.holder_known = _holder(message, refusal), True
    if not message.carried and ticket.waiting:  # the slot that waits may be its own
        (seen,) = yield Look((ticket.waiting,))
        if seen.holder.waits_as(message.id):
            message.ticket = ticket = replace(ticket, secret=seen.secret)
            if not (yield from _take_running(message, ticket)):
                return None
    if message.waits_in_line:
        refusal = yield from _wait_in_process(message, refusal, holder)
        if not refusal:
            return None
        holder = _holder(message, refusal)
    return (yield from _give_way(message, holder))


def _wait_in_process(message: Message, refusal: LockTakenError, holder: Holder) -> Steps[LockTakenError | None]:
    """
    Wait a little for the slot if it is the message's turn in a moment; return the last error if it is still taken.

    If the slot was free when the message was put back, is free now and a moment later, and at least as many come first
    as then, all of them are away: they have expected longer runs. Nobody knows for how long, so this message overtakes
    them. Not so with permits: one may be free while the first in the line waits until all of them are.
    """
    ahead, ticket = message.ahead or 0, message.ticket
    is_short = (yield from _time_to_wait(message, holder)).is_short
    # *behind* is how many came first when it was put back, or -1 if the slot was not free then.
    they_are_away = message.free_but_queued and 0 <= ticket.behind <= ahead and ticket.limit == 1
    if not (is_short or they_are_away):
        return refusal
    again = yield from _take_running(message, ticket, wait=SOON if is_short else IDLE)
    if again and they_are_away and message.free_but_queued and (message.ahead or 0) >= ahead:
        again = yield from _take_running(message, ticket, barge=True)
        if not again:  # only the first in the line leaves it with its slot
            yield LeaveLine(ticket)
    return again


def _join_line(message: Message) -> Steps[None]:
    """
    Give a message that will wait for its slot its place in the line of the slot, in the order of arrival at workers.

    The message of a pending call needs none: nobody else waits with it.
    """
    overlap = message.rules.overlap_of(message.ticket.scope)
    if message.waits_in_line or not (message.unfinished or overlap in ("wait", "follow")) or message.inline:
        return
    # Both at this moment: a process may take long to prepare its first message.
    came = (yield Wall()) - ((yield Kept()) or 0.0)
    message.ticket = replace(message.ticket, stamp=int(came * 1e6))


def _take_running(
    message: Message, ticket: Ticket, wait: float = 0.0, away: float = GRACE, barge: bool = False
) -> Steps[LockTakenError | None]:
    """
    Take the slot for the run; return the error that names the holder if it is taken.

    A message that waits keeps its place in the line for *away* seconds then.

    Only the slots of runs exclude each other. So a waiting message whose slot no quorum of the nodes has keeps nobody
    from running: the entries of that slot are freed. If that message still comes, it runs as well.
    """
    take = Take(ticket, message.secret, message.inline, wait, away if message.waits_in_line else 0.0, barge)
    try:
        try:
            message.slot = yield take
        except QuorumUnavailableError:
            if ticket.limit > 1:  # no message waits with a permit
                raise
            (seen,) = yield Look((ticket.running,))
            if not seen.split or seen.is_changing or not all(remains.holder.waits for remains in seen.split):
                raise
            for remains in seen.split:
                yield Free(ticket.running, remains.secret)
            message.slot = yield take
    except LockTakenError as refusal:
        message.ahead, message.free_but_queued = refusal.ahead, refusal.queued
        return refusal
    return None


def _holder(message: Message, refusal: LockTakenError) -> Holder:
    """
    Return the holder in the way.

    While a slot changes hands, the nodes name several. A message that waits in any case need not know for whom.

    Raises:
        QuorumUnavailableError: It depends on the holder what happens, and the nodes do not agree on one.
    """
    overlap = message.rules.overlap_of(message.ticket.scope)
    waits = message.ticket.trailing or message.unfinished or overlap == "wait"
    if waits and not refusal.agreed and not message.inline:
        return Holder(None, SlotState.CLAIMED, refusal.retry_after)
    return Holder.of(refusal)


def _time_to_wait(message: Message, holder: Holder) -> Steps[Wait]:
    """Return how long the message has to wait until it is its turn: as long as the runs before its own, as expected."""
    ticket, ahead = message.ticket, message.ahead
    if ahead is None:  # its line is full, or it waits alone, as the message of a pending call does
        ahead = QUEUE_CAP if message.waits_in_line else 0
    is_claim = holder.state is SlotState.CLAIMED and holder.task_id  # the message is sent, or the claim lapses, soon
    is_other = holder.state is SlotState.HELD and not holder.task_id  # no task, or runs under another limit
    if is_claim or is_other:  # the length of the runs of its task tells nothing
        return Wait(0.0, ahead, ticket.waited, None, limit=ticket.limit)
    known: Expected = yield Length(ticket.running, holder.length, holder.since)
    minimum, now = message.rules.minimum, (yield Wall())
    length = max(known.seconds, minimum)
    holder, looked = yield from _first_to_end(ticket, holder, length, now)
    lasted, left = _progress(holder, now)
    return Wait(length, ahead, ticket.waited, lasted, left, ticket.limit, looked, known.sure)


def _first_to_end(ticket: Ticket, holder: Holder, length: float, now: float) -> Steps[tuple[Holder, int]]:
    """
    Return whose permit is probably free first, of as many permits as the number says.

    The *holder* has the permit that was tried last.
    """
    if ticket.limit == 1:
        return holder, 1

    def expected(holder: Holder) -> tuple[float, float]:
        lasted, left = _progress(holder, now)
        if lasted is not None and lasted < length:
            left = length - lasted
        return inf if left is None else left, -(lasted or 0.0)

    with suppress(QuorumUnavailableError):
        seen = yield Look(ticket.runs[:PERMITS])
        # The first waiter is away until it expects a free permit. Without an expectation, it comes back often.
        if length and any(each.free for each in seen):
            return Holder(None, SlotState.CLAIMED, None), len(seen)
        known = [each.holder for each in seen if each.value and each.holder.task_id and not each.holder.waits]
        return min(known or [holder], key=expected), len(seen)
    return holder, 1


def _progress(holder: Holder, now: float) -> tuple[float | None, float | None]:
    """Return for how long the run of a holder has lasted, and when its slot is free if it is over; None if unknown."""
    if holder.state is SlotState.HELD:
        return None, holder.retry_after
    return (max(now - holder.since, 0.0) if holder.since else None), None


# ... or the slot of its pending call, which newer messages may have taken over


def _take_pending(message: Message) -> Steps[Verdict | None]:
    """Take the slot for the message of a pending call, or leave it to the one that counts; see :mod:`.pending`."""
    # Most older messages end here, without waiting for nodes that are away: they are superseded from the moment at
    # which a newer one is known until long after that has ended.
    if (yield from look_up(message.ticket)).is_superseded():
        return _superseded(message)
    # A lock that another one takes meanwhile makes the turn fail, as if the nodes had not answered.
    found = yield InTurn(message.ticket, _begin(message), LONGEST_LINE)
    if not isinstance(found, Holder):
        return found  # type: ignore[no-any-return]
    if not message.copy_began and found.task_id == message.id:  # a run with older arguments, not a copy of this one
        found = Holder(None, found.state, found.retry_after)
    return (yield from _give_way(message, found))


def _begin(message: Message) -> Steps[Verdict | Holder | None]:
    """Begin the run of a pending call in the turn of its key; return None, or a verdict, or the holder before it."""
    pending = yield from look_up(message.ticket)
    if pending.is_superseded():
        return _superseded(message)
    if pending.has_begun():
        # It is a copy, though the broker may not have marked it: another worker ran it, or discarded it without a run.
        message.copy_began, message.ticket = True, replace(message.ticket, redelivered=True)
        if verdict := (yield from _leave_if_done(message, may_be_copy=True)):
            return verdict
        if message.rules.redelivery == "drop":
            return (yield from _end_copy(message))
    if holder := (yield from _take_for_pending(message)):
        message.holder_known = True
        if not message.copy_began:
            yield from keep(pending, message.lifetime)
        return holder
    try:
        yield from begin(pending, message.rules)  # from here on, no later call takes it over
    except (LockTakenError, QuorumUnavailableError):
        yield from end(message.run(), hold=False)
        message.slot = None
        raise
    message.ticket = message.ticket.begun
    if not message.ticket.running and message.rules.minimum:
        yield from free_waiting(message.ticket, message.rules)  # so that its slot is held before the turn ends
    return None


def _superseded(message: Message) -> Leave:
    return Leave(f"Another message of {message.id} has newer arguments.", newer=True)


def _take_for_pending(message: Message) -> Steps[Holder | None]:
    """Take the slot of the run of a pending call, if runs have one; return the holder that comes first."""
    ticket = message.ticket.begun
    if ticket.queued != ticket.running and not message.copy_began:
        (first,) = yield Look((ticket.queued,))  # a retry, a call that has links, or a run that is over but held
        if first.value:
            return cast(Holder, first.holder)
    if not ticket.running:
        return None
    if not message.copy_began:
        # Nobody can have left the slot of a run to this message yet. If it named its secret all the same, a node that
        # does not know of the present run would grant the slot in place of that secret, and remember it as replaced.
        # Then it would refuse the record, which has the same secret, and an older message would run.
        ticket = ticket.without_slot
    refusal = yield from _take_running(message, ticket)
    return _holder(message, refusal) if refusal else None


# 3. Another holder has the slot: another run, or an earlier delivery of this same message


def _give_way(message: Message, holder: Holder) -> Steps[Verdict | None]:
    """
    End the message or put it back, because *holder* has its slot; None if it got the slot after all.

    A message whose run may have begun and not ended waits, whatever ``on_overlap`` and ``wait_for`` say: its caller was
    promised the run, and only the death of a process kept that from its end.
    """
    if holder.task_id == message.id and not message.inline:
        return (yield from _watch(message, holder))
    # A holder whose message may not have been sent is no reason to drop this one: it lapses in a moment.
    ticket = message.ticket
    waits = ticket.trailing or message.unfinished or holder.state is SlotState.CLAIMED
    how = "wait" if waits else message.rules.overlap_of(ticket.scope)
    if not ticket.waited and not ticket.trailing:  # a pending call is expected to wait
        strategy = str(how)
        what = CONSEQUENCES["drop" if message.inline and strategy in ("wait", "follow") else strategy]
        yield Report(holder, strategy, f"task {ticket.task_id} {what}")
    if how == "fail":
        return (yield from _store_outcome(message, Fail(holder.error(message.error, ticket.name))))
    if isinstance(how, Return):
        return (yield from _store_outcome(message, Answer(how.value)))
    if how in ("wait", "follow") and not message.inline:
        return (yield from _wait(message, holder, follow=how == "follow"))
    # on_overlap="drop"
    return (yield from _store_outcome(message, Revoke(f"Skipped: {printable(ticket.name)} is {holder}.", holder)))


# 4. It has the slot. Has anything changed since the first questions?


def _look_once_more(message: Message, was_pending: bool) -> Steps[Verdict | None]:
    """
    Ask once more whether it is done, now that no other run can begin.

    Raises:
        LockLostError: The questions took longer than the lease.
        QuorumUnavailableError: Too few nodes answered.
    """
    if message.copy_began or not was_pending:
        kept = yield Kept()
        if verdict := (yield from _leave_if_done(message, may_be_copy=kept is None or kept > PREFETCHED)):
            return verdict
        if verdict := (yield from _leave_to_its_run(message)):
            return verdict
        if verdict := (yield from _leave_if_begun(message)):
            return verdict
    if message.slot:
        message.slot.ensure()
    if not was_pending:
        yield from free_waiting(message.ticket, message.rules)
    return None


def _leave_to_its_run(message: Message) -> Steps[Verdict | None]:
    """Put a copy back that has a permit while the run of the first delivery has another one."""
    if not message.slot or message.ticket.limit == 1 or not (message.late or message.is_copy):
        return None
    holder = yield from _live_run(message.ticket, message.slot.secret)
    if not holder:
        return None
    yield from end(message.run(), hold=False)
    message.slot = None
    return (yield from _watch(message, holder))


def _leave_if_begun(message: Message) -> Steps[Verdict | None]:
    """Note that the run begins, for ``redelivery="drop"``; end the message if it had begun before."""
    if message.rules.redelivery != "drop" or message.inline:
        return None
    try:
        ttl = max(LONGEST_PAUSE, message.rules.queue_ttl)
        yield Put(message.ticket.begins(message.attempt), ttl, NOTE, ref=message.id)
    except LockTakenError:  # if runs have a slot, this message has it now, so no other run of it is alive
        return (yield from _end_without_a_run(message))
    return None


# 5. The nodes or the result store do not answer


def _without_nodes_before(message: Message, error: QuorumUnavailableError) -> Steps[Verdict]:
    """
    Do what ``on_unavailable`` says for a run, because the nodes do not answer before the message has its slot.

    ========  ==============================================  =======================================
    option    before it has its slot                          after that
    ========  ==============================================  =======================================
    "retry"   it is put back                                  its slot waits for it, and it is put back
    "run"     it runs without a slot; if another holder was   it runs under its slot, but is put back if
              known to have that, it is put back              that was lost
    "fail"    it fails                                        its slot is free, and it fails
    ========  ==============================================  =======================================

    If the result is known, neither a copy nor an older message of a pending call may run or fail: that would store
    another one. What cannot be put back fails.
    """
    ticket, how = message.ticket, message.rules.without_nodes("run")
    if how != "retry" and (ticket.trailing or message.is_copy):
        stored = (yield ResultOf(message.id)).state
        if stored.final if ticket.trailing else stored.done:
            return Leave(f"{message.id} has a result, and this message may be an older one, or a copy.")
    if how == "run" and not message.holder_known:
        log.warning("%s runs without a slot: %s", printable(ticket.name), error)
        yield from _stop_watching(message)
        return Run(message.run(still_waiting=True, since=(yield Now())))
    return (yield from _until_nodes_answer(message, error))


def _without_nodes_after(message: Message, error: QuorumUnavailableError | LockLostError) -> Steps[Verdict]:
    """Do the same when the message has its slot already; see the table of :func:`_without_nodes_before`."""
    ticket, how = message.ticket, message.rules.without_nodes("run")
    if how == "run" and isinstance(error, QuorumUnavailableError):
        log.warning("%s runs without further questions about its slot: %s", printable(ticket.name), error)
        yield from free_waiting(ticket, message.rules)
        yield from _stop_watching(message)
        return Run(message.run(since=(yield Now())))
    run = message.run()
    claim = (yield from give_back(run)) if how == "retry" else None
    yield from end(run, hold=False)
    message.slot = None
    return (yield from _until_nodes_answer(message, error, claim))


def _until_nodes_answer(message: Message, error: Exception, claim: Any = None) -> Steps[PutBack | Fail]:
    """Put the message back, with the slot that it claims; with "fail", or if it cannot be put back, it fails."""
    ticket = message.ticket
    if message.rules.without_nodes("run") == "fail" or message.inline:
        return Fail(error)
    # This uses up no retry: without an answer from the nodes, the body must not run.
    shown = None if ticket.trailing else error  # it would overwrite the result of another message of the call
    reason = f"The lock nodes do not answer: {error}"
    return (yield from _put_back(message, ticket, pause_after(error, ticket.tries), reason, claim, shown))


def _without_results(message: Message, error: Exception) -> Steps[Verdict | None]:
    """
    Put the message back, because the result store would have to say whether it is to run.

    It goes on nevertheless, as if nothing were stored, with ``on_unavailable={"run": "run"}``, and when it has been put
    back often: no run needs the result store. That is about copies without a note, and about messages that follow
    another task. A message that a note calls done is put back until the note ends, and one that ends without a run
    until its outcome is stored, however often.
    """
    if message.rules.without_nodes("run") != "run" and message.ticket.tries < RESULT_TRIES:
        return (yield from _put_off(message, error))
    log.warning("task %s runs, though the result backend does not answer: %s", printable(message.id), error)
    return None


def _store_outcome(message: Message, verdict: Answer | Fail | Revoke) -> Steps[Verdict]:
    """
    Have the outcome of a message stored that ends without a run; put the message back if it is not stored.

    Otherwise everybody would wait for ever who has its id: callers, and what comes after it. So everything is decided
    anew when it arrives again.
    """
    error = yield StoreOutcome(verdict)
    return (yield from _put_off(message, error)) if error else verdict


# 6. Back to the broker


def _wait(message: Message, holder: Holder, follow: bool) -> Steps[Verdict | None]:
    """
    Put the message back until it is its turn; this uses up no retry.

    Its place in the line of the slot is kept for as long as it is away; None if the slot was free at that moment.
    """
    if follow and holder.task_id and message.stores:
        message.ticket = replace(message.ticket, joined=message.ticket.joined or holder.task_id)
        other: Result = yield ResultOf(message.ticket.joined)
        if other.state.final and (verdict := (yield from _follow(message, other))):
            return verdict
    pause = (yield from _time_to_wait(message, holder)).pause
    ticket = message.ticket
    limit = None if message.unfinished or holder.state is SlotState.CLAIMED else message.rules.wait_for
    if limit is not None:
        left = limit - ticket.waited
        pause = min(pause, max(left, SHORTEST))
        if left <= 0:
            reason = f"Skipped: {printable(ticket.name)} is {holder}, after {ticket.waited:.1f} s."
            log.info("task %s is dropped. %s", printable(ticket.task_id), reason)
            return (yield from _store_outcome(message, Revoke(reason, holder)))
    if message.waits_in_line and not (yield from _take_running(message, ticket, away=pause + GRACE)):
        return None
    reason = f"{message.id} waits for its slot; it is tried again in {pause:.1f} s."
    # The nodes have answered, so if they do not the next time, the pauses begin to grow then.
    behind = message.ahead if message.free_but_queued and message.ahead is not None else -1
    again = replace(ticket, waited=ticket.waited + pause, tries=0, behind=behind)
    return (yield from _put_back(message, again, pause, reason))


def _watch(message: Message, holder: Holder) -> Steps[Verdict]:
    """
    Put the message back, because the holder is a run of this same message, which the broker has delivered twice.

    The run may be alive or dead; only the end of its lease will show that. If this copy were dropped and the run died,
    the message would be lost, because some brokers take both copies for one. One waiting copy is enough.
    """
    ticket, lease = message.ticket, message.rules.lease
    pause = max(FIRST_WAIT, min(lease, holder.retry_after or lease) + 0.1)
    about: Any = {"ref": message.id, "adopt": ticket.watch}
    try:
        # For a moment only, as a claim: if this process dies before it has sent the copy, another one has to watch.
        secret = yield Put(ticket.watching, CLAIM, NOTE, **about)
    except LockTakenError as taken:
        if (taken.retry_after or 0.0) > CLAIM:
            return Leave(f"{message.id} was delivered again; another copy is already waiting.")
        return (yield from _put_copy_back(message, ticket, (taken.retry_after or CLAIM) + 0.1))
    verdict = yield from _put_copy_back(message, replace(ticket, watch=secret), pause)
    if isinstance(verdict, PutBack) and not verdict.unsent:
        with suppress(LockTakenError, QuorumUnavailableError):  # then several copies may watch for a while
            yield Put(ticket.watching, pause + message.rules.queue_ttl, NOTE, secret, ref=message.id)
    else:
        yield Free(ticket.watching, secret)
    return verdict


def _put_copy_back(message: Message, ticket: Ticket, pause: float) -> Steps[Verdict]:
    """Put a copy back, or leave the message to its run if the broker refuses the copy."""
    reason = f"{message.id} was delivered a second time; it is checked again in {pause:.1f} s."
    verdict = yield from _put_back(message, ticket, pause, reason)
    if isinstance(verdict, PutBack) and not verdict.unsent:
        return verdict
    error = verdict.unsent if isinstance(verdict, PutBack) else verdict.error
    log.warning("a copy of task %s could not be put back: %s", printable(message.id), error)
    # Not a failure, which would be stored as the result of the live run.
    return verdict if isinstance(verdict, PutBack) else Leave(f"A copy of {message.id} could not be put back.")


def _stop_watching(message: Message) -> Steps[None]:
    """Let other copies watch a run of this message."""
    if message.ticket.watch:
        yield Free(message.ticket.watching, message.ticket.watch)


def _await_outcome(message: Message) -> Steps[Verdict]:
    """
    Put the message back, because the work is done but its result is not stored yet, or its retry not sent.

    The worker is about to do that, or died first. If it died, the note expires sooner or later, and then the work is
    repeated.
    """
    pause = message.rules.lease
    reason = f"{message.id} is done, but its outcome is not known yet; it is checked again in {pause:.1f} s."
    return (yield from _put_back(message, message.ticket, pause, reason))


def _put_off(message: Message, error: Exception) -> Steps[Verdict]:
    """Put the message back until the result store answers again."""
    pause = pause_after(error, message.ticket.tries)
    what = f"{type(error).__name__}: {error}"
    reason = f"The result backend does not answer: {what}; the message is tried again in {pause:.1f} s."
    return (yield from _put_back(message, message.ticket, pause, reason))


def _put_back(
    message: Message, ticket: Ticket, pause: float, reason: str, claim: Any = None, unanswered: Exception | None = None
) -> Steps[PutBack | Fail]:
    """
    Send the message back to the broker for *pause* seconds, with *ticket*, and confirm its claim if it has one.

    The slot that it holds while it waits is not renewed, and may lapse meanwhile; see the top of this file.
    """
    again = replace(ticket, tries=ticket.tries + 1, redelivered=message.came_again)
    refused: NotSent | None = yield Send(again, claim, pause)
    if refused and (refused.for_good or message.inline or not message.late):
        return Fail(refused.error)
    message.is_back = True
    return PutBack(reason, pause, unanswered, refused.error if refused else None)


def pause_after(error: Exception, tries: int) -> float:
    """Return the pause, in seconds, of a message that cannot be run because a part that it needs does not answer."""
    if isinstance(error, QuorumUnavailableError) and error.retry_after is not None:
        # A little longer, so that the nodes vote again when the message arrives.
        return min(LONGEST_PAUSE, error.retry_after + 0.5)
    return min(LONGEST_PAUSE, FIRST_WAIT * 2.0 ** min(tries, 32))


# Messages that end before they arrive here, and calls without a message


def expire(ticket: Ticket, rules: SingletonOptions) -> Steps[bool]:
    """
    Return whether a message whose time has passed expires, which ends its task: not if that lives on elsewhere.

    The worker's main process asks this, and Celery ends the task as revoked; it keeps a result that is stored already.
    If it is False, the message arrives as any other. If it is True, or if an operator has revoked the task, the message
    never arrives here: that process has :func:`~.pending.discard` free its slot and its place in the line.

    The newer messages of a pending call have the same id, and so does the run of a message that is delivered again.
    Without nodes, one that waits for them is put back when it arrives, and expires later.
    """
    if ticket.trailing:
        yield from discard(ticket, rules)  # first, so that a caller can no longer take the call over unnoticed
    try:
        if ticket.trailing and (yield from look_up(ticket)).is_superseded():
            return False
        return (yield from _live_run(ticket)) is None
    except QuorumUnavailableError:
        return rules.without_nodes("run") != "retry"


def interrupted(message: Message, stopped: bool) -> Steps[None]:
    """
    Leave nothing behind of a message whose process is ended, or fails, before its body could begin.

    Args:
        message: The message.
        stopped: Whether the process is stopped, so that the message may return to the broker.
    """
    if message.slot:
        yield from end(message.run(), hold=False, stopped=stopped)
    # A slot stays with the message that returns, or returns to it, so that no other call is served before it.
    if not (stopped and message.returns and message.ticket.secret) and not message.is_back:
        yield from _leave_nothing(message)


def _leave_nothing(message: Message) -> Steps[None]:
    yield from discard(message.ticket, message.rules)
    yield from _stop_watching(message)


def enter(message: Message) -> Steps[Run | Fail]:
    """Take the slot for a direct call, which runs or fails at once."""
    try:
        message.slot = yield Take(message.ticket, inline=True)
    except LockTakenError as taken:
        return Fail(Holder.of(taken).error(message.error, message.ticket.name))
    except QuorumUnavailableError as error:
        if message.rules.without_nodes("run") != "run":
            return Fail(error)
        log.warning("%s runs without a slot: %s", printable(message.ticket.name), error)
    return Run(message.run(since=(yield Now())))


# Rows, which wait in their worker


@dataclass(slots=True)
class TaskRow:
    """
    A row of Django's tasks in a worker, and what it has so far.

    Args:
        ticket: The information about its slot.
        rules: The options of its task.
        within: The names of the slots of the runs that made this call, where calls run at once.
        slot: The slot of its run, once it has that.
        stamp: When it first asked for that slot, as in a ticket; 0 if it has not.
        over: Whether the row has ended meanwhile, because its coroutine was cancelled.
    """

    ticket: Ticket
    rules: SingletonOptions
    within: frozenset[str] = frozenset()
    slot: Slot | None = None
    stamp: int = 0
    over: bool = False

    def run(self, since: float = -inf) -> Execution:
        """Return its run; without *since*, its body has not begun."""
        return Execution(self.ticket, self.rules, self.slot, since)


def occupy(row: TaskRow) -> Steps[Run | Fail | Revoke]:
    """
    Take the slot for the run of a row, and wait in its worker while another run has it.

    A row that waits has no state between READY and RUNNING, and no worker can put it back. So it occupies its worker.
    It takes the slot of any row that only waits: two rows in one queue must not wait for each other.

    It keeps its place in the line of the slot until it has that, or ends without it.
    """
    verdict = yield from _until_it_may_run(row)
    if row.stamp and not row.slot:
        yield LeaveLine(row.ticket)
    return verdict


def _until_it_may_run(row: TaskRow) -> Steps[Run | Fail | Revoke]:
    level, task = logging.WARNING, printable(row.ticket.task_id)  # the level of the first of these messages
    while not row.over:
        try:
            return (yield from _occupy(row))
        except QuorumUnavailableError as error:
            how = row.rules.without_nodes("run")
            if how == "fail":
                return Fail(error)
            if how == "run":
                log.warning("task %s runs without a slot: %s", task, error)
                return Run(row.run())
            log.log(level, "task %s waits until the lock nodes answer: %s", task, error)
            level = logging.DEBUG
        yield Sleep(ROW_PAUSE)
    return _cancelled(row)


def _occupy(row: TaskRow) -> Steps[Run | Fail | Revoke]:
    ticket, wait = row.ticket, 0.0
    waiting = yield from _waiting_rows(row)
    while waiting is not None and ticket.running and not row.slot:
        row.stamp = row.stamp or int((yield Wall()) * 1e6)
        # In this scope, a run has the slot of its row. The row that waited with it runs later, as one that has none.
        secret = waiting.get(ticket.running, FREE).secret
        if secret and ticket.limit > 1:  # from before a deploy; no permit can be taken over from it
            yield Free(ticket.running, secret)
            secret = ""
        try:
            mine = replace(ticket, secret=secret, scope=LIFETIME, stamp=row.stamp)
            row.slot = yield Take(mine, wait=wait, away=GRACE)
        except LockTakenError as taken:
            if taken.name in row.within:
                return Fail(RuntimeError(f"{taken.name!r} would wait for itself, in a call of its own run."))
            yield ShowLife()
            waiting, wait = (yield from _waiting_rows(row)), ROW_WAIT
    if waiting is None or row.over:  # if it is over, a coroutine was cancelled, and this thread has gone on
        return _cancelled(row)
    place = waiting.get(ticket.waiting, FREE)
    if ticket.waiting != ticket.running and place.holder.task_id in (None, ticket.task_id):
        # One that is only claimed may be its own.
        yield from free_waiting(replace(ticket, secret=place.secret), row.rules)
    if wait or ticket.waiting:
        with suppress(QuorumUnavailableError):  # it may have been cancelled meanwhile
            if (yield from _waiting_rows(row, begun=True)) is None:
                return _cancelled(row)
    return Run(row.run((yield Now())))


def _waiting_rows(row: TaskRow, begun: bool = False) -> Steps[Mapping[str, Seen] | None]:
    """
    Return the row that waits with each slot of this one; itself if a node has that, though no quorum may.

    A slot that no row waits with is FREE here. The slot of the run may be that of a row which waits, whatever the
    scope: before a deploy, the scope may have been another one.

    Args:
        row: The row.
        begun: Whether its run has left the queue, so that ``cancel()`` may withdraw its note.

    Returns:
        None if the row was cancelled.
    """
    ticket = row.ticket
    names = list(dict.fromkeys(filter(None, (ticket.running, ticket.waiting))))
    cancelled, *places = yield Look((ticket.cancelled, *names))
    if row.over or (cancelled.sightings and not (begun and (yield from _is_withdrawn(ticket, cancelled)))):
        return None
    waiting = [[each for each in seen.sightings if each.holder.waits] for seen in places]
    first = [min(rows, key=lambda each: each.holder.task_id != ticket.task_id, default=FREE) for rows in waiting]
    return dict(zip(names, first, strict=True))


def cancel(ticket: Ticket, name: str, seen: Seen, left: float) -> Steps[bool]:
    """
    Cancel a row that waits with the slot *name*, and free the slot; return whether the row will not run.

    Args:
        ticket: The ticket of the row.
        name: The lock that it has.
        seen: What the nodes say about that.
        left: For how long the slot lasts, in seconds.
    """
    # The row may wait for longer than its slot lasts.
    secret = yield Put(ticket.cancelled, left + KNOWN, NOTE, ref=ticket.task_id)
    if (yield Free(name, seen.secret)) not in (Outcome.TAKEN, Outcome.EXPIRED):
        return True
    # A worker was quicker, but may have found the note; then it has taken that over.
    return (yield Free(ticket.cancelled, secret)) in (Outcome.TAKEN, Outcome.UNKNOWN)


def _is_withdrawn(ticket: Ticket, note: Seen) -> Steps[bool]:
    """
    Return whether the caller of ``cancel()`` has withdrawn its note, because it found that the run has begun.

    Both change the note, so whoever is first decides, and the other one knows.
    """
    if not note.value:  # too few nodes have it to decide
        return False
    with suppress(QuorumUnavailableError):
        try:
            yield Put(ticket.cancelled, note.left, NOTE, ref=ticket.task_id, adopt=note.secret, strict=True)
        except LockTakenError:
            return True
    return False


def _cancelled(row: TaskRow) -> Revoke:
    return Revoke(f"Task {printable(row.ticket.task_id)} was cancelled before it began.")
