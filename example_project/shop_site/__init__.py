"""The project: settings, URLs, Celery. The shop itself is the app ``shop``."""

from .celery import app as celery_app

__all__ = ["celery_app"]
