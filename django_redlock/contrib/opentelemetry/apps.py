"""The Django app."""

from django.apps import AppConfig


class OpenTelemetryConfig(AppConfig):
    """Tells OpenTelemetry of locks."""

    name = "django_redlock.contrib.opentelemetry"
    label = "redlock_opentelemetry"

    def ready(self) -> None:
        """Begin."""
        from . import install

        install()
