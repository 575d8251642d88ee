"""Releases that were sent without waiting for the replies (internal)."""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple
from weakref import ref

from ..core.protocol import Failure, Kind, failed
from ..core.round import Round
from ..runtime.clock import Clock
from .connections import ConnectionSet
from .rounds import Gather
from .watchdog import NEVER, Chore, Dog

LOOK = 0.1  # seconds after which the replies are read, if they have not been read by then

Ended = Callable[[Round], object]


class SentRelease(NamedTuple):
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


class UnattendedReleases(Chore):
    """
    The releases of one alias that threads sent and whose outcome is not known yet.

    As a rule, the thread that sent a release soon uses the same connections again, and reads the replies. Otherwise the
    watchdog reads them a tenth of a second later. The outcome is known when the replies decide the round, or when the
    node timeout has passed.

    Args:
        gather: Reads the replies.
        follow_up: Called with a finished round; has the release redelivered to the nodes that missed it.
        dog: The watchdog that looks after the leases.
        clock: Returns seconds on a steady clock.
    """

    def __init__(
        self,
        gather: Gather,
        follow_up: Callable[[Round], object],
        dog: Dog,
        clock: Clock,
    ) -> None:
        self._gather = gather
        self._follow_up = follow_up
        self._dog = dog
        self._clock = clock
        self._mutex = threading.RLock()  # a signal handler may close the manager in a thread that has it
        self._open: deque[SentRelease] = deque()
        self._over: deque[SentRelease] = deque()

    def __len__(self) -> int:
        return len(self._open) + len(self._over)

    def due(self) -> float:
        """Return when to read replies next, on the steady clock; infinity if there are none to read."""
        if self._over:
            return 0.0
        try:
            return self._open[0].look
        except IndexError:  # another thread was quicker
            return NEVER

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
        self._open.append(SentRelease(round, ref(connections), now + timeout, now + LOOK, ended))
        self._dog.watch(self)

    def do(self) -> None:
        """Read the replies that have come; the watchdog calls this."""
        self.look()

    def look(self, *, wait: bool = False) -> None:
        """Read the replies that have come, or *wait* for them for as long as each node timeout lasts."""
        with self._mutex:
            for sent in list(self._open):
                self._read(sent, wait)
                try:
                    self._open.remove(sent)  # last, so that an interruption loses nothing
                except ValueError:  # a signal handler in this thread was quicker
                    continue
                if sent.round.closed:
                    self._over.append(sent)
                else:
                    self._open.append(sent._replace(look=self._clock() + LOOK))
            over, self._over = self._over, deque()
        for sent in over:
            self._follow_up(sent.round)
        for sent in over:
            sent.ended(sent.round)

    def _read(self, sent: SentRelease, wait: bool) -> None:
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
