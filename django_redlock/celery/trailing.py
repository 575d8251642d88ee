"""
A call of a task whose duplicates are remembered as one pending call, which runs next; see :mod:`.pending` (internal).
"""

from dataclasses import dataclass, replace
from typing import Any

from ..exceptions import LockTakenError
from .dispatch import Call, SingletonResult
from .pending import NAME, digest_of, discard_seen, label_of, settle, take_over, turn
from .slots import FREE, Holder, Record, Seen, SlotState, look


@dataclass
class TrailingCall(Call):
    """One call of a task with ``on_duplicate="rerun"`` or ``"replace"``."""

    def take_and_send(self) -> SingletonResult[Any]:
        """
        Take the slot if it is free and no call is pending; otherwise join the pending call.

        Raises:
            DuplicateTask: As in :meth:`SingletonTask.apply_async`.
            QuorumUnavailableError: Too few nodes answered.
        """
        # A later call would take it over without its links, so a linked call is never replaced.
        self.ticket = replace(self.ticket, number=int(self.task.singleton_options.pends and not self.linked))
        takes_part = self.rules.trails and not self.linked
        run, record = self._look()
        if takes_part and self._has_these_arguments(record):
            return self._joined(run, record)
        free, holder = not run.value and record.free, run.holder if run.value else record.holder
        if free and not self.ticket.number:  # the slot of a run is not a record, so no turn is needed
            taken_by = self.claim()
            if not taken_by:
                return self.publish(self.ticket)
            free, holder = False, taken_by
        if not free and not takes_part:
            return self.answer(holder)
        with turn(self.ticket):
            taken_by = self.claim() if free else holder
            if taken_by and takes_part:
                run, record = self._look()
                return self._take_part(run, settle(self.ticket, record))
        return self.answer(taken_by) if taken_by else self.publish(self.ticket)

    def _take_part(self, run: Seen, record: Seen) -> SingletonResult[Any]:
        """Create the pending call, or take it over; only in this call's turn."""
        if pending := self._pending(record):
            if self._has_these_arguments(record):
                return self._joined(run, record)
            return self._take_over_pending(run, record, pending)
        if record.value:  # the holder cannot be taken over, or is not a call of this task, so this call comes after it
            return (
                self.noted(record.holder).publish(replace(self.ticket, secret="")).about(record.holder, accepted=True)
            )
        # The attempt to take the slot decides whether there is a run; a value on single nodes does not.
        holder = run.holder if run.value else self.claim()
        if holder is None:
            return self.publish(self.ticket)
        if run.value or not self.ticket.number:
            self.ticket = replace(self.ticket, number=1)
            if self.claim():
                raise LockTakenError(self.ticket.waiting)
            return self.noted(holder).publish(self.ticket).about(holder, accepted=True)
        raise LockTakenError(self.ticket.waiting)

    def _take_over_pending(self, run: Seen, seen: Seen, record: Record) -> SingletonResult[Any]:
        """Send the message that counts from now on, under the id of the pending call; only in this call's turn."""
        holder = run.holder if run.value else seen.holder
        self.ticket = replace(self.ticket, number=record.number + 1)
        ticket = replace(self.ticket, task_id=record.task_id)
        # First, so that there is always a message that counts: until the next line, the previous one does.
        sent = self.noted(holder).publish(ticket)
        take_over(ticket, self.ttl, self.label, seen)
        return sent.about(holder, accepted=True)

    def _joined(self, run: Seen, record: Seen) -> SingletonResult[Any]:
        """Answer a call whose arguments are those of the pending call, so that no message is needed."""
        holder = run.holder if run.value else record.holder
        return self.noted(holder).result(str(record.holder.task_id)).about(holder, accepted=False)

    def _look(self) -> tuple[Seen, Seen]:
        """
        Return the holder of the slot that the pending call comes after, and the pending call.

        A call that was revoked before its time is out of the way: its callers know that, and no longer wait for it.

        Raises:
            QuorumUnavailableError: Too few nodes answered, or the message of the holder may not have been sent.
        """

        def found() -> tuple[tuple[Seen, Seen], Holder]:
            using, names = self.ticket.using, self.ticket.places(trails=True)
            slots = [self._unless_over(name, seen) for name, seen in zip(names, look(using, *names), strict=True)]
            run = next((seen for seen in slots[:-1] if seen.value), FREE)
            return (run, slots[-1]), run.holder

        return self.once_confirmed(found)

    def _unless_over(self, name: str, seen: Seen) -> Seen:
        """Return what was seen under a name; if that was revoked before its time, free it."""
        if not self.is_over(seen.holder):
            return seen
        discard_seen(self.ticket, name, seen, self.task)
        return FREE

    def _pending(self, record: Seen) -> Record | None:
        """Return the pending call if it is one of this task, so that this call can take it over."""
        found = record.record
        return found if found and found.task == self.task.name[:NAME] else None

    def _has_these_arguments(self, record: Seen) -> bool:
        """
        Return whether a message with these arguments was sent for the pending call.

        It counts as none with ``replace``, which also moves the time.
        """
        found = self._pending(record)
        moved = self.rules.on_duplicate == "replace"
        sent = record.holder.state is SlotState.QUEUED
        return found is not None and sent and not moved and found.digest == digest_of(self.task, self.args, self.kwargs)

    @property
    def label(self) -> str:
        """The label of the slot; for a pending call, it identifies the arguments and the message that count."""
        if not self.ticket.trailing:
            return str(self.task.name)
        return label_of(self.task.name, digest_of(self.task, self.args, self.kwargs), self.ticket.number)
