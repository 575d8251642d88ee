"""
Who is inside a lock: the threads and tasks that have entered it.

Neither the ident of a thread nor the address of a task tells one from another: both are used again.
"""

import asyncio
import threading
from weakref import ref


class _Thread(threading.local):
    def __init__(self) -> None:
        self.mark = object()  # made anew for each thread


_thread = _Thread()


def this_thread() -> object:
    """Return what stands for the calling thread, and never for another one."""
    # Greenlets share the mark if gevent was told of them only after this module had been imported.
    return threading.get_ident(), _thread.mark


def this_task() -> object:
    """Return what stands for the running task, and never for another one; does not keep it alive."""
    task = asyncio.current_task()
    return task and ref(task)
