"""
The findings of the doctor (internal).

Each finding has a stable name, one cause, and a remedy that can be typed.
"""

from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """How bad a finding is; a str, so that users' code and JSON documents show it as text."""

    NOTE = "note"
    WARNING = "warning"  # locks work, but will surprise
    ERROR = "error"  # locks fail, or may be held twice


def severity(level: Level) -> int:
    """Return how bad a level is: the higher, the worse."""
    return tuple(Level).index(level)


class Finding(NamedTuple):
    """
    One problem that the doctor found.

    Args:
        id: The finding's stable name; for a problem that the settings alone show, the id of the system check.
        level: How bad it is.
        node: The node's display name; empty if the problem concerns all nodes.
        text: What is wrong, and its possible consequences.
        remedy: What to do.
    """

    id: str
    level: Level
    node: str
    text: str
    remedy: str
