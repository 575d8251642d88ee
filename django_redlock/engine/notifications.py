"""
Notify the waiters of this process of their turn (internal).

A node that frees a lock publishes the name of the first waiter in the queue, on a channel of that waiter's process. One
connection per process and node listens, whatever the number of waiters. The connection is made when a caller first has
to wait, and again if nobody has waited for a while. A notification only makes a waiter ask sooner, so a lost one does
no harm.
"""

import asyncio
import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import ceil
from typing import Generic, TypeVar

from ..core.acquisition import Waiter
from ..core.names import in_one_word
from ..core.protocol import Failure
from ..core.votes import is_quorum
from ..nodes.base import LinkError, Node, NotificationLink
from ..runtime.clock import Clock
from ..runtime.poll import READABLE, poller
from ..runtime.process import HOST
from ..runtime.threads import new_event, start
from .connections import CONNECT_TIMEOUT, WakeUp

LINGER = 10.0  # seconds without waiters after which the connections are no longer trusted
RETRY = 1.0  # seconds between two attempts to reach a node

log = logging.getLogger("django_redlock")


Event = TypeVar("Event", threading.Event, asyncio.Event)


class Notifications:
    """
    The notifications of an alias to the threads of this process.

    Args:
        nodes: The nodes, in the order of the settings.
        needed: How many nodes make a quorum.
        clock: Returns seconds on a steady clock.
    """

    def __init__(self, nodes: Sequence[Node], needed: int, clock: Clock) -> None:
        self.waiters: Waiters[threading.Event] = Waiters(needed, new_event)
        self._nodes = nodes
        self._clock = clock
        self._mutex = threading.RLock()  # reentrant, as that of the listener
        self._listener: Listener | None = None

    def wait(self, waiter: Waiter, seconds: float, notified: float) -> None:
        """
        Block until *waiter* is notified.

        Args:
            waiter: The waiter.
            seconds: How long to wait at most if too few nodes can notify it.
            notified: How long to wait at most, in seconds, if enough nodes can.
        """
        bell = self.waiters.join(waiter)
        try:
            listener = self._listen()
        except OSError:  # this process has too many open files for the connections of a listener
            bell.wait(seconds)
            return
        listener.wait(waiter, bell, self._clock() + (notified if self.waiters.notifies(waiter) else seconds))

    def _listen(self) -> "Listener":
        """Return the connections, or new ones if these have not been used for long."""
        with self._mutex:
            listener = self._listener
            if listener is None or listener.forgotten():
                if listener:
                    listener.close()
                listener = self._listener = Listener(self._nodes, self.waiters, self._clock)
            return listener

    def forked(self) -> None:
        """In a forked child, drop what belongs to the parent, whose other threads may have held the mutex."""
        self._mutex = threading.RLock()
        if self._listener:
            self._listener.forked()
        self.close()

    def close(self) -> None:
        """Drop the connections; a waiter that waits now does so until its pause ends."""
        with self._mutex:
            listener, self._listener = self._listener, None
        if listener:
            listener.close()


