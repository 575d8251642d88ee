"""
The blocking connections to one server: one for requests, one for notifications (internal).

redis-py makes a connection, with TLS and authentication. These classes send and read everything after that.
"""

import socket
from collections.abc import Mapping
from typing import Any

from redis import exceptions
from redis.connection import AbstractConnection

from ...core.admission import Greeting
from ...core.protocol import Failure, Reply, Request
from ..base import INCOMPLETE, LinkError
from .errors import BROKEN, DEMOTED, link_error
from .wire import COMMON, PARTIAL, Assembly, Encoder, Replies, common_reply, parse_answer

# The errors of a non-blocking socket when it would block.
NOTHING = object()  # stands for a reply that has not arrived


class RedisLink:
    """
    One connection that redis-py made, used without its client, so that nothing is sent twice.

    Its socket does not block. With a timeout, Python would poll before each send and each receive, although the round
    has polled already. :mod:`.resp` reads the replies, as it does for an event loop.
    """

    unserved: Mapping[Failure, Failure] = DEMOTED
    """The errors of a server that no longer serves these locks, and what to report for each."""

    def __init__(self, connection: AbstractConnection, encoder: Encoder, greeting: Greeting) -> None:
        self.greeting = greeting
        self._connection = connection
        self.encoder = encoder
        # Requests whose scripts the server knows. A script is sent in full the first time, because loading it would
        # take a command, and a right, of its own.
        self._taught: set[type[Request]] = set()
        self._assembly = Assembly()
        self._replies = Replies(connection._parser.parse_error)
        self._ahead: Any = NOTHING
        self._sock: socket.socket | None = connection._sock
        if self._sock is not None:
            self._sock.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return fileno(self._connection)

    def send(self, request: Request, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.Link`."""
        if type(request) not in self._taught:
            self._taught.add(type(request))
            in_full = True
        data, sock = self.encoder.pack(request, packed, in_full), self._sock
        if sock is None:
            raise LinkError(Failure.CLOSED)
        try:
            sent = sock.send(data)
        except BLOCKED:
            sent = 0
        except OSError as error:
            raise link_error(error) from None
        if sent < len(data):
            self._send_rest(sock, memoryview(data)[sent:])

    def _send_rest(self, sock: socket.socket, rest: memoryview) -> None:
        """Send the rest of a request that did not fit the socket's buffer; block for at most the socket timeout."""
        try:
            sock.settimeout(self._connection.socket_timeout)
            sock.sendall(rest)
            sock.setblocking(False)
        except OSError as error:
            raise link_error(error) from None

    def receive(self, request: Request) -> Reply | None:
        """Return the reply to the oldest request; see :class:`~django_redlock.nodes.base.Link`."""
        whole: Reply | None = INCOMPLETE
        while whole is INCOMPLETE:
            raw = self._ahead
            if raw is NOTHING:
                raw = self._read(request)
            else:
                self._ahead = NOTHING
            if type(raw) is Reply:
                return raw
            if raw is NOTHING:
                return INCOMPLETE
            if isinstance(raw, LinkError):
                raise raw
            whole = self._assembly.add(request, parse_answer(raw, self.unserved))
        if whole is None:
            self._taught.discard(type(request))
        return whole

    def readable(self) -> bool:
        """Read one reply ahead if all of it has arrived; a poll does not show the bytes that TLS holds back."""
        if self._ahead is NOTHING:
            self._ahead = self._read()
        return self._ahead is not NOTHING

    def _read(self, request: Request | None = None) -> Any:
        """
        Return what has arrived, the error that ended the connection, or ``NOTHING``.

        A common reply to *request* is returned as a :class:`Reply`.
        """
        if self._sock is None:
            return LinkError(Failure.RESET)
        replies = self._replies
        try:
            while (empty := replies.empty) or (raw := replies.next()) is PARTIAL:
                data = self._sock.recv(READ_SIZE)
                if not data:
                    return LinkError(Failure.CLOSED)
                found = COMMON.fullmatch(data) if empty else None
                if found and request and (reply := common_reply(request, found)):
                    return reply
                replies.feed(data)
        except BLOCKED:
            return NOTHING
        except OSError as error:
            return link_error(error)
        except ValueError:
            return LinkError(Failure.MALFORMED)
        if isinstance(raw, exceptions.RedisError) and not isinstance(raw, exceptions.ResponseError):
            return link_error(raw)  # redis-py closes the connection after these
        return raw

    def close(self) -> None:
        """Close the connection."""
        self._sock = None
        self._connection.disconnect()


class RedisNotificationLink:
    """
    A connection that has subscribed to the channel of a process.

    Args:
        connection: The connection.
        messages: The reader of the connection, which already has what came right after the reply to the subscription.
    """

    def __init__(self, connection: AbstractConnection, messages: Replies) -> None:
        self._connection = connection
        self._messages = messages
        self._sock: socket.socket | None = connection._sock
        if self._sock is not None:
            self._sock.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return fileno(self._connection)

    def read(self) -> list[str]:
        """Return the waiters that were notified, without blocking."""
        notifications = []
        try:
            self._feed()
            while (message := self._messages.next()) is not PARTIAL:
                notifications.append(parse_notification(message))
        except BROKEN as error:
            raise link_error(error) from None
        return notifications

    def _feed(self) -> None:
        """Read until nothing is left, because a poll does not show the bytes that TLS holds back."""
        while self._sock is not None:
            try:
                data = self._sock.recv(READ_SIZE)
            except BLOCKED:
                return
            self._messages.feed(some(data))
        raise LinkError(Failure.CLOSED)

    def close(self) -> None:
        """Close the connection."""
        self._sock = None
        self._connection.disconnect()


def fileno(connection: AbstractConnection) -> int:
    """Return the file descriptor of a connection."""
    sock = connection._sock
    if sock is None:
        raise LinkError(Failure.CLOSED)
    return int(sock.fileno())
