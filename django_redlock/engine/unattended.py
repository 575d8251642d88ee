"""
Look after the releases that nobody waits for (internal).

Such a release is a round that stays open after it was sent. As a rule, the thread that sent it soon uses the same
connections again and reads the replies. Otherwise, the watchdog reads them a tenth of a second later. The outcome is
known when the replies decide the round, or when the node timeout has passed. Then the watchdog has the release
redelivered to the nodes that missed it, and sends the signal.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import ref

from ..core.protocol import Failure, Kind, failed
from ..core.round import Round
from ..nodes.clock import Clock
from .connections import ConnectionSet

LOOK = 0.1  # seconds after which the replies are read, if they have not been read by then
NEVER = float("inf")

Ended = Callable[[Round], object]


class Attendant(Protocol):
    """The part of a :class:`~.rounds.Gather` that is used here."""

    def attend(self, connections: ConnectionSet, round: Round, until: float, *, wait: bool = False) -> None:
        """Read the replies to an unattended round, unless a thread uses its connections."""


class Dog(Protocol):
    """The part of a watchdog that is used here."""

    def watch(self, lease: Any) -> None:
        """Look after *lease*."""


class Sent(NamedTuple):
    """
    A release that was sent.

    Attributes:
        round: The round of the release.
        connections: A reference to the connections that carried it, which gives None if an interruption dropped them.
        until: When the nodes that have not answered count as silent, in seconds on the steady clock.
        look: When to read the replies.
        ended: Called with the round when the outcome is known.
    """

    round: Round
    connections: "ref[ConnectionSet]"
    until: float
    look: float
    ended: Ended


class UnattendedReleases:
    """
    The releases of one alias that threads sent and whose outcome is not known; the watchdog treats them as a lease.

    Args:
        gather: Reads the replies.
        follow_up: Called with a finished round; has the release redelivered to the nodes that missed it.
        dog: The watchdog that looks after the leases.
        clock: Returns seconds on a steady clock.
    """

    renewed = True
    slack = 0.0

    def __init__(
        self,
        gather: Attendant,
        follow_up: Callable[[Round], object],
        dog: Dog,
        clock: Clock,
    ) -> None:
        self._gather = gather
        self._follow_up = follow_up
        self._dog = dog
        self._clock = clock
        self._mutex = threading.Lock()
        self._open: deque[Sent] = deque()
        self._over: deque[Sent] = deque()

    def __len__(self) -> int:
        return len(self._open) + len(self._over)

    @property
    def hold(self) -> "UnattendedReleases":
        """The object itself, which knows when the watchdog has to look at it."""
        return self

    @property
    def keeper(self) -> "UnattendedReleases":
        """The object itself, which reads the replies."""
        return self

    def due(self) -> float:
        """Return when to read replies next, on the steady clock; infinity if there are none to read."""
        if self._over:
            return 0.0
        try:
            return self._open[0].look
        except IndexError:  # another thread was quicker
            return NEVER

    def valid(self) -> bool:
        """Return True, because this never ends."""
        return True

    def add(self, round: Round, connections: ConnectionSet, timeout: float, ended: Ended) -> None:
        """
        Look after a release that has just been sent.

        Args:
            round: The round of the release, still open.
            connections: The connections that carried it.
            timeout: Seconds after which the nodes that have not answered count as silent.
            ended: Called with the round when the outcome is known, in the thread that finds out.
        """
        now = self._clock()
        self._open.append(Sent(round, ref(connections), now + timeout, now + LOOK, ended))
        self._dog.watch(self)

    def extend(self, leases: Any) -> int:
        """Read the replies that have come; the watchdog calls this."""
        self.look()
        return 0

    async def aextend(self, leases: Any) -> int:
        """Do nothing, because only the watchdog of the threads looks after these releases."""
        return 0

    def look(self, *, wait: bool = False) -> None:
        """Read the replies that have come, or *wait* for them for as long as each node timeout lasts."""
        with self._mutex:
            for _ in range(len(self._open)):
                sent = self._open[0]
                self._read(sent, wait)
                self._open.popleft()  # last, so that an interruption loses nothing
                if sent.round.closed:
                    self._over.append(sent)
                else:
                    self._open.append(sent._replace(look=self._clock() + LOOK))
            over = [self._over.popleft() for _ in range(len(self._over))]
        for sent in over:
            self._follow_up(sent.round)
        for sent in over:
            sent.ended(sent.round)

    def _read(self, sent: Sent, wait: bool) -> None:
        round, connections = sent.round, sent.connections()
        if round.closed:
            return
        if connections is not None:
            self._gather.attend(connections, round, sent.until, wait=wait)
        # If the connections are gone or in use, nobody else finds out that a node is silent.
        if not round.closed and self._clock() >= sent.until:
            for node in set(round.requests) - set(round.replies):
                round.receive(node, failed(Failure.TIMEOUT, Kind.UNKNOWN))
            round.close()  # an exception may have come between the last reply and the end of the round
