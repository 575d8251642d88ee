"""Wrong protocols of Django's tasks: the profile "django tasks" has to catch each of them."""

from dataclasses import replace
from typing import Any

from django_redlock.singleton import slots
from django_redlock.singleton.slots import SlotState
from django_redlock.tasks import enqueue, reaper
from django_redlock.tasks.run import Run
from tests.simulation.mutation import Mutant, always, returns

HAUNTS = ("django tasks",)


def at_once(action: Any, row: Any) -> None:
    action()


def waits_for_it(right: Any) -> Any:
    """Take the slot over from the row itself only, and wait until another row that waits has had it."""
    return lambda run, place, wait: right(
        run, place if place.holder.task_id in (None, run.ticket.task_id) else slots.FREE, wait
    )


def frees_first(right: Any) -> Any:
    def begin(run: Any) -> None:
        right(run)
        run.give_up()

    return begin


def believes_this_thread(right: Any) -> Any:
    """Take a row that this transaction has stored for one that is still there."""

    def stored_here(call: Any, holder: Any) -> Any:
        stored = enqueue._here.stored.get((call.ticket.using, call.ticket.waiting))
        seen = slots.peek(call.ticket.using, call.ticket.waiting)
        if stored is None or seen.secret != stored.secret:
            return holder
        return replace(holder, task_id=stored.task_id, state=SlotState.QUEUED)

    return stored_here


TASK_MUTANTS = (
    Mutant("the slot names a row before its commit", HAUNTS, (enqueue, "after_commit"), always(at_once)),
    Mutant("rows wait for rows that wait", HAUNTS, (Run, "_take"), waits_for_it),
    Mutant(
        "rows of processes that wait are put back",
        HAUNTS,
        (reaper, "life_name"),
        always("nobody:{}".format),
        also=((reaper, "is_held", returns(False)),),  # which sees the same lock
    ),
    Mutant("the slot is freed before the body", HAUNTS, (Run, "begin"), frees_first),
    Mutant("rows that were rolled back are joined", HAUNTS, (enqueue.RowCall, "_stored_here"), believes_this_thread),
)
