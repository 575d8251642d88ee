"""The connections to all nodes that one thread uses at a time, and the replies in flight on them (internal)."""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from ..core.admission import Admission
from ..core.protocol import Failure, Kind, Request, failed
from ..core.round import Round
from ..core.votes import is_quorum
from ..nodes.base import INCOMPLETE, Link, LinkError, Node, Packed, known_cause
from ..runtime.clock import Clock
from ..runtime.gevent import Home
from ..runtime.poll import READABLE, poller
from ..runtime.threads import exiting, start, threads

MAX_IN_FLIGHT = 64  # requests in flight to a silent node: more could fill the socket's buffer and block
STEPS = 6  # round trips to make a link: one for TCP, two for TLS, then the user, the database and the greeting
SLOWER = 3.0  # how many times as long as the last link to a node a release waits for another one
CONNECT_TIMEOUT = 1.5  # seconds to allow for a new link, if the timeout of the round is not longer
SOONER = 0.9  # share of the time that a round waits for a link after which making it ends, so that the round learns why
SILENCE = 0.25  # seconds for which a link may be silent after a request whose reply nobody waits for
PROMPT = 0.01  # seconds for which a reply in flight is left unread before the next request


def connect_timeout(timeout: float) -> float:
    """Return the seconds after which making a link for a round with this timeout has failed."""
    return SOONER * max(timeout, CONNECT_TIMEOUT)


InFlight = tuple[Request | None, Round, float]
"""A request whose reply has not been read, or None for a greeting, its round, and when it was sent."""


class Connection:
    """The connection to one node: its link, and the replies in flight."""

    def __init__(self, node: int, link: Link, admission: Admission) -> None:
        self.node = node
        self.link = link
        self.server = link.greeting.run_id
        self.fd = link.fileno()
        self._admission = admission
        self.in_flight: deque[InFlight] = deque()

    def is_prompt(self, now: float) -> bool:
        """Return whether to send before reading the replies in flight; they are read before the next reply anyway."""
        return now - self.in_flight[0][2] < PROMPT and len(self.in_flight) < MAX_IN_FLIGHT

    def is_overdue(self, now: float) -> bool:
        """Return whether the node has been silent for longer than the timeout of the oldest round in flight."""
        if not self.in_flight:
            return False
        _, round, sent = self.in_flight[0]
        return now > sent + (round.timeout or SILENCE)

    def send(self, round: Round, packed: Packed, now: float) -> None:
        """Send this node's request of a round."""
        request = round.requests[self.node]
        self.in_flight.append((request, round, now))
        self.link.send(request, packed, in_full=round.in_full())

    def greet(self, round: Round, now: float) -> None:
        """Ask the node to describe itself again, in front of its request of a round."""
        self._admission.asks(self.node, now)
        self.in_flight.append((None, round, now))
        self.link.greet()

    def read(self) -> LinkError | None:
        """
        Read every reply that has come, and give each to its round, even if that no longer waits for it.

        Returns:
            The error if the link broke, or if it can be read with no reply in flight, which can only be its end.
        """
        link, awaited = self.link, self.in_flight
        try:
            if not awaited and link.readable():
                return LinkError(Failure.CLOSED)
            while awaited:
                request, round, sent = awaited[0]
                if request is None:
                    if (said := link.receive_greeting()) is None:
                        break
                    awaited.popleft()
                    self.server = said.run_id
                    self._admission.greet(self.node, said)
                    continue
                reply = link.receive(request)
                if reply is INCOMPLETE:
                    break
                awaited.popleft()
                if reply is not None:
                    round.receive(self.node, self._admission.judge(self.node, reply, sent))
                elif round.wanted:  # the node does not know the script
                    awaited.append((request, round, sent))
                    link.send(request, {}, in_full=True)
                else:
                    round.receive(self.node, failed(Failure.NOSCRIPT))
        except LinkError as error:
            return error
        return None

    def fail(self, error: LinkError) -> None:
        """Close the link, and note in every round in flight that its reply will not come."""
        self.link.close()
        while self.in_flight:
            request, round, _ = self.in_flight.popleft()
            if request is not None:
                round.receive(self.node, error.reply(Kind.UNKNOWN))


