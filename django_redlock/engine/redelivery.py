"""
The redelivery of releases to nodes that missed them (internal).

A node that missed a release would keep the key until its ttl ends, and so refuse the next holder its vote.
"""

import logging
import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ..core.protocol import Failure, Kind, Reply, Request, failed
from ..nodes.base import INCOMPLETE, Link, LinkError, Node
from ..runtime.background import Background, Bell
from ..runtime.clock import Clock
from ..runtime.poll import READABLE, poller
from .connections import CONNECT_TIMEOUT, SILENCE

log = logging.getLogger("django_redlock")

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0  # seconds between two tries to reach a node
MAX_UNDELIVERED = 1000  # most releases waiting for one node; further keys end with their leases


class Redelivery:
    """
    Redelivers releases to the nodes of one alias that have missed them.

    A separate thread does that, because a node that does not answer must not hold up the renewal of other leases.

    Args:
        nodes: The nodes, in the order of the settings.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, nodes: Sequence[Node], clock: Clock) -> None:
        self._nodes = nodes
        self._clock = clock
        # Only the background thread changes ``_undelivered``. Others send it messages, each with one call into C.
        self._inbox: deque[tuple[Mapping[int, Request], float] | None] = deque()  # None makes the thread drop all
        self._bell = Bell(threading.Lock())
        self._undelivered: dict[int, dict[Request, float]] = {}
        self._thread = Background(self._run, self._busy, "django_redlock redelivery")

    def __len__(self) -> int:
        coming = sum(len(message[0]) for message in self._inbox.copy() if message)
        return coming + sum(map(len, self._undelivered.copy().values()))

    def take(self, requests: Mapping[int, Request], until: float) -> None:
        """Redeliver requests to their nodes until the time *until*, in seconds on the steady clock."""
        self._inbox.append((requests, until))
        self._bell.ring()
        if why := self._thread.start():  # the next missed release tries again
            log.warning("no thread to redeliver missed releases of locks: %s", why)

    def close(self) -> None:
        """Drop all undelivered releases, and end the thread."""
        self._inbox.append(None)
        self._bell.ring()
        self._thread.join(2 * SILENCE)

    def _busy(self) -> bool:
        return bool(self._inbox or self._undelivered)

    def _run(self) -> None:
        pauses: dict[int, float] = {}
        due: dict[int, float] = {}
        while (nodes := self._next(due)) is not None:
            for node in nodes:
                if self._visit(node):
                    pauses.pop(node, None)
                    due.pop(node, None)
                else:
                    pauses[node] = min(LONGEST_PAUSE, 2 * pauses.get(node, FIRST_PAUSE / 2))
                    due[node] = self._clock() + pauses[node]

    def _next(self, due: Mapping[int, float]) -> list[int] | None:
        """Wait until nodes are due for another try and return them; None when everything is delivered."""
        while True:
            self._read_inbox()
            now = self._clock()
            self._drop_late(now)
            if not self._undelivered:
                return None
            if ready := [node for node in self._undelivered if due.get(node, 0.0) <= now]:
                return ready
            self._bell.wait(min(due[node] for node in self._undelivered) - now)

    def _read_inbox(self) -> None:
        while self._inbox:
            message = self._inbox[0]
            if message is None:
                self._undelivered.clear()
            else:
                self._keep(*message)
            self._inbox.popleft()  # last, so that the thread never seems to be idle

    def _keep(self, requests: Mapping[int, Request], until: float) -> None:
        for node, request in requests.items():
            undelivered = self._undelivered.setdefault(node, {})
            if len(undelivered) < MAX_UNDELIVERED:
                undelivered[request] = until

    def _drop_late(self, now: float) -> None:
        for node, undelivered in list(self._undelivered.items()):
            for request in [request for request, until in undelivered.items() if until <= now]:
                del undelivered[request]
            if not undelivered:
                del self._undelivered[node]

    def _visit(self, node: int) -> bool:
        """Deliver everything for one node; return whether it took everything."""
        requests = list(self._undelivered.get(node, ()))
        try:
            link = self._nodes[node].connect(CONNECT_TIMEOUT)
        except LinkError:
            return False
        except Exception:  # whatever it was, the other nodes must get their releases
            log.exception("connecting to lock node %s failed", self._nodes[node].name)
            return False
        with suppress(LinkError):
            self._hand_over(node, link, requests)
        link.close()
        return not any(request in self._undelivered.get(node, ()) for request in requests)

    def _hand_over(self, node: int, link: Link, requests: Iterable[Request]) -> None:
        for request in requests:
            link.send(request, {}, in_full=True)
            reply = self._await(link, request)
            if reply.kind not in (Kind.UNKNOWN, Kind.FAILED):
                self._undelivered.get(node, {}).pop(request, None)

    def _await(self, link: Link, request: Request) -> Reply:
        poll = poller()
        if (fd := link.fileno()) >= 0:
            poll.register(fd, READABLE)
        until = self._clock() + CONNECT_TIMEOUT
        while (reply := link.receive(request)) is INCOMPLETE:
            left = until - self._clock()
            if fd < 0 or left <= 0:
                raise LinkError(Failure.TIMEOUT)
            poll.poll(left * 1000)
        return reply or failed(Failure.NOSCRIPT)
