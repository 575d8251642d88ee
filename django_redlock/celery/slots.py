"""
The slot of one call: one lock, in two states.

QUEUED: a message is on its way. The lock's token travels with the message, and nobody renews it. RUNNING: a worker
runs the task and renews a short lease under a token of its own. Each step takes the lock over from the one before
if that one still has it, in one atomic round, so a slot is never free in between; and when a queued slot expires,
all that happens is that one more message is let into the queue.
"""

import json
import logging
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..core.rules import MIN_TTL
from ..exceptions import LockTakenError
from ..handler import locks
from ..locks import Lease
from ..watchdog import watchdog

HEADER = "django_redlock"
RUN_HEADER = "django_redlock_run"
FORMAT = 1
LABEL = 100  # characters of a task's name that fit into a label
QUEUED = " (queued)"

log = logging.getLogger("django_redlock")


@dataclass(frozen=True, slots=True)
class Ticket:
    """
    What a message says about its slot; travels in one header.

    A flat string passes through every broker. It holds the message's own id, because people start tasks with
    ``headers=self.request.headers``, and such a task must not inherit the slot.

    Args:
        name: Name of the lock. A worker goes by this, also if the key is made differently since a deploy.
        using: Alias in ``REDLOCK``.
        task_id: Id of the message's task.
        token: Token of the queued slot; empty if the message was sent without one.
        tries: How often a worker has put the message back into the queue.
    """

    name: str
    using: str
    task_id: str
    token: str = ""
    tries: int = 0

    def pack(self) -> str:
        """Return the header's value."""
        return json.dumps([FORMAT, self.name, self.using, self.task_id, self.token, self.tries])

    @classmethod
    def unpack(cls, header: object, task_id: str | None) -> "Ticket | None":
        """Return what a header says, or None if there is none or it is not this task's own."""
        with suppress(TypeError, ValueError):
            version, name, using, owner, token, tries = json.loads(header)  # type: ignore[arg-type]
            if version == FORMAT and owner == task_id and is_token(token, or_empty=True):
                return cls(str(name), str(using), owner, token, int(tries))
        return None


@dataclass(frozen=True, slots=True)
class Holder:
    """
    Who has a slot, as far as a refusal says.

    Args:
        task_id: Id of the task that has it; None when the holder is not a task.
        state: ``queued``, ``running``, or ``held`` when the holder is not a task.
        retry_after: Seconds until the hold ends unless it is renewed; None when unknown.
    """

    task_id: str | None
    state: str
    retry_after: float | None

    @classmethod
    def of(cls, refusal: LockTakenError) -> "Holder":
        """Return whom a refusal tells of."""
        about = refusal.holder
        if about.get("kind") != "task" or not about.get("ref"):
            return cls(None, "held", refusal.retry_after)
        return cls(str(about["ref"]), state_of(str(about.get("label"))), refusal.retry_after)

    def __str__(self) -> str:
        return f"{self.state} as task {self.task_id}" if self.task_id else "held by something that is not a task"


class Execution:
    """
    One run of a task in this process, and its slot.

    Args:
        lease: The slot, RUNNING.
        label: The task's name.
    """

    def __init__(self, lease: Lease, label: str) -> None:
        self.lease = lease
        self.handed_over = False
        self._label = label

    def hand_over(self, ticket: Ticket, ttl: float) -> None:
        """
        Turn the slot into that of a message which will go on with the work.

        Raises:
            LockTakenError: It was lost, and somebody else has it.
            QuorumUnavailableError: Too few nodes answered.
        """
        watchdog.forget(self.lease)  # or an extension under way would report the slot as lost
        try:
            take_queued(ticket, ttl, self._label, adopt=self.lease.token)
        except BaseException:
            watchdog.watch(self.lease)
            raise
        self.handed_over = True

    def end(self) -> None:
        """Free the slot, unless it was handed over."""
        if not self.handed_over:
            self.lease.release()


def take_queued(ticket: Ticket, ttl: float, label: str, adopt: str = "") -> None:
    """
    Take the slot for a message, in one round trip.

    Raises:
        LockTakenError: Another task has it.
        QuorumUnavailableError: Too few nodes answered.
    """
    locks[ticket.using].lock(
        ticket.name,
        ttl=max(MIN_TTL, ttl),
        wait=0,
        renew=False,
        kind="task",
        label=label[:LABEL] + QUEUED,
        ref=ticket.task_id,
        token=ticket.token,
        adopt=adopt,
        detached=True,
    ).acquire()


def take_running(ticket: Ticket, lease: float, label: str, token: str) -> Lease:
    """
    Take the slot for a run: from the message's ticket, or anew if it is free.

    Args:
        ticket: The message's.
        lease: How long it lasts without renewal, in seconds.
        label: The task's name.
        token: What to hold it with; empty draws a fresh one.

    Raises:
        LockTakenError: Another task has it, or another run of this one.
        QuorumUnavailableError: Too few nodes answered.
    """
    return (
        locks[ticket.using]
        .lock(
            ticket.name,
            ttl=lease,
            wait=0,
            renew=True,
            kind="task",
            label=label[:LABEL],
            ref=ticket.task_id,
            token=token,
            adopt=ticket.token,
        )
        .acquire()
    )


def free(ticket: Ticket, token: str) -> None:
    """Free the slot if *token* still has it. Never raises: it is called on the way out of something worse."""
    if not token:
        return
    try:
        locks[ticket.using].release(ticket.name, token)
    except Exception:
        log.exception("the slot %s could not be freed; it ends with its time", ticket.name)


def state_of(label: str) -> str:
    """Return the state of the slot whose holder has this label."""
    return "queued" if label.endswith(QUEUED) else "running"


def is_token(value: Any, or_empty: bool = False) -> bool:
    """Return whether *value* can be a lock's token."""
    return isinstance(value, str) and bool(re.fullmatch("[0-9a-f]{32}", value) or (or_empty and not value))
