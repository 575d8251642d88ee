"""The hold of a thread or task (internal)."""

import asyncio
import threading
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from ..engine.lease import Lease
from .term import Term


class Hold(NamedTuple):
    """
    The hold of one thread or task.

    Args:
        token: The token that redis-py would have written to the node.
        lease: The proof; None for a token that was handed over, until the lock is used.
        term: Its length; None if it has no end.
    """

    token: bytes
    lease: Lease | None = None
    term: Term | None = None


class Slot:
    """Keeps a hold. ``token`` can be read, and set to one that another process handed over."""

    hold: Hold | None = None

    @property
    def token(self) -> bytes | None:
        """The token of the lock that is held, or None."""
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
    """A slot for each asyncio task. A task that ends takes its hold with it, as a thread does."""

    def __init__(self) -> None:
        self._slots: WeakKeyDictionary[asyncio.Task[Any], Slot] = WeakKeyDictionary()
        self._outside = Slot()

    def mine(self) -> Slot:
        """Return the slot of the task that runs now."""
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
