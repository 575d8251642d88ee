"""
Decide what a run leaves behind: its slot free, held, or with the message that continues the work (internal).

Runs also end without a word, because their process is killed. Then another process decides what they leave behind:
:func:`free_dead` and :func:`shorten`.
"""

import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..core.names import GOES_ON, NOTE, SENDS
from ..core.protocol import Outcome
from ..exceptions import LockTakenError, QuorumUnavailableError, printable
from .options import SingletonOptions
from .pending import discard
from .questions import Free, FreeSlot, HandOver, LeaveLine, Look, NoteLength, Now, Put, Slot, Steps
from .slot import CLAIM, SlotState
from .ticket import Permit, Ticket

KILL_TIME = 3.0  # seconds until a process that gets TERM, and KILL 0.1 s later, is certainly dead

MOMENT = 30.0  # seconds after which a lock ends that is taken for a moment, if its release is lost

log = logging.getLogger("django_redlock")


@dataclass(slots=True, eq=False)
class Execution:
    """
    One run, from its start to its end, and what it has.

    Args:
        ticket: The information about the slot that its message carries.
        rules: The options of its task.
        slot: The slot of the run; None for a run that has none.
        since: When it began, on the clock of the locks.
        still_waiting: Whether the message still holds the slot of a waiting message, because the nodes did not answer.
        seen: Whether somebody may read its result and then expect the slot to be free.
        note: The name of the note that it is done; empty if it needs none.
        remembered: For how long that note lasts, in seconds.
        noted: The secret of that note, if it was left before the slot was free.
        returns: Whether its message returns to the broker if its process is stopped.
        over: Whether its slot was handed over or given up.
        goes_on: Whether another message continues the work, and has the slot.
    """

    ticket: Ticket
    rules: SingletonOptions
    slot: Slot | None
    since: float = 0.0
    still_waiting: bool = False
    seen: bool = True
    note: str = ""
    remembered: float = 0.0
    noted: str = ""
    returns: bool = False
    over: bool = False
    goes_on: bool = False


def end(run: Execution, hold: bool = True, stopped: bool = False) -> Steps[None]:
    """
    End the run: free the slot, or leave it held for the rest of ``hold_for``, unless it was handed over.

    If its process is stopped, and its message returns to the broker, the slot returns to the message.

    Args:
        run: The run.
        hold: Whether ``hold_for`` counts, because the body has ended for good. Then the release of a run whose result
            nobody sees may still be under way when this returns. In all other cases it is free, or held, by then.
        stopped: Whether its process is stopped.
    """
    if stopped and run.returns:
        yield from give_back(run)
        hold = False  # its message is to run again, and would wait for as long
    if run.over:
        return
    run.over = True
    rest = 0.0
    if hold:
        length = (yield Now()) - run.since
        if run.slot and run.ticket.stamp:  # others may wait for it
            yield NoteLength(run.ticket.running, length)
        rest = max(run.rules.minimum - length, 0.0)
    if run.slot:
        yield FreeSlot(run.slot, not hold or run.seen or rest > 0, rest)
    elif run.still_waiting:
        yield Free(run.ticket.waiting, run.ticket.secret)


def give_over(run: Execution, ticket: Ticket, ttl: float) -> Steps[Any]:
    """
    Hand the slot over to a message that is about to be sent and will continue the work; return its claim.

    Raises:
        LockTakenError: It was lost, and another holder has it.
        QuorumUnavailableError: Too few nodes answered.
    """
    assert run.slot
    claim = yield HandOver(run.slot, ticket, ttl)
    run.over = run.goes_on = True
    return claim


def give_back(run: Execution) -> Steps[Any]:
    """
    Return the slot to the run's own message, which will be delivered again; return the claim, or None.

    It is only a claim, because the message may be gone: a framework stops a process in the same way for a time limit.
    """
    ticket = run.ticket.begun
    if run.slot and ticket.secret and not run.over and ticket.waiting == run.slot.name and run.slot.valid():
        with suppress(LockTakenError, QuorumUnavailableError):
            return (yield from give_over(run, ticket, CLAIM))
    return None


def note_sending(run: Execution) -> Steps[None]:
    """
    Leave a note that the run is about to send a message that continues its work, before its slot is free.

    Otherwise a copy of its own message that waits for the slot would have it before the other message is sent, and do
    the work again. The note lasts for a moment: if the process dies before it has sent that message, a copy has to run.
    """
    if run.note:
        with suppress(LockTakenError, QuorumUnavailableError):
            run.noted = yield Put(run.note, CLAIM, SENDS, ref=run.ticket.task_id)


def note_done(run: Execution, goes_on: bool = False) -> Steps[None]:
    """
    Leave a note for later copies of a message that the broker may deliver again although it is done.

    Args:
        run: The run.
        goes_on: Whether another message continues the work and will have the result.
    """
    if not run.note or (run.goes_on and not goes_on):
        return
    try:
        about: Any = {"ref": run.ticket.task_id, "adopt": run.noted}
        yield Put(run.note, run.remembered, GOES_ON if goes_on else NOTE, **about)
    except LockTakenError:  # it has been done before
        pass
    except QuorumUnavailableError as error:
        log.warning("could not note that task %s is done; a copy may run: %s", printable(run.ticket.task_id), error)


