"""
Connect to the nodes that a connection set has no link to, each in a thread of its own (internal).
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial

from ..core.protocol import Failure, failed
from ..core.round import Round
from ..nodes.base import Link, LinkError, Node
from ..nodes.clock import Clock
from ..nodes.gevent import uses_gevent
from ..nodes.threads import start
from .connections import CONNECT_TIMEOUT, Breakers, ConnectionSet

log = logging.getLogger("django_redlock")


class Connector:
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
        # For each node, the connection sets that wait for the result of another thread's attempt to connect.
        self._followers: list[deque[ConnectionSet]] = [deque() for _ in nodes]

    def see_to(
        self, connections: ConnectionSet, round: Round, nodes: Iterable[int], now: float, *, spare: bool = True
    ) -> list[int]:
        """
        Connect to nodes that have no link, or note why that is not tried.

        With *spare*, return the nodes that failed lately and are not tried yet, because the others may be enough.
        """
        resting = self._breakers.resting(round, now) if spare else set()
        timeout = max(round.timeout, CONNECT_TIMEOUT)
        spared = []
        for node in nodes:
            if not round.timeout:
                round.receive(node, failed(Failure.FAILED_LATELY if node in resting else Failure.NOT_CONNECTED))
            elif node in connections.connecting:
                continue
            elif node in resting:
                spared.append(node)
            elif until := self._breakers[node].admits(now, timeout):
                self._connect(connections, node, timeout, until)
            else:
                self._follow(connections, node, timeout)
        return spared

    def _follow(self, connections: ConnectionSet, node: int, timeout: float) -> None:
        """Wait for the thread that tries to connect to *node*, and share its failure or connect after it."""
        if uses_gevent():  # a link belongs to the event loop of the thread that made it
            self._connect(connections, node, timeout, 0.0)
            return
        connections.expect(node)
        self._followers[node].append(connections)
        if not self._breakers[node].tried:  # it has just ended, perhaps before it saw this follower
            self._lead(node, None, timeout)

    def _lead(self, node: int, error: LinkError | None, timeout: float) -> None:
        """Give the followers of an attempt its error, or have them connect."""
        followers = self._followers[node]
        while followers:
            try:
                follower = followers.popleft()
            except IndexError:  # another thread was quicker
                return
            if error:
                follower.deliver(node, error)
            else:
                self._connect(follower, node, timeout, 0.0)

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
        try:
            link = self._nodes[node].connect(timeout)
        except LinkError as error:
            link = error
        except Exception:  # whatever it was, the node must not stay in the state "connecting"
            log.exception("connecting to %s failed", self._nodes[node].name)
            link = LinkError(Failure.UNREACHABLE)
        self._breakers[node].was_tried(until)
        if isinstance(link, LinkError) and link.failure is not Failure.LATE:
            # Noted now, because the connection set may not be used again for a long time.
            self._breakers[node].failed(self._clock(), link.detail)
        connections.deliver(node, link)
        if self._followers[node]:
            self._lead(node, link if isinstance(link, LinkError) else None, timeout)
