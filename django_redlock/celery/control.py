"""
What an operator tells the workers.
"""

from celery import current_app


def revoke(task_id: str, *, terminate: bool = False) -> None:
    """
    Tell all workers not to run a task, and the one that runs it to end it, if asked to.

    A task that runs learns of it only by *terminate*, which kills the process of a prefork worker. A singleton task
    whose lease is lost can also look at ``self.execution.lease.lost``, and end by itself.
    """
    current_app.control.revoke(task_id, terminate=terminate)
