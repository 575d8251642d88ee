"""
A ZooKeeper ensemble as a node: its records, the clock of its leader, its notifications (internal).

A request is one batch of reads and one transaction. The reads begin with a ``sync``, so that the member catches up with
its leader. The transaction compares the version of each record that it writes, and that of the record of the present
era (:mod:`..clock`). It also writes ``clock``: its reply then has the time of the write on the leader's wall clock, and
the write's number, whose upper half says which leader it was. That half is the era.

A deposed leader answers reads for a while. So even a request that changes nothing, such as a refused attempt, ends with
a transaction. If that was carried out in the same era, the reads were current.

If a record is deleted and created again, its version counts from 0 again. So a transaction that deletes records also
rewrites the era's record, and every write based on an earlier read fails.
"""

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from importlib.util import find_spec
from itertools import accumulate
from queue import SimpleQueue
from typing import Any
from urllib.parse import quote

from kazoo.protocol.states import EventType

from ....core.protocol import HIGHEST, PART, Failure
from ....nodes.base import LinkError, NodeSpec, parse_json
from ....nodes.records.record import Decision, Stored, digest, parsed
from ....nodes.records.table import AnswerError, TooLargeError, link_error
from ..bounded import connected
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
from .client import Listing, Znode, ZnodeChange, ZookeeperClient, logs_in

LARGEST_WRITE = 900_000  # bytes; a member closes the connection at 1,030 kB

AT_ONCE = 400  # records in one transaction

FOLDERS = 16  # folders of each kind, because a member lists everything in a folder at once

NAMES_AT_ONCE = 100_000  # in the folders that are listed together

MOST_NAMES = 380_000  # in a folder that can be listed: 36 bytes each, and READ for each packet, are LARGEST_LISTING

NAMES = "h"

KINDS = (NAMES, "x")  # and secrets that were released

PAGE = 100  # records that are read at once for a survey or to clean up

KEPT = 20  # notifications to a process that are kept for it

MOST = 500  # notifications to a process that are read at once

LATEST = HIGHEST // 1000  # milliseconds

ID = "redlock-id"

LACKING = (Failure.NOPERM, Failure.NOAUTH)  # the user lacks a right; the connection is sound

LONGEST = 10_000  # bytes of a member's report about itself


