"""
A replicated store of records: one node, whatever member of it is used (internal).

A URL names some members. A process uses one of them at a time, and the next one if it fails.
"""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Generic, TypeVar

from ...core.admission import Greeting
from ...core.protocol import Failure
from ...core.rules import Rules
from ...nodes.base import LinkError, NodeSpec, address, is_local
from ...nodes.inspection import Finding, Inspection
from ...nodes.records.node import RecordNode
from ...nodes.records.record import Moment, Stored, in_present_era, needed_until
from ...nodes.records.table import ANSWERING, AnswerError, RecordTable, link_error
from ...runtime.clock import steady
from .checks import members
from .clock import Era, EraClock
from .place import Member, Place, Store, read_place
from .watch import AsyncWatchLink, Deliver, Watch, WatchLink

ATTEMPTS = 10  # attempts to agree on the era's record, before the request fails
CLEANING = 60.0  # seconds between two searches for useless records, and for which such records are kept
LOOK_EVERY = 10.0  # seconds after which the leader's clock is read in any case, to notice if it was set

SAMPLES = 5  # round trips; the shortest one counts


class ReplicatedNode(RecordNode):
    """
    All members of a replicated store: one vote, which is as available as the store.

    A kind of store overrides :meth:`table`, :meth:`ask` and the attributes.

    Args:
        spec: A URL with some members, and the options for all of them.
        prefix: The beginning of every key.

    Raises:
        ValueError: The URL or the options cannot be used.
    """

    calls = True
    store: ClassVar[Store]
    watch: ClassVar[type[Watch]]
    checks: ClassVar[tuple[Callable[[Inspection, Rules], Iterator[Finding]], ...]] = (members,)

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        self.place = read_place(spec, self.store)
        self.members = tuple(sorted(address(*member) for member in self.place.members))
        where = ", ".join(self.members)
        super().__init__(spec.name or where, where)
        self.prefix = prefix
        self.replicated = len(self.members) > 2  # it survives the loss of a member, as far as its URL shows
        self.encrypted = self.place.encrypted
        self.verified = self.place.encrypted and self.place.verifies_hosts
        # The client sends a password or a certificate.
        self.authenticated = bool(self.place.options.get("password") or self.place.options.get("ssl_certfile"))
        self.remote = not all(is_local(host) for host, _ in self.place.members)

    def listen(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> WatchLink:
        """Open a link for notifications; see :class:`~django_redlock.nodes.base.Node`."""
        return WatchLink(self._watch(process, timeout), timeout)

    async def alisten(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> AsyncWatchLink:
        """Open a link for notifications to the running event loop."""
        link = AsyncWatchLink(self._watch(process, timeout))
        await link.begin(timeout)
        return link

    def _watch(self, process: str, timeout: float) -> Callable[[Deliver], Watch]:
        """Return what makes the watch of the key to which the notifications to a process are written."""
        return partial(self.watch, self.place, self.table(timeout).key("w", process), timeout)

    # For the doctor

    def inspect(self, timeout: float, *, rights: bool = True) -> Inspection:
        """
        Ask each member for facts; see :mod:`~django_redlock.nodes.inspection`.

        Raises:
            LinkError: No member answers.
        """
        self.connect(timeout).close()
        facts: dict[str, str] = {"kind": self.store.name}
        trips: list[float] = []
        silent: list[str] = []
        failure: LinkError | None = None
        for number, member in enumerate(self.place.members):
            try:
                trips.append(self.ask(number, timeout, facts))
            except (AnswerError, OSError, LinkError) as error:
                failure = link_error(error)
                silent.append(f"{address(*member)} ({failure.detail})")
        if failure and not trips:
            raise failure
        if silent:
            facts["silent"] = ", ".join(silent)
        return Inspection(self.name, known=False, round_trip=min(trips), facts=facts, checks=self.checks)

    def ask(self, number: int, timeout: float, facts: dict[str, str]) -> float:
        """
        Add what a member reports to the facts; return the time of the shortest round trip in seconds.

        Raises:
            AnswerError, OSError, LinkError: The member does not answer.
        """
        raise NotImplementedError


Answer = TypeVar("Answer")


def also(facts: dict[str, str], what: str, member: tuple[str, int]) -> None:
    """Add a member to those that a fact names."""
    facts[what] = ", ".join(filter(None, [facts.get(what), address(*member)]))


def shortest(trip: Callable[[], Answer]) -> tuple[float, Answer]:
    """Return the time of the shortest of a few round trips, in seconds, and the last answer."""
    trips = []
    for _ in range(SAMPLES):
        began = steady()
        answer = trip()
        trips.append(steady() - began)
    return min(trips), answer


def oldest(version: str, known: str) -> str:
    """Return the older one of two versions; *known* may be empty."""
    return min(version, known or version, key=lambda one: [int(part) for part in one.split(".") if part.isdigit()])


Client = TypeVar("Client", bound=Member)


class MemberTable(RecordTable, Generic[Client]):
    """
    Records over a connection to one member, or to the next one if it fails.

    A kind of store overrides :meth:`key`, :meth:`write`, :meth:`failed` and the last methods.

    Args:
        place: The members.
        patience: Seconds that a request may take.

    Attributes:
        identity: The unique name of the store, once it is known.
        client: The connection; None if there is none.
        clock: What is known of the leader's clock.
        looked: When that clock was read last.
        version: The version of the era's record, as it was read last; every write compares it.
    """

    errors = (AnswerError, OSError)

    def __init__(self, place: Place, patience: float) -> None:
        super().__init__(patience)
        self.place = place
        self.identity = ""
        self.client: Client | None = None
        self.clock = EraClock(self.now)
        self.looked = -LOOK_EVERY
        self.version = 0
        self._clean_at, self._cleaned = self.now() + CLEANING, ""
        self._at = secrets.randbelow(len(place.members))  # so that not all processes use the same member

    @property
    def connection(self) -> Client:
        """The connection; call :meth:`ready` first."""
        assert self.client is not None
        return self.client

    def open(self) -> Greeting:
        """Connect to the first member that answers and knows a leader, beginning with the last good one."""
        self.close()
        failure = LinkError(Failure.UNREACHABLE)
        for _ in self.place.members:
            client = None
            try:
                client = self.dial(self._at, self.patience / (len(self.place.members) + 1))
                client.open()
                identity = self.greet(client)
                self.identity = self.identity or identity
                self._check(identity)
                client.wait(self.patience * ANSWERING)
                self.client = client
                return Greeting(run_id=identity, age=float("inf"))
            except (*self.errors, LinkError) as error:
                if client:
                    client.close()
                failure = link_error(error)
                if failure.failure is Failure.RESTARTED:
                    break
                self.turn()
        raise failure

    def turn(self) -> None:
        """Use the next member from now on."""
        self._at = (self._at + 1) % len(self.place.members)

    def ready(self) -> None:
        """Connect if there is no connection; the member may have ended it and lost its data."""
        if self.client is None or self.client.ended:
            self.open()

    def close(self) -> None:
        """Drop the connection; the next request makes a new one."""
        client, self.client = self.client, None
        if client:
            client.close()

    def abort(self) -> None:
        """Make a call that waits for a member fail at once; any thread may call this."""
        if client := self.client:
            client.abort()

    def read(self, keys: Sequence[str]) -> tuple[Moment, Mapping[str, Stored]]:
        """Return the records that exist under some keys, and the moment."""
        for _ in range(ATTEMPTS):
            identity, era, found = self.fetch(keys)
            self._check(identity)
            moment = self.moment(era)
            if moment and self.clock.check(moment, [stored.record for stored in found.values()]):
                return moment, found
        raise AnswerError(Failure.NO_LEADER)

    def moment(self, stored: Stored | None) -> Moment | None:
        """Return the present moment; None if the record of the era had to change or the clock was not read."""
        era = Era.load(stored.record) if stored else None
        self.version = stored.version if stored else 0
        name, source = self.leader(era)
        if correction := self.clock.correction(era, name, source):
            # Nothing is decided in the same pass. Of several processes that correct the record, one wins, and the next
            # read shows all of them the same beginning of the era. A process with a beginning of its own might let a
            # hold of the era before end earlier than the others do.
            self.write_era(correction, era, stored.version if stored else None)
            return None
        assert era is not None
        return self.clock.moment(era)

    def _check(self, identity: str) -> None:
        """Raise LinkError if the store is not the one that is known: its keys may have been deleted meanwhile."""
        if identity != self.identity:
            raise LinkError(Failure.RESTARTED)

    def clean(self) -> None:
        """
        Occasionally delete records that have not been needed for a while; a failure does no harm.

        Requests of this process are waiting, so one call deletes the useless records of one page.
        """
        now = self.now()
        if self.client is None or now < self._clean_at:
            return
        self._clean_at = now + CLEANING
        try:
            moment, _ = self.read([])
            records, self._cleaned, _ = self.page(self._cleaned, of_names=False)
            if self._cleaned:  # this is not the end of the search
                self._clean_at = self.now() + 1.0
            useless = {
                key: stored.version
                for key, stored in records.items()
                if (until := needed_until(in_present_era(stored.record, moment))) is not None
                and until < moment.low - CLEANING
            }
            if useless:
                self.delete(useless)
        except self.errors as error:
            self.failed(error, unclear=False)

    # The parts that differ between kinds of stores

    def dial(self, number: int, timeout: float) -> Client:
        """Return a connection to a member, not yet open; each reply may take *timeout* seconds."""
        raise NotImplementedError

    def greet(self, client: Client) -> str:
        """
        Return an identifier that distinguishes the store from others.

        Raises:
            LinkError: The member cannot be used; any of :attr:`errors` means the same.
        """
        raise NotImplementedError

    def fetch(self, keys: Sequence[str]) -> tuple[str, Stored | None, dict[str, Stored]]:
        """Return the identity of the store, the record of its era, and the records that exist under some keys."""
        raise NotImplementedError

    def leader(self, era: Era | None) -> tuple[str, str]:
        """
        Return the name of the era of the leader that answered last, and where its clock is read; read it if due.

        Args:
            era: The record of the era; None if there is none.
        """
        raise NotImplementedError

    def write_era(self, era: Era, known: Era | None, version: int | None) -> None:
        """
        Write the record of the era unless it has changed.

        Args:
            era: Its new content.
            known: The content that was read; None if there is none.
            version: The version that was read; None if there is no record.
        """
        raise NotImplementedError

    def delete(self, versions: Mapping[str, int]) -> None:
        """
        Delete records that still have these versions, or none if another era has begun.

        A hold of the next era ends by another clock, so it may seem to have ended long ago.
        """
        raise NotImplementedError