class ConnectionSet:
    """One link per node, used by one thread at a time."""

    def __init__(self) -> None:
        self.by_node: dict[int, Connection] = {}
        self.connecting: set[int] = set()
        self.arrived: deque[tuple[int, Link | LinkError, float]] = deque()
        self.used = 0.0
        self.reviewed = -1  # what ``Admission.changes`` was when the links were last compared with the nodes' servers
        self.thread = 0  # the thread that sent an unattended round here; its next round uses the same connections
        self.closed = False
        self._poll = poller()
        self._by_fd: dict[int, Connection] = {}
        self._wakeup: WakeUp | None = None

    @property
    def unattended(self) -> bool:
        """Whether replies are in flight to a round that nobody waits for and that is still open."""
        return any(
            not round.closed and round.unattended
            for connection in list(self.by_node.values())
            for _, round, *_ in connection.in_flight
        )

    def connection(self, connection: Connection) -> None:
        """Add the connection to a node."""
        self.by_node[connection.node] = connection
        if connection.fd >= 0:
            self._by_fd[connection.fd] = connection
            self._poll.register(connection.fd, READABLE)

    def drop(self, connection: Connection) -> None:
        """Remove the connection to a node, before its link is closed."""
        del self.by_node[connection.node]
        if connection.fd >= 0:
            del self._by_fd[connection.fd]
            self._poll.unregister(connection.fd)

    def read(self, seconds: float) -> list[tuple[Connection, LinkError | None]]:
        """
        Wait until something has come, at most *seconds*, and read it.

        Returns:
            The connections that were read, each with the error if its link broke; none if only a link has arrived.
        """
        found: list[tuple[Connection, LinkError | None]] = []
        for fd, _ in self._poll.poll(max(1, round(seconds * 1000))):
            if (connection := self._by_fd.get(fd)) is not None:
                found.append((connection, connection.read()))
            elif self._wakeup:  # it announced links, which are in ``arrived``
                self._wakeup.hush()
        return found

    def expect(self, node: int) -> None:
        """Expect a link to *node*; its arrival wakes the waiting thread."""
        if self._wakeup is None:
            self._wakeup = WakeUp()  # first: it fails if the process has too many open files
            self._poll.register(self._wakeup, READABLE)
        self.connecting.add(node)

    def deliver(self, node: int, link: Link | LinkError, now: float) -> None:
        """Hand in a link, or the error instead of it; the thread that connected calls this, perhaps long before use."""
        self.arrived.append((node, link, now))
        if wakeup := self._wakeup:
            wakeup.ring()
        if self.closed:
            self.close()

    def arrivals(self) -> Iterator[tuple[int, Link | LinkError, float]]:
        """Remove and return what has arrived; free the two sockets of the wake-up if nothing more is expected."""
        while self.arrived:
            node, link, when = self.arrived.popleft()
            self.connecting.discard(node)
            yield node, link, when
        if self._wakeup and not self.connecting:
            self._poll.unregister(self._wakeup)
            self._wakeup = None  # not closed: the thread that connected may be about to ring it

    def retire(self) -> None:
        """Drop all links after long disuse, when replies in flight have come or never will."""
        for connection in self.by_node.values():
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
        if wakeup := self._wakeup:
            wakeup.close()

    def __del__(self) -> None:
        """Close the set if an exception came after it was taken from the stack and before it could be given back."""
        if getattr(self, "by_node", None) and not exiting():  # unset if the constructor was interrupted
            self.close()


MAX_IDLE = 60.0  # seconds after which a link is no longer used: firewalls drop idle connections silently


class IdleConnections:
    """
    The idle connection sets of one alias.

    Attributes:
        sets: The connection sets that any thread may take; the last one was used most recently.
    """

    def __init__(self) -> None:
        self.sets: list[ConnectionSet] = []
        # For each thread, the set on which it sent an unattended round. The thread's next round uses the same
        # connections, so that every node sees both in order.
        self._kept: dict[int, ConnectionSet] = {}
        self._by_thread: WeakKeyDictionary[Home, list[ConnectionSet]] | None = (
            WeakKeyDictionary() if threads().greenlets else None
        )

    def take(self, now: float) -> ConnectionSet:
        """Return the connection set that was used last, or a new one; close any that has been idle for too long."""
        stack = self.sets if self._by_thread is None else self._stack()
        try:
            connections = (self._kept.pop(get_ident(), None) if self._kept else None) or stack.pop()
            while connections.closed:  # the thread that gave it back was interrupted just then
                connections = stack.pop()
        except IndexError:
            return ConnectionSet()
        if connections.used > now - MAX_IDLE:
            if stack:
                self._trim(stack, now)
            return connections
        connections.retire()
        with suppress(IndexError):
            while True:  # all others have been idle for longer
                stack.pop().retire()
        return ConnectionSet()

    def borrow(self, connections: ConnectionSet) -> bool:
        """Take these connections; return whether they were idle."""
        kept = self._kept.pop(connections.thread, None)
        if kept is not None and kept is not connections:
            self.give_back(kept)  # its thread has sent another round meanwhile
        if kept is not connections:
            try:
                self._stack().remove(connections)
            except ValueError:
                return False
        return True

    def give_back(self, connections: ConnectionSet) -> None:
        """Let any thread take these connections, or only their own thread while an unattended round is open on them."""
        thread = connections.thread
        if thread and connections.unattended and self._kept.setdefault(thread, connections) is connections:
            return
        connections.thread = 0
        (self.sets if self._by_thread is None else self._stack()).append(connections)

    @staticmethod
    def _trim(stack: list[ConnectionSet], now: float) -> None:
        """Close the connection set that has been idle longest, left from when more threads used locks."""
        if (oldest := stack[:1]) and oldest[0].used < now - MAX_IDLE:  # another thread may have taken even this one
            with suppress(IndexError):  # others take connection sets at the same time
                stack.pop(0).retire()

    def close(self) -> None:
        """Drop all idle links."""
        while self._kept:
            with suppress(KeyError):  # its thread was quicker
                self._kept.popitem()[1].close()
        for stack in (self.sets, *list((self._by_thread or {}).values())):
            while stack:
                stack.pop().close()

    def _stack(self) -> list[ConnectionSet]:
        """Return the idle connection sets that may be used here: under gevent, those of this system thread."""
        home = threads().home()
        if self._by_thread is None or home is None:
            return self.sets
        stack = self._by_thread.get(home)
        if stack is None:
            stack = self._by_thread[home] = []
            home.links.append(stack)
        return stack


