"""
Bring releases to nodes that have missed them.

A release is sent once and not waited for longer than a round lasts. Where its connection broke, or there was none,
the node would keep the key until the lease ends; so the release is sent again, over a connection of its own, until
the node has answered or the lease would have ended anyway. Its own thread does that, because a node that does not
answer must not hold up the renewal of other leases.
"""

import logging
import select
import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

from ..core.messages import Kind, Reply, Request
from .base import INCOMPLETE, Link, LinkError, Node
from .gather import CONNECT_TIMEOUT, Clock, steady

FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0  # seconds between two tries to reach a node
MAX_PARCELS = 1000  # releases waiting for one node; more are left to their leases

log = logging.getLogger("django_redlock")


class Courier:
    """
    Brings releases to the nodes of one alias.

    Args:
        nodes: The nodes, in the order of the settings.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, nodes: Sequence[Node], clock: Clock = steady) -> None:
        self._nodes = nodes
        self._clock = clock
        self._changed = threading.Condition()
        self._parcels: dict[int, dict[Request, float]] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def __len__(self) -> int:
        return sum(map(len, self._parcels.values()))

    def take(self, requests: Mapping[int, Request], until: float) -> None:
        """Bring requests to their nodes; not beyond the time *until*, on the steady clock."""
        with self._changed:
            for node, request in requests.items():
                parcels = self._parcels.setdefault(node, {})
                if len(parcels) < MAX_PARCELS:
                    parcels[request] = until
            if self._thread is None or not self._thread.is_alive():
                self._start()
            self._changed.notify()

    def close(self) -> None:
        """Drop what has not been brought, and end the thread."""
        with self._changed:
            self._parcels.clear()
            self._closed = True
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread and thread is not threading.current_thread():
            thread.join(2 * CONNECT_TIMEOUT)

    def _start(self) -> None:
        """Start the thread; without one, the next release that is missed tries again."""
        thread = threading.Thread(target=self._run, name="django_redlock courier", daemon=True)
        self._closed, self._thread = False, thread
        try:
            thread.start()
        except RuntimeError as error:  # there are too many, or the interpreter is about to end
            self._thread = None
            log.warning("no thread to bring missed releases: %s", error)

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
        """Wait for a node whose time has come; returns None when there is nothing left to bring."""
        with self._changed:
            while True:
                now = self._clock()
                for node, parcels in list(self._parcels.items()):
                    late = [request for request, until in parcels.items() if until <= now]
                    for request in late:
                        del parcels[request]
                    if not parcels:
                        del self._parcels[node]
                if self._closed or not self._parcels:
                    if self._thread is threading.current_thread():
                        self._thread = None
                    return None
                if ready := [node for node in self._parcels if due.get(node, 0.0) <= now]:
                    return ready
                self._changed.wait(min(due[node] for node in self._parcels) - now)

    def _visit(self, node: int) -> bool:
        """Bring a node what there is for it; returns whether it took everything."""
        with self._changed:
            requests = list(self._parcels.get(node, ()))
        try:
            link = self._nodes[node].connect(CONNECT_TIMEOUT)
        except LinkError:
            return False
        except Exception:  # whatever it was, the others must get theirs
            log.exception("connecting to %s failed", self._nodes[node].name)
            return False
        with suppress(LinkError):
            self._hand_over(node, link, requests)
        link.close()
        return not any(request in self._parcels.get(node, ()) for request in requests)

    def _hand_over(self, node: int, link: Link, requests: Iterable[Request]) -> None:
        for request in requests:
            link.send(request, {}, in_full=True)
            reply = INCOMPLETE
            while reply is INCOMPLETE:
                reply = self._await(link, request)
            if reply.kind not in (Kind.UNKNOWN, Kind.FAILED):
                with self._changed:
                    self._parcels.get(node, {}).pop(request, None)

    def _await(self, link: Link, request: Request) -> Reply:
        poll = select.poll()
        if (fd := link.fileno()) >= 0:
            poll.register(fd, select.POLLIN)
        until = self._clock() + CONNECT_TIMEOUT
        while not link.readable():
            left = until - self._clock()
            if fd < 0 or left <= 0:
                raise LinkError("timeout")
            poll.poll(left * 1000)
        return link.receive(request) or Reply(Kind.FAILED, detail="NOSCRIPT")
