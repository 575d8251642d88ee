"""
How a hold can end, and the results of a release (internal).

Members are strings, so users' code, logs and metrics can compare and show them as text. Code of this package compares
members.
"""

from enum import StrEnum


class EndReason(StrEnum):
    """Why a hold ended; :data:`django_redlock.exceptions.EXPLANATIONS` describes each for people."""

    RELEASED = "released"
    EXPIRED = "expired"
    SUPERSEDED = "superseded"  # another caller came since, and may have got the lock or failed
    FORGOTTEN = "forgotten"  # the nodes no longer know this holder
    FENCED = "fenced"  # a database has seen a later holder
    REVOKED = "revoked"  # an operator asked for it
    MAX_HOLD = "max_hold"
    MAX_EXTENSIONS = "max_extensions"
    HEARTBEAT = "heartbeat"
    FORKED = "forked"  # this process is a fork of the holder


class Outcome(StrEnum):
    """The result of a release."""

    RELEASED = "released"  # the lock was held until now
    EXPIRED = "expired"  # the lock had ended before
    TAKEN = "taken"  # another owner has it
    UNKNOWN = "unknown"  # too few nodes answered in time; the lock ends with its ttl at the latest
    HELD = "held"  # the lock was entered more than once, and is still held


LOST = frozenset({Outcome.EXPIRED, Outcome.TAKEN})
"""The outcomes of a release that show that the lock had been lost before."""