SILENT = frozenset({Failure.TIMEOUT, Failure.LATE, Failure.SENTINEL})
"""The failures of an attempt to connect that another caller, who has begun to wait later, need not share."""

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
    silent: bool = False  # whether the last failure was that it did not answer in time
    tried: float = 0.0  # until when a thread tries to connect to the node
    linking: float = float("inf")  # seconds that the last link to it took to make
    report: Callable[[bool, str], object] = lambda down, why: None  # called when the node goes down or is back

    def failed(self, now: float, why: str = "", *, silent: bool = False) -> None:
        """Note a failure and its reason; the node is left alone for a while."""
        self.silent = silent
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
        left = len(round.requests) - len(resting)
        return resting if is_quorum(left, max(round.needed, 1)) else set()

    def left_to_redelivery(self, round: Round, node: int, now: float) -> bool:
        """Return whether a round is a release, which is not worth waiting for a node that was silent a moment ago."""
        return round.cleanup and self[node].silent and self[node].rest > 0 and self[node].until > now

    def allowance(self, timeout: float, connecting: Iterable[int], *, cleanup: bool = False) -> float:
        """
        Return for how many seconds a round with this timeout waits while links are made to the nodes *connecting*.

        At a distance, a link takes several times as long as a request. If all these nodes failed lately, the allowance
        is no longer than the timeout: their links are still made, for a later round. A release is delivered later if it
        has missed a node, so it does not wait for much longer than the last link took to make.
        """
        if all(self[node].rest for node in connecting):
            return timeout
        most = min(STEPS * timeout, CONNECT_TIMEOUT)
        if cleanup:
            most = min(most, SLOWER * max(self[node].linking for node in connecting))
        return max(timeout, most)


log = logging.getLogger("django_redlock")


