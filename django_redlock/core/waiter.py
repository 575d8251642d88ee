"""One waiter, and whether the nodes have notified it of its turn (internal)."""

from collections.abc import Set


class Waiter:
    """
    A caller that waits for a lock, as the nodes' queues know it.

    The waiter acts only on notifications from a quorum of nodes. A holder often lacks one node. Every waiter that asks
    is then granted that node and gives it back. If a single notification were enough, that release would wake the next
    waiter, and so on without end.

    A waiter that gives back grants without a quorum is notified by those nodes itself, if it is first in their queues.
    Such a notification is no news.

    Args:
        name: The waiter's name in the queues: ``process|number``.
        needed: How many nodes must notify the waiter before it asks again.
    """

    def __init__(self, name: str, needed: int) -> None:
        self.name = name
        self._needed = needed
        self._heard: set[int] = set()
        self._given_back: Set[int] = frozenset()
        self._recalled = False

    def hear(self, node: int) -> bool:
        """Note a node's notification that the waiter is first in its queue; return whether it is time to ask."""
        self._heard.add(node)
        return self.called

    def recall(self) -> None:
        """Have the waiter ask again in any case, because it may have missed a notification."""
        self._recalled = True

    @property
    def called(self) -> bool:
        """
        Whether it is time to ask again.

        That takes a quorum of nodes that have notified the waiter, or that it gave a grant back to. At least one
        notification must be news: from a node that the waiter gave nothing back to. A recall needs neither.
        """
        enough = len(self._heard | self._given_back) >= self._needed
        return self._recalled or (enough and not self._heard <= self._given_back)

    def attend(self) -> None:
        """Forget the notifications so far, because a new attempt begins."""
        self._heard.clear()
        self._given_back = frozenset()
        self._recalled = False

    def gives_back(self, nodes: Set[int]) -> None:
        """Note the nodes that granted the failed attempt; they will notify the waiter when it gives the grants back."""
        self._given_back = nodes
