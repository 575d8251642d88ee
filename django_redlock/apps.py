"""The Django app: its label, its checks."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class RedlockConfig(AppConfig):
    """Registers the system checks; connects to nothing."""

    name = "django_redlock"
    label = "redlock"
    verbose_name = _("Locks")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Import the checks, which register themselves."""
        from . import checks  # noqa: F401
        from .db import checks as checks_of_fences  # noqa: F401
