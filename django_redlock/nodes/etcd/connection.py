"""Connect the records in an etcd cluster with one member after the other (internal)."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from ...core.protocol import Failure
from ..base import LinkError
from ..records.record import Stored, parsed
from ..records.replicated import MemberTable, Place
from .client import (
    EXHAUSTED,
    INVALID_ARGUMENT,
    UNAUTHENTICATED,
    Client,
    EtcdError,
    decoded,
    encoded,
    header_of,
    link_error,
    number,
)

ID_LENGTH = 16  # characters of the random id


class EtcdConnection(MemberTable[Client]):
    """
    Records over a connection to one member, or to the next one if it fails.

    Args:
        place: The cluster.
        id_key: The key of a random id, which is made when it is missing.
        patience: Seconds that a request may take.

    Attributes:
        cluster: The id of the cluster, as soon as it is known.
    """

    errors = (EtcdError, OSError)

    def __init__(self, place: Place, id_key: str, patience: float) -> None:
        super().__init__(place, patience)
        self.cluster = 0
        self._id_key = id_key

    def dial(self, number: int, timeout: float) -> Client:
        """Return a connection to a member, not yet open."""
        return Client(self.place, number, timeout)

    def greet(self, client: Client) -> str:
        """
        Return the ids of the cluster, if the member knows a leader and the user may read and write.

        etcd makes its own id of the addresses of the members: a cluster that begins anew without its data has the same.
        So there is a random one beside it.
        """
        status = client.call("/v3/maintenance/status", {})
        if not number(status, "leader"):
            raise EtcdError(Failure.NO_LEADER)
        try:
            stored = self._own_id(client)
        except EtcdError as error:
            # Without a user, a cluster that wants one calls the request invalid.
            wants_user = error.code == INVALID_ARGUMENT and not self.place.options.get("username")
            raise EtcdError(Failure.NOAUTH) if wants_user else error from None
        cluster = header_of(status).cluster
        self.cluster = self.cluster or cluster
        return identity_of(cluster, stored)

    def _own_id(self, client: Client) -> Stored:
        """Return the record with the random id of the alias in this cluster; create it if there is none."""
        key = encoded(self._id_key)
        for _ in range(2):
            if found := records_of(client.call("/v3/kv/range", {"key": key})):
                return found[self._id_key]
            missing = {"target": "MOD", "result": "EQUAL", "key": key, "mod_revision": 0}
            record = json.dumps({"id": secrets.token_hex(ID_LENGTH // 2)})
            put = {"request_put": {"key": key, "value": encoded(record)}}
            client.call("/v3/kv/txn", {"compare": [missing], "success": [put]})
        raise EtcdError(Failure.MALFORMED)

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


def identity_of(cluster: int, stored: Stored | None) -> str:
    """Return the ids of a cluster: its own, and the random one in a record."""
    return f"etcd {cluster:x} {str(stored.record.get('id', ''))[:ID_LENGTH] if stored else ''}"


def records_of(reply: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the records in the reply to a range, by key."""
    return {
        decoded(each.get("key")): Stored(number(each, "mod_revision"), parsed(decoded(each.get("value", ""))))
        for each in reply.get("kvs", [])
    }
