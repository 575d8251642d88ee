"""
Nodes in the memory of this process that answer like real nodes (internal).

They are for tests and experiments: a lock over them excludes only threads and tasks of the same process.
"""

import asyncio
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from threading import Lock
from urllib.parse import urlsplit

from ..core.admission import Greeting
from ..core.node_state import NodeState
from ..core.protocol import HIGHEST, Failure, Reply, Request
from ..runtime.clock import steady
from .base import INCOMPLETE, LinkError, NodeSpec, Packed


class MemoryNode:
    """
    A node in this process.

    Tests can set faults. With ``down``, the node refuses connections; with ``silent``, it executes requests but never
    answers; with ``deaf``, it does neither. ``greeting`` is how the node describes itself on a new link. Links break
    when ``boot`` changes.

    Args:
        name: The node's name; nodes with the same name are one node.
        store: The node's keys.
    """

    instant = True
    calls = True
    fails_over = False

    def __init__(self, name: str, store: NodeState | None = None) -> None:
        self.name = name
        self.address = f"memory:{name}"
        # Tests freeze and move the time of day. Without times in the replies, the clock guard does not judge the node;
        # and any token is accepted, because no client of this process has a clock of its own.
        self.store = store or NodeState(steady, Lock(), wall=lambda: HIGHEST / 1e6)
        self.greeting = Greeting(run_id=f"memory {name} {secrets.token_hex(8)}", age=float("inf"))
        self.down = self.silent = self.deaf = False
        self.boot = 1

    def connect(self, timeout: float) -> "MemoryLink":
        """Open a link at once."""
        if self.down:
            raise LinkError(Failure.REFUSED)
        return MemoryLink(self, self.describe())

    async def aconnect(self, timeout: float) -> "AsyncMemoryLink":
        """Open a link at once."""
        return AsyncMemoryLink(self.connect(timeout))

    def listen(
        self, process: str, timeout: float, on_notification: Callable[[str], object]
    ) -> "MemoryNotificationLink":
        """Register a callback that notifies the waiters of a process at once."""
        if self.down:
            raise LinkError(Failure.REFUSED)
        return MemoryNotificationLink(self.store, process, on_notification)

    async def alisten(
        self, process: str, timeout: float, on_notification: Callable[[str], object]
    ) -> "AsyncMemoryNotificationLink":
        """Register a callback that notifies the waiters of an event loop at once."""
        return AsyncMemoryNotificationLink(self.listen(process, timeout, on_notification))

    def describe(self) -> Greeting:
        """Return how the node describes itself now."""
        if not self.store.mark:
            self.store.serve(secrets.token_hex(8), "")
        return replace(self.greeting, mark=self.store.mark)

    def execute(self, request: Request, mark: str = "") -> Reply | None:
        """Execute a request of a link that knows the memory with this mark; return None if the reply never comes."""
        if self.down:
            raise LinkError(Failure.RESET)
        if self.deaf:
            return None
        reply = self.store.execute(request, mark)
        return None if self.silent else reply


