"""The slots of a task's calls: look at them, and free them (internal)."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, Protocol, overload

from ..core.names import Owner, decode
from ..core.protocol import Outcome
from ..engine.lease import Lease
from ..exceptions import QuorumUnavailableError
from ..handler import locks
from ..inventory.survey import Poll, ask_nodes
from ..keys.task import TaskKey
from .call import ConfirmationWait
from .driver import Nodes, seen_in, slug_of
from .options import SingletonOptions
from .questions import Free, Look, Steps
from .slot import Holder, Seen, SlotState
from .ticket import RUNNING, Permit, Ticket

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """
    The present holder of a slot.

    Args:
        id: Id of the task; None if the holder is not a task.
        state: ``claimed`` while its message is being sent, ``queued``, ``running``, or ``held`` when the task is over
            or the holder is not a task.
        since: When it entered that state or, if it is held, when the run began, in seconds since the epoch on the clock
            of *hostname*.
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


class Singular(Protocol):
    """A singleton task, of Celery's or Django's."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def singleton_options(self) -> SingletonOptions:
        """Its options."""

    @property
    def singleton_key(self) -> TaskKey:
        """What distinguishes its calls."""

    def singleton_ticket(self, task_id: str, args: Any, kwargs: Any, /) -> Ticket:
        """Return the slot of a call."""


UNKNOWN = Holder(None, SlotState.UNKNOWN, None)


class Explanation(str):
    """A description of the slot of a call, and the state of the slot."""

    state: SlotState


class Slots(Generic[P]):
    """
    The slots of one task; every method takes the arguments of the call whose slot it concerns.

    Args:
        task: The task.
    """

    answers: Mapping[str, str] = {}
    """What a duplicate does, by ``on_duplicate``."""
    send = "be sent"
    """The verb for a call that is no duplicate, in explanations."""

    def __init__(self, task: Any) -> None:
        self._task: Singular = task

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._task.name!r}>"

    # In the body

    @property
    def lease(self) -> Lease | None:
        """
        The lease of the run in progress in this thread; None outside a run, and after the run gave the slot away.

        Its ``fencing_token`` is a number greater than that of every earlier run.
        """
        return self._own_lease()

    @property
    def lost(self) -> bool:
        """Whether the current run has lost its slot, so that another run may have begun; makes no network call."""
        return bool(self.lease and not self.lease.valid())

    @property
    def remaining(self) -> float:
        """The seconds for which the current run keeps its slot without renewal; 0.0 without a slot."""
        return self.lease.remaining() if self.lease else 0.0

    def check(self) -> None:
        """
        Check, between two steps of a body, that the run still has its slot; makes no network call.

        Does nothing in a direct call that has no slot.

        Raises:
            LockLostError: The slot was lost, so another run may have begun.
        """
        if self.lease:
            self.lease.ensure()

    # From anywhere

    def key(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """
        Return the name of the lock of a call, as the admin and the commands show it.

        Raises:
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        return self._task.singleton_ticket("", args, kwargs).name

    def holder(self, *args: P.args, **kwargs: P.kwargs) -> SlotHolder | None:
        """
        Return the holder of the slot of a call; None if the slot is free. The answer may be outdated when you read it.

        If one call runs and another one waits for it, the holder is the run.

        Raises:
            QuorumUnavailableError: Too few nodes answered and agreed to know.
        """
        for name, seen in self._slots(args, kwargs):
            if seen.value:
                owner, holder = seen.owner or Owner(), seen.holder
                return SlotHolder(holder.task_id, holder.state, owner.since, seen.left, owner.host, seen.nodes)
            self._check_decided([(name, seen)])
        return None

    def is_locked(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """
        Return whether the slot of a call is taken now. The answer may be outdated when you read it.

        A run may have it, or a message that waits; with ``limit``, runs have all permits.

        Raises:
            QuorumUnavailableError: Too few nodes answered and agreed to know.
        """
        slots = self._slots(args, kwargs)
        taken = sum([bool(seen.value) for _, seen in slots])
        if taken >= self._task.singleton_ticket("", args, kwargs).limit:
            return True
        self._check_decided(slots)
        return False

    @overload
    def release(self) -> str: ...

    @overload
    def release(self, *args: P.args, **kwargs: P.kwargs) -> str: ...

    @overload
    def release(self, *args: Any, force: bool, **kwargs: Any) -> str: ...

    def release(self, *args: Any, **kwargs: Any) -> str:
        """
        Free the slot of a call whose message was lost, for example when a queue was purged.

        This also removes remains of a slot on single nodes.

        In a body and without arguments, give up the slot of the run before its end.

        Args:
            force: Whether to free the slot even while the task is running. The run continues, so a duplicate may run
                beside it. If the task has a parameter of this name, this is that argument.

        Returns:
            ``released``, ``expired`` (the slot was free), ``taken`` (the task is running and *force* was not given, or
            the slot changed hands meanwhile), or ``unknown`` (too few nodes confirmed the release).

        Raises:
            QuorumUnavailableError: Too few nodes answered to know the holder.
        """
        if not args and not kwargs and (outcome := self._given_up()):
            return outcome
        force = "force" not in self._task.singleton_key.signature.parameters and kwargs.pop("force", False)
        outcomes = {
            self._nodes.free(Free(name, found.secret, revoke=True))
            if force or found.holder.waits or (found.holder.state is SlotState.HELD and found.holder.task_id)
            else Outcome.TAKEN
            for name, seen in self._slots(args, kwargs)
            for found in seen.sightings
        }
        worst_first = (Outcome.TAKEN, Outcome.UNKNOWN, Outcome.RELEASED)
        return next((outcome for outcome in worst_first if outcome in outcomes), Outcome.EXPIRED)

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> Explanation:
        """
        Describe the slot of a call in words: its key, its holder, and what a call would do now.

        Raises:
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        task, options = self._task, self._task.singleton_options
        ticket = task.singleton_ticket("", args, kwargs)
        lines = [
            f"task       {task.name}",
            f"arguments  {_arguments(task, args, kwargs)}",
            f"lock       {ticket.name}",
            f"scope      {options.scope}, {self._strategies(options)}",
        ]
        found: dict[str | Permit, Holder] = {}
        names = self._locks(ticket)
        poll = ask_nodes(locks[ticket.using], map(slug_of, names))
        if ticket.limit > 1:
            used = sum([not seen_in(poll, slug_of(name)).free for name in names])
            lines.append(f"limit      {used} of {ticket.limit} permits in use")
        for name in names:
            seen = seen_in(poll, slug_of(name))
            if ticket.limit == 1 or not seen.free:
                lines += ["", f"{name}:", *_nodes(poll, slug_of(name))]
            try:
                poll.require_quorum(str(name))
            except QuorumUnavailableError as error:
                lines.append(f"  {error}")
                found[name] = UNKNOWN
                continue
            if not seen.free:
                found[name] = seen.holder if seen.value else UNKNOWN
        place = None if options.trails else ticket.queued
        lines += ["", *self._next_call(options, first_of(found, place))]
        runs = {name: holder for name, holder in found.items() if name in ticket.runs} if ticket.running else found
        if len(runs) >= ticket.limit:
            lines += self._next_message(options, first_of(runs))
        explained = Explanation("\n".join(lines))
        explained.state = first_of(found).state
        return explained

    def _cancelled(self, args: Any, kwargs: Any) -> str | None:
        """Cancel the call that waits with the slot, and return its id; None if no call does."""
        slots = self._nodes.run(self._confirmed(self._task.singleton_ticket("", args, kwargs)))
        for name, seen in slots:
            task_id = self._id_of(name, seen)
            if not (seen.value and task_id and seen.holder.waits):
                continue
            if self._cancel(self._task.singleton_ticket(task_id, args, kwargs), name, seen):
                return task_id
        self._check_decided(slots)
        return None

    def _confirmed(self, ticket: Ticket) -> Steps[list[tuple[str, Seen]]]:
        """Return the slots of a call, once each caller that has claimed one has sent its message, or is gone."""
        names, confirmation = tuple(ticket.places(self._task.singleton_options.trails)), ConfirmationWait()
        while True:
            slots = list(zip(names, (yield Look(names)), strict=True))
            claims = [seen.holder for name, seen in slots if seen.value and not self._id_of(name, seen)]
            holder = next((holder for holder in claims if holder.state is SlotState.CLAIMED), None)
            if not holder:
                return slots
            yield from confirmation.awaited(ticket.waiting, holder)

    def _id_of(self, name: str, seen: Seen) -> str | None:
        """Return the id of the task that has a slot; None if no task has it, or if only its caller knows the id yet."""
        return seen.holder.task_id

    def _cancel(self, ticket: Ticket, name: str, seen: Seen) -> bool:
        """Cancel the task of a ticket, which waits with the slot *name*, and free the slot; return whether it did."""
        raise NotImplementedError

    def _own_lease(self) -> Lease | None:
        """Return the lease of the run in progress in this thread."""
        return None

    def _given_up(self) -> str:
        """Give up the slot of the run in progress; return the outcome, or nothing if there is no such run."""
        return ""

    def _strategies(self, options: SingletonOptions) -> str:
        return f"on_duplicate={options.on_duplicate!r}"

    def _next_call(self, options: SingletonOptions, holder: Holder) -> list[str]:
        """Return what a call would do now, in sentences."""
        if options.scope == RUNNING:
            return [f"A call now would {self.send}: with scope='while_executing' any number may wait."]
        if holder.state is SlotState.UNKNOWN:
            what = f"{self.send} without a slot" if options.without_nodes("enqueue") == "publish" else "raise an error"
            return [f"Too few nodes answer and agree. A call made now would {what}."]
        if holder.state is SlotState.FREE:
            return [f"A call now would take the slot and {self.send}."]
        if holder.state is SlotState.CLAIMED:
            return ["A call now would wait until the holder's message was sent, for a second at most, or send its own."]
        what = self.answers[options.on_duplicate]
        if options.on_duplicate == "join" and not holder.task_id:
            what = self.answers["skip"] + ", because the holder is not a task"
        return [f"A call now would {what.format(id=holder.task_id or 'that has it')}."]

    def _next_message(self, options: SingletonOptions, holder: Holder) -> list[str]:
        """Return what becomes now of a message that finds another holder, in sentences."""
        return []

    @property
    def _nodes(self) -> Nodes:
        return Nodes(self._task.singleton_options.using, self._task.name)

    def _slots(self, args: Any, kwargs: Any) -> list[tuple[str | Permit, Seen]]:
        """Return the locks of a call and their state on the nodes: first that of its run, last that of a later run."""
        names = self._locks(self._task.singleton_ticket("", args, kwargs))
        return list(zip(names, self._nodes.look(Look(names)), strict=True))

    def _locks(self, ticket: Ticket) -> tuple[str | Permit, ...]:
        """Return the locks that calls with a key may hold, each of its permits included."""
        return ticket.runs if ticket.limit > 1 else tuple(ticket.places(self._task.singleton_options.trails))

    def _check_decided(self, slots: Iterable[tuple[str | Permit, Seen]]) -> None:
        """Raise QuorumUnavailableError if the nodes do not agree on one of the slots."""
        for name, seen in slots:
            if seen.split:
                raise seen.undecided(str(name))


def first_of(holders: Mapping[str | Permit, Holder], place: str | None = None) -> Holder:
    """Return the first holder, or that of one *place*."""
    chosen = (holder for name, holder in holders.items() if place in (None, name))
    return next(chosen, Holder(None, SlotState.FREE, None))


def celery_task(owner: Owner | None) -> str:
    """Return the id of the Celery task that holds a lock; empty if none does, or, as far as is known, one of Django."""
    if owner is None or owner.kind != "task":
        return ""
    module, _, function = owner.label.rpartition(".")
    found = getattr(getattr(sys.modules.get(module), function, None), "func", None)
    return "" if hasattr(found, "singleton_function") else owner.ref


def explain_call(task: Any, args: str, kwargs: str) -> Explanation:
    """
    Describe the slot of a call of a singleton task, given the arguments in JSON, as typed in a shell.

    Raises:
        ValueError: The arguments are not valid JSON of the right type, or do not fit the task.
    """
    try:
        positional, named = json.loads(args), json.loads(kwargs)
    except ValueError as error:
        raise ValueError(
            f"The arguments are not JSON ({error}); write --args '[7]' --kwargs '{{\"day\": 1}}'."
        ) from None
    if not isinstance(positional, list) or not isinstance(named, dict):
        raise ValueError("--args takes a list in JSON, --kwargs an object: --args '[7]' --kwargs '{\"day\": 1}'.")
    try:
        task.singleton.key(*positional, **named)
    except TypeError as error:
        raise ValueError(f"{task.name} does not take these arguments: {error}") from None
    except Exception as error:  # the error comes from the project's own key function
        raise ValueError(f"{task.name} has no key for these arguments: {type(error).__name__}: {error}") from None
    explained: Explanation = task.singleton.explain(*positional, **named)
    return explained


def _arguments(task: Any, args: Any, kwargs: Any) -> str:
    try:
        return task.singleton_key.canonical(args, kwargs) or "none"
    except (TypeError, ValueError) as error:
        return f"not all have a form of their own: {error}"


def _nodes(poll: Poll, slug: str) -> Iterator[str]:
    """Yield one line for each node about its entry for a lock's key."""
    rows = {index: row for vote in poll.tally(slug).votes for index, row in vote.rows.items()}
    for index, node in enumerate(poll.manager.nodes):
        if index in poll.silent:
            yield f"  {node.name}  no answer ({poll.silent[index]})"
        elif index not in rows:
            yield f"  {node.name}  free"
        else:
            owner, left = decode(rows[index].value), rows[index].left
            who = f"{Holder.described(owner, left).state}, {owner}" if owner else "held by another program"
            yield f"  {node.name}  {who}, " + ("no expiry" if left is None else f"{left:.1f} s left")
