"""
A thread that waits for notifications from a replicated store (internal).

A release writes the names of waiters to a key that their process watches. A watch sees only changes after its start.
Missing an earlier change is harmless, because each waiter soon asks again by itself.
"""

import asyncio
import os
from collections.abc import Callable
from typing import ClassVar

from ...core.protocol import Failure
from ...nodes.base import LinkError, RateLimit
from ...nodes.records.table import link_error
from ...nodes.records.worker import Mailbox
from ...runtime.threads import call_soon, new_event, start
from .place import Member, Place

UNASKED = 500  # notifications within a second; these stores write no more

Deliver = Callable[[list[str] | LinkError], object]


class Watch:
    """
    A thread that reads the notifications to a process.

    A kind of store overrides :meth:`begin` and :meth:`read`.

    Args:
        place: The members.
        key: The key under which they are written.
        timeout: Seconds in which the watch must begin.
        deliver: Called in that thread with the notified waiters; first with none, when the watch has begun, and at
            the end with the reason.

    Attributes:
        client: The connection; None if there is none yet.
        timeout: Seconds for each member.
        closed: Whether the thread must end.
    """

    kind: ClassVar[str]
    """The name of this kind of store, for the name of the thread."""

    def __init__(self, place: Place, key: str, timeout: float, deliver: Deliver) -> None:
        self.place = place
        self.key = key
        self.timeout = timeout / (len(place.members) + 1)
        self.client: Member | None = None
        self.closed = False
        self._deliver = deliver
        self._pid = os.getpid()

    def start(self) -> None:
        """Start the thread; raise LinkError if there are too many threads."""
        try:
            start(self._run, f"django_redlock {self.kind} notifications")
        except RuntimeError:
            raise LinkError(Failure.NO_THREAD) from None

    def close(self) -> None:
        """End the watch; in a forked child, send the member nothing, because the parent uses the connection."""
        self.closed = True
        if self.client and self._pid == os.getpid():
            self.client.abort()

    def _run(self) -> None:
        reason = LinkError(Failure.CLOSED)
        try:
            self._begin()
            self._deliver([])
            limit = RateLimit(UNASKED)
            while not self.closed:
                limit.count()
                if names := self.read():
                    self._deliver(names)
        except Exception as error:  # the waiters must learn of the failure, whatever it was
            reason = link_error(error)
        finally:
            self._end()
            self._deliver(reason)

    def _begin(self) -> None:
        """Begin to watch at the first member that answers."""
        failure: Exception = LinkError(Failure.UNREACHABLE)
        for number in range(len(self.place.members)):
            if self.closed:
                break
            try:
                return self.begin(number)
            except Exception as error:
                failure = error
                self._end()
        raise failure

    def _end(self) -> None:
        if self.client:
            self.client.close()

    # The parts that differ between kinds of stores

    def begin(self, number: int) -> None:
        """Connect to a member and begin to watch; raise any exception if that is not possible."""
        raise NotImplementedError

    def read(self) -> list[str]:
        """Wait for a notification, and return the waiters that it names; raise any exception at the end."""
        raise NotImplementedError


class WatchLink:
    """
    The notifications of a store to the waiters of a process; see :class:`~django_redlock.nodes.base.Node`.

    Args:
        watch: Returns the watch that delivers to a function.
        timeout: Seconds in which it must begin.
    """

    def __init__(self, watch: Callable[[Deliver], Watch], timeout: float) -> None:
        self._notified = Mailbox[list[str] | LinkError]()
        self.fileno = self._notified.fileno
        self._begun = new_event()
        self._watch = watch(self._deliver)
        try:
            self._watch.start()
            if not self._begun.wait(timeout):
                raise LinkError(Failure.TIMEOUT)
            self.read()
        except BaseException:
            self.close()
            raise

    def _deliver(self, names: list[str] | LinkError) -> None:
        self._notified.deliver(names)
        self._begun.set()  # last, so that the constructor reads the byte that announces the beginning

    def read(self) -> list[str]:
        """Return the waiters that were notified, without blocking; raise LinkError at the end of the watch."""
        names: list[str] = []
        self._notified.look()
        while self._notified.arrived:
            arrived = self._notified.arrived.popleft()
            if isinstance(arrived, LinkError):
                raise arrived
            names += arrived
        return names

    def close(self) -> None:
        """End the watch."""
        self._watch.close()
        self._notified.close()


class AsyncWatchLink:
    """A :class:`WatchLink` for an event loop."""

    def __init__(self, watch: Callable[[Deliver], Watch]) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[list[str] | LinkError] = asyncio.Queue()
        self._watch = watch(self._deliver)

    async def begin(self, timeout: float) -> None:
        """Begin to watch, within *timeout* seconds; raise LinkError if that is not possible."""
        self._watch.start()
        try:
            async with asyncio.timeout(timeout):
                await self.read()
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise LinkError(Failure.TIMEOUT) from None
            raise

    def _deliver(self, names: list[str] | LinkError) -> None:
        call_soon(self._loop, self._arrived.put_nowait, names)

    async def read(self) -> list[str]:
        """Wait for notifications and return the waiters that they name; raise LinkError at the end of the watch."""
        arrived = await self._arrived.get()
        if isinstance(arrived, LinkError):
            raise arrived
        return arrived

    def close(self) -> None:
        """End the watch."""
        self._watch.close()
