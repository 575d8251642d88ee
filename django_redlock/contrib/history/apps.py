"""The Django app."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class HistoryConfig(AppConfig):
    """The app that records locks when they end."""

    name = "django_redlock.contrib.history"
    label = "redlock_history"
    verbose_name = _("Locks: history")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Start to record the locks of this process."""
        from .recorder import recorder  # only here: Django's apps must be ready

        recorder.listen()
