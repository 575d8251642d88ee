"""All members of a replicated store as one node (internal)."""

import time
from collections.abc import Callable
from functools import partial
from typing import ClassVar

from ..base import LinkError, NodeSpec
from ..records.node import RecordNode
from ..records.replicated import Store, address, read_place
from ..records.watch import AsyncWatchLink, Watch, WatchLink

SAMPLES = 5  # round trips; the shortest one counts


class ReplicatedNode(RecordNode):
    """
    All members of a replicated store: one vote, which is as available as the store.

    A kind of store overrides :meth:`table`, :meth:`channel`, :meth:`ask` and the attributes.

    Args:
        spec: A URL with some members, and the options for all of them.
        prefix: The beginning of every key.

    Raises:
        ValueError: The URL or the options cannot be used.
    """

    calls = True
    store: ClassVar[Store]
    watch: ClassVar[type[Watch]]

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        self.place = read_place(spec, self.store)
        self.members = self.place.addresses
        where = ", ".join(self.members)
        super().__init__(spec.name or where, where)
        self.prefix = prefix

    @property
    def replicated(self) -> bool:
        """Whether the store survives the loss of a member, as far as its URL shows."""
        return len(self.members) > 2

    @property
    def encrypted(self) -> bool:
        """Whether connections are encrypted."""
        return self.place.encrypted

    @property
    def authenticated(self) -> bool:
        """Whether a password or a certificate of the client is sent."""
        return bool(self.place.options.get("password") or self.place.options.get("ssl_certfile"))

    @property
    def remote(self) -> bool:
        """Whether connections leave this machine."""
        return not self.place.local

    def channel(self, process: str) -> str:
        """Return the key under which the notifications to a process are written."""
        raise NotImplementedError

    def listen(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> WatchLink:
        """Open a link for notifications; see :class:`~django_redlock.nodes.base.Node`."""
        return WatchLink(partial(self.watch, self.place, self.channel(process), timeout), timeout)

    async def alisten(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> AsyncWatchLink:
        """Open a link for notifications to the running event loop."""
        link = AsyncWatchLink(partial(self.watch, self.place, self.channel(process), timeout))
        await link.begin(timeout)
        return link

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
            except LinkError as error:
                failure = error
                silent.append(f"{address(*member)} ({failure.detail})")
        if failure and not trips:
            raise failure
        return min(trips), facts | ({"silent": ", ".join(silent)} if silent else {})

    def ask(self, number: int, timeout: float, facts: dict[str, str]) -> float:
        """
        Add what a member reports to the facts; return the time of the shortest round trip in seconds.

        Raises:
            LinkError: The member does not answer.
        """
        raise NotImplementedError


def also(facts: dict[str, str], what: str, member: tuple[str, int]) -> None:
    """Add a member to those that a fact names."""
    facts[what] = ", ".join(filter(None, [facts.get(what), address(*member)]))


def shortest(trip: Callable[[], object]) -> float:
    """Return the time of the shortest of a few round trips, in seconds."""
    trips = []
    for _ in range(SAMPLES):
        began = time.perf_counter()
        trip()
        trips.append(time.perf_counter() - began)
    return min(trips)


def oldest(version: str, known: str) -> str:
    """Return the older one of two versions; *known* may be empty."""
    return min(version, known or version, key=lambda one: [int(part) for part in one.split(".") if part.isdigit()])
