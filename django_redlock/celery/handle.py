"""``task.singleton``: look at the slot of a call, and free it by hand."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from ..core.names import slug
from ..core.owner import decode, nonce_of
from ..exceptions import QuorumUnavailableError
from ..handler import locks
from ..locks import Lease
from .keys import lock_name
from .slots import state_of

if TYPE_CHECKING:
    from .task import SingletonTask


class Singleton:
    """
    The slots of one task. The arguments of every method are those of the call in question.

    Args:
        task: The task.
    """

    def __init__(self, task: "SingletonTask[..., Any]") -> None:
        self._task = task

    def __repr__(self) -> str:
        return f"<Singleton {self._task.name!r}>"

    @property
    def lease(self) -> Lease | None:
        """
        The lease of the run under way in this thread; None outside a run, or after ``retry()`` gave the slot away.

        Its ``fencing_token`` is a number greater than that of every earlier run.
        """
        execution = self._task.execution
        return execution.lease if execution and not execution.handed_over else None

    def check(self) -> None:
        """
        Check between two steps of a body that the run still has its slot; asks no node.

        Does nothing in a direct call, which has no slot.

        Raises:
            LockLostError: The slot was lost, so another run may have begun.
        """
        if self.lease:
            self.lease.ensure()

    def key(self, *args: Any, **kwargs: Any) -> str:
        """
        Return the name of the lock of a call, as the admin and the commands show it.

        Raises:
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        task = self._task
        return lock_name(task.name, task.singleton_options, task.parameters, args, kwargs)

    def is_locked(self, *args: Any, **kwargs: Any) -> bool:
        """
        Return whether a call would be a duplicate now. By the time you read the answer it may be wrong.

        Raises:
            QuorumUnavailableError: Too few nodes answered.
        """
        return bool(self._value(self.key(*args, **kwargs)))

    def release(self, *args: Any, force: bool = False, **kwargs: Any) -> str:
        """
        Free the slot of a call whose message was lost, such as in a queue that was purged.

        Args:
            force: Free it also if the task is running. Nothing stops that run, so its equal may then run beside it.

        Returns:
            ``released``, ``expired`` (it was free), ``taken`` (it is running, and *force* was not given, or it
            changed hands meanwhile), or ``unknown`` (too few nodes confirmed it).

        Raises:
            QuorumUnavailableError: Too few nodes answered when asked who has it.
        """
        name = self.key(*args, **kwargs)
        value = self._value(name)
        if not value:
            return "expired"
        holder = decode(value)
        if not force and (holder is None or state_of(holder.label) != "queued"):
            return "taken"
        return locks[self._task.singleton_options.using].release(name, nonce_of(value))

    def _value(self, name: str) -> str:
        """Return what a quorum of nodes has under the lock's key, or nothing."""
        manager = locks[self._task.singleton_options.using]
        replies = manager.survey(slugs=(slug(name),))
        rows = [row for reply in replies.values() for row in reply.rows]
        needed = manager.rules.needed
        if len(rows) < needed:
            said = {manager.nodes[node].name: str(reply) for node, reply in replies.items()}
            raise QuorumUnavailableError(name, nodes=said, needed=needed)
        value, votes = Counter(row.value for row in rows).most_common(1)[0]
        return value if votes >= needed else ""
