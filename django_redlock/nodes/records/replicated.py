"""
A replicated store of records: one node, whatever member of it is used (internal).

A URL names some members. A process uses one of them at a time, and the next one if it fails.
"""

import os
import re
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Protocol, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from ...core.admission import Greeting
from ...core.protocol import ABSENT, ENDLESS, Failure, Reply, Survey
from ...runtime.clock import steady
from ..base import LOGIN_UNREADABLE, LinkError, NodeSpec, address, is_local, split_url, unreadable
from .clock import Era, EraClock, Moment
from .node import RecordNode
from .record import Stored, in_present_era, is_held, needed_until
from .table import ANSWERING, AnswerError, RecordTable, link_error
from .watch import AsyncWatchLink, Deliver, Watch, WatchLink

ATTEMPTS = 10  # attempts to agree on the era's record, before the request fails
CLEANING = 60.0  # seconds between two searches for useless records, and for which such records are kept
LOOK_EVERY = 10.0  # seconds after which the leader's clock is read in any case, to notice if it was set
SEARCHING = 0.3  # share of the patience that a survey spends on records of locks that have ended

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
    store: ClassVar["Store"]
    watch: ClassVar[type[Watch]]

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

    def inspect(self, timeout: float) -> tuple[float, dict[str, str]]:
        """
        Ask each member; return the time of the shortest round trip in seconds, and facts for the doctor.

        Raises:
            LinkError: No member answers.
        """
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
        return min(trips), facts | ({"silent": ", ".join(silent)} if silent else {})

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


Client = TypeVar("Client", bound="Member")


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

    def __init__(self, place: "Place", patience: float) -> None:
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

    # Listings

    def survey(self, request: Survey) -> Reply:
        """Report the named locks, or one page of the held ones, in the order of their keys."""
        if request.size <= 0:
            return self.look_up(request)
        moment, _ = self.read([])
        slugs, cursor, total = self._search(request, moment)
        reply = self.look_up(request._replace(slugs=tuple(slugs)))
        rows = tuple(row for row in reply.rows if row.left != ABSENT)
        return reply._replace(rows=rows, total=total, cursor=cursor)

    def _search(self, request: Survey, moment: Moment) -> tuple[list[str], str, int]:
        """
        Return the names that are held on one page, the cursor of the next page, and the number of records.

        Most records may belong to locks that have ended. Requests of this process wait for the search, so it ends
        early if there are very many such records. The page is then not full, but has a cursor.
        """
        slugs: list[str] = []
        cursor, total, until = request.after, 0, self.now() + self.patience * SEARCHING
        if cursor == ENDLESS:
            return slugs, "", total  # in these stores, every lock has an end
        while True:
            records, cursor, count = self.page(cursor, of_names=True)
            total = total or count
            for key, stored in sorted(records.items()):
                if is_held(stored.record, moment):
                    slugs.append(str(stored.record.get("slug", "")))
                if len(slugs) == request.size:
                    return slugs, key, total
            if not cursor or self.now() > until:
                return slugs, cursor, total

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

    def page(self, after: str, *, of_names: bool) -> tuple[dict[str, Stored], str, int]:
        """
        Return some records whose keys follow *after*, those of names or those of any kind, in the order of their keys.

        The text is the key after which the next page begins, empty if there is none; the number is the approximate
        number of records.
        """
        raise NotImplementedError

    def delete(self, versions: Mapping[str, int]) -> None:
        """
        Delete records that still have these versions, or none if another era has begun.

        A hold of the next era ends by another clock, so it may seem to have ended long ago.
        """
        raise NotImplementedError


class Member(Protocol):
    """A connection to one member."""

    @property
    def ended(self) -> bool:
        """Whether the member is known to have ended the connection."""

    def open(self) -> None:
        """Connect, and authenticate if there is a user."""

    def wait(self, timeout: float) -> None:
        """Wait for at most the given seconds for each reply from now on."""

    def close(self) -> None:
        """Close the connection."""

    def abort(self) -> None:
        """Make a call that waits for the member fail at once; any thread may call this."""


