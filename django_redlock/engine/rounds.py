"""
Ask all nodes at once, blocking the calling thread, and stop as soon as the outcome is certain.

A *connection set* has one connection per node. Threads take connection sets from a stack, last in, first out, so that
a process with one busy thread has one warm set. Requests are written to all connections, then one poll waits for all
replies; threads are used only to connect. A reply that has not come when the outcome is certain stays *in flight*: its
connection reads it before it is used again.
"""

import logging
import select
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ..core.admission import Admission
from ..core.failure import Failure
from ..core.replies import Kind, failed
from ..core.requests import Request
from ..core.round import Round
from ..nodes.base import INCOMPLETE, Link, LinkError, Node
from ..nodes.clock import Clock, steady
from ..nodes.gevent import Here, here, is_green
from ..nodes.threads import exiting, start
from .wakeup import WakeUp

IDLE = 1.0  # seconds after which a link may have been closed by its server, so that it is looked at before use
MAX_IDLE = 60.0  # seconds after which a link is no longer used: firewalls forget connections without telling anybody
MAX_IN_FLIGHT = 64  # requests on their way to a silent node: more could fill the socket's buffer and block
FIRST_REST, LONGEST_REST = 0.1, 2.0  # seconds for which a node that failed is left alone
CONNECT_TIMEOUT = 0.25  # seconds, at least: connecting is off the hot path and need not be as quick as a round
PATIENCE = 0.01  # seconds for which nobody looks whether a reply that is outstanding has come
GRACE = (
    0.02  # seconds for which the first round of a connection set, though decided, waits for links to the other nodes
)

log = logging.getLogger("django_redlock")


@dataclass(slots=True)
class Breaker:
    """
    Leaves a node alone for a while after it failed, twice as long each time it fails again.

    When too few others are left, it is tried all the same, by one thread of a process at a time: connections by all
    of them at once would keep a server down that has more to do than it can.
    """

    rest: float = 0.0
    until: float = 0.0
    tried: float = 0.0  # until when somebody tries to connect to it
    tell: Callable[[bool, str], object] = lambda down, why: None  # called when it goes down, with why, or comes back

    def failed(self, now: float, why: str = "") -> None:
        """Note a failure, and why it was one; the node is left alone for a while."""
        if not self.rest:
            self.tell(True, why)
        if now >= self.until:
            self.rest = min(LONGEST_REST, self.rest * 2 or FIRST_REST)
            self.until = now + self.rest

    def admits(self, now: float, seconds: float) -> float:
        """Return until when to try to connect to the node, for so long at most; 0.0 while somebody else does."""
        if self.rest and now < self.tried:
            return 0.0
        self.tried = now + seconds
        return self.tried

    def was_tried(self, until: float) -> None:
        """Note that this try to connect is over, whatever came of it; the next may follow, unless it has begun."""
        if self.tried == until:
            self.tried = 0.0

    def answered(self) -> None:
        """Note an answer; the node is asked again."""
        if self.rest:
            self.rest = self.until = 0.0
            self.tell(False, "")


class Breakers(list[Breaker]):
    """
    One breaker per node, shared by all that ask the nodes of an alias.

    ``news`` has the nodes that went down, with the reason, or came back, until somebody takes it.
    """

    def __init__(self, nodes: int) -> None:
        self.news: deque[tuple[int, bool, str]] = deque(maxlen=100)
        super().__init__(Breaker(tell=partial(self._note, node)) for node in range(nodes))

    def _note(self, node: int, down: bool, why: str) -> None:
        self.news.append((node, down, why))

    def resting(self, round: Round, now: float) -> set[int]:
        """
        Return the nodes to leave out of a round: those that failed lately.

        If too few would remain to reach a quorum, all are asked: the rest may have recovered.
        """
        resting = {node for node in round.requests if self[node].until > now}
        return resting if len(round.requests) - len(resting) >= max(round.needed, 1) else set()


