"""The error about a duplicate: a call whose slot is held by another call (internal)."""

from typing import Self

from ..exceptions import RedlockError, printable


class DuplicateTask(RedlockError):
    """
    Another call has the slot, and the options ask for an error in that case.

    Args:
        holder_id: Id of the task that has the slot; None when it is not a task.
        state: What that task does: ``queued``, ``running``, or ``held`` when the holder is not a task.
        retry_after: Seconds until the slot frees itself unless its holder keeps it; None when unknown.
        name: The lock's name.
    """

    def __init__(
        self,
        holder_id: str | None = None,
        state: str = "held",
        retry_after: float | None = None,
        name: str = "",
    ) -> None:
        super().__init__(holder_id, state, retry_after, name)
        self.holder_id = holder_id
        self.state = state
        self.retry_after = retry_after
        self.name = name

    @classmethod
    def found(cls, holder_id: str | None, state: str, retry_after: float | None, name: str) -> Self:
        """Return the error about a holder; a subclass with another constructor overrides this."""
        return cls(holder_id, state, retry_after, name)

    def __str__(self) -> str:
        if self.holder_id is None:
            return f"{self.name!r} is held, and not by a task."
        return f"{self.name!r} is {self.state} as task {printable(self.holder_id)}."
