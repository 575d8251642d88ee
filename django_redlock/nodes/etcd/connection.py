"""Connect the records in an etcd cluster with one member after the other (internal)."""

from collections.abc import Mapping
from typing import Any

from ...core.failure import Failure
from ..base import LinkError
from ..cas.members import MemberTable
from ..cas.place import Place
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


class EtcdConnection(MemberTable[Client]):
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
        super().__init__(place, patience)
        self.cluster = 0
        self._probe = probe

    def dial(self, number: int, timeout: float) -> Client:
        """Return a connection to a member, not yet open."""
        return Client(self.place, number, timeout)

    def greet(self, client: Client) -> str:
        """Return the id of the cluster, if the member knows a leader and the user may read."""
        status = client.call("/v3/maintenance/status", {})
        if not number(status, "leader"):
            raise EtcdError(Failure.NO_LEADER)
        try:
            client.call("/v3/kv/range", {"key": encoded(self._probe)})
        except EtcdError as error:
            # Without a user, a cluster that wants one calls the request invalid.
            wants_user = error.code == INVALID_ARGUMENT and not self.place.options.get("username")
            raise EtcdError(Failure.NOAUTH) if wants_user else error from None
        cluster = header_of(status).cluster
        self.cluster = self.cluster or cluster
        return f"etcd {cluster:x}"

    def explain(self, error: Exception) -> LinkError:
        """Return what to report of a failure; never what the error quotes."""
        return link_error(error)

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request over the connection and return the reply."""
        return self.connection.call(path, body)

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
        self.turn()
        if unclear:
            raise LinkError(failure)
        return failure

    def _has_alarm(self) -> bool:
        try:
            return bool(self.call("/v3/maintenance/alarm", {"action": "GET"}).get("alarms"))
        except self.errors:
            return False
