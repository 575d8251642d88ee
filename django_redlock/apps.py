"""The Django app: its label and its system checks."""

import sys
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, register
from django.utils.translation import gettext_lazy as _


class RedlockConfig(AppConfig):
    """The app that registers the system checks; it connects to nothing."""

    name = "django_redlock"
    label = "redlock"
    verbose_name = _("Locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import the checks, which register themselves."""
        from . import checks, views  # noqa: F401  (only here: when Django imports this module, its apps are not ready)

        register(check_code, checks.TAG)


def check_code(**kwargs: Any) -> list[CheckMessage]:
    """Report mistakes in tasks and then in decorators, because the check of the tasks imports their modules."""
    from .checks import check_decorators  # only here: see ready()

    return [*check_tasks(), *check_decorators()]


def check_tasks(**kwargs: Any) -> list[CheckMessage]:
    """Report singleton tasks that cannot work, if the project has imported Celery by the time the checks run."""
    if "celery" not in sys.modules:
        return []
    from .celery.checks import check_singletons  # only here, because Celery is an extra and slow to import

    return check_singletons(**kwargs)