class Listener:
    """
    The connections that bring notifications, and the waiter that reads them.

    The first waiter *leads*: its thread reads for all of them. When it is notified or stops waiting, another waiter
    takes over. A thread of its own would have to be woken for every notification, and would then wake the waiter. That
    would be two more thread switches between one holder and the next.
    """

    def __init__(self, nodes: Sequence[Node], waiters: "Waiters[threading.Event]", clock: Clock) -> None:
        self._nodes = nodes
        self._waiters = waiters
        self._clock = clock
        # Guards the leader, and whether the connections are still in use. Reentrant, because a signal handler may run
        # in a thread that has it, and wait for a lock itself.
        self._mutex = threading.RLock()
        self._leader: Waiter | None = None
        self._closed = False
        self._bells: dict[str, threading.Event] = {}  # of the threads that wait at this moment
        self._used = clock()
        self._links: dict[int, NotificationLink] = {}
        self._arrived: deque[tuple[int, NotificationLink | LinkError]] = deque()
        self._connecting: set[int] = set()
        self._again = {number: 0.0 for number, node in enumerate(nodes) if node.calls}
        self._wakeup = WakeUp()

    def forgotten(self) -> bool:
        """Return whether the connections were closed, or unused for longer than firewalls keep them open."""
        return self._closed or (not self._bells and self._clock() - self._used > LINGER)

    def wait(self, waiter: Waiter, bell: threading.Event, until: float) -> None:
        """Block until *waiter* is notified or the time is *until*."""
        try:
            self._bells[waiter.name] = bell  # before the check for a leader, which may be about to stop
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
        """Return whether the lead is free; a leader that was interrupted as it stopped no longer leads."""
        return self._leader is None or self._leader.name not in self._bells

    def _step_down(self, waiter: Waiter) -> None:
        """Pass the lead to another waiter, even if this one was only about to take it."""
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
        """Drop the connections, or have the thread that reads them do it."""
        with self._mutex:
            self._closed = True
            self._waiters.listening.clear()  # now, because the new connections fill it again
            if self._nobody_leads():
                self._drop_all()
            else:
                self._wakeup.ring()

    def forked(self) -> None:
        """Note in a forked child that nobody leads, and that the mutex is free."""
        self._mutex, self._leader = threading.RLock(), None

    def _read(self, left: float) -> None:
        """Wait for an event for at most *left* seconds, and deal with it."""
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
            self._again[node] = now + RETRY  # even if the link ends at once: a node must not keep this thread busy
            try:
                if self._nodes[node].instant:
                    self._connect(node)
                else:
                    start(partial(self._connect, node), "django_redlock connect")
            except RuntimeError:  # too many threads; a waiter asks again by itself
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
            log.exception("listening to lock node %s failed", self._nodes[node].name)
            link = LinkError(Failure.UNREACHABLE)
        self._arrived.append((node, link))
        self._wakeup.ring()
        if self._closed:
            self._drop_arrivals()  # because no other thread would

    def _called_elsewhere(self, node: int, name: str) -> None:
        """Pass on a notification from any thread, and wake the thread that reads."""
        self._waiters.notification(node, name)
        self._wakeup.ring()

    def _take_arrivals(self) -> None:
        for arrival in self._arrived.copy():
            node, link = arrival  # it stays there until it is in use, because this may be interrupted
            if isinstance(link, LinkError):
                self._again[node] = self._clock() + RETRY
            else:
                self._links[node] = link
                with self._mutex:
                    if not self._closed:
                        self._waiters.reached(node)
            self._connecting.discard(node)
            with suppress(ValueError):  # the manager was closed, and the thread that connected has dropped it
                self._arrived.remove(arrival)

    def _poll(self, left: float) -> list[int]:
        """Wait for an event; return the nodes whose connections can be read."""
        if self._arrived:
            return []
        poll = poller()
        poll.register(self._wakeup, READABLE)
        nodes: dict[int, int] = {}
        for node, link in self._links.items():
            with suppress(LinkError):
                if link.fileno() >= 0:
                    nodes[link.fileno()] = node
                    poll.register(link.fileno(), READABLE)
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
        needed: How many nodes make a quorum.
    """

    def __init__(self, nodes: Sequence[Node], needed: int) -> None:
        self.waiters: Waiters[asyncio.Event] = Waiters(needed, asyncio.Event)
        self._nodes = nodes
        self._tasks: list[asyncio.Task[None]] = []
        self._end: asyncio.TimerHandle | None = None

    async def wait(self, waiter: Waiter, seconds: float, notified: float) -> None:
        """Do what :meth:`Notifications.wait` does without blocking."""
        event = self.waiters.join(waiter)
        self._listen()
        with suppress(TimeoutError):
            async with asyncio.timeout(notified if self.waiters.notifies(waiter) else seconds):
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

        again = 0.0
        while True:
            await asyncio.sleep(again - loop.time())  # a node that ends each link at once must not keep the loop busy
            again = loop.time() + RETRY
            try:
                link = await self._nodes[node].alisten(
                    self.waiters.process, CONNECT_TIMEOUT, lambda name: loop.call_soon_threadsafe(notification, name)
                )
            except LinkError:
                continue
            except Exception:  # whatever it was, the next try may succeed
                log.exception("listening to lock node %s failed", self._nodes[node].name)
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


class Waiters(Generic[Event]):
    """
    The waiters of this process, or of one event loop, by the names that the nodes know.

    Args:
        needed: How many nodes must be listened to so that a waiter can rely on notifications.
        event: Makes the event that a waiter waits for.
    """

    def __init__(self, needed: int, event: Callable[[], Event]) -> None:
        # Nodes publish to this name. Random bits distinguish two processes with the same host name and process id, as
        # in containers; the host is for people who look at the queue.
        host = HOST.replace("|", "-").replace(" ", "-")
        self.process = f"{host}:{os.getpid()}.{os.urandom(6).hex()}"
        self.listening: set[int] = set()
        self._needed = needed
        self._event: Callable[[], Event] = event
        self._numbers = itertools.count(1)
        self._expected: dict[str, Waiter] = {}
        self._waiting: dict[str, tuple[Waiter, Event]] = {}

    def new_name(self, label: str = "") -> str:
        """Return a name for one more waiter, with the *label* of its work, for people."""
        name = f"{self.process}|{next(self._numbers)}"
        return f"{name}|{in_one_word(label)}" if label else name

    @property
    def notified(self) -> bool:
        """Whether enough nodes can notify a waiter of its turn."""
        return is_quorum(len(self.listening), self._needed)

    def notifies(self, waiter: Waiter) -> bool:
        """Return whether enough nodes can notify *waiter*: they notify those whose names begin with this process."""
        return self.notified and waiter.name.startswith(f"{self.process}|")

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, waiter: Waiter) -> None:
        """
        Take notifications for a waiter that asks for the first time and may have to wait.

        A node queues the waiter when it refuses the lock, and may notify the waiter before that reply has been read.
        """
        if self.listening and waiter.name:
            self._expected[waiter.name] = waiter

    def join(self, waiter: Waiter) -> Event:
        """Let *waiter* wait; return the event that is set when it is notified."""
        if waiter.name not in self._waiting:
            self._waiting[waiter.name] = (waiter, self._event())
        event = self._waiting[waiter.name][1]
        event.clear()
        if waiter.called:
            event.set()
        return event

    def leave(self, waiter: Waiter) -> None:
        """Forget *waiter*."""
        self._expected.pop(waiter.name, None)
        self._waiting.pop(waiter.name, None)

    def notification(self, node: int, name: str) -> None:
        """Pass on a node's notification that a waiter is first in the queue."""
        waiter, event = self._waiting.get(name, (self._expected.get(name), None))
        if waiter and waiter.hear(node) and event:
            event.set()

    def reached(self, node: int) -> None:
        """
        Note that a node is listened to from now on.

        Once enough nodes are, all waiters ask again, in case they missed a notification.
        """
        before = self.notified
        self.listening.add(node)
        if self.notified and not before:
            for waiter, event in list(self._waiting.values()):
                waiter.recall()
                event.set()
