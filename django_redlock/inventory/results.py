"""The results of what an operator does to a lock (internal)."""

from enum import StrEnum


class ActionResult(StrEnum):
    """
    The result of an action on a lock that somebody else holds, or on a stale key.

    Members are texts, so that code of users, logs and commands compare and show them as such.
    """

    RELEASED = "released"
    ASKED = "asked"  # its holder learns of the request to stop at its next renewal
    EXTENDED = "extended"
    LONGER = "longer"  # a quorum keeps it for longer already
    STOPPING = "stopping"  # its holder was asked to stop, so it gets no more time
    SHARED = "shared"  # several hold it, who cannot be asked or extended one by one
    CHANGED = "changed"  # somebody else has it now, or the key is no longer stale
    GONE = "gone"  # nobody holds it
    UNKNOWN = "unknown"  # too few nodes answered to tell
    REMOVED = "removed"  # a stale key
    FAILED = "failed"  # a node that has the stale key may still have it
