"""
The findings of the doctor (internal).

Each finding has a name that stays the same, one cause, and a remedy that can be typed.
"""

from enum import StrEnum
from typing import NamedTuple


class Level(StrEnum):
    """How bad a finding is; a text, so that code of users and JSON documents show it as such."""

    NOTE = "note"
    WARNING = "warning"  # it will surprise
    ERROR = "error"  # locks fail, or may be held twice


def severity(level: Level) -> int:
    """Return how bad a level is: the higher, the worse."""
    return tuple(Level).index(level)


class Finding(NamedTuple):
    """
    One thing that is wrong.

    Args:
        id: Its name, which stays the same; that of a system check for what the settings alone show.
        level: How bad it is.
        node: The node's display name; empty if it concerns all of them.
        text: What is wrong, and its possible consequences.
        remedy: What to do.
    """

    id: str
    level: Level
    node: str
    text: str
    remedy: str
