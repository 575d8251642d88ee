"""Keep the holds of threads and tasks (internal)."""

import asyncio
import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..compat.holds import Term
from ..engine.lease import Lease


class Hold(NamedTuple):
    """
    The hold of one thread or task.

    Args:
        token: The token that redis-py would have written to the node.
        lease: The lease; None for a token that was handed over, until the lock is used.
        term: The term of the hold; None if the hold has no end.
    """

    token: bytes
    lease: Lease | None = None
    term: Term | None = None


class Slot:
    """Keep a hold. Its ``token`` can be read, and set to a token that another process handed over."""

    hold: Hold | None = None

    @property
    def token(self) -> bytes | None:
        """The token of the held lock, or None."""
        return self.hold.token if self.hold else None

    @token.setter
    def token(self, token: str | bytes | None) -> None:
        self.hold = None if token is None else Hold(as_bytes(token))

    def mine(self) -> "Slot":
        """Return the slot of the calling thread or task."""
        return self


class ThreadSlot(threading.local, Slot):
    """A slot for each thread."""


class TaskSlot(Slot):
    """A slot for each asyncio task. When a task ends, its slot goes with it, as a thread's does."""

    def __init__(self) -> None:
        self._slots: WeakKeyDictionary[asyncio.Task[Any], Slot] = WeakKeyDictionary()
        self._outside = Slot()

    def mine(self) -> Slot:
        """Return the slot of the running task."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs here
            task = None
        return self._outside if task is None else self._slots.setdefault(task, Slot())

    @property
    def hold(self) -> Hold | None:
        """The hold of the running task."""
        return self.mine().hold

    @hold.setter
    def hold(self, hold: Hold | None) -> None:
        self.mine().hold = hold


def as_bytes(token: str | bytes) -> bytes:
    """Return a token as redis-py keeps it."""
    return token.encode() if isinstance(token, str) else bytes(token)
