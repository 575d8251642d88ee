"""
End or put back a message whose slot another task has, according to ``on_overlap`` (internal).
"""

from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

from celery import states
from celery.exceptions import Ignore

from ..exceptions import printable
from .options import Overlap, Return
from .pending import FIRST_WAIT, LONGEST_WAIT, backoff
from .signals import OVERLAP, report
from .slots import Holder, SlotState
from .worker import Answered, Message, NoResultsError


def give_way(message: Message, holder: Holder) -> NoReturn:
    """
    End the message or put it back into the queue, because *holder* has its slot.

    A message whose run may have begun and not ended waits, whatever ``on_overlap`` and ``wait_for`` say: its caller was
    promised the run, and only the death of a process kept that from its end.

    Raises:
        Answered: The task has a result without running.
        Ignore: It does not run, or not now.
        DuplicateTask: ``on_overlap="fail"``.
    """
    # A holder whose message may not have been sent is no reason to drop this one: it lapses in a moment.
    waits = message.ticket.trailing or message.unfinished or holder.state is SlotState.CLAIMED
    ticket, how = message.ticket, "wait" if waits else message.rules.overlap
    if not ticket.waited and not ticket.trailing:  # a pending call is expected to wait
        _report(message, holder, how)
    if how == "fail":
        error = holder.error(message.task.singleton_error, ticket.name)
        message.store(error, states.FAILURE)
        raise error from None
    if isinstance(how, Return):
        message.store(how.value, states.SUCCESS)
        raise Answered(how.value)
    if how in ("wait", "follow") and not message.request.is_eager:
        _wait(message, holder, follow=how == "follow")
    message.skip(f"Skipped: {printable(ticket.name)} is {holder}.", holder)


def _report(message: Message, holder: Holder, how: Overlap | Return) -> None:
    ticket = message.ticket
    report(
        message.task,
        OVERLAP,
        "%s is %s",
        ticket.name,
        holder,
        task_id=ticket.task_id,
        name=ticket.name,
        holder_id=holder.task_id,
        state=str(holder.state),
        strategy="return" if isinstance(how, Return) else how,
    )


def _wait(message: Message, holder: Holder, follow: bool) -> NoReturn:
    """Put the message back into the queue until the holder is done; this uses up no retry."""
    ticket = message.ticket
    if follow and holder.task_id and message.stores_results:
        ticket = replace(ticket, joined=ticket.joined or holder.task_id)
        with suppress(NoResultsError):  # it waits anyway
            message.answer_with(ticket.joined)
    pause = backoff(FIRST_WAIT, LONGEST_WAIT, ticket.tries)
    limit = None if message.unfinished or holder.state is SlotState.CLAIMED else message.rules.wait_for
    if limit is not None:
        left = limit - ticket.waited
        pause = min(pause, max(left, FIRST_WAIT))
        if left <= 0:
            message.skip(f"Skipped: {printable(ticket.name)} is {holder}, after {ticket.waited:.1f} s.", holder)
    message.send_again(replace(ticket, waited=ticket.waited + pause), pause)
    raise Ignore(f"{message.request.id} waits for its slot; it is tried again in {pause:.1f} s.") from None
