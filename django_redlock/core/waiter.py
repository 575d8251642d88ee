"""One waiter, and whether the nodes have notified it of its turn (internal)."""

from collections.abc import Set


class Waiter:
    """
    One who waits for a lock, as the nodes' queues know it.

    Acts on notifications from a quorum of nodes only. A holder often lacks one node. Every waiter that asks is then
    granted that node and gives it back. If a single notification were enough, that would wake the next waiter, and so
    on without end.
    A waiter that gives back grants without a quorum is notified by these nodes itself, if it is first in their queues.
    That is no news.

    Args:
        name: Its name in the queues: ``process|number``.
        needed: Notifications from how many nodes make it ask again.
    """

    def __init__(self, name: str, needed: int) -> None:
        self.name = name
        self._needed = needed
        self._heard: set[int] = set()
        self._given_back: Set[int] = frozenset()
        self._recalled = False

    def hear(self, node: int) -> bool:
        """Take a node's notification that it is first in the queue; returns whether it is time to ask."""
        self._heard.add(node)
        return self.called

    def recall(self) -> None:
        """Have it ask again, whatever it has heard: it may have missed a notification."""
        self._recalled = True

    @property
    def called(self) -> bool:
        """Whether a quorum told it or would grant again what it gave back, with news of one; or it is to ask anyway."""
        enough = len(self._heard | self._given_back) >= self._needed
        return self._recalled or (enough and not self._heard <= self._given_back)

    def attend(self) -> None:
        """Forget the notifications that have led to the attempt that begins."""
        self._heard.clear()
        self._given_back = frozenset()
        self._recalled = False

    def gives_back(self, nodes: Set[int]) -> None:
        """Note the nodes that granted the failed attempt; they will notify the waiter when it gives the grants back."""
        self._given_back = nodes
