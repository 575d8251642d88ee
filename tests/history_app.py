"""The history of locks, which listens only when a test says so."""

from django_redlock.contrib.history.apps import HistoryConfig


class Quiet(HistoryConfig):
    """The app, without its thread writing to the database of any test."""

    def ready(self) -> None:
        """Do nothing."""