class ZookeeperTable(MemberTable[ZookeeperClient]):
    """
    The records of an alias in one ensemble.

    Args:
        place: The ensemble.
        prefix: The beginning of the keys of the alias.
        patience: Seconds that a request may take.
    """

    part = PART
    most = AT_ONCE

    def __init__(self, place: Place, prefix: str, patience: float) -> None:
        super().__init__(place, patience)
        self.root = f"{place.path}/{quote(prefix, safe=':')}"  # the folder of the alias
        self._id = f"{place.path}/{ID}"
        self._era: Era | None = None  # the era that was read last
        self._epoch = -1  # the epoch of the leader that wrote last

    # Connections

    def dial(self, number: int, timeout: float) -> ZookeeperClient:
        """Return a connection to a member, not yet open."""
        return ZookeeperClient(self.place, number, timeout)

    def greet(self, client: ZookeeperClient) -> str:
        """Return the id of the ensemble; create missing folders if the user has the right."""
        try:
            if client.exists([self._id, self.root]).count(None):
                self._prepare(client)
            written = client.write([ZnodeChange(f"{self.root}/clock", b"", -1)])
            (known,) = client.get([self._id])
        except AnswerError as error:
            if error.failure not in LACKING:
                raise
            raise LinkError(error.failure, f"{error.failure.value} for {self.place.path or '/'}") from None
        if known is None or written is None:
            raise AnswerError(Failure.CONTENDED)
        return identity_of(known)

    def _prepare(self, client: ZookeeperClient) -> None:
        """Create what is missing; another process may do the same at the same time."""
        parts = self.place.path.split("/")
        parents = ["/".join(parts[:end]) for end in range(2, len(parts) + 1)]
        for parent, known in zip(parents, client.exists(parents), strict=True):
            if known is None:
                client.write([ZnodeChange(parent, b"", None)])
        client.write([ZnodeChange(self._id, secrets.token_hex(16).encode(), None)])
        folders = ["clock", "w", *(f"{kind}{number:02}" for kind in KINDS for number in range(FOLDERS))]
        client.write(
            [ZnodeChange(each, b"", None) for each in (self.root, *(f"{self.root}/{name}" for name in folders))]
        )

    def failed(self, error: Exception, *, unclear: bool) -> Failure:
        """Return the meaning of an error; a broken connection is replaced by one to the next member."""
        failure = link_error(error).failure
        if failure in LACKING or failure is Failure.TOO_MANY:
            return failure
        self.close()
        if failure is not Failure.WRONGPASS:
            self.turn()
        if unclear:
            raise LinkError(failure)
        return failure

    # Requests

    def key(self, kind: str, name: str) -> str:
        """Return the path of a record."""
        if kind == "w":
            return f"{self.root}/w/{name}"
        short = digest(name)
        return f"{self.root}/{kind}{int(short[:2], 16) % FOLDERS:02}/{short}"

    def fetch(self, keys: Sequence[str]) -> tuple[str, Stored | None, dict[str, Stored]]:
        """Return the id of the ensemble, the record of the era, and the records that exist under some keys."""
        known, era, *found = self.connection.get([self._id, f"{self.root}/era", *keys], sync=self.root)
        records = {key: record(one) for key, one in zip(keys, found, strict=True) if one}
        return identity_of(known), record(era) if era else None, records

    def leader(self, era: Era | None) -> tuple[str, str]:
        """Return the name of the era of the leader that wrote last; let it write, and so tell the time, if due."""
        self._era, now = era, self.now()
        # Only a write shows who the leader is: kazoo's answer to a read does not tell, and a member may be behind.
        unknown = era is None or era.name != str(self._epoch) or not self.clock.knows(era)
        if unknown or now - self.looked > LOOK_EVERY:
            self._observe(self.connection.write([ZnodeChange(f"{self.root}/clock", b"", -1)]), now)
        return str(self._epoch), ""

    def write_era(self, era: Era, known: Era | None, version: int | None) -> None:
        """Write the record of the era unless it has changed."""
        self.connection.write([ZnodeChange(f"{self.root}/era", json.dumps(era.dump()).encode(), version)])

    def _observe(self, written: Znode | None, sent: float) -> None:
        """Use the reading of the leader's clock that comes with a write."""
        if written is None or not 0 < written.time <= LATEST:
            raise AnswerError(Failure.MALFORMED)
        self._epoch, self.looked = written.zxid >> 32, sent
        if self._era and self._era.name == str(self._epoch):
            self.clock.observe(self._era, written.time / 1e3, (written.time + 1) / 1e3, sent)

    def write(self, decision: Decision) -> bool | None:
        """Write the changes of a decision, and the names of the waiters to the znodes that their processes watch."""
        changes = [ZnodeChange(one.key, dump(one.record), one.version) for one in decision.changes]
        return self._commit([*changes, *self._notify(decision.notified)])

    def confirm(self, decision: Decision) -> bool:
        """Return whether the records read for a decision without changes were those of the leader of its era."""
        return not decision.moment.era or self._commit([]) is True  # a survey makes no decision

    def _commit(self, changes: Sequence[ZnodeChange]) -> bool | None:
        """Write in the present era; see :meth:`write`."""
        if sum(len(one.path) + len(one.data or b"") + 100 for one in changes) > LARGEST_WRITE:
            raise TooLargeError
        sent, era = self.now(), self._era
        written = self.connection.write(
            [ZnodeChange(f"{self.root}/clock", b"", -1), ZnodeChange(f"{self.root}/era", None, self.version), *changes]
        )
        if written is None:
            return False
        self._observe(written, sent)
        counts = era and era.name == str(self._epoch) and not self.clock.jumped(era.tag)
        return True if counts else None

    def _notify(self, waiters: Iterable[str]) -> list[ZnodeChange]:
        """Return the changes that notify waiters. A process that does not watch is left out; its waiters ask again."""
        by_path: dict[str, list[str]] = {}
        for waiter in waiters:
            by_path.setdefault(self.key("w", waiter.partition("|")[0]), []).append(waiter)
        changes = []
        for (path, names), known in zip(by_path.items(), self.connection.get(by_path) if by_path else [], strict=True):
            if known:
                earlier = record(known).record.get("to", [])
                notified = [
                    *(earlier if isinstance(earlier, list) else []),
                    *([secrets.token_hex(4), one] for one in names),
                ]
                changes.append(ZnodeChange(path, dump({"to": notified[-max(KEPT, len(names)) :]}), -1))
        return changes

    # Listings

    def page(self, after: str, *, of_names: bool) -> tuple[dict[str, Stored], str, int]:
        """
        Return some records, folder after folder, in the order of the digests of their names.

        A member lists a folder as a whole, and a listing that is too long would cost the connection, so the number of
        names decides which folders are listed together.
        """
        kinds = [NAMES] if of_names else KINDS
        folders = [f"{self.root}/{kind}{number:02}" for kind in kinds for number in range(FOLDERS)]
        begun, _, last = after.rpartition("/")
        sizes = {
            path: known.children if known else 0
            for path, known in zip(folders, self.connection.exists(folders), strict=True)
        }
        later = [folder for folder in folders if folder >= begun]
        ends = accumulate(sizes[folder] for folder in later)
        some = [folder for folder, end in zip(later, ends, strict=True) if end <= NAMES_AT_ONCE] or later[:1]
        if any(sizes[folder] > MOST_NAMES for folder in some):
            raise AnswerError(Failure.TOO_MANY)
        listed = self.connection.children([Listing(each, last if each == begun else "", PAGE + 1) for each in some])
        paths = [f"{folder}/{name}" for folder, names in zip(some, listed, strict=True) for name in names]
        found = dict(zip(paths[:PAGE], self.connection.get(paths[:PAGE]), strict=True))
        end = paths[PAGE - 1] if len(paths) > PAGE else f"{later[len(some)]}/" if len(later) > len(some) else ""
        return {path: record(one) for path, one in found.items() if one}, end, sum(sizes.values())

    def delete(self, versions: Mapping[str, int]) -> None:
        """Delete records, and rewrite the record of the era, which changes its version: see above."""
        if self._era:
            useless = [ZnodeChange(path, None, version, delete=True) for path, version in versions.items()]
            self.connection.write([ZnodeChange(f"{self.root}/era", dump(self._era.dump()), self.version), *useless])


