"""The states of a slot (internal)."""

from enum import StrEnum


class SlotState(StrEnum):
    """
    What is known about a slot.

    Members are texts, so that code of users, logs and events compare and show them as such.
    """

    FREE = "free"
    QUEUED = "queued"  # a message is on its way
    RUNNING = "running"
    HELD = "held"  # the run is over, and the slot is kept; or the holder is not a task
    UNKNOWN = "unknown"  # too few nodes answer and agree
