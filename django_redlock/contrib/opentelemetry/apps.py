"""The Django app."""

from django.apps import AppConfig


class OpenTelemetryConfig(AppConfig):
    """The app that reports locks to OpenTelemetry."""

    name = "django_redlock.contrib.opentelemetry"
    label = "redlock_opentelemetry"

    def ready(self) -> None:
        """Start reporting."""
        from . import install  # only here: Django's apps must be ready

        install()
