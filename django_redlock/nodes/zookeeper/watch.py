"""
Notifications from a ZooKeeper ensemble (internal).

Each process that waits has a znode, which ends with its session. A release adds the names of waiters to that znode. If
two releases do so at the same instant, only one of them is noticed; the other waiter asks again by itself.
"""

import json
from queue import SimpleQueue
from typing import Any

from kazoo.protocol.states import EventType

from ...core.protocol import Failure
from ..base import LinkError
from ..records.watch import Watch
from .client import Change, Client, link_error


class ZookeeperWatch(Watch):
    """A thread that reads the notifications of an ensemble to a process."""

    kind = "zookeeper"
    _client: Client | None = None

    def begin(self, number: int) -> None:
        """Begin to watch at a member."""
        self._events: SimpleQueue[Any] = SimpleQueue()
        self._notified: list[Any] = []
        self._client = Client(self.place, number, self.timeout)
        self._client.open()
        if self._client.get([self.key])[0]:  # left from an earlier session of this process
            self._client.write([Change(self.key, None, -1, delete=True)])
        self._client.write([Change(self.key, b"", None)], fleeting=True)
        self._client.when_lost(lambda: self._events.put(None))
        self._look()

    def _look(self) -> list[Any]:
        """Return the present notifications, and watch for the next one."""
        assert self._client is not None
        (found,) = self._client.get([self.key], watch=self._events.put)
        if found is None:
            raise LinkError(Failure.CLOSED)
        notified = json.loads(found.data or b"{}").get("to", [])
        return notified if isinstance(notified, list) else []

    def read(self) -> list[str]:
        """Wait for a notification, and return the waiters that it names."""
        event = self._events.get()
        if event is None or event.type == EventType.DELETED:  # the connection is gone, or a later one has taken over
            raise LinkError(Failure.CLOSED)
        notified = self._look()
        new, self._notified = [one for one in notified if one not in self._notified], notified
        return [str(name) for _, name in new]

    def end(self) -> None:
        """Close the connection."""
        if self._client:
            self._client.close()

    def cut(self) -> None:
        """Make :meth:`read` fail."""
        if self._client:
            self._client.abort()

    def explain(self, error: Exception) -> LinkError:
        """Return what to report about an exception."""
        return link_error(error, known=bool(self.place.options.get("password")))
