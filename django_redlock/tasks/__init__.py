"""
Django's own tasks of which one waits or runs at a time: :func:`singleton_task`.

Needs Django 6.0, which brought ``django.tasks``. Nothing else in the package imports this one, and it needs no Celery.
"""

from importlib.util import find_spec

if find_spec("django.tasks") is None:
    raise ImportError("django_redlock.tasks needs Django 6.0 or later; for Celery, import django_redlock.celery.")

from ..singleton.handle import SlotHolder
from ..singleton.slots import DuplicateTask
from .enqueue import SingletonResult
from .run import CancelledTask
from .task import Singleton, SingletonTask, singleton_task

__all__ = [
    "CancelledTask",
    "DuplicateTask",
    "Singleton",
    "SingletonResult",
    "SingletonTask",
    "SlotHolder",
    "singleton_task",
]
