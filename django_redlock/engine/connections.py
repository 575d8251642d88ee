"""The connections to all nodes that one thread uses at a time, and the replies in flight on them (internal)."""

import select
from collections import deque
from contextlib import suppress

from ..core.admission import Admission
from ..core.protocol import Failure, Kind, Request, failed
from ..core.round import Round
from ..nodes.base import INCOMPLETE, Link, LinkError
from ..nodes.threads import exiting

MAX_IN_FLIGHT = 64  # requests in flight to a silent node: more could fill the socket's buffer and block
CONNECT_TIMEOUT = 0.25  # least seconds to allow: connecting is off the hot path and need not be as quick as a round
PATIENCE = 0.01  # seconds before a reply in flight is looked for


InFlight = tuple[Request, Round, float]
"""A request whose reply has not been read, its round, and when it was sent."""


class Connection:
    """The connection to one node: its link, and the replies in flight."""

    def __init__(self, node: int, link: Link, admission: Admission) -> None:
        self.node = node
        self.link = link
        self.fd = link.fileno()
        self._admission = admission
        self.in_flight: deque[InFlight] = deque()

    def is_prompt(self, now: float) -> bool:
        """Return whether to send before reading the replies in flight; they are read before the next reply anyway."""
        return now - self.in_flight[0][2] < PATIENCE and len(self.in_flight) < MAX_IN_FLIGHT

    def is_overdue(self, now: float) -> bool:
        """Return whether the node has been silent for longer than the timeout of the oldest round in flight."""
        if not self.in_flight:
            return False
        _, round, sent = self.in_flight[0]
        return now > sent + (round.timeout or CONNECT_TIMEOUT)

    def send(self, round: Round, packed: dict[int, bytes], now: float) -> None:
        """Send this node's request of a round."""
        request = round.requests[self.node]
        self.in_flight.append((request, round, now))
        self.link.send(request, packed, in_full=not round.timeout and round.in_full)

    def read(self) -> None:
        """
        Read every reply that has come, and give each to its round, even if that no longer waits for it.

        Raises:
            LinkError: The link broke, or it can be read with no reply in flight, which can only be its end.
        """
        link, awaited = self.link, self.in_flight
        if not awaited and link.readable():
            raise LinkError(Failure.CLOSED)
        while awaited:
            request, round, sent = awaited[0]
            reply = link.receive(request)
            if reply is INCOMPLETE:
                return
            awaited.popleft()
            if reply is not None:
                round.receive(self.node, self._admission.judge(self.node, reply, sent))
            elif round.wanted:  # the node does not know the script
                awaited.append((request, round, sent))
                link.send(request, {}, in_full=True)
            else:
                round.receive(self.node, failed(Failure.NOSCRIPT))

    def fail(self, error: LinkError) -> None:
        """Close the link, and note in every round in flight that its reply will not come."""
        self.link.close()
        while self.in_flight:
            self.in_flight.popleft()[1].receive(self.node, error.reply(Kind.UNKNOWN))


class ConnectionSet:
    """One link per node, used by one thread at a time."""

    def __init__(self) -> None:
        self.by_node: dict[int, Connection] = {}
        self.connecting: set[int] = set()
        self.arrived: deque[tuple[int, Link | LinkError]] = deque()
        self.used = 0.0
        self.thread = 0  # the thread that sent an unattended round here; its next round uses the same connections
        self.closed = False
        self._poll = select.poll()
        self._by_fd: dict[int, Connection] = {}
        self._wakeup: WakeUp | None = None

    @property
    def unattended(self) -> bool:
        """Whether replies are in flight to a round that nobody waits for and that is still open."""
        return any(
            not round.closed and round.unattended
            for connection in list(self.by_node.values())
            for _, round, _ in connection.in_flight
        )

    def connection(self, connection: Connection) -> None:
        """Add the connection to a node."""
        self.by_node[connection.node] = connection
        if connection.fd >= 0:
            self._by_fd[connection.fd] = connection
            self._poll.register(connection.fd, select.POLLIN)

    def drop(self, connection: Connection) -> None:
        """Remove the connection to a node, before its link is closed."""
        del self.by_node[connection.node]
        if connection.fd >= 0:
            del self._by_fd[connection.fd]
            self._poll.unregister(connection.fd)

    def ready(self, seconds: float) -> list[Connection]:
        """Wait until connections can be read, have ended, or have arrived; return those that can be read."""
        events, by_fd = self._poll.poll(max(1, round(seconds * 1000))), self._by_fd
        by_node = [by_fd[fd] for fd, _ in events if fd in by_fd]
        if len(by_node) < len(events):
            self._hush()
        return by_node

    def expect(self, node: int) -> None:
        """Expect a link to *node*; its arrival wakes the waiting thread."""
        self.connecting.add(node)
        if self._wakeup is None:
            self._wakeup = WakeUp()
            self._poll.register(self._wakeup, select.POLLIN)

    def deliver(self, node: int, link: Link | LinkError) -> None:
        """Hand in a link, or the error instead of it; the thread that connected calls this."""
        self.arrived.append((node, link))
        if self._wakeup:
            self._wakeup.ring()
        if self.closed:
            self.close()

    def _hush(self) -> None:
        """Clear the wake-ups; the links that they announced are in ``arrived``."""
        if self._wakeup:
            self._wakeup.hush()

    def retire(self) -> None:
        """Drop all links after long disuse, when replies in flight have come or never will."""
        for connection in self.by_node.values():
            with suppress(LinkError):
                connection.read()
        self.close()

    def close(self) -> None:
        """Drop all links without reading the replies in flight."""
        self.closed = True
        for connection in list(self.by_node.values()):
            connection.fail(LinkError(Failure.CLOSED))
            self.by_node.pop(connection.node, None)
        with suppress(IndexError):
            while True:
                link = self.arrived.popleft()[1]
                if not isinstance(link, LinkError):
                    link.close()
        if self._wakeup:
            self._wakeup.close()

    def __del__(self) -> None:
        """Close the set if an exception came after it was taken from the stack and before it could be given back."""
        if getattr(self, "by_node", None) and not exiting():  # unset if the constructor was interrupted
            self.close()
