"""Connect the records in an etcd cluster with one member after the other (internal)."""

import secrets
from collections.abc import Mapping
from typing import Any

from ...core.admission import Greeting
from ...core.failure import Failure
from ..base import LinkError
from ..cas.table import ANSWERING, RecordTable, UntouchedError
from .client import (
    EXHAUSTED,
    INVALID_ARGUMENT,
    UNAUTHENTICATED,
    Client,
    EtcdError,
    encoded,
    header_of,
    link_error,
    number,
)
from .place import Place


class EtcdConnection(RecordTable):
    """
    Records over a connection to one member, or to the next one if it fails.

    Args:
        place: The cluster.
        probe: A key that the user must have the right to read.
        patience: Seconds that a request may take.

    Attributes:
        cluster: The id of the cluster, as soon as it is known.
    """

    errors = (EtcdError, OSError)

    def __init__(self, place: Place, probe: str, patience: float) -> None:
        super().__init__(patience)
        self.cluster = 0
        self._place = place
        self._probe = probe
        self._client: Client | None = None
        self._at = secrets.randbelow(len(place.members))  # so that not all processes use the same member

    @property
    def connected(self) -> bool:
        """Whether there is a connection."""
        return self._client is not None

    def open(self) -> Greeting:
        """Connect to the first member that answers and knows a leader, beginning with the last good one."""
        self.close()
        failure = LinkError(Failure.UNREACHABLE)
        for _ in self._place.members:
            client = None
            try:
                client = self.dial(self._at, self.patience / (len(self._place.members) + 1))
                client.open()
                greeting = self._greet(client)
                client.wait(self.patience * ANSWERING)
                self._client = client
                return greeting
            except (EtcdError, OSError, LinkError) as error:
                if client:
                    client.close()
                failure = link_error(error)
                if failure.failure is Failure.RESTARTED:
                    break
                self._at = (self._at + 1) % len(self._place.members)
        raise failure

    def _greet(self, client: Client) -> Greeting:
        status = client.call("/v3/maintenance/status", {})
        if not number(status, "leader"):
            raise EtcdError(Failure.NO_LEADER)
        try:
            client.call("/v3/kv/range", {"key": encoded(self._probe)})
        except EtcdError as error:
            # Without a user, a cluster that wants one calls the request invalid.
            wants_user = error.code == INVALID_ARGUMENT and not self._place.options.get("username")
            raise EtcdError(Failure.NOAUTH) if wants_user else error from None
        cluster = header_of(status).cluster
        if self.cluster not in (0, cluster):
            raise LinkError(Failure.RESTARTED)
        self.cluster = cluster
        return Greeting(run_id=f"etcd {cluster:x}", age=float("inf"))

    def dial(self, number: int, timeout: float) -> Client:
        """Return a connection to a member, not yet open; each reply may take *timeout* seconds."""
        return Client(self._place, number, timeout)

    def ready(self) -> None:
        """Connect if there is no connection."""
        if self._client is None:
            try:
                self.open()
            except LinkError as error:
                raise UntouchedError(error.failure, error.detail) from None

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request over the connection and return the reply."""
        assert self._client is not None
        return self._client.call(path, body)

    def failed(self, error: Exception, *, unclear: bool) -> Failure:
        """Return what an error means; a broken connection is made anew, with the next member."""
        failure = link_error(error).failure
        if isinstance(error, EtcdError):
            if error.code == EXHAUSTED and self._has_alarm():
                return Failure.NO_SPACE
            if error.code == UNAUTHENTICATED:  # the token has expired, or the server was restarted
                self.close()
                return Failure.RESET
            if not unclear or error.certain:
                return failure
        self.close()
        self._at = (self._at + 1) % len(self._place.members)
        if unclear:
            raise LinkError(failure)
        return failure

    def _has_alarm(self) -> bool:
        try:
            return bool(self.call("/v3/maintenance/alarm", {"action": "GET"}).get("alarms"))
        except self.errors:
            return False

    def close(self) -> None:
        """Drop the connection; the next request makes a new one."""
        client, self._client = self._client, None
        if client:
            client.close()

    def abort(self) -> None:
        """Make a call that waits for a member fail at once; from any thread."""
        if client := self._client:
            client.abort()
