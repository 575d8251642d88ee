"""The Django app."""

from django.apps import AppConfig


class PrometheusConfig(AppConfig):
    """Installs the metrics."""

    name = "django_redlock.contrib.prometheus"
    label = "redlock_prometheus"

    def ready(self) -> None:
        """Install them in the default registry."""
        from . import install

        install()
