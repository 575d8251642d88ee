"""Records in a replicated store, over a connection to one of its members (internal)."""

import secrets
from typing import Generic, NamedTuple, Protocol, TypeVar

from ...core.admission import Greeting
from ...core.protocol import ABSENT, ENDLESS, Failure, Reply, Survey
from ..base import LinkError
from ..records.clock import Moment
from ..records.record import Stored, is_held
from ..records.replicated import Place
from ..records.table import ANSWERING, RecordTable, UntouchedError

SEARCHING = 0.3  # share of the patience that a survey spends on records of locks that have ended


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


Client = TypeVar("Client", bound=Member)


class Page(NamedTuple):
    """
    One page of the records of names.

    Args:
        records: The records, by key.
        cursor: The key after which the next page begins; empty if there is none.
        total: The approximate number of records.
    """

    records: dict[str, Stored]
    cursor: str
    total: int


class MemberTable(RecordTable, Generic[Client]):
    """
    Records over a connection to one member, or to the next one if it fails.

    A kind of store overrides :meth:`dial`, :meth:`greet`, :meth:`explain`, :meth:`page` and the methods for records.

    Args:
        place: The members.
        patience: Seconds that a request may take.

    Attributes:
        identity: The unique name of the store, once it is known.
        client: The connection; None if there is none.
    """

    def __init__(self, place: Place, patience: float) -> None:
        super().__init__(patience)
        self.place = place
        self.identity = ""
        self.client: Client | None = None
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
                check_identity(identity, self.identity)
                client.wait(self.patience * ANSWERING)
                self.client = client
                return Greeting(run_id=identity, age=float("inf"))
            except Exception as error:
                if not isinstance(error, (*self.errors, LinkError)):
                    raise
                if client:
                    client.close()
                failure = self.explain(error)
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
            try:
                self.open()
            except LinkError as error:
                raise UntouchedError(error.failure, error.detail) from None

    def close(self) -> None:
        """Drop the connection; the next request makes a new one."""
        client, self.client = self.client, None
        if client:
            client.close()

    def abort(self) -> None:
        """Make a call that waits for a member fail at once; any thread may call this."""
        if client := self.client:
            client.abort()

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
            page = self.page(cursor)
            cursor, total = page.cursor, total or page.total
            for key, stored in sorted(page.records.items()):
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

    def explain(self, error: Exception) -> LinkError:
        """Return what to report about a failure, without anything that the error quotes."""
        raise NotImplementedError

    def page(self, after: str) -> Page:
        """Return the records of some names whose keys follow *after*, in the order of their keys."""
        raise NotImplementedError


def check_identity(identity: str, known: str) -> None:
    """Raise LinkError if a store is not the one that is known, for example because its keys were deleted meanwhile."""
    if identity != known:
        raise LinkError(Failure.RESTARTED)
