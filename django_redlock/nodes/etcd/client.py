"""
Speak the JSON gateway of etcd's v3 API with one member (internal).

The gateway needs nothing but the standard library. The client libraries for gRPC are unsafe in processes that fork, as
those of Celery and gunicorn do.
"""

import json
import socket
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from io import BufferedReader, RawIOBase
from types import MappingProxyType
from typing import Any, NamedTuple

from ...core.protocol import Failure
from ...runtime.clock import steady
from ..base import RateLimit, parse_json
from ..records.replicated import Place
from ..records.table import AnswerError

LARGEST = 2 * 2**20  # bytes of a reply; a hundred records with long references take fewer
LONGEST_HEAD = 65_536  # bytes of a reply before its body
MOST_LINES = 5000  # lines of a reply's head, and chunks of its body, which have two thousand bytes or more each
LAST_READS = 4  # reads of what has arrived by the end of the time, of 8 kB or more each
UNASKED = 131_072  # bytes of notifications within a second: a few hundred
OUTDATED = b"revision of auth store is old"  # users or roles have changed since the member gave a signed token
# After ten seconds, the system probes a silent member, and gives it up after twenty more.
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}

# Codes of gRPC.
INVALID_ARGUMENT, NOT_FOUND, DENIED, EXHAUSTED, PRECONDITION = 3, 5, 7, 8, 9
OUT_OF_RANGE, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 11, 12, 14, 16
DEADLINE = 4
CERTAIN = (INVALID_ARGUMENT, NOT_FOUND, DENIED, EXHAUSTED, PRECONDITION, OUT_OF_RANGE, UNIMPLEMENTED, UNAUTHENTICATED)
FAILURES = {
    DEADLINE: Failure.NO_LEADER,
    UNAVAILABLE: Failure.NO_LEADER,
    DENIED: Failure.NOPERM,
    EXHAUSTED: Failure.BACKLOG,
    UNAUTHENTICATED: Failure.NOAUTH,
}


class EtcdError(AnswerError):
    """
    A member sent an error or a reply that cannot be used.

    Args:
        failure: The meaning of the reply.
        code: The code of gRPC; 0 if there is none.
    """

    def __init__(self, failure: Failure, code: int = 0) -> None:
        super().__init__(failure)
        self.code = code
        self.certain = code in CERTAIN


class Header(NamedTuple):
    """The header of every reply, about the member that sent it; ``term`` changes with every election of a leader."""

    cluster: int
    member: int
    term: int


class Timed(RawIOBase):
    """
    What a socket receives, until its timeout has passed since now, even if data arrives byte by byte.

    Args:
        source: The stream of the socket.
        connection: The socket.

    Attributes:
        left: How many more bytes may come.
        unasked: Counts what comes on a stream without end, which has no time limit.
    """

    def __init__(self, source: RawIOBase, connection: socket.socket) -> None:
        self.left = LONGEST_HEAD
        self.unasked: RateLimit | None = None
        self._source = source
        self._connection = connection
        timeout = connection.gettimeout()
        self._until = None if timeout is None else steady() + timeout
        self._last_reads = LAST_READS

    def readable(self) -> bool:
        """Return whether data can be read: always."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what has arrived into a buffer."""
        if self._until is not None and not self.unasked:
            # What has arrived is read even if this thread had no turn until now.
            self._connection.settimeout(left := max(0.0, self._until - steady()))
            self._last_reads -= not left
        found: int | None = self._source.readinto(buffer)
        if found is None or not self._last_reads:
            raise TimeoutError
        if self.unasked:
            self.unasked.count(found)
        else:
            self.left -= found
        if self.left < 0:
            raise EtcdError(Failure.MALFORMED)
        return found

    def close(self) -> None:
        """Close the stream."""
        self._source.close()
        super().close()


class Lines(BufferedReader):
    """
    The lines of a response: those of its head, and the size of each chunk of its body.

    Their number is bounded, because to read a chunk of one byte takes as much of the processor as one of thousands.
    """

    left = MOST_LINES

    def readline(self, size: int | None = -1, /) -> bytes:
        """Read a line."""
        self.left -= 1
        if self.left < 0 and isinstance(self.raw, Timed) and not self.raw.unasked:
            raise EtcdError(Failure.MALFORMED)
        return super().readline(size)


class Response(HTTPResponse):
    """A response that must be complete when the timeout of its connection has passed, and is bounded."""

    def __init__(self, connection: socket.socket, *args: Any, **options: Any) -> None:
        super().__init__(connection, *args, **options)
        self.timed = Timed(self.fp.detach(), connection)
        self.fp = Lines(self.timed)

    def begin(self) -> None:
        """Read what comes before the body."""
        super().begin()
        self.timed.left = LARGEST


