"""
Django's own tasks of which one waits or runs at a time: :func:`singleton_task`.

Needs Django 6.0, which brought ``django.tasks``, and no Celery. Nothing else in the package imports this one; but
Celery imports the module ``tasks`` of every installed app, so that succeeds on any Django.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..singleton.handle import SlotHolder
from ..singleton.slot import DuplicateTask

if TYPE_CHECKING or find_spec("django.tasks"):
    from .enqueue import SingletonResult
    from .run import CancelledTask
    from .task import Singleton, SingletonTask, singleton_task
else:

    def __getattr__(name: str) -> Any:
        """Say what is missing, at the first use."""
        if name in __all__:
            raise ImportError(f"{__name__}.{name} needs Django 6.0; for Celery, import it from django_redlock.celery.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CancelledTask",
    "DuplicateTask",
    "Singleton",
    "SingletonResult",
    "SingletonTask",
    "SlotHolder",
    "singleton_task",
]