def identity_of(known: Znode | None) -> str:
    """Return the id of an ensemble, from the znode that has it."""
    return f"zookeeper {known.data.decode('ascii', 'replace')[:40] if known else ''}"


def dump(content: Mapping[str, Any]) -> bytes:
    """Return a record in the form in which it is stored."""
    return json.dumps(content, separators=(",", ":")).encode()


def record(stored: Znode) -> Stored:
    """Return the record in a znode."""
    return Stored(stored.version, parsed(stored.data))


class ZookeeperWatch(Watch):
    """A thread that reads the notifications of an ensemble to a process."""

    kind = "zookeeper"
    client: ZookeeperClient | None

    def begin(self, number: int) -> None:
        """Begin to watch at a member."""
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._notified: list[Any] = []
        self.client = ZookeeperClient(self.place, number, self.timeout)
        self.client.open()
        if self.client.get([self.key])[0]:  # left from an earlier session of this process
            self.client.write([ZnodeChange(self.key, None, -1, delete=True)])
        self.client.write([ZnodeChange(self.key, b"", None)], fleeting=True)
        self.client.when_lost(lambda: self._events.put(None))
        self._look()

    def _look(self) -> list[Any]:
        """Return the present notifications, and watch for the next one."""
        assert self.client is not None
        (found,) = self.client.get([self.key], watch=self._events.put)
        if found is None:
            raise LinkError(Failure.CLOSED)
        notified = parse_json(found.data or b"{}").get("to", [])
        return notified[-MOST:] if isinstance(notified, list) else []

    def read(self) -> list[str]:
        """Wait for a notification, and return the waiters that it names."""
        event = self._events.get()
        if event is None or event.type == EventType.DELETED:  # the connection is gone, or a later one has taken over
            raise LinkError(Failure.CLOSED)
        notified = self._look()
        new, self._notified = [one for one in notified if one not in self._notified], notified
        return [str(name) for _, name in new]


