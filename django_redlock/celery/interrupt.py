"""
Interrupt a running body from another thread, for ``on_lost="raise"`` (internal).

Python raises an exception in another thread before its next instruction (``PyThreadState_SetAsyncExc``). So a loop is
interrupted at once, and a call that waits in C when it returns. Under gevent, one thread runs many tasks, and the
exception could hit the wrong one. There, the task's greenlet is killed at its next switch instead.
"""

import ctypes
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from ..exceptions import LockLostError
from ..nodes.threads import STARTS

PATIENCE = 1.0
"""Seconds that an interruption waits, on Python 3.11, for a thread that is starting another one."""


class SlotLostError(LockLostError):
    """The slot of a singleton was lost while its body ran; raised at an arbitrary point in the body."""

    def __init__(self, name: str = "", reason: str = "expired", held: float = 0.0) -> None:
        super().__init__(name, reason, held)


class Interrupt:
    """A means to raise :class:`SlotLostError` in the thread or greenlet that created it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._greenlet = _current_greenlet()
        self._mutex = threading.Lock()
        self._armed = True
        self.struck = False

    def strike(self) -> None:
        """Interrupt the body, unless it has ended."""
        with self._mutex:
            if not self._armed or self.struck:
                return
            self.struck = True
            if self._greenlet is not None:
                hub, greenlet = self._greenlet
                hub.loop.run_callback_threadsafe(greenlet.throw, SlotLostError)
            elif threading.get_ident() != self._thread:  # else the body itself has just checked, and gets the error
                raise_in(self._thread, SlotLostError)

    def disarm(self) -> None:
        """Note, in its thread, that the body has ended; withdraw an exception that has not reached it yet."""
        with self._mutex:
            pending = self._armed and self.struck and self._greenlet is None
            self._armed = False
        if pending:
            _take_back(self._thread)


def _take_back(thread: int) -> None:
    # Up to Python 3.12, withdrawing it would leave a mark in the interpreter that slows all threads down and makes
    # ``sys.settrace`` hang. An exception that arrives removes the mark, so it is raised again where it is harmless.
    with suppress(SlotLostError):
        raise_in(thread, SlotLostError)
        for _ in range(1000):
            pass


def raise_in(thread: int, error: type[BaseException]) -> None:
    """Raise *error* in the thread with the given number, before its next instruction."""
    # Up to Python 3.11, a new thread has the number of the thread that started it until it runs. It would
    # get the exception, and a start() that waits for it would never return.
    until = time.monotonic() + (PATIENCE if sys.version_info < (3, 12) else 0)
    number, raised = ctypes.c_ulong(thread), ctypes.py_object(error)
    while time.monotonic() < until and _starts_another(thread):
        time.sleep(0.001)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(number, raised)


def _starts_another(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame:
        if frame.f_code in STARTS:
            return True
        frame = frame.f_back
    return False


def _current_greenlet() -> tuple[Any, Any] | None:
    """Return the hub and the greenlet that runs, if tasks are greenlets here."""
    monkey: Any = sys.modules.get("gevent.monkey")
    if monkey is None or not monkey.is_module_patched("threading"):
        return None
    gevent: Any = sys.modules["gevent"]
    return gevent.get_hub(), gevent.getcurrent()