@dataclass(frozen=True)
class Store:
    """
    A kind of store, with the form of its URLs.

    Args:
        name: The name in messages.
        scheme: The scheme of its URLs; with ``s`` at the end, connections are encrypted.
        port: The default port.
        encrypted_port: The default port of encrypted connections.
        example: A valid URL.
        check_path: Raises ValueError if a URL must not have a path, given without a slash at its end.
        more: The options that it takes in addition to those for the login and for TLS.
    """

    name: str
    scheme: str
    port: int
    encrypted_port: int
    example: str
    check_path: Callable[[str], object]
    more: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """
    The addresses of some members, and the credentials for all of them.

    Args:
        members: Host and port of each.
        options: The options of the connection, under redis-py's names.
        encrypted: Whether connections are encrypted.
        path: The path of the URL, without a slash at its end.
    """

    members: tuple[tuple[str, int], ...]
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    encrypted: bool = False
    path: str = ""

    @property
    def verifies(self) -> bool:
        """Whether certificates are verified, if connections are encrypted."""
        return self.options.get("ssl_cert_reqs", "required") not in ("none", None, ssl.CERT_NONE)

    @property
    def verifies_hosts(self) -> bool:
        """Whether certificates must be those of the hosts, too."""
        check = self.options.get("ssl_check_hostname", True)
        return self.verifies and bool(check) and str(check).lower() not in FALSE

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """
        How to verify certificates, and which one to present; None without encryption.

        Raises:
            LinkError: A file named in the options cannot be used.
        """
        if not self.encrypted:
            return None
        for option in FILES:
            path = self.options.get(option)
            if path and not (os.path.isfile(path) and os.access(path, os.R_OK)):
                raise LinkError(Failure.UNUSABLE, f"cannot be used, because its {option} does not name a readable file")
        try:
            context = ssl.create_default_context(cafile=self.options.get("ssl_ca_certs"))
            context.check_hostname = self.verifies_hosts
            if not self.verifies:
                context.verify_mode = ssl.CERT_NONE
            if certificate := self.options.get("ssl_certfile"):
                password = self.options.get("ssl_password") or ""  # without any, OpenSSL would ask at the terminal
                context.load_cert_chain(certificate, self.options.get("ssl_keyfile"), password)
            return context
        except ssl.SSLError as error:
            why = error.reason or "a key may need another ssl_password"
            text = f"cannot be used: TLS refuses a file of its ssl_ options ({why})"
            raise LinkError(Failure.UNUSABLE, text) from None


LOGIN = ("username", "password")

TLS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_cert_reqs", "ssl_check_hostname")

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")

FALSE = ("0", "false", "no", "off")


def read_place(spec: NodeSpec, store: Store) -> Place:
    """
    Return the place that a URL and its options describe.

    Raises:
        ValueError: They cannot be used; the message shows nothing of the URL, which may hold a password.
    """
    if spec.url.count("://") > 1:
        raise ValueError("it names several nodes: make each a separate item, or write all NODES as one string")
    if "#" in spec.url or spec.url.count("@") > 1:
        raise ValueError(LOGIN_UNREADABLE)
    try:
        parts = split_url(spec.url)
        encrypted = parts.scheme == f"{store.scheme}s"
        user, _, hosts = parts.netloc.rpartition("@")
        port = store.encrypted_port if encrypted else store.port
        members = tuple(member(host, port) for host in hosts.split(","))
    except ValueError:
        raise unreadable("its hosts or ports", spec.url, store.example) from None
    if "@" in parts.path + parts.query:
        raise ValueError(LOGIN_UNREADABLE)
    path = unquote(parts.path).rstrip("/")
    store.check_path(path)
    name, _, password = user.partition(":")
    login = {"username": unquote(name), "password": unquote(password)} if user else {}
    options = {**login, **dict(parse_qsl(parts.query)), **spec.options}
    check_options(options, store, encrypted=encrypted)
    return Place(members, options, encrypted, path)


def member(host: str, port: int) -> tuple[str, int]:
    """Return the host and the port of a member; *port* is the default. Raise ValueError if there is no host."""
    parts = urlsplit(f"//{host.strip()}")
    if not parts.hostname or parts.path or parts.query or parts.port == 0 or re.search(r"[\s;]", parts.hostname):
        raise ValueError(host)
    return parts.hostname, parts.port or port


def check_options(options: Mapping[str, Any], store: Store, *, encrypted: bool) -> None:
    """Raise ValueError for an option that the store does not take, or that has no effect."""
    known = (*LOGIN, *store.more, *TLS)
    for option in options:
        if option not in known:
            raise ValueError(f"{store.name} has no option {option!r}; it has {', '.join(known)}")
        if option in TLS and not encrypted:
            scheme = store.scheme
            raise ValueError(f"its option {option!r} is for TLS: write {scheme}s:// instead of {scheme}://")
    if bool(options.get("username")) != bool(options.get("password")):
        host = address(*member(split_url(store.example).netloc.split(",")[0], store.port)).rpartition(":")[0]
        raise ValueError(
            f"{store.name} needs a user name and a password, or neither: write {store.scheme}://user:password@{host}"
        )
    if options.get("ssl_keyfile") and not options.get("ssl_certfile"):
        raise ValueError("its ssl_keyfile belongs to a certificate: add ssl_certfile")
