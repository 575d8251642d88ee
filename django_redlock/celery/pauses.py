"""The pauses for which a worker puts a message back into the queue (internal)."""

from ..exceptions import QuorumUnavailableError

LONGEST_PAUSE = 60.0  # seconds until a message whose slot could not be looked up is tried again
# Seconds for which a message that waits for its slot is put back. Celery's delayed delivery over quorum queues counts
# whole seconds, and fails with 0.
FIRST_WAIT, LONGEST_WAIT = 1.0, 10.0


def backoff(first: float, longest: float, tries: int) -> float:
    """Return the next pause, in seconds, of a message that has been put back *tries* times."""
    return min(longest, first * 2.0 ** min(tries, 32))


def pause_after(error: Exception, tries: int) -> float:
    """Return the pause, in seconds, of a message that cannot be run because a part that it needs does not answer."""
    if isinstance(error, QuorumUnavailableError) and error.retry_after is not None:
        # A little longer, so that the nodes vote again when the message arrives.
        return min(LONGEST_PAUSE, error.retry_after + 0.5)
    return backoff(1.0, LONGEST_PAUSE, tries)