class MemoryLink:
    """A link to a node in this process: the reply is there as soon as the request is sent, or never."""

    def __init__(self, node: MemoryNode, greeting: Greeting) -> None:
        self.greeting = greeting
        self.node = node
        self._boot = node.boot
        self._replies: list[Reply | None] = []

    @property
    def _ended(self) -> bool:
        """Whether the node is down, or was since the link was made."""
        return self.node.down or self.node.boot != self._boot

    def fileno(self) -> int:
        """Return -1, because there is no descriptor to poll."""
        return -1

    def greet(self) -> None:
        """Ask the node to describe itself again; see :class:`~django_redlock.nodes.base.Link`."""

    def receive_greeting(self) -> Greeting | None:
        """Return how the node describes itself; see :class:`~django_redlock.nodes.base.Link`."""
        return checked(self.node.describe(), self.greeting.mark)

    def send(self, request: Request, packed: Packed, *, in_full: bool = False) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.Link`."""
        if self._ended:
            raise LinkError(Failure.RESET)
        self._replies.append(self.node.execute(request, self.greeting.mark))

    def readable(self) -> bool:
        """Return whether a reply, or the end of the connection, can be read without waiting."""
        return self._ended or bool(self._replies and self._replies[0])

    def receive(self, request: Request) -> Reply | None:
        """Return the reply to the oldest request; see :class:`~django_redlock.nodes.base.Link`."""
        if self._ended:
            raise LinkError(Failure.RESET)
        return known(self._replies.pop(0)) if self.readable() else INCOMPLETE

    def close(self) -> None:
        """Close the connection."""
        self._replies.clear()


class MemoryNotificationLink:
    """Call back when a waiter of a process is first in the queue."""

    def __init__(self, store: NodeState, process: str, on_notification: Callable[[str], object]) -> None:
        self._store = store
        self._process = process
        store.listeners[process] = on_notification

    def fileno(self) -> int:
        """Return -1, because there is no descriptor to poll."""
        return -1

    def read(self) -> list[str]:
        """Return no waiters, because the node calls back instead."""
        return []

    def close(self) -> None:
        """Close the connection."""
        self._store.listeners.pop(self._process, None)


class AsyncMemoryNotificationLink:
    """A :class:`MemoryNotificationLink` for an event loop."""

    def __init__(self, link: MemoryNotificationLink) -> None:
        self._link = link

    async def read(self) -> list[str]:
        """Wait for ever, because the node calls back instead."""
        await asyncio.Event().wait()
        return []

    def close(self) -> None:
        """Close the connection."""
        self._link.close()


class AsyncMemoryLink:
    """A :class:`MemoryLink` for an event loop."""

    def __init__(self, link: MemoryLink) -> None:
        self.greeting = link.greeting
        self._link = link
        self.broken = False

    def send(
        self,
        request: Request,
        packed: Packed,
        on_reply: Callable[[Reply | None], bool],
        *,
        in_full: bool = False,
    ) -> None:
        """Send a request; see :class:`~django_redlock.nodes.base.AsyncLink`."""
        # The link does not keep the reply: after an interruption, the next request would get the reply of this one.
        try:
            reply = known(self._link.node.execute(request, self.greeting.mark))
        except LinkError:
            self.broken = True
            raise
        if reply is not None:
            on_reply(reply)

    def greet(self, on_greeting: Callable[[Greeting], object]) -> None:
        """Ask the node to describe itself again; see :class:`~django_redlock.nodes.base.AsyncLink`."""
        on_greeting(checked(self._link.node.describe(), self.greeting.mark))

    def readable(self) -> bool:
        """Return False, because replies are delivered at once."""
        return False

    def close(self) -> None:
        """Close the connection."""
        self.broken = True


def known(reply: Reply | None) -> Reply | None:
    """Return *reply*; raise LinkError if the node's memory is another one than the link knows, which ends the link."""
    if reply is not None and reply.failure is Failure.FORGOT:
        raise LinkError(Failure.FORGOT)
    return reply


def checked(greeting: Greeting, mark: str) -> Greeting:
    """Return *greeting*; raise LinkError if it is that of another memory than the one with the *mark*."""
    if greeting.mark != mark:
        raise LinkError(Failure.FORGOT)
    return greeting


_nodes: dict[str, MemoryNode] = {}
_fences: dict[str, int] = {}  # the highest fencing tokens that were given out in simulations, by name


def open_node(spec: NodeSpec, prefix: str) -> MemoryNode:
    """Return the node with a name in this process; every alias with the same prefix shares it."""
    name = urlsplit(spec.url).netloc
    if not name or "@" in name:
        raise ValueError("a memory node needs a name, such as memory://a")
    if spec.options:
        raise ValueError("a node in memory takes no OPTIONS")
    key = f"{prefix}{name}"
    if key not in _nodes:
        node = MemoryNode(spec.name or name)
        node.store.lift(_fences)
        return _nodes.setdefault(key, node)
    return _nodes[key]


def forget_nodes() -> set[MemoryNode]:
    """Forget all in-memory nodes and the locks on them, for tests; return the nodes."""
    found = {*_nodes.values()}
    _nodes.clear()
    _fences.clear()
    return found


def remember_fences(nodes: Iterable[MemoryNode]) -> None:
    """Have the in-memory nodes accept no token that others, which are given up now, have accepted for the same name."""
    for node in nodes:
        for slug, (number, _) in node.store.records.fences.items():
            _fences[slug] = max(number, _fences.get(slug, 0))
    for node in list(_nodes.values()):
        node.store.lift(_fences)
