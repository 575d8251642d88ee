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
from http.client import HTTPConnection, HTTPException, HTTPResponse
from types import MappingProxyType
from typing import Any, NamedTuple

from ....core.protocol import Failure
from ....nodes.base import parse_json
from ....nodes.records.table import AnswerError
from ..bounded import LARGEST, BoundedSocket, TooMuchError, connected
from ..place import Place

LONGEST = 65_536  # bytes of one notification
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


class EtcdClient:
    """
    A connection to one member; used by one thread at a time.

    Args:
        place: The cluster.
        number: Which of its members.
        timeout: Seconds to wait for each reply.
    """

    def __init__(self, place: Place, number: int, timeout: float) -> None:
        self._place = place
        self._member = place.members[number]
        self._token = ""
        self._timeout = timeout
        self._socket: BoundedSocket | None = None
        self._http = HTTPConnection(*self._member)

    @property
    def ended(self) -> bool:
        """Whether the member has announced the end of the connection in its last reply."""
        return self._http.sock is None

    def open(self) -> None:
        """Connect, and authenticate if there is a user."""
        self._socket = connected(self._member, self._member[0], self._place, self._timeout)
        self._http.sock = self._socket
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                self._socket.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
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
            return reply_in(response.read(LARGEST + 1), response.status)
        except HTTPException:
            raise ConnectionResetError from None
        except TooMuchError:  # its rest is still to come
            self.close()
            raise EtcdError(Failure.MALFORMED) from None

    def stream(self, path: str, body: Mapping[str, Any]) -> HTTPResponse:
        """Send a request and return the response, whose lines are replies; it ends if the member loses its leader."""
        response = self._send(path, body, {"Grpc-Metadata-hasleader": "true"})
        if response.status != 200:
            reply_in(response.read(LARGEST + 1), response.status)
        return response

    def line(self, response: HTTPResponse) -> bytes:
        """Return the next line of a stream, empty at its end."""
        self._allow_reply()
        try:
            return response.readline(LONGEST)
        except HTTPException:
            raise ConnectionResetError from None

    def _send(self, path: str, body: Mapping[str, Any], more: Mapping[str, str] = MappingProxyType({})) -> HTTPResponse:
        if self._http.sock is None:  # http.client would connect again
            raise ConnectionResetError
        headers = {"Content-Type": "application/json", **more}
        if self._token:
            headers["Authorization"] = self._token
        self._allow_reply()
        try:
            self._http.request("POST", path, json.dumps(body, separators=(",", ":")), headers)
            return self._http.getresponse()
        except HTTPException:  # not even HTTP, or the end of the connection
            raise ConnectionResetError from None

    def _allow_reply(self) -> None:
        assert self._socket is not None
        self._socket.allow(LARGEST, self._timeout)

    def wait(self, timeout: float) -> None:
        """Wait for that many seconds for each reply from now on; infinity is for ever."""
        self._timeout = timeout

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def abort(self) -> None:
        """Make a call that waits for the member fail at once; from any thread."""
        with suppress(OSError, AttributeError):  # it is not connected, or no longer connected
            self._socket.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


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
