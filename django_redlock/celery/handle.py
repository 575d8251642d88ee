"""``task.singleton``: inspect and free the slot of a call; in the body, the slot of the run (internal)."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, overload

from celery import current_app
from celery._state import get_current_app

from ..core.names import Owner, decode, slug
from ..core.protocol import EndReason, Outcome
from ..core.rules import nearest
from ..engine.lease import Lease
from ..exceptions import QuorumUnavailableError
from ..handler import locks
from ..inventory.survey import Poll, ask_nodes
from .dispatch import store_revoked
from .options import Return, SingletonOptions
from .pending import discard_seen
from .slots import RUNNING, Holder, Seen, SlotState, Ticket, free, look

if TYPE_CHECKING:
    from .task import SingletonTask


P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class SlotHolder:
    """
    The present holder of a slot.

    Args:
        id: Id of the task; None if the holder is not a task.
        state: ``claimed`` while its message is being sent, ``queued``, ``running``, or ``held`` when the task is over
            or the holder is not a task.
        since: When it entered that state, in seconds since the epoch on the clock of *hostname*.
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


class Singleton(Generic[P]):
    """
    The slots of one task; every method takes the arguments of the call whose slot it concerns.

    Args:
        task: The task.
    """

    def __init__(self, task: "SingletonTask[P, Any]") -> None:
        self._task = task

    def __repr__(self) -> str:
        return f"<Singleton {self._task.name!r}>"

    # In the body

    @property
    def lease(self) -> Lease | None:
        """
        The lease of the run in progress in this thread; None outside a run, and after ``retry()`` gave the slot away.

        Its ``fencing_token`` is a number greater than that of every earlier run.
        """
        execution = self._task.singleton_run
        return execution.lease if execution and not execution.handed_over else None

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
        return self._task.singleton_key.lock_name(args, kwargs)

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
            if seen.split:
                raise self._undecided(name, seen)
        return None

    def is_locked(self, *args: P.args, **kwargs: P.kwargs) -> bool:
        """
        Return whether a call would be a duplicate now. The answer may be outdated when you read it.

        Raises:
            QuorumUnavailableError: Too few nodes answered and agreed to know.
        """
        slots = self._slots(args, kwargs)
        if any(seen.value for _, seen in slots):
            return True
        for name, seen in slots:
            if seen.split:
                raise self._undecided(name, seen)
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
        execution = self._task.singleton_run
        force = "force" not in self._task.singleton_key.signature.parameters and kwargs.pop("force", False)
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
        slots = self._slots(args, kwargs)
        for name, seen in slots:
            holder: Holder = seen.holder
            if seen.value and holder.task_id and holder.waits:
                ticket = self._task.singleton_ticket("", args, kwargs)
                discard_seen(ticket, name, seen, self._task)  # first, because the revocation may fail
                self._task.app.control.revoke(holder.task_id)
                store_revoked(self._task, holder.task_id, "Cancelled.", not self._task.ignore_result)
                return holder.task_id
        for name, seen in slots:
            if seen.split:
                raise self._undecided(name, seen)
        return None

    def explain(self, *args: P.args, **kwargs: P.kwargs) -> str:
        """
        Describe the slot of a call in words: its key, its holder, and what a call would do now.

        Raises:
            TypeError: The arguments do not fit the task, or one cannot be part of a key.
        """
        return explain(self._task, args, kwargs).text

    def _slots(self, args: Any, kwargs: Any) -> list[tuple[str, Seen]]:
        """Return the locks of a call and their state on the nodes: first that of its run, last that of a later run."""
        ticket: Ticket = self._task.singleton_ticket("", args, kwargs)
        names = ticket.places(self._task.singleton_options.trails)
        return list(zip(names, look(ticket.using, *names), strict=True))

    def _undecided(self, name: str, seen: Seen) -> QuorumUnavailableError:
        needed = locks[self._task.singleton_options.using].rules.needed
        return QuorumUnavailableError(name, nodes=seen.reported, needed=needed)


UNKNOWN = Holder(None, SlotState.UNKNOWN, None)

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


