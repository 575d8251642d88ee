"""
Nodes in this process's memory: the same answers as the real ones, with a clock that can be turned by hand.

They are for tests and for trying things out. A lock over them protects one process from itself and nothing else.
"""

import time
from collections.abc import Callable
from threading import Lock
from urllib.parse import urlsplit

from ..core.admission import Greeting
from ..core.messages import ABSENT, Acquire, Extend, Kind, Raise, Release, Reply, Request, Row, Survey
from ..core.owner import NONCE_SIZE
from .base import LinkError, NodeSpec


class MemoryStore:
    """
    The keys of one node: a lock's holder and fence, the index, the cancel markers.

    Args:
        clock: Returns the node's time in seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._mutex = Lock()
        self.skew = 0.0
        self.reset()

    def reset(self) -> None:
        """Forget everything, as a restart without data does."""
        with self._mutex:
            self._holders: dict[str, tuple[str, float | None]] = {}
            self._fences: dict[str, tuple[int, float | None]] = {}
            self._markers: dict[str, float] = {}
            self._index: dict[str, float] = {}

    def put(self, slug: str, value: str, ttl: float | None) -> None:
        """Write a holder key as a foreign program would; *ttl* in seconds, None for no expiry."""
        with self._mutex:
            now = self._now()
            self._holders[slug] = (value, None if ttl is None else now + ttl)
            self._index[slug] = now + (ttl or 0.0)

    def execute(self, request: Request) -> Reply:
        """Carry out one request in one atomic step."""
        with self._mutex:
            now = self._now()
            match request:
                case Acquire():
                    return self._acquire(request, now)
                case Raise():
                    return self._raise(request, now)
                case Extend():
                    return self._extend(request, now)
                case Release():
                    return self._release(request, now)
                case Survey():
                    return self._survey(request, now)

    def _now(self) -> float:
        # Whole microseconds, as TIME gives them: expiry and tokens are compared with it.
        return int((self._clock() + self.skew) * 1e6) / 1e6

    def _holder(self, slug: str, now: float) -> str | None:
        value, until = self._holders.get(slug, ("", now))
        if until is not None and until <= now:
            self._holders.pop(slug, None)
            return None
        return value

    def _left(self, slug: str, now: float) -> float | None:
        if self._holder(slug, now) is None:
            return ABSENT
        until = self._holders[slug][1]
        return None if until is None else until - now

    def _fence(self, slug: str, now: float) -> int:
        number, until = self._fences.get(slug, (0, None))
        if until is not None and until <= now:
            self._fences.pop(slug, None)
            return 0
        return number

    def _high(self, slugs: tuple[str, ...], now: float) -> int:
        return max(self._fence(slug, now) for slug in slugs)

    def _cancelled(self, nonce: str, now: float) -> bool:
        return self._markers.get(nonce, now) > now

    def _write(self, slugs: tuple[str, ...], value: str, ttl: float, now: float) -> None:
        for slug in slugs:
            self._holders[slug] = (value, now + ttl)
            self._index[slug] = now + ttl

    def _write_fence(self, slugs: tuple[str, ...], number: int, keep: float | None, now: float) -> None:
        for slug in slugs:
            self._fences[slug] = (number, None if keep is None else now + keep)

    def _trim(self, now: float) -> None:
        stale = sorted((until, slug) for slug, until in self._index.items() if until <= now)
        for _, slug in stale[:8]:
            left = self._left(slug, now)
            if left == ABSENT:
                del self._index[slug]
            else:
                self._index[slug] = float("inf") if left is None else now + left

    def _acquire(self, request: Acquire, now: float) -> Reply:
        high, time_us = self._high(request.slugs, now), int(now * 1e6)
        if self._cancelled(request.nonce, now):
            return Reply(Kind.CANCELLED, high, time_us)
        mine = {request.nonce, request.adopt} - {""}
        others = [slug for slug in request.slugs if (self._holder(slug, now) or request.nonce)[:NONCE_SIZE] not in mine]
        if others:
            lefts = [self._left(slug, now) for slug in others]
            self._index.update({slug: float("inf") for slug, left in zip(others, lefts, strict=True) if left is None})
            longest = None if None in lefts else max(left for left in lefts if left is not None)
            detail = (self._holder(others[0], now) or "")[NONCE_SIZE:]
            return Reply(Kind.BUSY, high, time_us, left=longest, detail=detail)
        self._write(request.slugs, request.value, request.ttl, now)
        self._trim(now)
        if high < request.number <= time_us + request.ahead * 1e6:
            self._write_fence(request.slugs, request.number, request.keep, now)
            return Reply(Kind.ACCEPTED, request.number, time_us)
        return Reply(Kind.GRANTED, high, time_us)

    def _raise(self, request: Raise, now: float) -> Reply:
        high, time_us = self._high(request.slugs, now), int(now * 1e6)
        if any((self._holder(slug, now) or "")[:NONCE_SIZE] != request.nonce for slug in request.slugs):
            return Reply(Kind.REFUSED, high, time_us)
        if request.number <= high:
            return Reply(Kind.GRANTED, high, time_us)
        self._write_fence(request.slugs, request.number, request.keep, now)
        return Reply(Kind.ACCEPTED, request.number, time_us)

    def _extend(self, request: Extend, now: float) -> Reply:
        high, time_us = self._high(request.slugs, now), int(now * 1e6)
        missing = [slug for slug in request.slugs if self._holder(slug, now) is None]
        held = [slug for slug in request.slugs if slug not in missing]
        if (
            self._cancelled(request.nonce, now)
            or any((self._holder(slug, now) or "")[:NONCE_SIZE] != request.nonce for slug in held)
            or any(self._fence(slug, now) > request.token for slug in missing)
        ):
            return Reply(Kind.REFUSED, high, time_us)
        for slug in held:
            self._write((slug,), self._holders[slug][0], request.ttl, now)
            if request.keep is not None and slug in self._fences:
                self._write_fence((slug,), self._fence(slug, now), request.keep, now)
        self._write(tuple(missing), request.value, request.ttl, now)
        self._write_fence(tuple(missing), request.token, request.keep, now)
        return Reply(Kind.HELD, high, time_us)

    def _release(self, request: Release, now: float) -> Reply:
        holders = {slug: self._holder(slug, now) for slug in request.slugs}
        mine = [slug for slug, value in holders.items() if value is not None and value[:NONCE_SIZE] == request.nonce]
        for slug in mine:
            del self._holders[slug]
            self._index.pop(slug, None)
        if request.bury > 0:
            self._markers[request.nonce] = now + request.bury
        if mine:
            return Reply(Kind.RELEASED, 0, int(now * 1e6))
        taken = any(value is not None for value in holders.values())
        return Reply(Kind.BUSY if taken else Kind.GONE, 0, int(now * 1e6))

    def _survey(self, request: Survey, now: float) -> Reply:
        slugs = request.slugs
        if request.count > 0:
            in_order = sorted(self._index, key=lambda slug: (self._index[slug], slug))
            slugs = tuple(in_order[request.offset : request.offset + request.count])
        rows = tuple(
            Row(slug, self._holder(slug, now) or "", self._left(slug, now), self._fence(slug, now)) for slug in slugs
        )
        return Reply(Kind.LISTED, 0, int(now * 1e6), rows=rows, total=len(self._index))


class MemoryNode:
    """
    A node in this process.

    Faults can be set by hand: ``down`` refuses to be reached, ``silent`` executes and never answers, ``deaf``
    neither executes nor answers. ``greeting`` is what it says of itself on a new link.

    Args:
        name: What to call it; nodes of one name are one node.
        store: Its keys.
    """

    instant = True
    fails_over = False

    def __init__(self, name: str, store: MemoryStore | None = None) -> None:
        self.name = name
        self.address = f"memory:{name}"
        self.store = store or MemoryStore()
        self.greeting = Greeting(run_id=f"memory {name} {id(self)}", uptime=float("inf"))
        self.down = self.silent = self.deaf = False

    def connect(self, timeout: float) -> "MemoryLink":
        """Open a link, at once."""
        if self.down:
            raise LinkError("refused")
        return MemoryLink(self)

    async def aconnect(self, timeout: float) -> "AsyncMemoryLink":
        """Open a link, at once."""
        return AsyncMemoryLink(self.connect(timeout))

    def execute(self, request: Request) -> Reply | None:
        """Carry out a request; None is a reply that never comes."""
        if self.down:
            raise LinkError("reset")
        if self.deaf:
            return None
        reply = self.store.execute(request)
        return None if self.silent else reply


class MemoryLink:
    """A link to a node in this process: the reply is there when the request is sent, or never."""

    def __init__(self, node: MemoryNode) -> None:
        self.greeting = node.greeting
        self._node = node
        self._replies: list[Reply | None] = []

    def fileno(self) -> int:
        return -1

    def send(self, request: Request, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        self._replies.append(self._node.execute(request))

    def readable(self) -> bool:
        return self._node.down or bool(self._replies and self._replies[0])

    def receive(self, request: Request) -> Reply | None:
        if self._node.down:
            raise LinkError("reset")
        return self._replies.pop(0)

    def close(self) -> None:
        self._replies.clear()


class AsyncMemoryLink:
    """The same for an event loop."""

    def __init__(self, link: MemoryLink) -> None:
        self.greeting = link.greeting
        self._link = link
        self.broken = False

    def send(
        self,
        request: Request,
        packed: dict[int, bytes],
        on_reply: Callable[[Reply | None], bool],
        *,
        in_full: bool = False,
    ) -> None:
        self._link.send(request, packed)
        if self._link.readable():
            reply = self._link.receive(request)
            if reply is not None:
                on_reply(reply)

    def close(self) -> None:
        self.broken = True


_nodes: dict[str, MemoryNode] = {}


def open_node(spec: NodeSpec, prefix: str) -> MemoryNode:
    """Return the node of this name in this process; every alias with this prefix shares it."""
    name = urlsplit(spec.url).netloc
    if not name:
        raise ValueError("a memory node needs a name, such as memory://a")
    return _nodes.setdefault(f"{prefix}{name}", MemoryNode(spec.name or name))


def forget_nodes() -> None:
    """Forget all nodes in memory, and so all locks on them; for tests."""
    _nodes.clear()
