"""
What singletons tell: Django signals, Celery events of the same names, and structured log lines.

The sender of a signal is the task. Receivers run where it happened: in the caller, the worker, or the watchdog's
thread. A failing receiver disturbs no task. Celery events are sent where the project has switched them on, with
``task_send_sent_event`` for callers and ``worker_send_task_events`` for workers; in an event's name the underscore is
a hyphen, as Celery has it.
"""

import logging
from typing import Any

from django.dispatch import Signal

singleton_duplicate = Signal()
"""Sent when a call finds the slot taken, with ``task_id``, ``name``, ``holder_id``, ``state`` and ``strategy``."""
singleton_overlap = Signal()
"""Sent when a worker finds the slot taken, with the same arguments as ``singleton_duplicate``."""
singleton_lost = Signal()
"""Sent when a run lost its slot, with ``task_id``, ``name``, ``lease`` and ``reason``."""
singleton_stolen = Signal()
"""Sent when a run lost its slot to another run or an operator, with the same arguments as ``singleton_lost``."""

SIGNALS = {
    "singleton_duplicate": singleton_duplicate,
    "singleton_overlap": singleton_overlap,
    "singleton_lost": singleton_lost,
    "singleton_stolen": singleton_stolen,
}

log = logging.getLogger("django_redlock")


def tell(task: Any, event: str, text: str, *values: object, **about: Any) -> None:
    """
    Tell everybody of an event.

    Args:
        task: The task.
        event: The signal's name.
        text: For the log.
        values: What stands for each ``%s`` in it.
        about: The signal's arguments.
    """
    level = logging.INFO if event in ("singleton_duplicate", "singleton_overlap") else logging.ERROR
    fields = {name: value for name, value in about.items() if name != "lease"}
    if log.isEnabledFor(level):
        extra = {"event": event, "task": task.name, "lock": about["name"], "singleton": fields}
        log.log(level, text, *values, extra=extra)
    for receiver, result in SIGNALS[event].send_robust(sender=task, **about):
        if isinstance(result, Exception):
            log.error("receiver %r of %s failed", receiver, event, exc_info=result)
    conf = task.app.conf
    if conf.task_send_sent_event if event == "singleton_duplicate" else conf.worker_send_task_events:
        _send_event(task, event.replace("_", "-"), fields)


def _send_event(task: Any, kind: str, fields: dict[str, Any]) -> None:
    try:
        with task.app.events.default_dispatcher() as dispatcher:
            # A field called "name" is what Celery calls a task.
            dispatcher.send(kind, uuid=fields.pop("task_id"), lock=fields.pop("name"), task=task.name, **fields)
    except Exception:
        log.exception("the event %s could not be sent", kind)
