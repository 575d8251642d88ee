"""One round: the same question to all nodes, and what they reply (internal)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from .replies import LEAVING_TRACES, MISSES, POSITIVE, Kind, Reply, no_vote
from .requests import Extend, Request, Term, in_parts


@dataclass(eq=False, slots=True)
class Round:
    """
    One round: the same question to some nodes, and their answers.

    Args:
        requests: What to ask of which node, by the node's index in the settings.
        decided: Whether the replies so far settle the round.
        timeout: Seconds to wait for replies; 0 sends and does not wait.
        needed: How many nodes must be asked for the round to make sense, whatever their recent failures.
        cleanup round: Whether it ends something, so that it is sent to a node even if that node is silent.
        patience: For how many seconds a round that was refused waits for the replies that are still on their way: a
            node that refused as well has nothing to give back, which otherwise it would be asked to.
        lasting: For how many seconds it is worth to bring a node what it missed; 0.0 is not at all.
        remedy: What to bring which node instead of the request that it missed, for those that differ.
        mending: Whether, though decided, it waits within its timeout for links that are being made: it gives nodes back
            what they have lost, and those have just been away.

    ``replies`` are those in time; ``late`` came after the round was over and only inform. Its driver says which nodes
    are ``doubted``, in ``closed`` whether it is over. ``on_missed`` hears of nodes that turn out to have missed it when
    it is over.
    """

    requests: Mapping[int, Request]
    decided: Callable[[Mapping[int, Reply]], bool]
    timeout: float
    needed: int = 0
    cleanup: bool = False
    lasting: float = 0.0
    patience: float = 0.0
    remedy: Mapping[int, Request] = field(default_factory=dict)
    mending: bool = False
    replies: dict[int, Reply] = field(default_factory=dict)
    late: dict[int, Reply] = field(default_factory=dict)
    closed: bool = False
    on_late: Callable[[Reply], None] | None = None
    on_missed: "Callable[[Round, set[int]], None] | None" = None
    doubted: Callable[[], Mapping[int, str]] = dict

    @property
    def in_full(self) -> bool:
        """Whether to send requests so that no node has to ask back: nobody would be there to answer."""
        return not self.timeout

    @property
    def wanted(self) -> bool:
        """Whether a request that a node could not understand should be sent again, in full."""
        return self.cleanup or not self.closed

    def receive(self, node: int, reply: Reply) -> None:
        """Take one node's reply, in time or late."""
        if self.closed:
            self.late[node] = reply
            if self.on_late:
                self.on_late(reply)
            if self.on_missed and reply.kind in MISSES:
                self.on_missed(self, {node})
            return
        self.replies[node] = reply
        if len(self.replies) == len(self.requests) or self.decided(self._votes() if self.doubted() else self.replies):
            self.close()

    def close(self) -> None:
        """End the round; what comes now is late."""
        if not self.closed:
            self.closed = True
            self.replies = self._votes()

    def _votes(self) -> dict[int, Reply]:
        """Return the replies as they count at this moment."""
        doubted = self.doubted()
        if not doubted:
            return self.replies
        return {
            node: no_vote(reply, doubted[node]) if node in doubted and reply.kind in POSITIVE else reply
            for node, reply in self.replies.items()
        }

    @property
    def terms(self) -> tuple[Term, ...]:
        """The leases that the round extends."""
        return next((request.terms for request in self.requests.values() if isinstance(request, Extend)), ())

    def known(self) -> dict[int, Reply]:
        """Return what has come from each node, in time or late."""
        return self.replies | self.late if self.late else self.replies

    def unanswered(self) -> set[int]:
        """Return the nodes that may still execute, or have executed, a request without our knowing."""
        known = self.known()
        return {node for node in self.requests if node not in known or known[node].kind is Kind.UNKNOWN}

    @property
    def unheard(self) -> bool:
        """Whether it was refused before all have replied, and has patience for the rest."""
        missing = any(node not in self.replies and node not in self.late for node in self.requests)
        return missing and self.patience > 0 and self.count(*POSITIVE) < self.needed

    def missed(self) -> set[int]:
        """Return the nodes that did not get the request, as far as can be told, or whose answer was lost."""
        return {node for node, reply in self.known().items() if reply.kind in MISSES}

    def may_queue(self) -> set[int]:
        """Return the nodes that have put the waiter in line, or may have without our knowing."""
        known = self.known()
        return {
            node
            for node in self.requests
            if node not in known or known[node].position >= 0 or known[node].kind is Kind.UNKNOWN
        }

    def untouched(self) -> set[int]:
        """Return the nodes that certainly executed nothing, not even put a waiter in line."""
        return {
            node
            for node, reply in self.known().items()
            if reply.kind is Kind.FAILED and not in_parts(self.requests[node])
        }

    def may_hold(self) -> set[int]:
        """Return the nodes where something of ours may be left: all but those that certainly executed nothing."""
        known = self.known()
        return {
            node
            for node, request in self.requests.items()
            if node not in known or known[node].kind in LEAVING_TRACES or in_parts(request)
        }

    def count(self, *kinds: Kind) -> int:
        """Return how many nodes replied with one of *kinds* in time."""
        return count(self.replies, *kinds)


def count(replies: Mapping[int, Reply], *kinds: Kind) -> int:
    """Return how many replies are of one of *kinds*."""
    return sum([reply.kind in kinds for reply in replies.values()])
