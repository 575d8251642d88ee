"""The Django app."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class HistoryConfig(AppConfig):
    """Starts to record locks that end."""

    name = "django_redlock.contrib.history"
    label = "redlock_history"
    verbose_name = _("Locks: history")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Listen to the locks of this process."""
        from .recorder import recorder

        recorder.listen()