SASL = ("sasl_mechanism", "sasl_service", "sasl_principal")

MECHANISMS = ("DIGEST-MD5", "GSSAPI")

EXAMPLE = "zookeeper://zoo-1:2181,zoo-2:2181,zoo-3:2181/redlock"


def check_path(path: str) -> None:
    """Raise ValueError if ZooKeeper does not accept the path."""
    names = path.split("/")[1:]
    if len(names) == 1 and names[0].isdigit():
        raise ValueError(f"ZooKeeper has no database numbers: write {EXAMPLE}, and choose a KEY_PREFIX")
    if "," in path:
        raise ValueError(f"its path comes once, after the last member: write, for example, {EXAMPLE}")
    if any(not name.isprintable() or name in ("", ".", "..", "zookeeper") for name in names):
        raise ValueError(f"its path is not valid in ZooKeeper: write, for example, {EXAMPLE}")


ZOOKEEPER = Store("ZooKeeper", "zookeeper", 2181, 2281, EXAMPLE, check_path, SASL)


class ZookeeperNode(ReplicatedNode):
    """
    All members of a ZooKeeper ensemble: one vote, which is as available as the ensemble.

    Args:
        spec: A ``zookeeper`` or ``zookeepers`` URL with some members, and the options for all of them.
        prefix: The beginning of every key.

    Raises:
        ValueError: The URL or the options cannot be used.
    """

    kind = "zookeeper"
    store = ZOOKEEPER
    watch = ZookeeperWatch

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        super().__init__(spec, prefix)
        options = self.place.options
        self.authenticated = self.authenticated or logs_in(self.place)
        mechanism = options.get("sasl_mechanism")
        if mechanism is None and (given := [name for name in SASL if options.get(name)]):
            raise ValueError(f"its option {given[0]!r} is for SASL: add sasl_mechanism=GSSAPI")
        if mechanism not in (None, *MECHANISMS):
            raise ValueError(f"its sasl_mechanism must be one of {', '.join(MECHANISMS)}")
        if mechanism == "DIGEST-MD5" and not options.get("password"):
            raise ValueError("SASL with DIGEST-MD5 needs a user: write zookeeper://user:password@zoo-1")
        if mechanism and find_spec("puresasl") is None:
            raise ValueError('SASL needs one more package: pip install "kazoo[sasl]"')

    def table(self, patience: float) -> ZookeeperTable:
        """Return the records, not yet connected."""
        return ZookeeperTable(self.place, self.prefix, patience)

    def ask(self, number: int, timeout: float, facts: dict[str, str]) -> float:
        """Add what a member reports to the facts; return the time of the shortest round trip in seconds."""
        trip, report = shortest(lambda: self._command(number, timeout))
        values = dict(line.partition(": ")[::2] for line in report.splitlines())
        if "Mode" not in values and "srvr" not in report:  # otherwise the member does not accept this command
            raise LinkError(Failure.NO_LEADER)
        if version := values.get("Zookeeper version", "").partition("-")[0][:20]:
            facts["version"] = oldest(version, facts.get("version", ""))
        if values.get("Mode") == "standalone" and len(self.members) > 1:
            also(facts, "alone", self.place.members[number])
        return trip

    def _command(self, number: int, timeout: float) -> str:
        """Return a member's report about itself."""
        data, member = b"", self.place.members[number]
        with closing(connected(member, member[0], self.place, timeout)) as connection:
            connection.allow(LONGEST, timeout)
            connection.sendall(b"srvr")
            while more := connection.recv(1000):
                data += more
        return data.decode("utf-8", "replace")
