"""An in-memory node that can crash, restart, lose a reply, and have a wrong clock (internal)."""

from collections.abc import Callable

from ..core.admission import Greeting
from ..core.node_state import NodeState
from ..core.protocol import Failure, Reply, Request
from ..nodes.base import LinkError
from ..nodes.memory import MemoryLink, MemoryNode

EPOCH = 1_800_000_000.0  # the time of day when the clock of a simulation shows 0, in seconds


class SimulatedNode(MemoryNode):
    """
    One node of a :class:`~django_redlock.testing.Simulation`.

    Attributes set further faults. With ``down = True``, the node refuses every request; with ``silent``, it executes
    requests but never answers; with ``deaf``, it does neither.

    Args:
        name: The node's name.
        clock: Returns the time of the simulation, in seconds.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        super().__init__(name, NodeState(lambda: EPOCH + clock()))
        self._clock = clock
        self._dropping = 0
        self.boot = 1
        self._since = float("-inf")

    def crash(self) -> None:
        """End the node; all connections break. :meth:`start` brings it back with its data."""
        self.down = True
        self.boot += 1

    def start(self, *, keep_data: bool = True) -> None:
        """
        Bring the node back.

        With three or more nodes, the node gives no vote for ``max_ttl``, 60 s by default, unless ``OPTIONS`` call it
        durable.

        Args:
            keep_data: Whether the node still has its earlier locks and tokens.
        """
        if not keep_data:
            self.store.reset()
        self.down, self._since = False, self._clock()

    def restart(self, *, keep_data: bool = False) -> None:
        """Crash and come back at once, by default empty."""
        self.crash()
        self.start(keep_data=keep_data)

    def drop_next_reply(self) -> None:
        """Execute the next request, but never answer it; that connection stays silent."""
        self._dropping += 1

    def step_clock(self, seconds: float) -> None:
        """Set the node's clock forward, or back by a negative number of seconds; keys expire by this clock."""
        self.store.skew += seconds

    def connect(self, timeout: float) -> "SimulatedLink":
        """Open a link at once."""
        if self.down:
            raise LinkError(Failure.REFUSED)
        self.greeting = Greeting(run_id=f"{self.name}/{self.boot}", age=self._clock() - self._since)
        return SimulatedLink(self)

    def execute(self, request: Request) -> Reply | None:
        """Execute a request; return None if the reply never comes."""
        reply = super().execute(request)
        if reply is not None and self._dropping:
            self._dropping -= 1
            return None
        return reply


class SimulatedLink(MemoryLink):
    """A link that breaks when its node ends."""

    def __init__(self, node: SimulatedNode) -> None:
        super().__init__(node)
        self._to = node
        self._boot = node.boot

    def send(self, request: Request, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.Link`."""
        self._check()
        super().send(request, packed, in_full=in_full)

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        return self._boot != self._to.boot or super().readable()

    def receive(self, request: Request) -> Reply | None:
        """Return the reply to the oldest request; see :class:`~django_redlock.nodes.base.Link`."""
        self._check()
        return super().receive(request)

    def _check(self) -> None:
        if self._boot != self._to.boot:
            raise LinkError(Failure.RESET)
