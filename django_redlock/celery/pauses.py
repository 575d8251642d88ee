"""For how long a worker puts a message back into the queue (internal)."""

from ..exceptions import QuorumUnavailableError

LONGEST_PAUSE = 60.0  # seconds until a message whose slot could not be looked up is tried again
# Seconds for which a message that waits for its slot is put back. Celery's delayed delivery over quorum queues counts
# whole ones, and fails with none.
FIRST_WAIT, LONGEST_WAIT = 1.0, 10.0


def backoff(first: float, longest: float, tries: int) -> float:
    """Return for how long to put a message back that has been put back *tries* times, in seconds."""
    return min(longest, first * 2.0 ** min(tries, 32))


def pause_without_nodes(error: QuorumUnavailableError, tries: int) -> float:
    """Return for how long to put back a message whose slot could not be looked up, in seconds."""
    if error.retry_after is None:
        return backoff(1.0, LONGEST_PAUSE, tries)
    return min(LONGEST_PAUSE, error.retry_after + 0.5)  # a moment more, so that the nodes vote when it comes