class InFlight(NamedTuple):
    """A request whose reply has not been read."""

    request: Request
    round: Round
    sent: float

    @property
    def overdue(self) -> float:
        """When it is so late that its link is given up; by its own time, which another round's does not shorten."""
        return self.sent + (self.round.timeout or CONNECT_TIMEOUT)


class Connection:
    """One node's place in a connection set: its link, if there is one, and the replies it owes."""

    def __init__(self, node: int, link: Link, admission: Admission) -> None:
        self.node = node
        self.link = link
        self.fd = link.fileno()
        self._admission = admission
        self.in_flight: deque[InFlight] = deque()

    def is_prompt(self, now: float) -> bool:
        """Return whether to send more before reading what is in flight; it is read before the next reply anyway."""
        return now - self.in_flight[0].sent < PATIENCE and len(self.in_flight) < MAX_IN_FLIGHT

    def send(self, round: Round, packed: dict[int, bytes], now: float) -> None:
        """Send this node's request of a round."""
        request = round.requests[self.node]
        self.in_flight.append(InFlight(request, round, now))
        self.link.send(request, packed, in_full=round.in_full)

    def read(self) -> None:
        """
        Read every reply that is there and give each to the round that waits for it, or that no longer does.

        Raises:
            LinkError: The link broke, or a link that owes nothing has something to say, which can only be its end.
        """
        link, awaited = self.link, self.in_flight
        if not awaited and link.readable():
            raise LinkError(Failure.CLOSED)
        while awaited and link.readable():
            request, round, sent = awaited[0]
            reply = link.receive(request)
            if reply is INCOMPLETE:
                continue
            awaited.popleft()
            if reply is not None:
                round.receive(self.node, self._admission.judge(self.node, reply, sent))
            elif round.wanted:  # its script is unknown there
                awaited.append(InFlight(request, round, sent))
                link.send(request, {}, in_full=True)
            else:
                round.receive(self.node, failed(Failure.NOSCRIPT))

    def fail(self, error: LinkError) -> None:
        """Close the link and tell every round that waits on it."""
        self.link.close()
        while self.in_flight:
            self.in_flight.popleft().round.receive(self.node, error.reply(Kind.UNKNOWN))


class ConnectionSet:
    """One link per node, used by one thread at a time."""

    def __init__(self) -> None:
        self.by_node: dict[int, Connection] = {}
        self.connecting: set[int] = set()
        self.arrived: deque[tuple[int, Link | LinkError]] = deque()
        self.used = 0.0
        self.closed = False
        self._poll = select.poll()
        self._by_fd: dict[int, Connection] = {}
        self._wakeup: WakeUp | None = None

    def connection(self, connection: Connection) -> None:
        """Give a node its place."""
        self.by_node[connection.node] = connection
        if connection.fd >= 0:
            self._by_fd[connection.fd] = connection
            self._poll.register(connection.fd, select.POLLIN)

    def drop(self, connection: Connection) -> None:
        """Take a node's place away, before its link is closed."""
        del self.by_node[connection.node]
        if connection.fd >= 0:
            del self._by_fd[connection.fd]
            self._poll.unregister(connection.fd)

    def ready(self, seconds: float) -> list[Connection]:
        """Wait until links can be read, have ended, or have arrived; returns the places of the former."""
        events, by_fd = self._poll.poll(max(1, round(seconds * 1000))), self._by_fd
        by_node = [by_fd[fd] for fd, _ in events if fd in by_fd]
        if len(by_node) < len(events):
            self._hush()
        return by_node

    def expect(self, node: int) -> None:
        """Be woken when a link to *node* has arrived."""
        self.connecting.add(node)
        if self._wakeup is None:
            self._wakeup = WakeUp()
            self._poll.register(self._wakeup, select.POLLIN)

    def deliver(self, node: int, link: Link | LinkError) -> None:
        """Hand in a link, or why there is none; called by the thread that connected."""
        self.arrived.append((node, link))
        if self._wakeup:
            self._wakeup.ring()
        if self.closed:
            self.close()

    def _hush(self) -> None:
        """Take back the wake-up calls; what arrived before them is in ``arrived``."""
        if self._wakeup:
            self._wakeup.hush()

    def retire(self) -> None:
        """Drop all links, after long disuse: what they owe has come, or never will."""
        for connection in self.by_node.values():
            with suppress(LinkError):
                connection.read()
        self.close()

    def close(self) -> None:
        """Drop all links without reading what they owe."""
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
        """Close it if an exception came after it was taken from the stack, and before anybody could give it back."""
        if getattr(self, "by_node", None) and not exiting():  # it has none if it was interrupted while it was made
            self.close()


