"""
Celery tasks of which one runs at a time: :func:`singleton_task`.

Needs the extra ``celery``. Nothing else in the package imports this one.
"""

from . import checks as checks  # a worker runs them when it starts
from .decorator import singleton_task
from .exceptions import DuplicateTask
from .handle import Singleton, SlotHolder
from .options import Return, SingletonOptions
from .override import override_singleton
from .result import SingletonResult
from .signals import singleton_duplicate, singleton_lost, singleton_overlap, singleton_stolen
from .task import SingletonTask

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
