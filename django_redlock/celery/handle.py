"""``task.singleton``: inspect and free the slot of a call; in the body, the slot of the run (internal)."""

from dataclasses import dataclass
from typing import Any, Protocol

from ..core.outcome import EndReason, Outcome
from ..engine.lease import Lease
from ..exceptions import QuorumUnavailableError
from .execution import Execution
from .keys import Parameters, lock_name
from .options import SingletonOptions
from .result import store_revoked
from .sightings import Seen, peek, undecided
from .slots import Holder, Ticket, free, state_of
from .state import SlotState


class Task(Protocol):
    """What this module needs of a task; :class:`~django_redlock.celery.SingletonTask` has it."""

    name: str
    ignore_result: bool
    singleton_options: SingletonOptions

    @property
    def app(self) -> Any:
        """The Celery app."""

    @property
    def singleton_parameters(self) -> Parameters:
        """The parameters of the body."""

    @property
    def singleton_run(self) -> Execution | None:
        """The run under way in this thread."""

    def singleton_ticket(self, task_id: str, args: Any, kwargs: Any) -> Ticket:
        """Return what the message of a call says of its slot."""


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """
    Who has a slot now.

    Args:
        id: Id of the task; None if the holder is not a task.
        state: ``queued``, ``running``, or ``held`` when the task is over or the holder is not a task.
        since: When it got into that state, in seconds since the epoch on the clock of *hostname*.
        ttl: Seconds until the slot frees itself unless it is renewed.
        hostname: The machine.
        nodes: How many lock nodes agree.
    """

    id: str | None
    state: SlotState
    since: float
    ttl: float
    hostname: str
    nodes: int


