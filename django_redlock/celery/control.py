"""
Commands from an operator to the workers (internal).
"""

from celery import current_app

CONNECT_TIMEOUT = 2  # seconds


def revoke(task_id: str, *, terminate: bool = False) -> None:
    """
    Revoke a task on all workers; if asked to, have the worker that runs the task end it.

    Only *terminate* affects a running task: it kills the process of a prefork worker. A singleton task that has lost
    its lease can also check ``self.singleton.lost`` and end by itself.

    Raises:
        Exception: The broker cannot be reached, refuses, or has unusable settings; the class depends on the broker.
    """
    # Try once, because a person is waiting: a sender of tasks would retry for longer.
    with current_app.connection_for_write(connect_timeout=CONNECT_TIMEOUT) as connection:
        if str(connection.transport_cls).startswith(("redis", "sentinel")):  # these would wait for a reply for ever
            patience = dict.fromkeys(("socket_timeout", "socket_connect_timeout"), CONNECT_TIMEOUT)
            connection.transport_options = {**(connection.transport_options or {}), **patience}
        connection.ensure_connection(max_retries=1, interval_start=0, timeout=CONNECT_TIMEOUT)
        current_app.control.revoke(task_id, terminate=terminate, connection=connection, retry=False)
