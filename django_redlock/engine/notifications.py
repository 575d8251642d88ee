"""
Tell the waiters of this process that it is their turn.

A node that frees a lock publishes who is first in line, on a channel of that waiter's process. One connection per
process and node listens, whatever the number of waiters; it is made when somebody first has to wait, and made anew if
nobody has waited for a while. A notification only makes a waiter ask sooner: nothing is wrong if it is lost.
"""

import asyncio
import logging
import select
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from math import ceil

from ..core.failure import Failure
from ..core.waiter import Waiter
from ..nodes.base import LinkError, Node, NotificationLink
from ..nodes.clock import Clock, steady
from ..nodes.threads import new_event, start
from .connections import CONNECT_TIMEOUT
from .waiters import Waiters
from .wakeup import WakeUp

LINGER = 10.0  # seconds without waiters after which the connections are not trusted any more
RETRY = 1.0  # seconds between two tries to reach a node

log = logging.getLogger("django_redlock")


class Notifications:
    """
    The notifications of an alias to the threads of this process.

    Args:
        nodes: The nodes, in the order of the settings.
        needed: How many of them a quorum is.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, nodes: Sequence[Node], needed: int, clock: Clock = steady) -> None:
        self.waiters: Waiters[threading.Event] = Waiters(needed, new_event)
        self._nodes = nodes
        self._clock = clock
        self._mutex = threading.Lock()
        self._listener: Listener | None = None

    def wait(self, waiter: Waiter, seconds: float, told: float) -> None:
        """
        Block until *waiter* is called.

        Args:
            waiter: Who waits.
            seconds: For how long at most, if too few nodes can call it.
            told: For how long at most if enough can.
        """
        bell = self.waiters.join(waiter)
        listener = self._listen()
        listener.wait(waiter, bell, self._clock() + (told if self.waiters.told else seconds))

    def _listen(self) -> "Listener":
        """Return the connections, new ones if these have been out of use for long."""
        with self._mutex:
            listener = self._listener
            if listener is None or listener.forgotten():
                if listener:
                    listener.close()
                listener = self._listener = Listener(self._nodes, self.waiters, self._clock)
            return listener

    def forked(self) -> None:
        """In a forked child: drop what belongs to the parent, whose other threads may have been holding the mutex."""
        self._mutex = threading.Lock()
        if self._listener:
            self._listener.forked()
        self.close()

    def close(self) -> None:
        """Drop the connections; who waits now does so until its pause is over."""
        with self._mutex:
            listener, self._listener = self._listener, None
        if listener:
            listener.close()


class Listener:
    """
    The connections that notifications come on, and which of those who wait reads them.

    Whoever waits first *leads*: it reads for all. When it is notified or its time is over, another takes its place. A
    thread that did nothing but read would have to be woken for every notification, and would then wake the waiter.
    Between one holder and the next, that is two changes of threads too many.
    """

    def __init__(self, nodes: Sequence[Node], waiters: Waiters[threading.Event], clock: Clock) -> None:
        self._nodes = nodes
        self._waiters = waiters
        self._clock = clock
        self._mutex = threading.Lock()  # guards who leads, and whether the connections are still to be used
        self._leader: Waiter | None = None
        self._closed = False
        self._bells: dict[str, threading.Event] = {}  # of those who wait at this moment
        self._used = clock()
        self._links: dict[int, NotificationLink] = {}
        self._arrived: deque[tuple[int, NotificationLink | LinkError]] = deque()
        self._connecting: set[int] = set()
        self._again = {number: 0.0 for number, node in enumerate(nodes) if node.calls}
        self._wakeup = WakeUp()

    def forgotten(self) -> bool:
        """Return whether nobody has waited for so long that a firewall may have dropped the connections."""
        return self._closed or (not self._bells and self._clock() - self._used > LINGER)

    def wait(self, waiter: Waiter, bell: threading.Event, until: float) -> None:
        """Block until *waiter* is called or the time is *until*."""
        try:
            self._bells[waiter.name] = bell  # before it is seen that another leads, who may be about to stop
            while not waiter.called and (left := until - self._clock()) > 0:
                bell.clear()
                if self._leads(waiter):
                    self._read(left)
                elif not waiter.called:
                    bell.wait(left)
        finally:
            self._bells.pop(waiter.name, None)
            self._used = self._clock()
            self._step_down(waiter)

    def _leads(self, waiter: Waiter) -> bool:
        with self._mutex:
            if self._nobody_leads() and self._again and not self._closed:
                self._leader = waiter
            return self._leader is waiter

    def _nobody_leads(self) -> bool:
        """Return whether somebody else may lead: one that was interrupted as it stopped to wait does so no longer."""
        return self._leader is None or self._leader.name not in self._bells

    def _step_down(self, waiter: Waiter) -> None:
        """Leave the lead to somebody who waits; whoever was to take it and is gone itself has it passed on."""
        with self._mutex:
            if self._leader is waiter:
                self._leader = None
            if self._nobody_leads():
                if self._closed:
                    self._drop_all()
                for bell in self._bells.copy().values():
                    bell.set()
                    break

    def close(self) -> None:
        """Drop the connections, or have the one who reads them do it."""
        with self._mutex:
            self._closed = True
            self._waiters.listening.clear()  # now, because the connections that take their place will fill it
            if self._nobody_leads():
                self._drop_all()
            else:
                self._wakeup.ring()

    def forked(self) -> None:
        """In a forked child: nobody leads, and the mutex is free."""
        self._mutex, self._leader = threading.Lock(), None

    def _read(self, left: float) -> None:
        """Wait for something to happen, for at most so many seconds, and deal with it."""
        self._connect_missing(self._clock())
        for node in self._poll(left):
            self._read_link(node)
        self._take_arrivals()
        if self._closed:
            with self._mutex:
                self._leader = None
                self._drop_all()

    def _connect_missing(self, now: float) -> None:
        for node in self._again.keys() - self._links.keys() - self._connecting:
            if now < self._again[node]:
                continue
            self._connecting.add(node)
            try:
                if self._nodes[node].instant:
                    self._connect(node)
                else:
                    start(partial(self._connect, node), "django_redlock connect")
            except RuntimeError:  # there are too many threads; who waits asks again by itself
                self._arrived.append((node, LinkError(Failure.UNREACHABLE)))
            except BaseException:  # if the thread has started, a second one will do no harm
                self._connecting.discard(node)
                raise

    def _connect(self, node: int) -> None:
        link: NotificationLink | LinkError
        try:
            link = self._nodes[node].listen(
                self._waiters.process, CONNECT_TIMEOUT, lambda name: self._called_elsewhere(node, name)
            )
        except LinkError as error:
            link = error
        except Exception:  # whatever it was, the node must not stay "connecting" for ever
            log.exception("listening to %s failed", self._nodes[node].name)
            link = LinkError(Failure.UNREACHABLE)
        self._arrived.append((node, link))
        self._wakeup.ring()
        if self._closed:
            self._drop_arrivals()  # nobody else would

    def _called_elsewhere(self, node: int, name: str) -> None:
        """Take a notification in a thread that may not be the one that reads, which is then woken."""
        self._waiters.notification(node, name)
        self._wakeup.ring()

    def _take_arrivals(self) -> None:
        while self._arrived:
            node, link = self._arrived[0]  # it stays there until it is in use: this may be interrupted
            if isinstance(link, LinkError):
                self._again[node] = self._clock() + RETRY
            else:
                self._links[node] = link
                with self._mutex:
                    if not self._closed:
                        self._waiters.reached(node)
            self._connecting.discard(node)
            self._arrived.popleft()

    def _poll(self, left: float) -> list[int]:
        """Wait for something to happen; returns the nodes that have something to say."""
        if self._arrived:
            return []
        poll = select.poll()
        poll.register(self._wakeup, select.POLLIN)
        nodes: dict[int, int] = {}
        for node, link in self._links.items():
            with suppress(LinkError):
                if link.fileno() >= 0:
                    nodes[link.fileno()] = node
                    poll.register(link.fileno(), select.POLLIN)
        fds = [fd for fd, _ in poll.poll(ceil(min(left, RETRY) * 1000))]
        ready = [nodes[fd] for fd in fds if fd in nodes]
        if len(ready) < len(fds):
            self._wakeup.hush()
        return ready

    def _read_link(self, node: int) -> None:
        try:
            for name in self._links[node].read():
                self._waiters.notification(node, name)
        except LinkError:
            self._drop_link(node)
        except BaseException:  # interrupted, perhaps in the middle of a message
            self._drop_link(node)
            raise

    def _drop_link(self, node: int) -> None:
        with self._mutex:
            if not self._closed:
                self._waiters.listening.discard(node)
        self._again[node] = self._clock()
        self._links.pop(node).close()

    def _drop_all(self) -> None:
        self._drop_arrivals()
        while self._links:
            self._links.popitem()[1].close()
        self._wakeup.close()

    def _drop_arrivals(self) -> None:
        with suppress(IndexError):
            while True:
                link = self._arrived.popleft()[1]
                if not isinstance(link, LinkError):
                    link.close()


class AsyncNotifications:
    """
    The notifications of an alias to the tasks of one event loop; a task for each node reads them.

    Args:
        nodes: The nodes, in the order of the settings.
        needed: How many of them a quorum is.
    """

    def __init__(self, nodes: Sequence[Node], needed: int) -> None:
        self.waiters: Waiters[asyncio.Event] = Waiters(needed, asyncio.Event)
        self._nodes = nodes
        self._tasks: list[asyncio.Task[None]] = []
        self._end: asyncio.TimerHandle | None = None

    async def wait(self, waiter: Waiter, seconds: float, told: float) -> None:
        """Do what :meth:`Notifications.wait` does without blocking."""
        event = self.waiters.join(waiter)
        self._listen()
        with suppress(TimeoutError):
            async with asyncio.timeout(told if self.waiters.told else seconds):
                await event.wait()

    async def aclose(self) -> None:
        """Drop the connections."""
        tasks = self._stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        if not self._tasks:
            self._tasks = [
                loop.create_task(self._read(number), name="django_redlock notifications")
                for number, node in enumerate(self._nodes)
                if node.calls
            ]
        if self._end:
            self._end.cancel()
        self._end = loop.call_later(LINGER, self._end_if_unused)

    def _end_if_unused(self) -> None:
        if len(self.waiters):
            self._listen()
        else:
            self._stop()

    def _stop(self) -> list[asyncio.Task[None]]:
        if self._end:
            self._end.cancel()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        return tasks

    async def _read(self, node: int) -> None:
        loop = asyncio.get_running_loop()

        def notification(name: str) -> None:
            self.waiters.notification(node, name)

        while True:
            try:
                link = await self._nodes[node].alisten(
                    self.waiters.process, CONNECT_TIMEOUT, lambda name: loop.call_soon_threadsafe(notification, name)
                )
            except LinkError:
                await asyncio.sleep(RETRY)
                continue
            except Exception:  # whatever it was, it may not be so the next time
                log.exception("listening to %s failed", self._nodes[node].name)
                await asyncio.sleep(RETRY)
                continue
            self.waiters.reached(node)
            try:
                while True:
                    for name in await link.read():
                        notification(name)
            except LinkError:
                pass
            finally:
                self.waiters.listening.discard(node)
                link.close()
