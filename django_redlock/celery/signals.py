"""
The reports of singletons: Django signals, Celery events of the same names, and log lines (internal).

The sender of a signal is the task. Receivers run where the event happened: in the caller, the worker, or the watchdog's
thread. A failing receiver does not affect the task. Celery events are sent if the project has switched them on, with
``task_send_sent_event`` for callers and ``worker_send_task_events`` for workers. The name of a Celery event has hyphens
in place of underscores.
"""

import logging
from typing import Any, NamedTuple

from ..exceptions import printable
from ..signals import SyncSignal
from ..singleton.slot import Holder
from ..singleton.ticket import Ticket

singleton_duplicate = SyncSignal()
"""A call is a duplicate. Arguments: ``task_id``, ``name``, ``holder_id``, ``state``, ``strategy``."""
singleton_overlap = SyncSignal()
"""A worker has a message whose slot another task has. Arguments: as above."""
singleton_lost = SyncSignal()
"""Sent when a run lost its slot, with ``task_id``, ``name``, ``lease`` and ``reason``."""
singleton_stolen = SyncSignal()
"""Sent when a run lost its slot to another run or an operator, with the same arguments as ``singleton_lost``."""


class SlotEvent(NamedTuple):
    """
    Something that happens to a slot.

    Args:
        name: The name of the log event and of Celery's event.
        signal: Its signal.
        level: The level of its log line.
        setting: The Celery setting that switches its event on.
    """

    name: str
    signal: SyncSignal
    level: int
    setting: str


DUPLICATE = SlotEvent("singleton_duplicate", singleton_duplicate, logging.INFO, "task_send_sent_event")
OVERLAP = SlotEvent("singleton_overlap", singleton_overlap, logging.INFO, "worker_send_task_events")
LOST = SlotEvent("singleton_lost", singleton_lost, logging.ERROR, "worker_send_task_events")
STOLEN = SlotEvent("singleton_stolen", singleton_stolen, logging.ERROR, "worker_send_task_events")

# What Celery's events call our arguments; there, a field called "name" is the name of a task.
IN_EVENTS = {"task_id": "uuid", "name": "lock"}

log = logging.getLogger("django_redlock")


def report_holder(task: Any, event: SlotEvent, ticket: Ticket, holder: Holder, strategy: str, effect: str) -> None:
    """
    Report that another holder has the slot of a call or a message.

    Args:
        task: The task.
        event: The event.
        ticket: The ticket of the call or the message.
        holder: Who has the slot.
        strategy: The option that says what happens then.
        effect: What happens, for people.
    """
    about: dict[str, Any] = {"task_id": ticket.task_id, "name": ticket.name, "holder_id": holder.task_id}
    about |= {"state": str(holder.state), "strategy": strategy}
    report(task, event, "%s is %s; %s", ticket.name, holder, effect, **about)


def report(task: Any, event: SlotEvent, text: str, *values: object, lease: Any = None, **about: Any) -> None:
    """
    Report an event: by a log line, to the receivers of its signal, and to Celery if its events are switched on.

    Args:
        task: The task.
        event: The event.
        text: The log line.
        values: The value for each ``%s`` in the text; may have any characters.
        lease: An argument of the signal alone; None if it has none.
        about: The other arguments of the signal.
    """
    if log.isEnabledFor(event.level):
        extra = {"event": event.name, "task": task.name, "lock": about["name"], "singleton": about}
        log.log(event.level, text, *(printable(str(value)) for value in values), extra=extra)
    arguments = {**about, "lease": lease} if lease else about
    for receiver, result in event.signal.send_robust(sender=task, **arguments):
        if isinstance(result, Exception):
            log.error("receiver %r of %s failed", receiver, event.name, exc_info=result)
    if getattr(task.app.conf, event.setting):
        kind = event.name.replace("_", "-")
        fields = {IN_EVENTS.get(name, name): value for name, value in about.items()}
        try:
            with task.app.events.default_dispatcher() as dispatcher:
                dispatcher.send(kind, task=task.name, **fields)
        except Exception:
            log.exception("the event %s could not be sent", kind)