class Explanation(NamedTuple):
    """A description of the slot of a call, line by line, and the state of the slot."""

    text: str
    state: SlotState


def explain(task: Any, args: Any, kwargs: Any) -> Explanation:
    """
    Describe the slot of a call of *task*.

    Raises:
        TypeError: The arguments do not fit the task, or one cannot be part of a key.
    """
    ticket: Ticket = task.singleton_ticket("", args, kwargs)
    options: SingletonOptions = task.singleton_options
    lines = [
        f"task       {task.name}",
        f"arguments  {_arguments(task, args, kwargs)}",
        f"lock       {ticket.name}",
        f"scope      {options.scope}, on_duplicate={options.on_duplicate!r}, on_overlap={options.overlap!r}",
    ]
    holder = Holder(None, SlotState.FREE, None)
    names = ticket.places(options.trails)
    poll = ask_nodes(locks[ticket.using], map(slug, names))
    for name in names:
        lines += ["", f"{name}:", *_nodes(poll, slug(name))]
        try:
            poll.require_quorum(name)
        except QuorumUnavailableError as error:
            lines.append(f"  {error}")
            holder = UNKNOWN
            continue
        seen = Seen.of(poll, slug(name))
        if holder.state is SlotState.FREE and not seen.free:
            holder = seen.holder if seen.value else UNKNOWN
    lines += ["", *_next_call(options, holder), *_next_message(options, holder)]
    return Explanation("\n".join(lines), holder.state)


def explain_call(name: str, args: str, kwargs: str) -> Explanation:
    """
    Describe the slot of a call, given the task's name and the arguments in JSON, as typed in a shell.

    Raises:
        ValueError: There is no such singleton task, or the arguments are not valid JSON of the right type.
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
    try:
        positional, named = json.loads(args), json.loads(kwargs)
    except ValueError as error:
        raise ValueError(
            f"The arguments are not JSON ({error}); write --args '[7]' --kwargs '{{\"day\": 1}}'."
        ) from None
    if not isinstance(positional, list) or not isinstance(named, dict):
        raise ValueError("--args takes a list in JSON, --kwargs an object: --args '[7]' --kwargs '{\"day\": 1}'.")
    try:
        known[name].singleton_ticket("", positional, named)
    except TypeError as error:
        raise ValueError(f"{name} does not take these arguments: {error}") from None
    except Exception as error:  # the error comes from the project's own key function
        raise ValueError(f"{name} has no key for these arguments: {type(error).__name__}: {error}") from None
    return explain(known[name], positional, named)


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


def _next_call(options: SingletonOptions, holder: Holder) -> list[str]:
    if options.scope == RUNNING:
        return ["A call now would be sent: with scope='while_executing' any number may wait."]
    if holder.state is SlotState.UNKNOWN:
        what = "be sent without a slot" if options.without_nodes("enqueue") == "publish" else "raise an error"
        return [f"Too few nodes answer and agree. A call made now would {what}."]
    if holder.state is SlotState.FREE:
        return ["A call now would take the slot and be sent."]
    if holder.state is SlotState.CLAIMED:
        return ["A call now would wait until the holder's message was sent, for a second at most, or send its own."]
    what = ANSWERS[options.on_duplicate]
    if options.on_duplicate == "join" and not holder.task_id:
        what = ANSWERS["skip"] + ", because the holder is not a task"
    lines = [f"A call now would {what.format(id=holder.task_id or 'that has it')}."]
    if options.on_duplicate != "raise":
        lines.append("With link= or link_error= it would raise DuplicateTask: the holder would not follow them.")
    return lines


def _next_message(options: SingletonOptions, holder: Holder) -> list[str]:
    if holder.state in (SlotState.FREE, SlotState.UNKNOWN):
        return []
    if holder.state is SlotState.CLAIMED:
        return ["A worker that gets another message for this slot now would put it back for a moment."]
    how = options.overlap
    what = "end it with the value of Return()" if isinstance(how, Return) else OVERLAPS[how]
    what = what.format(id=holder.task_id or "that has it")
    return [f"A worker that gets another message for this slot now would {what}."]


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
