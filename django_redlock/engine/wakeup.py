"""
Wake a thread that polls sockets.
"""

import socket
from contextlib import suppress


class WakeUp:
    """A pair of sockets: who polls one end is woken through the other. Closed when nobody has it any more."""

    _near: socket.socket | None = None
    _far: socket.socket | None = None

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Return what to poll."""
        return self._near.fileno() if self._near else -1

    def ring(self) -> None:
        """Wake whoever polls; from any thread, also when it is closed."""
        with suppress(OSError, AttributeError):
            self._far.send(b"!")  # type: ignore[union-attr]

    def hush(self) -> None:
        """Take all calls back."""
        with suppress(OSError, AttributeError):
            self._near.recv(4096)  # type: ignore[union-attr]

    def close(self) -> None:
        """Close both ends."""
        for end in (self._near, self._far):
            if end is not None:  # else it was interrupted while it was made
                end.close()

    __del__ = close
