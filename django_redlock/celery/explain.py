"""Describe the slot of a call in words, for ``task.singleton.explain()`` and ``redlock_inspect`` (internal)."""

import json
from typing import Any, NamedTuple

from celery._state import get_current_app

from ..core.names import decode, slug
from ..exceptions import QuorumUnavailableError
from ..handler import locks
from ..keys import canonical
from .options import Return, SingletonOptions, nearest
from .slots import RUNNING, Holder, SlotState, Ticket, peek, state_of

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
    for name in ticket.places(options.trails):
        lines += ["", f"{name}:", *_nodes(ticket.using, name)]
        try:
            seen = peek(ticket.using, name)
        except QuorumUnavailableError as error:
            lines.append(f"  {error}")
            holder = UNKNOWN
            continue
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
        return canonical(task.singleton_parameters, args, kwargs) or "none"
    except (TypeError, ValueError) as error:
        return f"not all have a form of their own: {error}"


def _nodes(using: str, name: str) -> list[str]:
    """Return one line for each node about its entry for a lock's key."""
    manager = locks[using]
    replies = manager.survey(slugs=(slug(name),))
    lines = []
    for index, node in enumerate(manager.nodes):
        reply = replies.get(index)
        row = reply.rows[0] if reply and reply.rows else None
        if row is None:
            lines.append(f"  {node.name}  no answer ({reply})")
        elif not row.value:
            lines.append(f"  {node.name}  free")
        else:
            owner = decode(row.value)
            who = f"{state_of(owner.label)}, {owner}" if owner else "held by another program"
            left = "no expiry" if row.left is None else f"{row.left:.1f} s left"
            lines.append(f"  {node.name}  {who}, {left}")
    return lines


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


def _overlap(options: SingletonOptions) -> str:
    how = options.overlap
    return "end it with the value of Return()" if isinstance(how, Return) else OVERLAPS[how]


def _next_message(options: SingletonOptions, holder: Holder) -> list[str]:
    if holder.state in (SlotState.FREE, SlotState.UNKNOWN):
        return []
    if holder.state is SlotState.CLAIMED:
        return ["A worker that gets another message for this slot now would put it back for a moment."]
    what = _overlap(options).format(id=holder.task_id or "that has it")
    return [f"A worker that gets another message for this slot now would {what}."]
