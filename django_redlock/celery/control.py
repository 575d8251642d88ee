"""
What an operator tells the workers.
"""

from celery import current_app
from kombu.exceptions import KombuError

CONNECT_TIMEOUT = 2  # seconds
BROKER_ERRORS = (KombuError, OSError)


def revoke(task_id: str, *, terminate: bool = False) -> None:
    """
    Tell all workers not to run a task, and the one that runs it to end it, if asked to.

    A task that runs learns of it only by *terminate*, which kills the process of a prefork worker. A singleton task
    whose lease is lost can also look at ``self.execution.lease.lost``, and end by itself.

    Raises:
        BROKER_ERRORS: The broker cannot be reached, or refused.
    """
    # Once: who waits for an answer must not wait for as long as a sender of tasks would try.
    with current_app.connection_for_write(connect_timeout=CONNECT_TIMEOUT) as connection:
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=CONNECT_TIMEOUT)
        current_app.control.revoke(task_id, terminate=terminate, connection=connection, retry=False)
