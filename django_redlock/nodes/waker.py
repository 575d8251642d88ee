"""
Wake a thread that polls sockets.
"""

import socket
from contextlib import suppress


class Waker:
    """A pair of sockets: who polls one end is woken through the other. Closed when nobody has it any more."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Return what to poll."""
        return self._near.fileno()

    def ring(self) -> None:
        """Wake whoever polls; from any thread, also when it is closed."""
        with suppress(OSError):
            self._far.send(b"!")

    def hush(self) -> None:
        """Take all calls back."""
        with suppress(OSError):
            self._near.recv(4096)

    def close(self) -> None:
        """Close both ends."""
        self._near.close()
        self._far.close()

    __del__ = close
