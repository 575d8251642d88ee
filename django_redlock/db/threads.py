"""
Work in the thread of Django's asynchronous interface, which a cancelled task waits for (internal).

A cancellation ends only the wait for a thread. If the task went on, its lock would be free while the thread still
commits, and the next holder would read old rows.
"""

from asyncio import CancelledError, shield
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import Any, TypeVar

from asgiref.sync import sync_to_async

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """
    Call a function in the thread, and wait for its end, even if the task is cancelled meanwhile.

    A function that has not begun when the task is cancelled is never called. Asynchronous code for which it waits is
    cancelled, too.

    Raises:
        CancelledError: At the end, if cancelled meanwhile, unless that code goes on.
    """
    decided = Lock()  # the function takes it as it begins; a cancellation takes it to prevent that

    def begin() -> T:
        if not decided.acquire(blocking=False):
            raise CancelledError
        return function(*args)

    try:
        return await sync_to_async(begin)()
    except CancelledError:
        if not decided.acquire(blocking=False):
            await end_of_thread_work()
        raise


async def surely_in_thread(function: Callable[..., T], *args: Any) -> T:
    """
    Do the same with a function that ends or undoes something, which is called in any case.

    Raises:
        CancelledError: At the end, if cancelled meanwhile.
    """
    try:
        return await shield(sync_to_async(function)(*args))
    except CancelledError:
        await end_of_thread_work()
        raise


async def end_of_thread_work() -> None:
    """
    Wait for what a task that was cancelled, or has failed, has left in its thread, even if cancelled meanwhile.

    The thread does one thing at a time, so this is the last.

    Raises:
        CancelledError: At the end, if cancelled meanwhile.
    """
    cancelled: CancelledError | None = None
    while True:
        try:
            with suppress(RuntimeError):  # the thread has ended
                await sync_to_async(lambda: None)()
            break
        except CancelledError as error:
            cancelled = error
    if cancelled:
        raise cancelled
