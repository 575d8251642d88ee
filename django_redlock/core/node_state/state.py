"""One node as its callers see it: requests in, replies out, one at a time (internal)."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..protocol import Acquire, Extend, Raise, Release, Repair, Reply, Request, Survey
from . import records as dumps
from .decisions import Decisions, survey
from .queues import NOBODY
from .records import Records


class NodeState:
    """
    The keys of one node, and how it carries out requests.

    Args:
        clock: Returns the node's time in seconds since the epoch.
        mutex: Held during each step; without it, only one thread at a time may use this object.
        wall: Returns seconds since the epoch, for the bound of fencing tokens. Given if *clock* counts from another
            moment; replies then have no time.

    ``skew`` is by how many seconds the node's time is ahead of *clock*. ``listeners`` has a function for each process,
    which is called with the name of a waiter of that process when it is first in a queue.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        mutex: AbstractContextManager[object] | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._mutex = mutex or nullcontext()
        self.skew = 0.0
        self.listeners: dict[str, Callable[[str], object]] = {}
        self.records = Records()

    def now(self) -> float:
        """Return the node's time, in seconds since the epoch."""
        # Whole microseconds, as TIME gives them: expiry and tokens are compared with this time.
        return int((self._clock() + self.skew) * 1e6) / 1e6

    def execute(self, request: Request) -> Reply:
        """Carry out one request in one atomic step."""
        with self._mutex:
            now = self.now()
            decisions = Decisions(self.records, self.listeners, now, self._wall and self._wall())
            match request:
                case Acquire():
                    return decisions.acquire(request)
                case Raise():
                    return decisions.raise_token(request)
                case Extend():
                    return decisions.extend(request)
                case Release():
                    return decisions.release(request)
                case Survey():
                    reported = survey(self.records, request, now)
                    return reported._replace(time=0) if self._wall else reported
                case Repair():
                    return decisions.repair(request)

    def reset(self) -> None:
        """Forget everything, as a restart without data does."""
        with self._mutex:
            self.records = Records()

    def serve(self, run_id: str, replication_id: str, *, was_replica: bool = False) -> float:
        """
        Return for how many seconds the server with these ids has served these locks; see ``served.lua``.

        Args:
            run_id: Changes with every start.
            replication_id: Changes when the server becomes a master again, and when it has had no replica for long.
            was_replica: Whether the server remembers having been a replica.
        """
        with self._mutex:
            now = int(self.now() * 1e6)
            ran, replicated, since = self.records.served or ("", "", now)
            # A master without a replica for an hour gets another replication id and has lost nothing. A master that was
            # a replica meanwhile may lack the last locks. A start in the future was noted before the clock was set
            # back.
            stayed = replicated == replication_id or not was_replica
            if ran != run_id or not stayed or since > now:
                since = now
            self.records.served = (run_id, replication_id, since)
            return (now - since) / 1e6

    def put(self, slug: str, value: str, ttl: float | None) -> None:
        """Write a holder key as a foreign program would; *ttl* in seconds, None for no expiry."""
        with self._mutex:
            now = self.now()
            self.records.holders[slug] = (value, None if ttl is None else now + ttl)
            self.records.index[slug] = now + (ttl or 0.0)

    def sharers(self, slug: str) -> list[str]:
        """Return the secrets that share a name."""
        return list(self.records.shared.get(slug, {}))

    def waiters(self, slug: str) -> list[str]:
        """Return the waiters for a name, in the order of their turns."""
        with self._mutex:
            return self.records.queues.get(slug, NOBODY).waiting(self.now())

    def load(self, slug: str, record: Mapping[str, Any]) -> None:
        """Restore the record of a name from :meth:`dump`, for nodes that store it elsewhere."""
        dumps.load(self.records, slug, record)

    def dump(self, slug: str) -> dict[str, Any]:
        """Return the record of a name in a form that JSON can write, without anything that has expired."""
        return dumps.dump(self.records, slug, self.now())

    def load_tombstone(self, secret: str, record: Mapping[str, Any]) -> None:
        """Restore a tombstone from :meth:`dump_tombstone`."""
        dumps.load_tombstone(self.records, secret, record)

    def dump_tombstone(self, secret: str) -> dict[str, Any]:
        """Return the tombstone of an attempt or hold that was released; empty if there is none."""
        return dumps.dump_tombstone(self.records, secret, self.now())
