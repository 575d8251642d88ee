"""Leave a node alone that failed lately, so that no lock waits for it (internal)."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ..core.round import Round

FIRST_REST, LONGEST_REST = 0.1, 2.0  # seconds for which a node that failed is left alone


@dataclass(slots=True)
class Breaker:
    """
    Leaves a node alone for a while after it failed, twice as long each time it fails again.

    If the other nodes do not make a quorum, the node is tried all the same, by one thread of a process at a time, whose
    result the other threads wait for. Connections from all threads at once would keep an overloaded server down.
    """

    rest: float = 0.0
    until: float = 0.0
    tried: float = 0.0  # until when a thread tries to connect to the node
    report: Callable[[bool, str], object] = lambda down, why: None  # called when the node goes down or is back

    def failed(self, now: float, why: str = "") -> None:
        """Note a failure and its reason; the node is left alone for a while."""
        if not self.rest:
            self.report(True, why)
        if now >= self.until:
            self.rest = min(LONGEST_REST, self.rest * 2 or FIRST_REST)
            self.until = now + self.rest

    def admits(self, now: float, seconds: float) -> float:
        """Return until when to try to connect, at most *seconds* from *now*; 0.0 while another thread tries."""
        if self.rest and now < self.tried:
            return 0.0
        self.tried = now + seconds
        return self.tried

    def was_tried(self, until: float) -> None:
        """Note that the attempt to connect that lasts until *until* is over, unless another one has already begun."""
        if self.tried == until:
            self.tried = 0.0

    def answered(self) -> None:
        """Note an answer; the node is asked again."""
        if self.rest:
            self.rest = self.until = 0.0
            self.report(False, "")


class Breakers(list[Breaker]):
    """
    One breaker per node, shared by all threads and event loops.

    ``news`` has the nodes that went down, with the reason, or came back; a reader removes what it has read.
    """

    def __init__(self, nodes: int) -> None:
        self.news: deque[tuple[int, bool, str]] = deque(maxlen=100)
        super().__init__(Breaker(report=partial(self._note, node)) for node in range(nodes))

    def _note(self, node: int, down: bool, why: str) -> None:
        self.news.append((node, down, why))

    def resting(self, round: Round, now: float) -> set[int]:
        """
        Return the nodes to ask only if the others do not decide the round: those that failed lately.

        If too few nodes would remain for a quorum, all are asked at once, because some may have recovered.
        """
        resting = {
            node for node in round.requests if self[node].rest and (self[node].until > now or self[node].tried > now)
        }
        return resting if len(round.requests) - len(resting) >= max(round.needed, 1) else set()