class EtcdClient:
    """
    A connection to one member; used by one thread at a time.

    Args:
        place: The cluster.
        number: Which of its members.
        timeout: Seconds to wait for each reply.
    """

    def __init__(self, place: Place, number: int, timeout: float) -> None:
        host, port = place.members[number]
        self._place = place
        self._token = ""
        self._timeout: float | None = timeout
        self._http = (
            HTTPSConnection(host, port, timeout=timeout, context=place.context)
            if place.encrypted
            else HTTPConnection(host, port, timeout=timeout)
        )
        self._http.response_class = Response

    @property
    def ended(self) -> bool:
        """Whether the member has announced the end of the connection in its last reply."""
        return self._http.sock is None

    def open(self) -> None:
        """Connect, and authenticate if there is a user."""
        self._http.connect()
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._http.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                self._http.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        if user := self._place.options.get("username"):
            login = {"name": user, "password": self._place.options["password"]}
            try:
                self._token = str(self.call("/v3/auth/authenticate", login).get("token", ""))
            except EtcdError as error:
                known = {INVALID_ARGUMENT: Failure.WRONGPASS, PRECONDITION: Failure.NO_PASSWORD}
                raise EtcdError(known.get(error.code, error.failure), error.code) from None

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """
        Send a request and return the reply.

        Raises:
            EtcdError: The reply is an error, or malformed.
            OSError: The connection broke, or there was no reply in time.
        """
        try:
            response = self._send(path, body)
            text = response.read(LARGEST + 1)
        except HTTPException:
            raise ConnectionResetError from None
        except EtcdError:  # too long, and its rest is still to come
            self.close()
            raise
        return reply_in(text, response.status)

    def stream(self, path: str, body: Mapping[str, Any]) -> HTTPResponse:
        """Send a request and return the response, whose lines are replies; it ends if the member loses its leader."""
        response = self._send(path, body, {"Grpc-Metadata-hasleader": "true"})
        if response.status != 200:
            reply_in(response.read(LARGEST), response.status)
        response.timed.unasked = RateLimit(UNASKED)
        self.wait(self._timeout)  # each line may take the timeout
        return response

    def _send(self, path: str, body: Mapping[str, Any], more: Mapping[str, str] = MappingProxyType({})) -> Response:
        headers = {"Content-Type": "application/json", **more}
        if self._token:
            headers["Authorization"] = self._token
        self.wait(self._timeout)  # the last response has changed it
        try:
            self._http.request("POST", path, json.dumps(body, separators=(",", ":")), headers)
            response = self._http.getresponse()
            assert isinstance(response, Response)
            return response
        except HTTPException:  # not even HTTP, or the end of the connection
            raise ConnectionResetError from None

    def wait(self, timeout: float | None) -> None:
        """Wait for that many seconds for each reply from now on; None is for ever."""
        self._timeout = timeout
        if self._http.sock is not None:
            self._http.sock.settimeout(timeout)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def abort(self) -> None:
        """Make a call that waits for the member fail at once; from any thread."""
        with suppress(OSError, AttributeError):  # it is not connected, or no longer connected
            self._http.sock.shutdown(socket.SHUT_RDWR)


def reply_in(text: bytes, status: int) -> dict[str, Any]:
    """Return the reply in a response; raise EtcdError if there is none."""
    try:
        reply = parse_json(text)
        if not isinstance(reply, dict):
            raise EtcdError(Failure.MALFORMED)
        code = int(reply.get("code", 0))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise EtcdError(Failure.MALFORMED) from None
    if code == INVALID_ARGUMENT and OUTDATED in text:
        code = UNAUTHENTICATED  # the code alone does not tell this from a mistake in the request
    if status != 200 or "error" in reply:
        raise EtcdError(FAILURES.get(code, Failure.ERROR_REPLY), code)
    return reply


def header_of(reply: Mapping[str, Any]) -> Header:
    """Return which member replied, and in which term."""
    header = object_in(reply, "header")
    return Header(number(header, "cluster_id"), number(header, "member_id"), number(header, "raft_term"))


def object_in(reply: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return an object in a reply, empty if it is missing."""
    found = reply.get(field, {})
    if not isinstance(found, dict):
        raise EtcdError(Failure.MALFORMED)
    return found


def objects_in(reply: Mapping[str, Any], field: str) -> list[dict[str, Any]]:
    """Return a list of objects in a reply, empty if it is missing."""
    found = reply.get(field, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise EtcdError(Failure.MALFORMED)
    return found


def number(reply: Mapping[str, Any], field: str) -> int:
    """Return a number of a reply, which JSON writes as text and leaves out if it is 0."""
    try:
        found = int(reply.get(field, 0))
    except (TypeError, ValueError, OverflowError):
        found = -(2**63)
    if abs(found) >= 2**64 or found == -(2**63):
        raise EtcdError(Failure.MALFORMED)
    return found


def encoded(text: str) -> str:
    """Return a key or a value as the gateway takes it."""
    return b64encode(text.encode()).decode()


def decoded(text: Any) -> str:
    """Return a key or a value that the gateway gave."""
    try:
        return b64decode(text, validate=True).decode("utf-8", "replace")
    except (TypeError, ValueError):
        raise EtcdError(Failure.MALFORMED) from None
