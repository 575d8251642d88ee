"""
Ask all nodes at once, blocking the calling thread, and stop as soon as the outcome is certain (internal).

A *connection set* has one connection per node. Requests are written to all connections, then one poll waits for all
replies; threads are used only to connect. A reply that has not come when the outcome is certain stays *in flight*: its
connection reads it before any later reply.
"""

import logging
from collections.abc import Sequence
from threading import get_ident

from ..core.admission import Admission
from ..core.protocol import Failure, Kind, failed
from ..core.round import Round
from ..nodes.base import LinkError, Node, Packed
from ..runtime.clock import SLICES, Clock, Patience
from .connections import MAX_IN_FLIGHT, Breakers, Connection, ConnectionSet, IdleConnections, NodeConnector

# Seconds after which a link may have been cut, so that it is checked before use, and its silence proves nothing. A cut
# that leaves no trace is found only by using the link: a probe would cost each lock after a pause one more round trip.
IDLE = 1.0
# Seconds for which the first round of a connection set, even if decided, waits for links to the other nodes.
GRACE = 0.02
UNATTENDED = 0.3  # seconds by which the watchdog is late, at most, when it reads the replies to unattended rounds

log = logging.getLogger("django_redlock")


class Gather:
    """
    Ask the nodes of one alias from any thread of this process.

    Args:
        nodes: The nodes, in the order of the settings.
        admission: Which nodes may vote.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, nodes: Sequence[Node], admission: Admission, clock: Clock) -> None:
        self.admission = admission
        self._clock = clock
        self.idle = IdleConnections()
        self.breakers = Breakers(len(nodes))
        self._connector = NodeConnector(nodes, self.breakers, clock)

    def ask(self, round: Round, timeout: float = 0.0) -> ConnectionSet | None:
        """
        Carry out one round: send it, and wait until it is decided, all nodes have replied, or it has timed out.

        A round that is *unattended* stays open; :meth:`attend` reads the replies if no later round does. If it finds no
        links, because other threads use all of them, it is attended, with this timeout. The result is the connections
        that the round was sent on.
        """
        if not round.requests:
            round.close()
            return None
        connections = None
        try:
            now = self._clock()
            connections = self.idle.take(now)
            self._ask(connections, round, now, timeout)
            if not (round.closed or round.unattended):
                round.close()
            connections.used = now
            if round.unattended:
                connections.thread = get_ident()
            self.idle.give_back(connections)
        except BaseException:
            round.close()
            if connections is not None:
                connections.close()  # interrupted at an unknown point: its links cannot be trusted
            raise
        return connections

    def attend(self, connections: ConnectionSet, round: Round, until: float, *, wait: bool = False) -> None:
        """
        Read the replies to an unattended round, unless a thread uses its connections and so reads the replies itself.

        Args:
            connections: The connections that the round was sent on.
            round: The round.
            until: When the nodes that have not answered count as silent, in seconds on the steady clock.
            wait: Whether to wait until then; otherwise only the replies that have come are read.
        """
        if not self.idle.borrow(connections):
            return
        try:
            self._settle(connections, look=True)
            while wait and not round.closed and (left := until - self._clock()) > 0:
                if not self._wait(connections, round, {}, left):
                    break
            if not round.closed and (wait or self._clock() >= until):
                self._time_out(connections, round, late=self._clock() > until + UNATTENDED)
            self.idle.give_back(connections)
        except BaseException:
            connections.close()
            raise

    def close(self) -> None:
        """Drop all idle links."""
        self.idle.close()

    def _ask(self, connections: ConnectionSet, round: Round, now: float, timeout: float) -> None:
        """
        Take a round from its first byte to its outcome.

        Nearly always three things happen: each node has a link and gets its request, one poll brings the replies, and
        they decide the round. Everything else is for a node that has no link, is silent, or failed lately:

        1. *Settle*: links that have arrived since the last round are added, and links that may be dead are looked at.
        2. *Send*. A node without a link is connected to, in another thread (``connecting``). One that failed lately is
           *spared*: it is asked only if the others do not decide.
        3. *Wait*, in slices of the timeout, because the first slice tells who is slow. From then on, ``patience``
           measures: time in which this process was not served, or in which links were being made, is not held
           against the nodes. After a slow slice, or when nobody else can reply (``expects``), the spared nodes are
           asked after all.
        4. *Time out*: what a busy interpreter has not read yet is read; then the missing nodes count as silent.
        5. *Linger*: a new connection set, or an extension, also waits for links that are just arriving, although the
           round is decided.
        6. *Hear out*: a refused waiter waits a moment for replies in flight, so that fewer releases are needed.

        The loop ends with the round decided, with nothing left to wait for, or with the time used up (``asked``). At
        the end, each node that was not asked has a reply that says so; otherwise a release would later be sent to a
        node that never got anything.
        """
        rested = now - connections.used > IDLE
        look = rested or round.mending
        if look or connections.arrived:
            self._settle(connections, look)
        fresh = not connections.by_node  # also if all links were found cut
        round.begin(self.admission)
        if fresh and round.unattended:  # else no node would get the release now, and the next attempt overtakes it
            round.attend(timeout)
        if rested and not fresh:
            round.note_rest()
        if now > self.admission.next_due or connections.reviewed != self.admission.changes:  # for few rounds
            self._review(connections, round, now)
        packed: Packed = {}
        unasked: list[int] = []
        for node in round.requests:
            sent = self._send(connections, round, node, packed, now)
            if not sent:
                unasked.append(node)
        spared = self._connector.see_to(connections, round, unasked, now) if unasked else None
        expects, asked, patience = True, round.timeout / SLICES, None
        part, began = asked, self._clock()
        while asked > 0 and not round.closed:
            expects = self._wait(connections, round, packed, asked)
            if round.closed:
                break
            ended = self._clock()
            slow = patience is not None or ended - began >= part
            if slow:  # only now, because nearly all rounds end before
                patience = patience or Patience(
                    round.timeout,
                    round.lifetime,
                    self._clock,
                    self.breakers.allowance(round.timeout, connections.connecting, cleanup=round.cleanup),
                )
                asked = patience.count(asked, ended - began, connecting=self._awaits_links(connections, round))
                began = ended
            if spared and round.needed and (slow or not expects):
                self._connector.see_to(connections, round, spared, ended, spare=False)
                spared = None
            elif not expects:
                break
        for node in spared or ():
            round.receive(node, failed(Failure.FAILED_LATELY))
        if round.timeout and not round.closed:
            self._hear(connections, 0.0)  # replies that came in time, but that a busy interpreter has not read yet
            if not round.closed:
                self._time_out(connections, round, late=expects and patience is not None and patience.late)
        if fresh or round.mending:
            self._linger(connections, round, packed, now + round.timeout)
        if round.complete:
            return
        if round.patience:
            self._hear_out(connections, round, packed)
        for node in connections.connecting:
            if node in round.requests and node not in round.replies:
                round.receive(node, failed(Failure.NOT_CONNECTED))  # the request will not be sent there

    def _settle(self, connections: ConnectionSet, look: bool) -> None:
        """Bring a connection set up to date: add links that have arrived, and drop those that servers have closed."""
        if connections.arrived:
            self._take_arrivals(connections)
        if look:
            for connection in list(connections.by_node.values()):
                if connection.in_flight:
                    self._catch_up(connections, connection)
                # The end of a link comes after the replies in flight.
                if not connection.in_flight and connection.node in connections.by_node:
                    self._catch_up(connections, connection)

    def _review(self, connections: ConnectionSet, round: Round, now: float) -> None:
        """Drop connections that no longer lead to their nodes, and ask nodes what they are if they said it long ago."""
        connections.reviewed = self.admission.changes
        for connection in list(connections.by_node.values()):
            try:
                if self.admission.disowns(connection.node, connection.server, now):
                    raise LinkError(Failure.CLOSED)
                if now > self.admission.due[connection.node]:
                    connection.greet(round, now)
            except LinkError as error:
                self._drop(connections, connection, error)

    def _send(self, connections: ConnectionSet, round: Round, node: int, packed: Packed, now: float) -> bool:
        """Send one node its request, or note why the node did not get it; return whether it has a usable link."""
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
        else:
            if connection.fd < 0:
                self._read(connections, connection)
        return True

    def _heard(self, connections: ConnectionSet, connection: Connection, round: Round, now: float) -> Connection | None:
        """Read the replies in flight; return the connection, unless its link broke or was silent for too long."""
        if not self._catch_up(connections, connection):
            return None
        if round.cleanup or not connection.is_overdue(now):
            return connection
        # Perhaps this process or its whole machine stood still. The attempt to connect again tells.
        self._drop(connections, connection, LinkError(Failure.TIMEOUT))
        return None

    def _catch_up(self, connections: ConnectionSet, connection: Connection) -> bool:
        """Read the replies that have come; return whether the link still works."""
        if error := connection.read():
            self._drop(connections, connection, error)
        return error is None

    def _read(self, connections: ConnectionSet, connection: Connection) -> None:
        """Read the replies that have come; if the link broke, the next one shows whether the node works."""
        if self._catch_up(connections, connection) and (breaker := self.breakers[connection.node]).rest:
            breaker.answered()

    def _wait(self, connections: ConnectionSet, round: Round, packed: Packed, left: float) -> bool:
        """Wait for an event and deal with it; return False if no more events can come."""
        if connections.arrived:
            self._welcome(connections, round, packed)
            return True
        if not self._expects(connections, round):
            return False
        self._hear(connections, left)
        return True

    def _hear(self, connections: ConnectionSet, seconds: float) -> None:
        """Read the replies that come; if a link broke, the next one shows whether the node works."""
        for connection, error in connections.read(seconds):
            if error:
                self._drop(connections, connection, error)
            elif (breaker := self.breakers[connection.node]).rest:
                breaker.answered()

    def _hear_out(self, connections: ConnectionSet, round: Round, packed: Packed) -> None:
        """Wait for the other replies to a refused round, for as long as its patience lasts."""
        until = self._clock() + round.patience
        while round.unheard and (left := until - self._clock()) > 0 and self._wait(connections, round, packed, left):
            pass

    @staticmethod
    def _awaits_links(connections: ConnectionSet, round: Round) -> bool:
        """Return whether none of the nodes without a reply has been asked yet, because their links are being made."""
        return all(node in round.replies or node in connections.connecting for node in round.requests)

    def _expects(self, connections: ConnectionSet, round: Round) -> bool:
        """
        Return whether a node may still reply.

        Whoever releases many locks waits once for a node that is silent: a later release is sent to it, but is not
        waited for.
        """
        for node in round.requests:
            if node not in round.replies:
                connection = connections.by_node.get(node)
                if node in connections.connecting:
                    return True
                if connection and connection.fd >= 0:
                    # The reply cannot come while that to an earlier round is overdue.
                    earlier = round.cleanup and connection.in_flight and connection.in_flight[0][1] is not round
                    if not (earlier and connection.is_overdue(self._clock())):
                        return True
        return False

    def _linger(self, connections: ConnectionSet, round: Round, packed: Packed, deadline: float) -> None:
        """
        Send a decided round to the nodes whose links are just arriving.

        Otherwise, the first lock of a process would be held by a bare quorum, which the next lost node breaks. And a
        node that came back empty would learn of a lease only with a later extension.
        """
        until = deadline if round.mending else self._clock() + min(GRACE, round.timeout)
        while connections.connecting and (left := until - self._clock()) > 0:
            if not connections.arrived:  # the link of an instant node may have arrived already, without a wake-up
                self._hear(connections, left)
            self._welcome(connections, round, packed)

    def _welcome(self, connections: ConnectionSet, round: Round, packed: Packed) -> None:
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
        """Turn links that arrived into connections; return the nodes, each with the error if it has no link."""
        seen: list[tuple[int, LinkError | None]] = []
        for node, link, when in connections.arrivals():
            if isinstance(link, LinkError):
                seen.append((node, link))
            else:
                self.admission.greet(node, link.greeting, when)
                connections.connection(Connection(node, link, self.admission))
                seen.append((node, None))
        return seen

    def _time_out(self, connections: ConnectionSet, round: Round, *, late: bool) -> None:
        """
        Note the nodes that did not answer in time; their links stay, so that a release follows in order.

        If this process itself was *late*, that says nothing about the nodes. Neither does the silence of a link that
        had *rested*, and may have been cut; the node gets a new link.
        """
        now, failure = self._clock(), Failure.LATE if late else Failure.TIMEOUT
        for node in list(round.requests.keys() - round.replies.keys()):
            sent = node in connections.by_node
            if sent and round.rested:
                self._drop(connections, connections.by_node[node], LinkError(failure))
                continue
            if not late:
                self.breakers[node].failed(now, failure.value, silent=True)
            round.receive(node, failed(failure, Kind.UNKNOWN if sent else Kind.FAILED))

    def _drop(self, connections: ConnectionSet, connection: Connection, error: LinkError) -> None:
        connections.drop(connection)
        connection.fail(error)
