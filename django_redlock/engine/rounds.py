"""
Ask all nodes at once, blocking the calling thread, and stop as soon as the outcome is certain.

A *bundle* is one link per node. Threads take bundles from a stack, last in, first out, so that a process with one
busy thread has one warm bundle. Requests are written to all links, then one poll waits for all replies; no thread
is used but to connect. A reply that comes after the outcome was certain is *owed*: its link reads it before it
is used again.
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
from ..core.round import Ballot
from ..nodes.base import INCOMPLETE, Link, LinkError, Node
from ..nodes.clock import Clock, steady
from ..nodes.gevent import Here, here, is_green
from ..nodes.threads import exiting, start
from .wakeup import Waker

IDLE = 1.0  # seconds after which a link may have been closed by its server, so that it is looked at before use
MAX_IDLE = 60.0  # seconds after which a link is no longer used: firewalls forget connections without telling anybody
MAX_OWED = 64  # requests on their way to a silent node: more could fill the socket's buffer and block
FIRST_REST, LONGEST_REST = 0.1, 2.0  # seconds for which a node that failed is left alone
CONNECT_TIMEOUT = 0.25  # seconds, at least: connecting is off the hot path and need not be as quick as a round
PATIENCE = 0.01  # seconds for which nobody looks whether a reply that is owed has come
GRACE = 0.02  # seconds for which the first round of a bundle, though decided, waits for links to the other nodes

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

    def resting(self, ballot: Ballot, now: float) -> set[int]:
        """
        Return the nodes to leave out of a round: those that failed lately.

        If too few would remain to reach a quorum, all are asked: the rest may have recovered.
        """
        resting = {node for node in ballot.requests if self[node].until > now}
        return resting if len(ballot.requests) - len(resting) >= max(ballot.needed, 1) else set()


class Owed(NamedTuple):
    """A request whose reply has not been read."""

    request: Request
    ballot: Ballot
    sent: float

    @property
    def overdue(self) -> float:
        """When it is so late that its link is given up; by its own time, which another round's does not shorten."""
        return self.sent + (self.ballot.timeout or CONNECT_TIMEOUT)


class Seat:
    """One node's place in a bundle: its link, if there is one, and the replies it owes."""

    def __init__(self, node: int, link: Link, admission: Admission) -> None:
        self.node = node
        self.link = link
        self.fd = link.fileno()
        self._admission = admission
        self.owed: deque[Owed] = deque()

    def is_prompt(self, now: float) -> bool:
        """Return whether to send more without a look at what is owed; that is read before the next reply anyway."""
        return now - self.owed[0].sent < PATIENCE and len(self.owed) < MAX_OWED

    def send(self, ballot: Ballot, packed: dict[int, bytes], now: float) -> None:
        """Send this node's request of a round."""
        request = ballot.requests[self.node]
        self.owed.append(Owed(request, ballot, now))
        self.link.send(request, packed, in_full=ballot.in_full)

    def read(self) -> None:
        """
        Read every reply that is there and give each to the round that waits for it, or that no longer does.

        Raises:
            LinkError: The link broke, or a link that owes nothing has something to say, which can only be its end.
        """
        link, owing = self.link, self.owed
        if not owing and link.readable():
            raise LinkError(Failure.CLOSED)
        while owing and link.readable():
            request, ballot, sent = owing[0]
            reply = link.receive(request)
            if reply is INCOMPLETE:
                continue
            owing.popleft()
            if reply is not None:
                ballot.receive(self.node, self._admission.judge(self.node, reply, sent))
            elif ballot.wanted:  # its script is unknown there
                owing.append(Owed(request, ballot, sent))
                link.send(request, {}, in_full=True)
            else:
                ballot.receive(self.node, failed(Failure.NOSCRIPT))

    def fail(self, error: LinkError) -> None:
        """Close the link and tell every round that waits on it."""
        self.link.close()
        while self.owed:
            self.owed.popleft().ballot.receive(self.node, error.reply(Kind.UNKNOWN))