class Gather:
    """
    Ask the nodes of one alias from any thread of this process.

    Args:
        nodes: The nodes, in the order of the settings.
        admission: Which of them may vote.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, nodes: Sequence[Node], admission: Admission, clock: Clock = steady) -> None:
        self._nodes = nodes
        self.admission = admission
        self._clock = clock
        self._connection_sets: list[ConnectionSet] = []
        self._by_thread: WeakKeyDictionary[Here, list[ConnectionSet]] | None = (
            WeakKeyDictionary() if is_green() else None
        )
        self.breakers = Breakers(len(nodes))

    def ask(self, round: Round) -> None:
        """Carry out one round: send, and wait until it is decided, everyone replied, or its time is over."""
        if not round.requests:
            return
        round.doubted = self.admission.doubted
        connections = None
        try:
            stack, now = self._stack(), self._clock()
            connections = self._take(stack, now)
            self._ask(connections, round, now)
            if not round.closed:
                round.close()
            connections.used = now
            stack.append(connections)
        except BaseException:
            round.close()
            if connections is not None:
                connections.close()  # interrupted anywhere: its links cannot be trusted
            raise
        if (oldest := stack[:1]) and oldest[0].used < now - MAX_IDLE:  # another thread may have taken even this one
            self._trim(stack)

    def close(self) -> None:
        """Drop all idle links."""
        for stack in (self._connection_sets, *list((self._by_thread or {}).values())):
            while stack:
                stack.pop().close()

    def _take(self, stack: list[ConnectionSet], now: float) -> ConnectionSet:
        """Return the connection set that was used last, or a new one."""
        try:
            connections = stack.pop()
            while connections.closed:  # whoever gave it back was interrupted just then
                connections = stack.pop()
        except IndexError:
            return ConnectionSet()
        if connections.used > now - MAX_IDLE:
            return connections
        connections.retire()
        with suppress(IndexError):
            while True:  # all others have been idle for longer
                stack.pop().retire()
        return ConnectionSet()

    def _trim(self, stack: list[ConnectionSet]) -> None:
        """Close the connection set that has been idle longest: it is from a time when more threads asked at once."""
        with suppress(IndexError):  # others take connection sets at the same time
            stack.pop(0).retire()

    def _stack(self) -> list[ConnectionSet]:
        """Return the idle connection sets that may be used here: under gevent, those of this thread of the system's."""
        if self._by_thread is None:
            return self._connection_sets
        place = here()
        stack = self._by_thread.get(place)
        if stack is None:
            stack = self._by_thread[place] = []
            place.links.append(stack)
        return stack

    def _ask(self, connections: ConnectionSet, round: Round, now: float) -> None:
        deadline = now + round.timeout
        fresh = not connections.by_node
        self._settle(connections, look=round.mending or now - connections.used > IDLE)
        packed: dict[int, bytes] = {}
        unasked = [node for node in round.requests if not self._send(connections, round, node, packed, now)]
        if unasked:
            self._see_to(connections, round, unasked, now)
        while round.timeout and not round.closed:
            left = deadline - self._clock()
            if left <= 0:
                self._look_once_more(connections)
                break
            if not self._wait(connections, round, packed, left):
                break
        if round.timeout and not round.closed:
            self._time_out(connections, round)
        if fresh or round.mending:
            self._linger(connections, round, packed, deadline)
        if round.patience:
            self._hear_out(connections, round, packed)
        for node in connections.connecting:
            if node in round.requests and node not in round.replies:
                round.receive(node, failed(Failure.NOT_CONNECTED))  # it will not be sent there any more

    def _settle(self, connections: ConnectionSet, look: bool) -> None:
        """Bring a connection set up to date: links that have arrived, and links that servers closed meanwhile."""
        if connections.arrived:
            self._take_arrivals(connections)
        if look:
            for connection in list(connections.by_node.values()):
                if connection.in_flight:
                    self._catch_up(connections, connection)
                if (
                    not connection.in_flight and connection.node in connections.by_node
                ):  # the end of a link comes behind what it outstanding
                    self._catch_up(connections, connection)

    def _send(self, connections: ConnectionSet, round: Round, node: int, packed: dict[int, bytes], now: float) -> bool:
        """Send one node its request, or note why it did not get it; returns whether it has a link for that."""
        connection = connections.by_node.get(node)
        if connection and connection.in_flight and not connection.is_prompt(now):
            connection = self._heard(connections, connection, round, now)
        if not connection:
            return False
        if len(connection.in_flight) >= MAX_IN_FLIGHT and not round.cleanup:
            round.receive(node, failed(Failure.BACKLOG))
            return True
        try:
            connection.send(round, packed, now)
        except LinkError as error:
            self._drop(connections, connection, error)
            self.breakers[node].failed(now, error.detail)
        else:
            if connection.fd < 0:
                self._read(connections, connection)
        return True

    def _heard(self, connections: ConnectionSet, connection: Connection, round: Round, now: float) -> Connection | None:
        """Read what a node owes; returns its connection, unless its link has broken or has been silent for too long."""
        if not self._catch_up(connections, connection):
            return None
        if round.cleanup or not connection.in_flight or now <= connection.in_flight[0].overdue:
            return connection
        silent = LinkError(Failure.TIMEOUT)
        self._drop(connections, connection, silent)
        self.breakers[connection.node].failed(now, silent.detail)
        return None

    def _see_to(self, connections: ConnectionSet, round: Round, nodes: list[int], now: float) -> None:
        """See to links for nodes that have none, or note why not."""
        resting = self.breakers.resting(round, now)
        timeout = max(round.timeout, CONNECT_TIMEOUT)
        for node in nodes:
            if node in resting:
                round.receive(node, failed(Failure.FAILED_LATELY))
            elif not round.timeout:
                round.receive(node, failed(Failure.NOT_CONNECTED))
            elif node in connections.connecting:
                continue
            elif until := self.breakers[node].admits(now, timeout):
                self._connect(connections, node, timeout, until)
            else:
                round.receive(node, failed(Failure.FAILED_LATELY))

    def _catch_up(self, connections: ConnectionSet, connection: Connection) -> bool:
        """Read what has come; returns whether the link still works."""
        try:
            connection.read()
        except LinkError as error:
            self._drop(connections, connection, error)
            return False
        return True

    def _read(self, connections: ConnectionSet, connection: Connection) -> None:
        """Do the same when something has come, and note whether the node is well."""
        try:
            connection.read()
        except LinkError as error:
            self._drop(connections, connection, error)
            self.breakers[connection.node].failed(self._clock(), error.detail)
        else:
            self.breakers[connection.node].answered()

    def _wait(self, connections: ConnectionSet, round: Round, packed: dict[int, bytes], left: float) -> bool:
        """Wait for something to happen and deal with it; returns False if nothing can happen any more."""
        if connections.arrived:
            self._welcome(connections, round, packed)
            return True
        if not self._expects(connections, round):
            return False
        for connection in connections.ready(left):
            self._read(connections, connection)
        return True

    def _look_once_more(self, connections: ConnectionSet) -> None:
        """Take what has come in time to a thread that had no time for it, as where an interpreter is busy."""
        for connection in connections.ready(0.0):
            self._read(connections, connection)

    def _hear_out(self, connections: ConnectionSet, round: Round, packed: dict[int, bytes]) -> None:
        """Take what else the nodes say to a round that was refused, for as long as it has patience."""
        until = self._clock() + round.patience
        while round.unheard and (left := until - self._clock()) > 0 and self._wait(connections, round, packed, left):
            pass

    @staticmethod
    def _expects(connections: ConnectionSet, round: Round) -> bool:
        """Return whether a node may still reply."""
        for node in round.requests:
            if node not in round.replies:
                connection = connections.by_node.get(node)
                if node in connections.connecting or (connection and connection.fd >= 0):
                    return True
        return False

    def _linger(self, connections: ConnectionSet, round: Round, packed: dict[int, bytes], deadline: float) -> None:
        """
        Send a decided round to the nodes whose links are just arriving.

        Otherwise the first lock of a process would be held by a bare quorum, which the next lost node breaks; and a
        node that came back empty would learn of a lease with the extension after this one, or a later one.
        """
        until = deadline if round.mending else min(deadline, self._clock() + GRACE)
        while connections.connecting and (left := until - self._clock()) > 0:
            if not connections.arrived:  # nothing would announce the link of an instant node, which is there already
                for connection in connections.ready(left):
                    self._read(connections, connection)
            self._welcome(connections, round, packed)

    def _welcome(self, connections: ConnectionSet, round: Round, packed: dict[int, bytes]) -> None:
        """Send the round's request over the links that have just arrived."""
        now = self._clock()
        for node, error in self._take_arrivals(connections):
            if node not in round.requests or node in round.replies:
                continue
            if error:
                round.receive(node, error.reply())
            else:
                self._send(connections, round, node, packed, now)

    def _take_arrivals(self, connections: ConnectionSet) -> list[tuple[int, LinkError | None]]:
        """Give arrived links their connections; returns the nodes and, for those without a link, why."""
        seen: list[tuple[int, LinkError | None]] = []
        while connections.arrived:
            node, link = connections.arrived.popleft()
            connections.connecting.discard(node)
            if isinstance(link, LinkError):
                seen.append((node, link))
            else:
                self.admission.greet(node, link.greeting)
                connections.connection(Connection(node, link, self.admission))
                seen.append((node, None))
        return seen

    def _connect(self, connections: ConnectionSet, node: int, timeout: float, until: float) -> None:
        arguments = (connections, node, timeout, until)
        if self._nodes[node].instant:
            connections.connecting.add(node)
            self._connect_now(*arguments)
        else:
            connections.expect(node)  # the wake-up must be there before the thread is
            try:
                start(partial(self._connect_now, *arguments), "django_redlock connect")
            except RuntimeError:  # there are too many, or the interpreter is about to end: one after the other, then
                self._connect_now(*arguments)

    def _connect_now(self, connections: ConnectionSet, node: int, timeout: float, until: float) -> None:
        link: Link | LinkError
        try:
            link = self._nodes[node].connect(timeout)
        except LinkError as error:
            link = error
        except Exception:  # whatever it was, the node must not stay "connecting" for ever
            log.exception("connecting to %s failed", self._nodes[node].name)
            link = LinkError(Failure.UNREACHABLE)
        self.breakers[node].was_tried(until)
        if isinstance(link, LinkError):
            # Noted now: the set may not be used again for long, and the node has then been left alone long enough.
            self.breakers[node].failed(self._clock(), link.detail)
        connections.deliver(node, link)

    def _time_out(self, connections: ConnectionSet, round: Round) -> None:
        """Note the nodes that did not answer in time; their links stay, so that a release follows in order."""
        now = self._clock()
        for node in list(round.requests.keys() - round.replies.keys()):
            sent = node in connections.by_node
            self.breakers[node].failed(now, Failure.TIMEOUT.value)
            round.receive(node, failed(Failure.TIMEOUT, Kind.UNKNOWN if sent else Kind.FAILED))

    def _drop(self, connections: ConnectionSet, connection: Connection, error: LinkError) -> None:
        connections.drop(connection)
        connection.fail(error)
