"""
Connections to members that are bounded in time and in bytes (internal).

Members are servers of your own. One that has gone wrong still must not keep a thread busy, or fill the memory: for each
reply, its client allows a number of bytes and, where it reads itself, a time in all.
"""

import math
import socket
import ssl
from typing import Any

from ...runtime.clock import steady
from .place import Place

LARGEST = 2 * 2**20  # bytes of a reply, or of the replies to requests that are sent together
READ = 250  # bytes that each read counts in addition: small pieces take as much of the processor as large ones
LAST_READS = 4  # reads of what has arrived by the end of the time, of 8 kB or more each
MOMENT = 1e-6  # seconds


class TooMuchError(ConnectionResetError):
    """A member sent more than it was allowed to."""


class BoundedSocket(socket.socket):
    """
    A socket that ends when more comes than was allowed, or later.

    Attributes:
        left: How many more bytes may come.
        until: When the last of them must have come, on the steady clock.
    """

    left = LARGEST
    until = math.inf
    _last_reads = LAST_READS

    def allow(self, most: int, seconds: float = math.inf) -> None:
        """Let at most *most* bytes come from now on, and in *seconds* in all, even if they come one by one."""
        self.left, self.until, self._last_reads = most, steady() + seconds, LAST_READS
        self._limit(seconds)

    def recv(self, size: int, flags: int = 0) -> bytes:
        """Return what has arrived; kazoo asks for a whole packet, which may be too large before it has come."""
        if size > self.left:
            raise TooMuchError
        self._begin()
        data = super().recv(size, flags)
        self._count(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Read what has arrived into a buffer."""
        self._begin()
        size = super().recv_into(buffer, nbytes, flags)
        self._count(size)
        return size

    def _begin(self) -> None:
        # Bytes that have arrived are read even if this thread had no turn until now.
        if (left := self.until - steady()) <= 0:
            self._last_reads -= 1
        if self._last_reads < 0:
            raise TimeoutError
        self._limit(left)

    def _limit(self, seconds: float) -> None:
        if self.gettimeout() != 0.0:  # otherwise it does not wait
            self.settimeout(None if seconds == math.inf else max(seconds, MOMENT))

    def _count(self, size: int) -> None:
        self.left -= READ + size
        if self.left < 0:
            raise TooMuchError


class BoundedTLSSocket(BoundedSocket, ssl.SSLSocket):  # type: ignore[misc]  # typeshed names the parameter otherwise
    """The same with TLS."""


def connected(where: tuple[str, int], host: str, place: Place, timeout: float) -> BoundedSocket:
    """
    Return a connection to an address; with TLS, the certificate must be that of the host.

    Both the connection and the handshake of TLS may take *timeout* seconds.

    Raises:
        LinkError: A file named in the options cannot be used.
        OSError: There is no connection.
    """
    context = place.context
    connection = BoundedSocket(fileno=socket.create_connection(where, timeout).detach())
    connection.settimeout(timeout)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        if context is None:
            return connection
        context.sslsocket_class = BoundedTLSSocket
        secured = context.wrap_socket(connection, server_hostname=host)
        assert isinstance(secured, BoundedTLSSocket)
        return secured
    except BaseException:
        connection.close()
        raise