class Bundle:
    """One link per node, used by one thread at a time."""

    def __init__(self) -> None:
        self.seats: dict[int, Seat] = {}
        self.connecting: set[int] = set()
        self.arrived: deque[tuple[int, Link | LinkError]] = deque()
        self.used = 0.0
        self.closed = False
        self._poll = select.poll()
        self._by_fd: dict[int, Seat] = {}
        self._waker: Waker | None = None

    def seat(self, seat: Seat) -> None:
        """Give a node its place."""
        self.seats[seat.node] = seat
        if seat.fd >= 0:
            self._by_fd[seat.fd] = seat
            self._poll.register(seat.fd, select.POLLIN)

    def unseat(self, seat: Seat) -> None:
        """Take a node's place away, before its link is closed."""
        del self.seats[seat.node]
        if seat.fd >= 0:
            del self._by_fd[seat.fd]
            self._poll.unregister(seat.fd)

    def ready(self, seconds: float) -> list[Seat]:
        """Wait until links can be read, have ended, or have arrived; returns the places of the former."""
        events, by_fd = self._poll.poll(max(1, round(seconds * 1000))), self._by_fd
        seats = [by_fd[fd] for fd, _ in events if fd in by_fd]
        if len(seats) < len(events):
            self._hush()
        return seats

    def expect(self, node: int) -> None:
        """Be woken when a link to *node* has arrived."""
        self.connecting.add(node)
        if self._waker is None:
            self._waker = Waker()
            self._poll.register(self._waker, select.POLLIN)

    def deliver(self, node: int, link: Link | LinkError) -> None:
        """Hand in a link, or why there is none; called by the thread that connected."""
        self.arrived.append((node, link))
        if self._waker:
            self._waker.ring()
        if self.closed:
            self.close()

    def _hush(self) -> None:
        """Take back the wake-up calls; what arrived before them is in ``arrived``."""
        if self._waker:
            self._waker.hush()

    def retire(self) -> None:
        """Drop all links, after long disuse: what they owe has come, or never will."""
        for seat in self.seats.values():
            with suppress(LinkError):
                seat.read()
        self.close()

    def close(self) -> None:
        """Drop all links without reading what they owe."""
        self.closed = True
        for seat in list(self.seats.values()):
            seat.fail(LinkError(Failure.CLOSED))
            self.seats.pop(seat.node, None)
        with suppress(IndexError):
            while True:
                link = self.arrived.popleft()[1]
                if not isinstance(link, LinkError):
                    link.close()
        if self._waker:
            self._waker.close()

    def __del__(self) -> None:
        """Close it if an exception came after it was taken from the stack, and before anybody could give it back."""
        if getattr(self, "seats", None) and not exiting():  # it has none if it was interrupted while it was made
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
        self._bundles: list[Bundle] = []
        self._by_thread: WeakKeyDictionary[Here, list[Bundle]] | None = WeakKeyDictionary() if is_green() else None
        self.breakers = Breakers(len(nodes))

    def ask(self, ballot: Ballot) -> None:
        """Carry out one round: send, and wait until it is decided, everyone replied, or its time is over."""
        if not ballot.requests:
            return
        ballot.doubted = self.admission.doubted
        bundle = None
        try:
            stack, now = self._stack(), self._clock()
            bundle = self._take(stack, now)
            self._ask(bundle, ballot, now)
            if not ballot.closed:
                ballot.close()
            bundle.used = now
            stack.append(bundle)
        except BaseException:
            ballot.close()
            if bundle is not None:
                bundle.close()  # interrupted anywhere: its links cannot be trusted
            raise
        if (oldest := stack[:1]) and oldest[0].used < now - MAX_IDLE:  # another thread may have taken even this one
            self._trim(stack)

    def close(self) -> None:
        """Drop all idle links."""
        for stack in (self._bundles, *list((self._by_thread or {}).values())):
            while stack:
                stack.pop().close()

    def _take(self, stack: list[Bundle], now: float) -> Bundle:
        """Return the bundle that was used last, or a new one."""
        try:
            bundle = stack.pop()
            while bundle.closed:  # whoever gave it back was interrupted just then
                bundle = stack.pop()
        except IndexError:
            return Bundle()
        if bundle.used > now - MAX_IDLE:
            return bundle
        bundle.retire()
        with suppress(IndexError):
            while True:  # all others have been idle for longer
                stack.pop().retire()
        return Bundle()

    def _trim(self, stack: list[Bundle]) -> None:
        """Close the bundle that has been idle longest: it is from a time when more threads asked at once."""
        with suppress(IndexError):  # others take bundles at the same time
            stack.pop(0).retire()

    def _stack(self) -> list[Bundle]:
        """Return the idle bundles that may be used here: under gevent, those of this thread of the system's."""
        if self._by_thread is None:
            return self._bundles
        place = here()
        stack = self._by_thread.get(place)
        if stack is None:
            stack = self._by_thread[place] = []
            place.links.append(stack)
        return stack

    def _ask(self, bundle: Bundle, ballot: Ballot, now: float) -> None:
        deadline = now + ballot.timeout
        fresh = not bundle.seats
        self._settle(bundle, look=ballot.mending or now - bundle.used > IDLE)
        packed: dict[int, bytes] = {}
        unasked = [node for node in ballot.requests if not self._send(bundle, ballot, node, packed, now)]
        if unasked:
            self._see_to(bundle, ballot, unasked, now)
        while ballot.timeout and not ballot.closed:
            left = deadline - self._clock()
            if left <= 0:
                self._look_once_more(bundle)
                break
            if not self._wait(bundle, ballot, packed, left):
                break
        if ballot.timeout and not ballot.closed:
            self._time_out(bundle, ballot)
        if fresh or ballot.mending:
            self._linger(bundle, ballot, packed, deadline)
        if ballot.patience:
            self._hear_out(bundle, ballot, packed)
        for node in bundle.connecting:
            if node in ballot.requests and node not in ballot.replies:
                ballot.receive(node, failed(Failure.NOT_CONNECTED))  # it will not be sent there any more

    def _settle(self, bundle: Bundle, look: bool) -> None:
        """Bring a bundle up to date: links that have arrived, links that servers closed while nobody used them."""
        if bundle.arrived:
            self._seat_arrivals(bundle)
        if look:
            for seat in list(bundle.seats.values()):
                if seat.owed:
                    self._catch_up(bundle, seat)
                if not seat.owed and seat.node in bundle.seats:  # the end of a link comes behind what it owed
                    self._catch_up(bundle, seat)

    def _send(self, bundle: Bundle, ballot: Ballot, node: int, packed: dict[int, bytes], now: float) -> bool:
        """Send one node its request, or note why it did not get it; returns whether it has a link for that."""
        seat = bundle.seats.get(node)
        if seat and seat.owed and not seat.is_prompt(now):
            seat = self._heard(bundle, seat, ballot, now)
        if not seat:
            return False
        if len(seat.owed) >= MAX_OWED and not ballot.farewell:
            ballot.receive(node, failed(Failure.BACKLOG))
            return True
        try:
            seat.send(ballot, packed, now)
        except LinkError as error:
            self._unseat(bundle, seat, error)
            self.breakers[node].failed(now, error.detail)
        else:
            if seat.fd < 0:
                self._read(bundle, seat)
        return True

    def _heard(self, bundle: Bundle, seat: Seat, ballot: Ballot, now: float) -> Seat | None:
        """Read what a node owes; returns its seat, unless its link has broken or has been silent for too long."""
        if not self._catch_up(bundle, seat):
            return None
        if ballot.farewell or not seat.owed or now <= seat.owed[0].overdue:
            return seat
        silent = LinkError(Failure.TIMEOUT)
        self._unseat(bundle, seat, silent)
        self.breakers[seat.node].failed(now, silent.detail)
        return None

    def _see_to(self, bundle: Bundle, ballot: Ballot, nodes: list[int], now: float) -> None:
        """See to links for nodes that have none, or note why not."""
        resting = self.breakers.resting(ballot, now)
        timeout = max(ballot.timeout, CONNECT_TIMEOUT)
        for node in nodes:
            if node in resting:
                ballot.receive(node, failed(Failure.FAILED_LATELY))
            elif not ballot.timeout:
                ballot.receive(node, failed(Failure.NOT_CONNECTED))
            elif node in bundle.connecting:
                continue
            elif until := self.breakers[node].admits(now, timeout):
                self._connect(bundle, node, timeout, until)
            else:
                ballot.receive(node, failed(Failure.FAILED_LATELY))

    def _catch_up(self, bundle: Bundle, seat: Seat) -> bool:
        """Read what has come; returns whether the link still works."""
        try:
            seat.read()
        except LinkError as error:
            self._unseat(bundle, seat, error)
            return False
        return True

    def _read(self, bundle: Bundle, seat: Seat) -> None:
        """Do the same when something has come, and note whether the node is well."""
        try:
            seat.read()
        except LinkError as error:
            self._unseat(bundle, seat, error)
            self.breakers[seat.node].failed(self._clock(), error.detail)
        else:
            self.breakers[seat.node].answered()

    def _wait(self, bundle: Bundle, ballot: Ballot, packed: dict[int, bytes], left: float) -> bool:
        """Wait for something to happen and deal with it; returns False if nothing can happen any more."""
        if bundle.arrived:
            self._welcome(bundle, ballot, packed)
            return True
        if not self._expects(bundle, ballot):
            return False
        for seat in bundle.ready(left):
            self._read(bundle, seat)
        return True

    def _look_once_more(self, bundle: Bundle) -> None:
        """Take what has come in time to a thread that had no time for it, as where an interpreter is busy."""
        for seat in bundle.ready(0.0):
            self._read(bundle, seat)

    def _hear_out(self, bundle: Bundle, ballot: Ballot, packed: dict[int, bytes]) -> None:
        """Take what else the nodes say to a round that was refused, for as long as it has patience."""
        until = self._clock() + ballot.patience
        while ballot.unheard and (left := until - self._clock()) > 0 and self._wait(bundle, ballot, packed, left):
            pass

    @staticmethod
    def _expects(bundle: Bundle, ballot: Ballot) -> bool:
        """Return whether a node may still reply."""
        for node in ballot.requests:
            if node not in ballot.replies:
                seat = bundle.seats.get(node)
                if node in bundle.connecting or (seat and seat.fd >= 0):
                    return True
        return False

    def _linger(self, bundle: Bundle, ballot: Ballot, packed: dict[int, bytes], deadline: float) -> None:
        """
        Send a decided round to the nodes whose links are just arriving.

        Otherwise the first lock of a process would be held by a bare quorum, which the next lost node breaks; and a
        node that came back empty would learn of a lease with the extension after this one, or a later one.
        """
        until = deadline if ballot.mending else min(deadline, self._clock() + GRACE)
        while bundle.connecting and (left := until - self._clock()) > 0:
            if not bundle.arrived:  # nothing would announce the link of an instant node, which is there already
                for seat in bundle.ready(left):
                    self._read(bundle, seat)
            self._welcome(bundle, ballot, packed)

    def _welcome(self, bundle: Bundle, ballot: Ballot, packed: dict[int, bytes]) -> None:
        """Send the round's request over the links that have just arrived."""
        now = self._clock()
        for node, error in self._seat_arrivals(bundle):
            if node not in ballot.requests or node in ballot.replies:
                continue
            if error:
                ballot.receive(node, error.reply())
            else:
                self._send(bundle, ballot, node, packed, now)

    def _seat_arrivals(self, bundle: Bundle) -> list[tuple[int, LinkError | None]]:
        """Give arrived links their seats; returns the nodes and, for those without a link, why."""
        seen: list[tuple[int, LinkError | None]] = []
        while bundle.arrived:
            node, link = bundle.arrived.popleft()
            bundle.connecting.discard(node)
            if isinstance(link, LinkError):
                seen.append((node, link))
            else:
                self.admission.greet(node, link.greeting)
                bundle.seat(Seat(node, link, self.admission))
                seen.append((node, None))
        return seen

    def _connect(self, bundle: Bundle, node: int, timeout: float, until: float) -> None:
        arguments = (bundle, node, timeout, until)
        if self._nodes[node].instant:
            bundle.connecting.add(node)
            self._connect_now(*arguments)
        else:
            bundle.expect(node)  # the waker must be there before the thread is
            try:
                start(partial(self._connect_now, *arguments), "django_redlock connect")
            except RuntimeError:  # there are too many, or the interpreter is about to end: one after the other, then
                self._connect_now(*arguments)

    def _connect_now(self, bundle: Bundle, node: int, timeout: float, until: float) -> None:
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
            # Noted now: the bundle may not be used again for long, and the node has then been left alone long enough.
            self.breakers[node].failed(self._clock(), link.detail)
        bundle.deliver(node, link)

    def _time_out(self, bundle: Bundle, ballot: Ballot) -> None:
        """Note the nodes that did not answer in time; their links stay, so that a release follows in order."""
        now = self._clock()
        for node in list(ballot.requests.keys() - ballot.replies.keys()):
            sent = node in bundle.seats
            self.breakers[node].failed(now, Failure.TIMEOUT.value)
            ballot.receive(node, failed(Failure.TIMEOUT, Kind.UNKNOWN if sent else Kind.FAILED))

    def _unseat(self, bundle: Bundle, seat: Seat, error: LinkError) -> None:
        bundle.unseat(seat)
        seat.fail(error)