class Singleton:
    """
    The slots of one task. The arguments of every method are those of the call in question.

    Args:
        task: The task.
    """

    def __init__(self, task: Task) -> None:
        self._task = task

    def __repr__(self) -> str:
        return f"<Singleton {self._task.name!r}>"

    # In the body

    @property
    def lease(self) -> Lease | None:
        """
        The lease of the run under way in this thread; None outside a run, or after ``retry()`` gave the slot away.

        Its ``fencing_token`` is a number greater than that of every earlier run.
        """
        execution = self._task.singleton_run
        return execution.lease if execution and not execution.handed_over else None

    @property
    def lost(self) -> bool:
        """Whether the run under way has lost its slot, so that another one may have begun; makes no network call."""
        return bool(self.lease and not self.lease.valid())

    @property
    def remaining(self) -> float:
        """The seconds that the run under way has its slot for without renewal; 0.0 without a slot."""
        return self.lease.remaining() if self.lease else 0.0

    def check(self) -> None:
        """
        Check between two steps of a body that the run still has its slot; makes no network call.

        Does nothing in a direct call that has no slot.

        Raises:
            LockLostError: The slot was lost, so another run may have begun.
        """
        if self.lease:
            self.lease.ensure()

    # From anywhere

    def key(self, *args: Any, **kwargs: Any) -> str:
        """
        Return the name of the lock of a call, as the admin and the commands show it.

        Raises:
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        task = self._task
        return lock_name(task.name, task.singleton_options, task.singleton_parameters, args, kwargs)

    def holder(self, *args: Any, **kwargs: Any) -> SlotHolder | None:
        """
        Return who has the slot of a call; None if it is free. By the time you read the answer it may be wrong.

        If one call runs and another one waits for it, that is the run.

        Raises:
            QuorumUnavailableError: Too few nodes answered and agree, so it is unknown.
        """
        for name, seen in self._slots(args, kwargs):
            if seen.value:
                return _described(seen)
            if seen.split:
                raise self._undecided(name, seen)
        return None

    def is_locked(self, *args: Any, **kwargs: Any) -> bool:
        """
        Return whether a call would be a duplicate now. By the time you read the answer it may be wrong.

        Raises:
            QuorumUnavailableError: Too few nodes answered and agree, so it is unknown.
        """
        slots = self._slots(args, kwargs)
        if any(seen.value for _, seen in slots):
            return True
        for name, seen in slots:
            if seen.split:
                raise self._undecided(name, seen)
        return False

    def release(self, *args: Any, **kwargs: Any) -> str:
        """
        Free the slot of a call whose message was lost, such as in a queue that was purged.

        This includes what single nodes have left of a slot.

        In a body, and without arguments: give up the slot of the run before its end.

        Args:
            force: True frees it also if the task is running. Nothing stops that run, so a duplicate may then run
                beside it. If the task has a parameter of this name, it is an argument like all others.

        Returns:
            ``released``, ``expired`` (it was free), ``taken`` (it is running, and *force* was not given, or it
            changed hands meanwhile), or ``unknown`` (too few nodes confirmed it).

        Raises:
            QuorumUnavailableError: Too few nodes answered when asked who has it.
        """
        execution = self._task.singleton_run
        force = "force" not in self._task.singleton_parameters.signature.parameters and kwargs.pop("force", False)
        if execution and execution.lease and not args and not kwargs:
            execution.end(hold=False)
            released = execution.lease.reason is EndReason.RELEASED
            return Outcome.RELEASED if released else execution.lease.release()
        outcomes = {
            free(self._task.singleton_options.using, name, found.secret)
            if force or (found.holder.state is not SlotState.RUNNING and found.holder.task_id)
            else Outcome.TAKEN
            for name, seen in self._slots(args, kwargs)
            for found in seen.sightings
        }
        worst_first = (Outcome.TAKEN, Outcome.UNKNOWN, Outcome.RELEASED)
        return next((outcome for outcome in worst_first if outcome in outcomes), Outcome.EXPIRED)

    def cancel(self, *args: Any, **kwargs: Any) -> str | None:
        """
        Revoke the task that has the slot of a call, and free the slot at once if it was waiting.

        Celery's ``revoke()`` alone leaves the slot of a task with a countdown or eta taken until that is over. A task
        that is running is left alone, as by ``revoke()``.

        Returns:
            The id of the revoked task; None if no waiting task has the slot.

        Raises:
            QuorumUnavailableError: Too few nodes answered and agree, so it is unknown which task that is.
        """
        slots = self._slots(args, kwargs)
        for name, seen in slots:
            holder: Holder = seen.holder
            if seen.value and holder.task_id and holder.state is SlotState.QUEUED:
                free(self._task.singleton_options.using, name, seen.secret)  # first: what follows may fail
                self._task.app.control.revoke(holder.task_id)
                store_revoked(self._task, holder.task_id, "Cancelled.", not self._task.ignore_result)
                return holder.task_id
        for name, seen in slots:
            if seen.split:
                raise self._undecided(name, seen)
        return None

    def explain(self, *args: Any, **kwargs: Any) -> str:
        """
        Return, in words, what is known of the slot of a call: its key, who has it, and what a call would do now.

        Raises:
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        from .explain import explain

        return explain(self._task, args, kwargs).text

    def _slots(self, args: Any, kwargs: Any) -> list[tuple[str, Seen]]:
        """Return the locks of a call, that of its run first and of a run after it last, and what nodes have there."""
        ticket: Ticket = self._task.singleton_ticket("", args, kwargs)
        names = ticket.places(self._task.singleton_options.trails)
        return [(name, peek(ticket.using, name)) for name in names]

    def _undecided(self, name: str, seen: Seen) -> QuorumUnavailableError:
        return undecided(self._task.singleton_options.using, name, seen)


def _described(seen: Seen) -> SlotHolder:
    owner = seen.owner
    if owner is None:
        return SlotHolder(None, SlotState.HELD, 0.0, seen.left, "", seen.nodes)
    state = state_of(owner.label) if owner.kind == "task" else SlotState.HELD
    return SlotHolder(seen.holder.task_id, state, owner.since, seen.left, owner.host, seen.nodes)
