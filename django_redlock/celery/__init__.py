"""
Celery tasks of which one runs at a time: :func:`singleton_task`.

Needs the extra ``celery``. Nothing else in the package imports this one.
"""

from importlib import import_module

from ..exceptions import missing_extra

try:
    import_module("celery")
except ModuleNotFoundError as error:
    raise missing_extra(error, "celery") from None

from ..singleton.handle import SlotHolder
from ..singleton.options import Return, SingletonOptions
from ..singleton.slot import DuplicateTask
from . import checks as checks  # a worker runs them when it starts
from .dispatch import SingletonResult
from .handle import Singleton
from .signals import singleton_duplicate, singleton_lost, singleton_overlap, singleton_stolen
from .task import SingletonTask, override_singleton, singleton_task

__all__ = [
    "DuplicateTask",
    "Return",
    "Singleton",
    "SingletonOptions",
    "SingletonResult",
    "SingletonTask",
    "SlotHolder",
    "override_singleton",
    "singleton_duplicate",
    "singleton_lost",
    "singleton_overlap",
    "singleton_stolen",
    "singleton_task",
]
