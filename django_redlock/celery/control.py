"""
What an operator tells the workers.
"""

from celery import current_app

CONNECT_TIMEOUT = 2  # seconds


def revoke(task_id: str, *, terminate: bool = False) -> None:
    """
    Tell all workers not to run a task, and the one that runs it to end it, if asked to.

    A task that runs learns of it only by *terminate*, which kills the process of a prefork worker. A singleton task
    whose lease is lost can also look at ``self.singleton.lost``, and end by itself.

    Raises:
        Exception: The broker cannot be reached, or refused, or its settings cannot be used; which one depends on it.
    """
    # Once: who waits for an answer must not wait for as long as a sender of tasks would try.
    with current_app.connection_for_write(connect_timeout=CONNECT_TIMEOUT) as connection:
        if str(connection.transport_cls).startswith(("redis", "sentinel")):  # which would wait for a reply for ever
            patience = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), CONNECT_TIMEOUT)
            connection.transport_options = {**(connection.transport_options or {}), **patience}
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=CONNECT_TIMEOUT)
        current_app.control.revoke(task_id, terminate=terminate, connection=connection, retry=False)
