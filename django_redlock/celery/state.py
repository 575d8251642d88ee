"""The states of a slot (internal)."""

from enum import StrEnum


class SlotState(StrEnum):
    """
    What is known about a slot.

    The members are strings, so that users' code, logs and events can compare and show them.
    """

    FREE = "free"
    CLAIMED = "claimed"  # a message is about to be sent, or may have been
    QUEUED = "queued"  # a message is on its way
    RUNNING = "running"
    HELD = "held"  # the run has ended and the slot is kept, or the holder is not a task
    UNKNOWN = "unknown"  # too few nodes answered and agreed
