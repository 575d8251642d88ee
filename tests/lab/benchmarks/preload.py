"""Imported once by the process from which all child processes are forked."""

from . import locking, waiting  # noqa: F401
from .bench import set_up

set_up()
