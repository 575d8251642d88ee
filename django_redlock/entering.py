"""
Who is inside a lock: the threads and tasks that have entered it.

Neither the ident of a thread nor the address of a task tells one from another: both are used again.
"""

import asyncio
import threading
from contextlib import suppress
from typing import Any, Generic, TypeVar
from weakref import ref

from .core.names import named

Entry = TypeVar("Entry")


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


class Entries(Generic[Entry]):
    """
    Which threads, or which tasks, are inside the ``with`` blocks of one lock.

    Args:
        names: The lock's names, for errors.
    """

    __slots__ = ("_entries", "_names")

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self._entries: dict[object, list[Entry]] = {}

    def __contains__(self, who: object) -> bool:
        return who in self._entries

    def add(self, who: object, entry: Entry) -> None:
        """Note that *who* has entered."""
        self._entries.setdefault(who, []).append(entry)

    def remove(self, who: object) -> Entry:
        """
        Note that *who* leaves; returns what was noted last.

        A generator may be closed by another thread or task than the one that entered; so who has not entered leaves
        for the only one that has.

        Raises:
            RuntimeError: That one cannot be told.
        """
        if who not in self._entries:
            who = self._only_one()
        entries = self._entries[who]
        entry = entries.pop()
        if not entries:
            del self._entries[who]
        return entry

    def _only_one(self) -> object:
        inside = list(self._entries)
        if len(inside) == 1:
            return inside[0]
        if not inside:
            raise RuntimeError(f"Lock {named(self._names)!r} is not entered: there is nothing to leave.")
        raise RuntimeError(
            f"Lock {named(self._names)!r} is not entered here, but in {len(inside)} other tasks or threads, and it "
            "cannot be told which of them to leave for. Leave it where it was entered, or make a lock for each."
        )


class Interruption:
    """
    Cancels the body of an ``async with`` block when its lock is lost, but never what comes after the body.

    Args:
        task: The task that has entered.
    """

    def __init__(self, task: "asyncio.Task[Any]") -> None:
        self._task = task
        self._loop = task.get_loop()
        self._struck = False
        self._over = False

    def __call__(self, lease: object) -> None:
        """Cancel the body soon, whichever thread noticed the loss."""
        with suppress(RuntimeError):  # its loop has been closed
            self._loop.call_soon_threadsafe(self._strike)

    def _strike(self) -> None:
        if not self._over:
            self._struck = self._task.cancel()

    def end(self, kind: type[BaseException] | None) -> bool:
        """Note that the body ended, with an exception of that kind; returns whether it was this that ended it."""
        self._over = True
        if not self._struck or asyncio.current_task() is not self._task:
            return False
        others = self._task.uncancel()
        return kind is asyncio.CancelledError and others == 0
