"""Wake a thread that polls sockets (internal)."""

import socket
from contextlib import suppress


class WakeUp:
    """A pair of sockets: a thread that polls one end is woken through the other. Garbage collection closes both."""

    _near: socket.socket | None = None
    _far: socket.socket | None = None

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._near.fileno() if self._near else -1

    def ring(self) -> None:
        """Wake the thread that polls; safe in any thread, even after :meth:`close`."""
        with suppress(OSError, AttributeError):
            self._far.send(b"!")  # type: ignore[union-attr]

    def hush(self) -> None:
        """Clear all wake-ups."""
        with suppress(OSError, AttributeError):
            self._near.recv(4096)  # type: ignore[union-attr]

    def close(self) -> None:
        """Close both ends."""
        for end in (self._near, self._far):
            if end is not None:  # None if the constructor was interrupted
                end.close()

    __del__ = close
