"""
Notifications from an etcd cluster (internal).

A release puts the names of waiters under a key of their process, and a watch of etcd streams every change of that key.
"""

import json
from http.client import HTTPException, HTTPResponse

from ...core.protocol import Failure
from ..base import LinkError
from ..records.watch import Watch
from .client import Client, EtcdError, decoded, encoded, link_error, parsed

LONGEST = 2**20  # bytes of one notification


class EtcdWatch(Watch):
    """A thread that reads the notifications of a cluster to a process."""

    kind = "etcd"
    _client: Client | None = None
    _response: HTTPResponse

    def begin(self, number: int) -> None:
        """Begin to watch at a member."""
        self._client = Client(self.place, number, self.timeout)
        self._client.open()
        self._response = self._client.stream("/v3/watch", {"create_request": {"key": encoded(self.key)}})
        names_in(self._response.readline(LONGEST))  # the line that confirms the watch
        self._client.wait(None)

    def read(self) -> list[str]:
        """Wait for a notification, and return the waiters that it names."""
        line = self._response.readline(LONGEST)
        if not line:
            raise LinkError(Failure.CLOSED)
        return names_in(line)

    def end(self) -> None:
        """Close the connection."""
        if self._client:
            self._client.close()

    def cut(self) -> None:
        """Make :meth:`read` fail."""
        if self._client:
            self._client.abort()

    def explain(self, error: Exception) -> LinkError:
        """Return what to report about an exception."""
        return LinkError(Failure.RESET) if isinstance(error, HTTPException) else link_error(error)


def names_in(line: bytes) -> list[str]:
    """Return the waiters that a line names; raise EtcdError if the line ends the watch."""
    result = parsed(line, 200).get("result", {})
    if result.get("canceled"):
        raise EtcdError(Failure.CLOSED)
    names: list[str] = []
    for event in result.get("events", []):
        text = decoded(event.get("kv", {}).get("value", ""))
        names += [str(name) for name in (json.loads(text).get("to", []) if text else [])]
    return names
