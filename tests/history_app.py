"""The history app, which listens only when a test enables it."""

from django_redlock.contrib.history.apps import HistoryConfig


class Quiet(HistoryConfig):
    """The app, without its thread writing to the database of any test."""

    def ready(self) -> None:
        """Do nothing."""
