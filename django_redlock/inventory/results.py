"""The results of an operator's actions on a lock (internal)."""

from enum import StrEnum


class ActionResult(StrEnum):
    """
    The result of an action on a lock that somebody else holds, or on a stale key.

    Members are strings, so that users' code, logs and commands compare and show them as text.
    """

    RELEASED = "released"
    ASKED = "asked"  # the holder learns of the request to stop at its next renewal
    EXTENDED = "extended"
    LONGER = "longer"  # a quorum already keeps the lock for longer
    STOPPING = "stopping"  # the holder was asked to stop, so it gets no more time
    SHARED = "shared"  # several holders share the lock; they cannot be asked or extended one by one
    FOREIGN = "foreign"  # another program holds the lock, and cannot be asked to stop
    WRONG_TYPE = (
        "wrong_type"  # another program wrote the key, which is not a string: only a DEL on the nodes deletes it
    )
    CHANGED = "changed"  # somebody else holds the lock now, or the key is no longer stale
    GONE = "gone"  # nobody holds the lock
    UNKNOWN = "unknown"  # too few nodes answered
    REMOVED = "removed"  # a stale key
    FAILED = "failed"  # a node that has the stale key may still have it
