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
        # only here: the checks import models, which needs Django's apps to be ready
        from . import checks
        from . import checks as checks_of_fences  # noqa: F401
        from . import views as checks_of_views  # noqa: F401

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
