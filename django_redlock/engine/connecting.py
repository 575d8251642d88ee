"""
Connect to the nodes that a connection set has no link to, each in a thread of its own (internal).
"""

import logging
from collections.abc import Sequence
from functools import partial

from ..core.failure import Failure
from ..core.replies import failed
from ..core.round import Round
from ..nodes.base import Link, LinkError, Node
from ..nodes.clock import Clock
from ..nodes.threads import start
from .breaker import Breakers
from .connections import CONNECT_TIMEOUT, ConnectionSet

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

    def see_to(self, connections: ConnectionSet, round: Round, nodes: list[int], now: float) -> None:
        """Connect to nodes that have no link, or note why that is not tried."""
        resting = self._breakers.resting(round, now)
        timeout = max(round.timeout, CONNECT_TIMEOUT)
        for node in nodes:
            if node in resting:
                round.receive(node, failed(Failure.FAILED_LATELY))
            elif not round.timeout:
                round.receive(node, failed(Failure.NOT_CONNECTED))
            elif node in connections.connecting:
                continue
            elif until := self._breakers[node].admits(now, timeout):
                self._connect(connections, node, timeout, until)
            else:
                round.receive(node, failed(Failure.FAILED_LATELY))

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
        if isinstance(link, LinkError):
            # Noted now, because the connection set may not be used again for a long time.
            self._breakers[node].failed(self._clock(), link.detail)
        connections.deliver(node, link)