class NodeConnector:
    """
    Connects to the nodes of one alias.

    Args:
        nodes: The nodes, in the order of the settings.
        breakers: Which nodes failed lately.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, nodes: Sequence[Node], breakers: Breakers, clock: Clock) -> None:
        self._nodes = nodes
        self._breakers = breakers
        self._clock = clock
        # For each node, the connection sets that wait for the result of another thread's attempt to connect, and how
        # long they do.
        self._followers: list[deque[tuple[ConnectionSet, float]]] = [deque() for _ in nodes]

    def see_to(
        self, connections: ConnectionSet, round: Round, nodes: Iterable[int], now: float, *, spare: bool = True
    ) -> list[int]:
        """
        Connect to nodes that have no link, or note why that is not tried.

        With *spare*, return the nodes that failed lately and are not tried yet, because the others may be enough.
        """
        resting = self._breakers.resting(round, now) if spare else set()
        timeout = connect_timeout(round.timeout)
        spared = []
        for node in nodes:
            if not round.timeout:
                round.receive(node, failed(Failure.FAILED_LATELY if node in resting else Failure.NOT_CONNECTED))
            elif node in connections.connecting:
                continue
            elif self._breakers.left_to_redelivery(round, node, now):
                round.receive(node, failed(Failure.FAILED_LATELY))
            elif node in resting:
                spared.append(node)
            else:
                until = self._breakers[node].admits(now, timeout)
                try:
                    if until:
                        self._connect(connections, node, timeout, until)
                    else:
                        self._follow(connections, node, timeout)
                except OSError as error:  # this process has too many open files, and could not be woken
                    self._breakers[node].was_tried(until)
                    round.receive(node, (known_cause(error) or LinkError(Failure.UNREACHABLE)).reply())
        return spared

    def _follow(self, connections: ConnectionSet, node: int, timeout: float) -> None:
        """Wait for the thread that tries to connect to *node*, and share its failure or connect after it."""
        if threads().greenlets:  # a link belongs to the event loop of the thread that made it
            self._connect(connections, node, timeout, 0.0)
            return
        connections.expect(node)
        self._followers[node].append((connections, self._clock() + timeout))
        if not self._breakers[node].tried:  # it has just ended, perhaps before it saw this follower
            self._lead(node, None, timeout)

    def _lead(self, node: int, error: LinkError | None, timeout: float) -> None:
        """
        Give the followers of an attempt its error, or have them connect.

        That another thread's time has passed says nothing about theirs, which began later: the node may answer within
        it. So the first of them tries next, and the others go on waiting.
        """
        followers = self._followers[node]
        while followers:
            try:
                follower, gives_up = followers.popleft()
            except IndexError:  # another thread was quicker
                return
            now = self._clock()
            if error is None:
                self._connect(follower, node, timeout, 0.0)
            elif error.failure not in SILENT or now >= gives_up:
                follower.deliver(node, error, now)
            elif until := self._breakers[node].admits(now, timeout):
                self._connect(follower, node, timeout, until)
                return
            else:  # a thread that has come since tries already, and sees to the followers when it ends
                followers.appendleft((follower, gives_up))
                if self._breakers[node].tried:
                    return

    def _connect(self, connections: ConnectionSet, node: int, timeout: float, until: float) -> None:
        arguments = (connections, node, timeout, until)
        if self._nodes[node].instant:
            connections.connecting.add(node)
            self._connect_now(*arguments)
        else:
            connections.expect(node)  # the wake-up must exist before the thread starts
            try:
                start(partial(self._connect_now, *arguments), "django_redlock connect")
            except RuntimeError:  # too many threads, or the interpreter is ending: connect in this thread instead
                self._connect_now(*arguments)

    def _connect_now(self, connections: ConnectionSet, node: int, timeout: float, until: float) -> None:
        link: Link | LinkError
        began = self._clock()
        try:
            link = self._nodes[node].connect(timeout)
            self._breakers[node].linking = self._clock() - began
        except LinkError as error:
            link = error
        except Exception:  # whatever it was, the node must not stay in the state "connecting"
            log.exception("connecting to lock node %s failed", self._nodes[node].name)
            link = LinkError(Failure.UNREACHABLE)
        self._breakers[node].was_tried(until)
        if isinstance(link, LinkError) and link.failure is not Failure.LATE:
            # Noted now, because the connection set may not be used again for a long time.
            self._breakers[node].failed(self._clock(), link.detail, silent=link.failure is Failure.TIMEOUT)
        connections.deliver(node, link, self._clock())
        if self._followers[node]:
            self._lead(node, link if isinstance(link, LinkError) else None, timeout)


T = TypeVar("T")


class PerLoop(Generic[T]):
    """
    One thing per event loop, for as long as the loop is open.

    The things hold timers and connections, and these hold their loop, so neither would ever be freed. Therefore the
    things of closed loops are dropped when another loop first asks for its own.

    Args:
        make: Makes the thing in the running loop.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._things: dict[asyncio.AbstractEventLoop, T] = {}

    def __len__(self) -> int:
        return len(self._things)

    def get(self) -> T:
        """Return the thing of the running event loop; make it on first use."""
        loop = asyncio.get_running_loop()
        thing = self._things.get(loop)
        if thing is None:
            for other in list(self._things):
                if other.is_closed():
                    self._things.pop(other, None)
            thing = self._things[loop] = self._make()
        return thing

    def pop(self) -> T | None:
        """Remove and return the thing of the running event loop, if there is one."""
        return self._things.pop(asyncio.get_running_loop(), None)


class WakeUp:
    """A pair of sockets: a thread that polls one end is woken through the other. Garbage collection closes both."""

    _near: socket.socket | None = None
    _far: socket.socket | None = None

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._far.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._near.fileno() if self._near else -1

    def ring(self) -> None:
        """Wake the thread that polls; safe in any thread, even after :meth:`close`."""
        with suppress(OSError, AttributeError):
            self._far.send(b"!")  # type: ignore[union-attr]

    def hush(self) -> None:
        """Clear all wake-ups."""
        with suppress(OSError, AttributeError):
            self._near.recv(4096)  # type: ignore[union-attr]

    def close(self) -> None:
        """Close both ends."""
        for end in (self._near, self._far):
            if end is not None:  # None if the constructor was interrupted
                end.close()

    __del__ = close
