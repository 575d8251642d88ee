"""Wait for several connections at once, also where the system has no ``poll()`` (internal)."""

import select
import selectors
import socket
import threading
from typing import Any

# Events of poll(): there is data to read; the connection has ended. Where the end is not reported, a read finds it.
READABLE = getattr(select, "POLLIN", 1)
ENDED = sum(getattr(select, name, 0) for name in ("POLLHUP", "POLLERR", "POLLNVAL", "POLLRDHUP")) or 16


class SelectorPoll:
    """What ``select.poll()`` does for sockets to read from, for Windows, which has no such function."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()

    def register(self, fd: Any, events: int) -> None:
        """Wait for data from now on."""
        self._selector.register(fd, selectors.EVENT_READ)

    def unregister(self, fd: Any) -> None:
        """Wait for it no longer."""
        self._selector.unregister(fd)

    def poll(self, milliseconds: float) -> list[tuple[int, int]]:
        """Wait until something can be read; return descriptors with their events."""
        watched = list(self._selector.get_map().values())
        if not watched:  # Windows refuses to wait for nothing
            nobody = threading.Lock()
            nobody.acquire()
            nobody.acquire(timeout=milliseconds / 1000)
        try:
            found = [key for key, _ in self._selector.select(milliseconds / 1000)] if watched else []
        except (OSError, ValueError):  # one of them was closed meanwhile, and a read finds out which
            found = watched
        return [(key.fd, READABLE | (ENDED if self._has_ended(key.fd) else 0)) for key in found]

    @staticmethod
    def _has_ended(fd: int) -> bool:
        try:
            with socket.fromfd(fd, socket.AF_INET, socket.SOCK_STREAM) as copy:
                return not copy.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True


def poller() -> Any:
    """Return what waits for several connections at once: ``select.poll()``, where there is one."""
    return select.poll() if hasattr(select, "poll") else SelectorPoll()
