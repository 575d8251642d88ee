"""The result that a caller of a singleton task receives (internal)."""

import logging
from time import time
from typing import Any, Self, cast

from celery import states

from ..exceptions import printable
from .dispatch import BaseResult, R
from .slots import Holder, SlotState

log = logging.getLogger("django_redlock")

STORED = 10.0  # seconds from the end of a run until its result is stored, including the difference between clocks
OVER = frozenset({states.SUCCESS, states.FAILURE, states.REVOKED})
ANSWER_FIELDS = ("duplicate", "reason", "holder_id", "accepted")


class SingletonResult(BaseResult[R]):
    """
    An :class:`~celery.result.AsyncResult` that knows whether the call was a duplicate.

    For a joined duplicate it is the result of the holder: ``get()`` waits for that task, and ``revoke()`` revokes it.
    ``bool()`` is true for every result, including that of a duplicate.
    """

    duplicate: bool = False
    """Whether another call had the slot."""
    reason: str = ""
    """The state of that call (``queued``, ``running``, or ``held`` if it is no task); empty without a duplicate."""
    holder_id: str | None = None
    """The id of that call; None without a duplicate, or if it is not a task."""
    accepted: bool = True
    """Whether this call sent a message."""

    def __copy__(self) -> Self:
        copy = cast(Self, super().__copy__())
        copy.__dict__.update(self._answer_fields)
        return copy

    def __reduce__(self) -> Any:
        return *super().__reduce__(), self._answer_fields

    def __setstate__(self, given: dict[str, Any]) -> None:
        self.__dict__.update(given)  # nothing else: Celery recreates the rest

    @property
    def _answer_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ANSWER_FIELDS}

    def about(self, holder: Holder, *, accepted: bool) -> Self:
        """Note that the call was a duplicate, and of which holder."""
        self.duplicate, self.accepted = True, accepted
        self.reason, self.holder_id = str(holder.state), holder.task_id
        return self


def eager_result(result: Any) -> Any:
    """Add our attributes to a result of Celery's eager mode, in which no other call waits or runs."""
    if isinstance(result, SingletonResult):
        return result
    for name in ANSWER_FIELDS:
        setattr(result, name, getattr(SingletonResult, name))
    return result


def store_revoked(task: Any, task_id: str, reason: str, wanted: bool) -> None:
    """Store that a call was revoked. If the backend cannot, as ``rpc://`` outside a worker, only log that."""
    try:
        task.backend.mark_as_revoked(task_id, reason, store_result=wanted)
    except Exception:
        log.exception("the result backend did not store that task %s was revoked (%s)", printable(task_id), reason)


def result_of(task: Any, task_id: str, **options: Any) -> SingletonResult[Any]:
    """Return the result of a task's message."""
    options = {"backend": task.backend, "task_name": task.name, "app": task.app} | options
    return SingletonResult(task_id, **options)


def is_over(task: Any, holder: Holder, queue_ttl: float) -> bool:
    """
    Return whether a holder that waits for its countdown has already ended because it was revoked.

    Other holders are not checked, because their slot is freed as soon as a worker gets the message.
    """
    waits = holder.state is SlotState.QUEUED
    delayed = waits and holder.retry_after is not None and holder.retry_after > queue_ttl
    return bool(delayed and holder.task_id and _state(task, holder) in OVER)


def is_gone(task: Any, holder: Holder) -> bool:
    """
    Return whether a task whose slot is still held has ended and its result no longer exists.

    The slot is held from before the result is stored, so a missing result counts as gone only after some time.
    """
    if holder.state is not SlotState.HELD or task.ignore_result or time() - holder.since < STORED:
        return False
    return _state(task, holder) == states.PENDING


def _state(task: Any, holder: Holder) -> str:
    """Return the state of a holder; empty if there is no result backend or it does not answer."""
    try:
        return str(task.backend.get_state(holder.task_id))
    except Exception:
        return ""
