"""``task.singleton``: inspect and free the slot of a call; in the body, the slot of the run (internal)."""

from typing import Any, cast

from celery import current_app
from celery._state import get_current_app

from ..core.protocol import EndReason, Outcome
from ..core.rules import nearest
from ..engine.lease import Lease
from ..singleton.handle import P, Slots
from ..singleton.options import Return, SingletonOptions
from ..singleton.pending import discard_seen
from ..singleton.slot import Holder, Seen, SlotState
from ..singleton.ticket import RUNNING, Ticket
from .dispatch import store_revoked
from .worker import DIRECT, end_run

ANSWERS = {
    "join": "send nothing, and return the result of task {id}",
    "skip": "send nothing, and return a result that is already revoked",
    "raise": "raise DuplicateTask",
    "rerun": "be remembered, and run once after task {id}",
    "replace": "give its arguments to the call that waits, or run once after task {id}",
}
OVERLAPS = {
    "drop": "end it as revoked",
    "wait": "put it back until the slot is free",
    "follow": "put it back, and end it with the result of task {id}",
    "fail": "fail it with DuplicateTask",
}


class Singleton(Slots[P]):
    """
    The slots of one task; most methods take the arguments of the call whose slot they concern.

    Args:
        task: The task.
    """

    answers = ANSWERS

    _task: Any

    # In the body

    def _own_run(self) -> Any:
        return None if getattr(self._task.request, DIRECT, False) else self._task.singleton_run

    def _own_lease(self) -> Lease | None:
        run = self._own_run()
        return cast("Lease | None", run.slot) if run and not run.over else None

    def _given_up(self) -> str:
        run = self._own_run()
        if not run or not run.slot:
            return Outcome.EXPIRED if self._task.request_stack.top else ""  # a run that has no slot gives none up
        end_run(self._task, run)
        lease = cast(Lease, run.slot)
        return Outcome.RELEASED if lease.reason is EndReason.RELEASED else lease.release()

    # From anywhere

    def cancel(self, *args: P.args, **kwargs: P.kwargs) -> str | None:
        """
        Revoke the task that has the slot of a call, and free the slot at once if it was waiting.

        Celery's ``revoke()`` alone leaves the slot of a task with a countdown or eta taken until that time has passed.
        A running task continues, as with ``revoke()``.

        Returns:
            The id of the revoked task; None if no waiting task has the slot.

        Raises:
            QuorumUnavailableError: Too few nodes answered and agreed to know that task.
        """
        return self._cancelled(args, kwargs)

    def _cancel(self, ticket: Ticket, name: str, seen: Seen) -> bool:
        self._nodes.run(
            discard_seen(name, seen, ticket, self._task.singleton_options)
        )  # first, because the revocation may fail
        self._task.app.control.revoke(ticket.task_id)
        store_revoked(self._task, ticket.task_id, "Cancelled.", not self._task.ignore_result)
        return True

    def _strategies(self, options: SingletonOptions) -> str:
        return f"{super()._strategies(options)}, on_overlap={options.overlap!r}"

    def _next_call(self, options: SingletonOptions, holder: Holder) -> list[str]:
        lines = super()._next_call(options, holder)
        is_duplicate = holder.state in (SlotState.QUEUED, SlotState.RUNNING, SlotState.HELD)
        if is_duplicate and options.scope != RUNNING and options.on_duplicate != "raise":
            lines.append("With link= or link_error= it would raise DuplicateTask: the holder would not follow them.")
        return lines

    def _next_message(self, options: SingletonOptions, holder: Holder) -> list[str]:
        if holder.state is SlotState.UNKNOWN:
            return []
        what, how = "put it back for a moment", options.overlap
        if holder.state is not SlotState.CLAIMED:
            what = "end it with the value of Return()" if isinstance(how, Return) else OVERLAPS[how]
            what = what.format(id=holder.task_id or "that has it")
        return [f"A worker that gets another message for this slot now would {what}."]


def find(name: str) -> Any:
    """
    Return the singleton task of this name.

    Raises:
        ValueError: There is none.
    """
    app: Any = get_current_app()
    app.loader.import_default_modules()
    known = {task.name: task for task in app.tasks.values() if hasattr(task, "singleton_options")}
    if name not in known and name in app.tasks:
        raise ValueError(
            f"{name!r} is not a singleton task: its calls share no slot. Decorate it with @singleton_task."
        )
    if name not in known:
        raise ValueError(f"There is no singleton task {name!r}{nearest(name, known)}")
    return known[name]


CONNECT_TIMEOUT = 2  # seconds


def revoke(task_id: str, *, terminate: bool = False) -> None:
    """
    Revoke a task on all workers; if asked to, have the worker that runs the task end it.

    Only *terminate* affects a running task: it kills the process of a prefork worker. A singleton task that has lost
    its lease can also check ``self.singleton.lost`` and end by itself.

    Raises:
        Exception: The broker cannot be reached, refuses, or has unusable settings; the class depends on the broker.
    """
    # Try once, because a person is waiting: a sender of tasks would retry for longer.
    with current_app.connection_for_write(connect_timeout=CONNECT_TIMEOUT) as connection:
        if str(connection.transport_cls).startswith(("redis", "sentinel")):  # these would wait for a reply for ever
            patience = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), CONNECT_TIMEOUT)
            connection.transport_options = {**(connection.transport_options or {}), **patience}
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=CONNECT_TIMEOUT)
        current_app.control.revoke(task_id, terminate=terminate, connection=connection, retry=False)
