"""
An etcd cluster as a node: its records, the clock of its leader, its notifications (internal).

A request is one transaction that reads and one that writes. The second compares the revision of each record that it
writes, and that of the record of the present era; see :mod:`~django_redlock.contrib.consensus.clock`.

etcd has no wall clock. Its leader counts the seconds of each lease on a monotonic clock, so a lease that never ends
serves as a clock: what was granted minus what remains. Nothing else depends on that lease, and no lock is attached to
one. The count begins anew with every leader, and the era is the cluster, the term and the lease.
"""

import json
import math
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from http.client import HTTPResponse
from typing import Any
from urllib.parse import quote

from ....core.protocol import SMALLEST_PART, Failure
from ....nodes.base import LinkError, NodeSpec, parse_json
from ....nodes.records.record import Decision, Stored, parsed
from ....nodes.records.table import ANSWERING, AnswerError, TooLargeError, link_error
from .. import checks
from ..clock import Era
from ..place import Place, Store
from ..replicated import (
    LOOK_EVERY,
    MemberTable,
    ReplicatedNode,
    also,
    oldest,
    shortest,
)
from ..watch import Watch
from .client import (
    EXHAUSTED,
    INVALID_ARGUMENT,
    UNAUTHENTICATED,
    EtcdClient,
    EtcdError,
    Header,
    decoded,
    encoded,
    header_of,
    number,
    object_in,
    objects_in,
    reply_in,
)

AT_ONCE = 128  # operations that etcd accepts in one transaction, by the default of --max-txn-ops

LARGEST_WRITE = 120  # records in one transaction, with room for some notifications

LONGEST_WRITE = 1_000_000  # bytes of the records in one transaction; etcd refuses more than 1,500 kB

GRANTED = 5_000_000_000  # seconds of the lease that serves as a clock: 158 years

UNCOUNTED = 0.1  # longest pause, in seconds, before a leader that does not count the time yet is asked again

FINE = 0.05  # seconds; a clock known more precisely than this need not be read again

PAGE = LARGEST_WRITE  # records that are read at once for a survey, or to delete them in one transaction

KINDS = ("h/{", "x/", "w/")  # the keys to clean up; no KEY_PREFIX has a brace, so no other alias has such names

ID_LENGTH = 16  # characters of the random id