def free_waiting(ticket: Ticket, rules: SingletonOptions) -> Steps[None]:
    """Free the lock that a message held while it waited, unless it is the lock of the run or is to be held."""
    if ticket.waiting == ticket.running:
        return
    if not ticket.running and rules.minimum and ticket.waiting == ticket.queued:
        try:
            about: Any = {"ref": ticket.task_id, "adopt": ticket.secret}
            yield Put(ticket.waiting, rules.minimum, SlotState.HELD, **about)
            return
        except LockTakenError:  # it has ended
            return
        except QuorumUnavailableError:  # it would stay that of a message that waits
            pass
    if ticket.secret:
        yield Free(ticket.waiting, ticket.secret)


# A process that died, or will


def free_dead(ticket: Ticket, secret: str, rules: SingletonOptions, comes_back: bool) -> Steps[None]:
    """
    Free the slot of a run whose process is dead, or return it to its message for one lease if that is delivered again.

    A slot that the process has left to a retry stays: if the retry was not sent, its claim lapses in a moment.

    Args:
        ticket: The ticket of the message.
        secret: The secret of the run.
        rules: The options of the task.
        comes_back: Whether the message is delivered again.
    """
    if ticket.trailing and comes_back:  # the process may have died before it freed this lock
        yield Free(ticket.waiting, ticket.secret)
    elif ticket.trailing:
        yield from discard(ticket, rules)
    ticket = ticket.begun
    locks = yield from _runs_with(ticket, secret)
    if comes_back and locks and ticket.secret and ticket.waiting == ticket.running:
        with suppress(LockTakenError, QuorumUnavailableError):
            about: Any = {"ref": ticket.task_id, "adopt": secret, "strict": True}
            yield Put(ticket.waiting, rules.lease, SlotState.QUEUED, ticket.secret, **about)
            return
    if not comes_back and ticket.stamp:
        yield LeaveLine(ticket)
    for lock in locks:
        yield Free(lock, secret)
    yield Free(ticket.waiting, ticket.secret)


def _runs_with(ticket: Ticket, secret: str) -> Steps[tuple[str | Permit, ...]]:
    """
    Return the lock of a run with this *secret*: the only one that it can be, or the permit that it is.

    A slot that is left held is no longer that of the run, and stays. If none is seen, the request for it may still be
    on its way.
    """
    with suppress(QuorumUnavailableError):
        looks = zip(ticket.runs, (yield Look(ticket.runs)), strict=True)
        found = [(lock, each) for lock, seen in looks for each in seen.sightings if each.secret == secret]
        if any(each.holder.state is SlotState.HELD for _, each in found):
            return ()
        if found:
            return (found[0][0],)
    return ticket.runs if ticket.limit == 1 else ()


def shorten(ticket: Ticket, secret: str, rules: SingletonOptions) -> Steps[None]:
    """
    Let the slot of a run end soon, whose process is about to be killed: its body may still be running.

    The slot of a process that dies is not freed otherwise. None is known to outlive the kill by more than this. A body
    that has not begun has no slot to keep, so the slot of its message is free at once.
    """
    yield from discard(ticket, rules)
    if not ticket.running:
        return
    for lock in (yield from _runs_with(ticket, secret)):
        with suppress(LockTakenError, QuorumUnavailableError):
            # The process does not have this secret, so it can neither renew the slot nor give it to its message.
            about: Any = {"ref": ticket.task_id, "adopt": secret, "strict": True, "limit": ticket.limit}
            yield Put(lock, min(KILL_TIME, rules.lease), "", **about)


def is_abandoned(ticket: Ticket) -> Steps[bool]:
    """
    Return whether no process runs a row of Django's tasks any more, or waits with it.

    Nodes that have just restarted answer, but have forgotten who lives. So this takes the lock that shows life itself
    for a moment: they do not grant it before whoever lives could show it again.

    Raises:
        QuorumUnavailableError: Too few nodes answered.
    """
    # A slot that a quorum of nodes has is seen on one of those that answer, at least.
    sightings = [each for seen in (yield Look(ticket.runs)) for each in seen.sightings]
    if any(each.holder.task_id == ticket.task_id and each.holder.state is SlotState.RUNNING for each in sightings):
        return False
    try:
        secret = yield Put(ticket.alive, MOMENT, "", label="redlock_reap_tasks")
    except LockTakenError:
        return False
    return bool((yield Free(ticket.alive, secret)) is Outcome.RELEASED)


def requeue(ticket: Ticket, rules: SingletonOptions) -> Steps[None]:
    """Take the slot for a row that is put back; without it, the row runs as one that has none."""
    if ticket.waiting:
        with suppress(LockTakenError, QuorumUnavailableError):
            yield Put(ticket.waiting, rules.queue_ttl, SlotState.QUEUED, ticket.secret, ticket.task_id)
