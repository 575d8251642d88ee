"""The Django app."""

from django.apps import AppConfig


class PrometheusConfig(AppConfig):
    """The app that installs the metrics."""

    name = "django_redlock.contrib.prometheus"
    label = "redlock_prometheus"

    def ready(self) -> None:
        """Install the metrics in the default registry."""
        from . import install  # only here: Django's apps must be ready

        install()
