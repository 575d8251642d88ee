"""Wrong protocols of Django's tasks: the profile "django tasks" has to catch each of them."""

from dataclasses import replace
from typing import Any

from django_redlock.singleton import arrival, call
from django_redlock.singleton.questions import Look, Result, ResultState, ShowLife, StoredHere
from django_redlock.singleton.slot import FREE, SlotState
from django_redlock.tasks import enqueue, reaper
from django_redlock.tasks.run import RowRun
from tests.machine.mutation import Mutant, always, returns

HAUNTS = ("django tasks",)


def at_once(action: Any, row: Any) -> None:
    action()


def waits_for_it(right: Any) -> Any:
    """Take the slot over from the row itself only, and wait until another row that waits has had it."""

    def waiting_rows(row: Any, begun: bool = False) -> Any:
        found = yield from right(row, begun)
        mine = (None, row.ticket.task_id)
        return found and {name: seen if seen.holder.task_id in mine else FREE for name, seen in found.items()}

    return waiting_rows


def frees_first(right: Any) -> Any:
    def begin(run: Any) -> None:
        right(run)
        run.give_up()

    return begin


def believes_this_thread(right: Any) -> Any:
    """Take a row that this transaction has stored for one that is still there."""

    def claim_or_own(given: Any, holder: Any, row: Any) -> Any:
        (seen,) = yield Look((given.ticket.waiting,))
        task_id = yield StoredHere(seen.secret)
        if not task_id:
            return holder, row
        return replace(holder, task_id=task_id, state=SlotState.QUEUED), Result(ResultState.WAITS)

    return claim_or_own


def shows_nothing(run: Any, question: Any = None) -> None:
    """Do not show that a process has the row."""


TASK_MUTANTS = (
    Mutant("the slot names a row before its commit", HAUNTS, (enqueue, "after_commit"), always(at_once)),
    Mutant("rows wait for rows that wait", HAUNTS, (arrival, "_waiting_rows"), waits_for_it),
    Mutant(
        "rows of processes that wait are put back",
        HAUNTS,
        (RowRun, "show_life"),
        always(shows_nothing),
        also=(
            (RowRun, "answers", lambda right: right | {ShowLife: shows_nothing}),
            (reaper, "is_held", returns(False)),
        ),
    ),
    Mutant("the slot is freed before the body", HAUNTS, (RowRun, "begin"), frees_first),
    Mutant("rows that were rolled back are joined", HAUNTS, (call, "_claim_or_own"), believes_this_thread),
)
