"""The waiters of one node (internal)."""

from collections.abc import Callable, Mapping, MutableMapping, Set

from ..protocol import ENROLMENT, QUEUE_CAP, Acquire, Release


class Queue:
    """The waiters for one name: their stamps, and until when each is enrolled."""

    def __init__(self) -> None:
        self.stamps: dict[str, int] = {}
        self.enrolled: dict[str, float] = {}

    def first(self, now: float, waiter: str = "") -> str:
        """Return the first waiter, empty if there is none; drop those before *waiter* whose enrolment has ended."""
        while self.stamps:
            first = self.head()
            if first == waiter or self.enrolled.get(first, now) > now:
                return first
            self.leave(first)
        return ""

    def head(self) -> str:
        """Return the first waiter, even if its enrolment has ended; empty if there is none."""
        if len(self.stamps) < 2:
            return next(iter(self.stamps), "")
        # By stamp, and by name where two have the same stamp, so that all nodes agree.
        return min(zip(self.stamps.values(), self.stamps, strict=True))[1]

    def waiting(self, now: float) -> list[str]:
        """Return the waiters that are enrolled at *now*, in the order of their turns."""
        in_order = sorted(zip(self.stamps.values(), self.stamps, strict=True))
        return [waiter for _, waiter in in_order if self.enrolled[waiter] > now]

    def enrol(self, waiter: str, stamp: int, until: float) -> int:
        """Put *waiter* in the queue or keep it there; return its position, -1 if the queue is full."""
        if waiter not in self.stamps and len(self.stamps) >= QUEUE_CAP:
            return -1
        self.stamps.setdefault(waiter, stamp)
        self.enrolled[waiter] = until
        rank = (self.stamps[waiter], waiter)
        return sum([rank > other for other in zip(self.stamps.values(), self.stamps, strict=True)])

    def leave(self, waiter: str) -> bool:
        """Take *waiter* out; return whether it was in the queue."""
        self.enrolled.pop(waiter, None)
        return self.stamps.pop(waiter, None) is not None


NOBODY = Queue()
"""The queue of a name that nobody waits for."""


class Queues:
    """
    The queues of a node, and how it notifies the first waiter of each.

    Args:
        by_slug: The queues.
        listeners: For each process, the function that notifies its waiters.
    """

    __slots__ = ("_by_slug", "_listeners")

    def __init__(self, by_slug: MutableMapping[str, Queue], listeners: Mapping[str, Callable[[str], object]]) -> None:
        self._by_slug = by_slug
        self._listeners = listeners

    def __bool__(self) -> bool:
        return bool(self._by_slug)

    def of(self, request: Acquire | Release, slug: str) -> Queue:
        """Return the queue that counts for a name: its own, or the one that all permits of a lock share."""
        return self._by_slug.get(request.queue or slug, NOBODY)

    def enrol(self, request: Acquire, in_the_way: Set[str], now: float) -> int:
        """
        Put the waiter in the queues as if it took the names one after another; return its worst position.

        The waiter has no claim yet to the names after the first one that is not free. The holder of that name may want
        the later names as well, and would then wait for a waiter that waits for it.
        """
        position = -1
        until = 1 if request.queue else min(map(request.slugs.index, in_the_way)) + 1
        for slug in request.slugs[:until]:
            queue = self.of(request, slug)
            if queue is NOBODY:
                queue = self._by_slug[request.queue or slug] = Queue()
            position = max(position, queue.enrol(request.waiter, request.stamp, now + (request.away or ENROLMENT)))
        for slug in request.slugs[until:]:
            self._leave(self.of(request, slug), request.waiter)
        return position

    def granted(self, request: Acquire, first_in: list[str], now: float) -> None:
        """
        Keep the waiter in the queues of the names it was granted, or let the next waiter move up.

        The waiter stays, because the grant of one node may not become a quorum. If it left, it would have to queue
        again behind all others. Where several callers may hold the lock at once, it leaves, so that the next waiter can
        hold it as well. So does one that was away: its stamp gives it its place back.
        """
        for slug in first_in:
            queue = self.of(request, slug)
            if request.passing:
                queue.leave(request.waiter)
                self._notify(queue)
            else:
                queue.enrolled[request.waiter] = now + min(request.ttl, ENROLMENT)

    def released(self, request: Release, free: list[str]) -> None:
        """Take out the waiter that leaves, and notify the first waiter of each name that is *free* now."""
        for slug in request.slugs if self._by_slug else ():
            queue = self.of(request, slug)
            if queue is NOBODY:
                continue
            left = bool(request.leaving) and self._leave(queue, request.leaving)
            if slug in free and not left:
                self._notify(queue)
            if not queue.stamps:
                self._by_slug.pop(request.queue or slug, None)

    def _leave(self, queue: Queue, waiter: str) -> bool:
        """Take *waiter* out of a queue, and notify the next if it was first; return whether it was."""
        was_first = queue.head() == waiter
        if queue.leave(waiter) and was_first:
            self._notify(queue)
            return True
        return False

    def _notify(self, queue: Queue) -> None:
        # Only the first waiter is notified: if all were, all but one would ask in vain.
        first = queue.head()
        listener = self._listeners.get(first.partition("|")[0]) if first else None
        if listener:
            listener(first)
