"""
What an operator tells the workers.
"""

import logging

from celery import current_app

PATIENCE = 2  # seconds for a broker to answer: the operator waits, and the lock is released all the same

log = logging.getLogger("django_redlock")


def revoke(task_id: str, *, terminate: bool = False) -> bool:
    """
    Tell all workers not to run a task, and the one that runs it to end it, if asked to.

    A task that runs learns of it only by *terminate*, which kills the process of a prefork worker. A singleton task
    whose lease is lost can also look at ``self.execution.lease.lost``, and end by itself.

    Returns:
        Whether the broker took it; that it did not is logged and harms nothing else.
    """
    try:
        with current_app.connection_for_write(connect_timeout=PATIENCE) as connection:
            connection.ensure_connection(max_retries=1, interval_start=0, timeout=PATIENCE)
            current_app.control.revoke(task_id, terminate=terminate, connection=connection)
    except Exception as error:  # each broker's library has its own; their texts may hold its address
        about = {"event": "task_not_revoked", "task": task_id}
        log.warning("the workers were not told to revoke task %r: %s", task_id, type(error).__name__, extra=about)
        return False
    return True
