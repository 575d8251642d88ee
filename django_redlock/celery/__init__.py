"""
Celery tasks of which one runs at a time: :func:`singleton_task`.

Needs the extra ``celery``. Nothing else in the package imports this one.
"""

from .decorator import singleton_task
from .exceptions import DuplicateTask
from .handle import Singleton
from .options import SingletonOptions
from .result import SingletonResult
from .task import SingletonTask

__all__ = [
    "DuplicateTask",
    "Singleton",
    "SingletonOptions",
    "SingletonResult",
    "SingletonTask",
    "singleton_task",
]