class EtcdTable(MemberTable[EtcdClient]):
    """
    The records of an alias in one cluster.

    Args:
        place: The cluster.
        prefix: The beginning of every key.
        patience: Seconds that a request may take.
    """

    part = SMALLEST_PART
    most = LARGEST_WRITE

    def __init__(self, place: Place, prefix: str, patience: float) -> None:
        super().__init__(place, patience)
        self._prefix = prefix
        self._id = f"{prefix}id"
        self._clock_key = f"{prefix}clock"
        self._header = Header(0, 0, 0)  # that of the last read

    # Connections

    def dial(self, number: int, timeout: float) -> EtcdClient:
        """Return a connection to a member, not yet open."""
        return EtcdClient(self.place, number, timeout)

    def greet(self, client: EtcdClient) -> str:
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
        return identity_of(header_of(status).cluster, stored)

    def _own_id(self, client: EtcdClient) -> Stored:
        """Return the record with the random id of the alias in this cluster; create it if there is none."""
        for _ in range(2):
            if found := records_of(client.call("/v3/kv/range", {"key": encoded(self._id)})):
                return found[self._id]
            put = put_of(self._id, json.dumps({"id": secrets.token_hex(ID_LENGTH // 2)}))
            client.call("/v3/kv/txn", {"compare": compared([(self._id, 0)]), "success": [put]})
        raise EtcdError(Failure.MALFORMED)

    def call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request over the connection and return the reply."""
        return self.connection.call(path, body)

    def failed(self, error: Exception, *, unclear: bool) -> Failure:
        """Return what an error means; a broken connection is made anew, with the next member."""
        failure = link_error(error).failure
        if isinstance(error, AnswerError):
            if error.code == EXHAUSTED:  # by requests that wait or, as an alarm shows, by what is stored
                with suppress(*self.errors):
                    if self.call("/v3/maintenance/alarm", {"action": "GET"}).get("alarms"):
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

    # Requests

    def key(self, kind: str, name: str) -> str:
        """Return the key of a record."""
        return f"{self._prefix}{kind}/{name}"

    def fetch(self, keys: Sequence[str]) -> tuple[str, Stored | None, dict[str, Stored]]:
        """Return the identity of the cluster, the record of the era, and the records that exist under some keys."""
        headers: list[Header] = []
        found: dict[str, Stored] = {}
        keys = [self._clock_key, self._id, *keys]
        for start in range(0, len(keys), AT_ONCE):
            ranges = [{"request_range": {"key": encoded(key)}} for key in keys[start : start + AT_ONCE]]
            reply = self.call("/v3/kv/txn", {"success": ranges})
            headers.append(header_of(reply))
            for each in objects_in(reply, "responses"):
                found |= records_of(object_in(each, "response_range"))
        self._header = headers[0]
        return identity_of(headers[0].cluster, found.pop(self._id, None)), found.pop(self._clock_key, None), found

    def leader(self, era: Era | None) -> tuple[str, str]:
        """Return the name of the present era, and the id of the lease that is its clock; read the clock if due."""
        source = era.source if era and era.source else self._grant()
        # The clock is read only in the era of the record. A reading that comes from another leader would narrow the
        # bounds of the wrong clock, and a hold might seem to have ended.
        if era and era.name == era_name(self._header, source) and self._is_due(era):
            source = self._look(era)
        return era_name(self._header, source), source

    def write_era(self, era: Era, known: Era | None, version: int | None) -> None:
        """Write the record of the era unless it has changed; if it has, drop the lease that was granted for it."""
        unwritten = False
        try:
            unwritten = self._txn([(self._clock_key, version or 0)], {self._clock_key: era.dump()}) is None
        except EtcdError as error:
            unwritten = error.certain  # otherwise the record may name the lease
            raise
        finally:
            if unwritten and (known is None or era.source != known.source):
                with suppress(EtcdError):
                    self.call("/v3/lease/revoke", {"ID": era.source})

    def _is_due(self, era: Era) -> bool:
        """Return whether to read the clock; readings are whole seconds, so one helps only at the turn of a second."""
        if not self.clock.knows(era) or self.now() - self.looked > LOOK_EVERY:
            return True
        low, high = self.clock.bounds()
        return high - low > FINE and int(low) != int(high)

    def _grant(self) -> str:
        """Return the id of a new lease that serves as a clock."""
        return str(number(self.call("/v3/lease/grant", {"TTL": GRANTED, "ID": 0}), "ID"))

    def _look(self, era: Era) -> str:
        """
        Read the clock; return the id of the lease that it is read from, a new one if the old one is gone.

        The reading belongs to the era only if the same member reports its term before and after.
        """
        sent = self.looked = self.now()
        reply = self.call("/v3/lease/timetolive", {"ID": era.source})
        left, granted = number(reply, "TTL"), number(reply, "grantedTTL")
        if left < 0 or not granted:
            return self._grant()
        if not plausible(left, granted):
            if not self.clock.knows(era):  # all processes are asking this leader
                self.pause(min(UNCOUNTED, self.patience * (1 - ANSWERING) / 2))
                raise EtcdError(Failure.NO_LEADER)
        elif header_of(reply) == self._header:
            # The remaining time is cut to whole seconds.
            self.clock.observe(era, granted - left, granted - left + 1.0, sent)
        return era.source

    def write(self, decision: Decision) -> bool | None:
        """
        Write the changes of a decision, and notify waiters by the keys that their processes watch.

        Ending a hold with very many sharers takes more operations than fit in one transaction. Their tombstones are
        then written before the record of the name.
        """
        header, changes = None, decision.changes[::-1]
        for start in range(0, len(changes), LARGEST_WRITE):
            some = changes[start : start + LARGEST_WRITE]
            values = {change.key: change.record for change in some}
            if start + LARGEST_WRITE >= len(changes):
                self._notify(decision, values)
            versions = [(self._clock_key, self.version), *((change.key, change.version or 0) for change in some)]
            header = self._txn(versions, values)
            if header is None:
                return False
        # The cluster of the read is the one that is known, because the identity was compared.
        return True if header and (header.cluster, header.term) == (self._header.cluster, self._header.term) else None

    def _notify(self, decision: Decision, values: dict[str, dict[str, Any]]) -> None:
        """Add the records that notify waiters; if they do not fit, a waiter asks again by itself."""
        moment = decision.moment
        for waiter in decision.notified:
            key = self.key("w", waiter.partition("|")[0])
            if key in values or len(values) < AT_ONCE:
                record = {"to": [], "until": moment.low, "era": moment.era, "written": moment.low}
                values.setdefault(key, record)["to"].append(waiter)

    def _txn(self, versions: Sequence[tuple[str, int]], values: Mapping[str, Any]) -> Header | None:
        """Write values if records have the given versions, 0 for none; return None if one has another version."""
        texts = {key: json.dumps(value, separators=(",", ":")) for key, value in values.items()}
        if sum(len(key) + len(text) for key, text in texts.items()) > LONGEST_WRITE:
            raise TooLargeError
        puts = [put_of(key, text) for key, text in texts.items()]
        reply = self.call("/v3/kv/txn", {"compare": compared(versions), "success": puts})
        return header_of(reply) if reply.get("succeeded") else None

    # Listings

    def page(self, after: str, *, of_names: bool) -> tuple[dict[str, Stored], str, int]:
        """Return some records, kind after kind, in the order of their keys."""
        kinds = [f"{self._prefix}{kind}" for kind in (KINDS[:1] if of_names else KINDS)]
        kind = next((kind for kind in kinds if after.startswith(kind)), kinds[0])
        start, end = f"{after}\0" if after else kind, f"{kind[:-1]}{chr(ord(kind[-1]) + 1)}"
        reply = self.call("/v3/kv/range", {"key": encoded(start), "range_end": encoded(end), "limit": PAGE})
        found, count = records_of(reply), number(reply, "count")
        cursor = max(found, default="") if len(found) < count else ""
        return found, cursor or next(iter(kinds[kinds.index(kind) + 1 :]), ""), count

    def delete(self, versions: Mapping[str, int]) -> None:
        """Delete records that still have these versions, or none if another era has begun."""
        compare = compared([(self._clock_key, self.version), *versions.items()])
        deletions = [{"request_delete_range": {"key": encoded(key)}} for key in versions]
        self.call("/v3/kv/txn", {"compare": compare, "success": deletions})


def compared(versions: Iterable[tuple[str, int]]) -> list[dict[str, Any]]:
    """Return the conditions that records have these versions, 0 for none."""
    return [
        {"target": "MOD", "result": "EQUAL", "key": encoded(key), "mod_revision": version} for key, version in versions
    ]


def put_of(key: str, text: str) -> dict[str, Any]:
    """Return the operation that writes a record."""
    return {"request_put": {"key": encoded(key), "value": encoded(text)}}


def plausible(left: int, granted: int) -> bool:
    """
    Return whether the time left of the clock's lease is plausible.

    A deposed leader reports that the lease never ends. A new leader adds its election timeout to the lease.
    """
    return left <= granted == GRANTED


def era_name(header: Header, source: str) -> str:
    """Return the name of an era, which only a cluster that was restored from a backup can have once more."""
    return f"{header.cluster:x}.{header.term}.{source}"


def identity_of(cluster: int, stored: Stored | None) -> str:
    """Return the ids of a cluster: its own, and the random one in a record."""
    return f"etcd {cluster:x} {str(stored.record.get('id', ''))[:ID_LENGTH] if stored else ''}"


def records_of(reply: Mapping[str, Any]) -> dict[str, Stored]:
    """Return the records in the reply to a range, by key."""
    return {
        decoded(each.get("key")): Stored(number(each, "mod_revision"), parsed(decoded(each.get("value", ""))))
        for each in objects_in(reply, "kvs")
    }


class EtcdWatch(Watch):
    """A thread that reads the notifications of a cluster: a watch streams every change of the key of its process."""

    kind = "etcd"
    _response: HTTPResponse

    def begin(self, number: int) -> None:
        """Connect to a member and begin to watch."""
        self.client = client = EtcdClient(self.place, number, self.timeout)
        client.open()
        self._response = client.stream("/v3/watch", {"create_request": {"key": encoded(self.key)}})
        names_in(client.line(self._response))  # the line that confirms the watch
        client.wait(math.inf)

    def read(self) -> list[str]:
        """Wait for a notification, and return the waiters that it names."""
        assert isinstance(self.client, EtcdClient)
        if line := self.client.line(self._response):
            return names_in(line)
        raise LinkError(Failure.CLOSED)


def names_in(line: bytes) -> list[str]:
    """Return the waiters that a line names; raise EtcdError if the line ends the watch."""
    result = object_in(reply_in(line, 200), "result")
    if result.get("canceled"):
        raise EtcdError(Failure.CLOSED)
    names: list[str] = []
    for event in objects_in(result, "events"):
        text = decoded(object_in(event, "kv").get("value", ""))
        notified = parse_json(text).get("to", []) if text else []
        names += [name for name in notified if isinstance(name, str)]
    return names


EXAMPLE = "etcd://etcd-1:2379,etcd-2:2379,etcd-3:2379"


def refuse_path(path: str) -> None:
    """Raise ValueError if a URL has a path."""
    if path:
        raise ValueError(f"etcd has neither a path nor database numbers: write {EXAMPLE}, and choose a KEY_PREFIX")


ETCD = Store("etcd", "etcd", 2379, 2379, EXAMPLE, refuse_path)


class EtcdNode(ReplicatedNode):
    """
    All members of an etcd cluster: one vote, which is as available as the cluster.

    Args:
        spec: An ``etcd`` or ``etcds`` URL with some members, and the options for all of them.
        prefix: The beginning of every key.

    Raises:
        ValueError: The URL or the options cannot be used.
    """

    kind = "etcd"
    store = ETCD
    watch = EtcdWatch
    checks = (checks.members, checks.etcd)

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        # Slashes separate the kinds of records: "app:x/y:" would begin with a kind of the alias "app:".
        super().__init__(spec, quote(prefix, safe=":"))

    def table(self, patience: float) -> EtcdTable:
        """Return its records, not yet connected."""
        return EtcdTable(self.place, self.prefix, patience)

    def ask(self, number: int, timeout: float, facts: dict[str, str]) -> float:
        """Add what a member reports to the facts; return the time of the shortest round trip in seconds."""
        with closing(EtcdClient(self.place, number, timeout)) as client:
            client.open()
            trip, status = shortest(lambda: client.call("/v3/maintenance/status", {}))
            add_facts(client, status, facts)
            with suppress(EtcdError):  # the trial of the doctor reports it
                identity = self.table(timeout).greet(client)
                if facts.setdefault("identity", identity) != identity:
                    also(facts, "alone", self.place.members[number])
            return trip


def add_facts(client: EtcdClient, status: Mapping[str, Any], facts: dict[str, str]) -> None:
    """Add the version of a member and its share of used space, from its status, and its alarms."""
    facts["version"] = oldest(str(status.get("version", ""))[:20], facts.get("version", ""))
    if quota := number(status, "dbSizeQuota"):  # from version 3.6 on
        used = number(status, "dbSize") / quota
        facts["used"] = f"{max(used, float(facts.get('used', 0))):.3f}"
    with suppress(EtcdError):  # the user may lack the right
        alarms = client.call("/v3/maintenance/alarm", {"action": "GET"})
        if names := {str(alarm.get("alarm"))[:20] for alarm in objects_in(alarms, "alarms")}:
            facts["alarms"] = ", ".join(sorted(names))
