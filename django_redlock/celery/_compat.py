"""
Celery's classes as type checkers see them: generic, which before Celery 5.7 they are not when the code runs (internal).
"""

from types import GenericAlias
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from celery import Task
from celery.result import AsyncResult

P = ParamSpec("P")
R = TypeVar("R", covariant=True)

if TYPE_CHECKING:
    from celery.contrib.django.task import DjangoTask

    class BaseTask(DjangoTask[P, R]):
        """Celery's task class for Django, which the app of every Django project has."""

    class BaseResult(AsyncResult[R]):
        """Celery's result class."""

else:

    class BaseTask(Task):
        """Celery's task class."""

        __class_getitem__ = classmethod(GenericAlias)

    class BaseResult(AsyncResult):
        """Celery's result class."""

        __class_getitem__ = classmethod(GenericAlias)
