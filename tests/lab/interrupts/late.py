"""
The code to interrupt: what happens only if replies, connections or other threads come at a certain moment.

A script makes them come at that moment: replies are held back until they are looked for a second time, a clock jumps
while one is awaited, a container is found empty as if another thread had been quicker.
"""

import asyncio
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from django_redlock import LockLostError, LockTakenError, QuorumUnavailableError
from django_redlock.core.acquisition import Waiter
from django_redlock.core.admission import Admission
from django_redlock.core.protocol import Failure, Release, Survey, failed
from django_redlock.core.round import Round
from django_redlock.core.rules import Rules
from django_redlock.engine import connections as idle
from django_redlock.engine import notifications
from django_redlock.engine import watchdog as renewal
from django_redlock.engine.connections import ConnectionSet, IdleConnections
from django_redlock.engine.manager import LockManager
from django_redlock.engine.notifications import Waiters
from django_redlock.engine.rounds import Gather
from django_redlock.engine.watchdog import Sent, UnattendedReleases
from django_redlock.nodes.base import INCOMPLETE, LinkError
from django_redlock.nodes.clock import steady
from django_redlock.nodes.gevent import Here
from django_redlock.nodes.memory import MemoryLink, MemoryNode
from django_redlock.nodes.threads import Background

from .background import Unfit
from .scenarios import TTL, Scenario, acquired, aside, fail, held, mend, overdue, taken, unfit

# Rounds whose replies come late


class LateNode(MemoryNode):
    """A node in memory whose links have a descriptor; each step of its script replaces one look at a reply."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.script: deque[Callable[[], Any]] = deque()

    def connect(self, timeout: float) -> MemoryLink:
        return LateLink(self)


class LateLink(MemoryLink):
    def __init__(self, node: LateNode) -> None:
        super().__init__(node)
        self._script = node.script
        self._ours, self._theirs = socket.socketpair()

    def fileno(self) -> int:
        return self._ours.fileno()

    def send(self, request: Any, packed: dict[int, bytes], *, in_full: bool = False) -> None:
        super().send(request, packed, in_full=in_full)
        self._theirs.send(b".")

    def receive(self, request: Any) -> Any:
        step = self._script.popleft() if self._script else None
        if step and (said := step()) is INCOMPLETE:
            return said
        reply = super().receive(request)
        if reply is not INCOMPLETE:
            self._ours.recv(1)
        return None if step else reply

    def close(self) -> None:
        super().close()
        self._ours.close()
        self._theirs.close()


class LateReplies:
    """
    Rounds over three nodes of its own, whose replies come as their scripts say.

    Args:
        lease: A lease of the lock.
    """

    def __init__(self, lease: Any) -> None:
        self._lease = lease
        self._ahead = 0.0
        self._nodes = [LateNode(f"late {number}") for number in range(3)]
        rules = Rules(3, restart_guard=False)
        admission = Admission(rules, tuple(node.name for node in self._nodes), self._now, time.time)
        self.gather = Gather(self._nodes, admission, self._now)

    def _now(self) -> float:
        return steady() + self._ahead

    def _pass(self, seconds: float) -> Any:
        self._ahead += seconds
        return INCOMPLETE

    def _later(self) -> Any:
        return INCOMPLETE

    def _forgotten(self) -> Any:
        """Let the node say that it does not know the script."""
        return None

    def _lost(self) -> Any:
        raise LinkError(Failure.RESET)

    def ask(self, needed: int, *nodes: int, **options: Any) -> tuple[Round, ConnectionSet]:
        """Carry out a round; return it and the connections that carried it."""
        requests = dict.fromkeys(nodes or range(3), Survey(("{late}",)))
        round = Round(requests, lambda replies: len(replies) >= needed, 1.0, needed, **options)
        connections = self.gather.ask(round)
        assert connections
        return round, connections

    def run(self) -> None:
        """Have every kind of reply come late."""
        one, two, three = (node.script for node in self._nodes)
        self.ask(3)
        self._at_the_end_of_the_time(one, two, three)
        self._while_another_round_begins(three)
        self._while_a_decided_round_waits_for_a_link(three)
        self._to_a_round_that_nobody_waits_for()

    def _at_the_end_of_the_time(self, *scripts: deque[Callable[[], Any]]) -> None:
        for script in scripts:
            script.append(self._later)
        scripts[0][0] = lambda: self._pass(2.0)
        self.ask(3)

    def _while_another_round_begins(self, script: deque[Callable[[], Any]]) -> None:
        for said in (self._later, self._forgotten, self._lost):
            script.extend((self._later, said))
            self.ask(2)
            self._ahead += 0.05  # too long to send without a look at the reply
            self.ask(2)
            self.ask(3)

    def _while_a_decided_round_waits_for_a_link(self, script: deque[Callable[[], Any]]) -> None:
        _, connections = self.ask(3)

        def arrive() -> Any:
            for node in (0, 3):  # one has answered, and one was not asked
                connections.deliver(node, LinkError(Failure.REFUSED))
            return INCOMPLETE

        connections.expect(3)
        script.extend((self._later, arrive))
        self.ask(2, mending=True)

    def _to_a_round_that_nobody_waits_for(self) -> None:
        round, connections = self.ask(3)
        in_use = self.gather.idle.take(self._now())
        self.gather.attend(in_use, round, 0.0)
        self.gather.idle.give_back(in_use)
        connection = connections.by_node[2]
        connections.drop(connection)
        connection.link.close()
        unanswered = Round({2: Survey(("{late}",))}, lambda replies: False, 0.0, unattended=True)
        self.gather.attend(connections, unanswered, self._now() + 60.0, wait=True)

    def release(self) -> None:
        """Check that all nodes answer a round; then release the lease."""
        for node in self._nodes:
            node.script.clear()
        self._ahead += 120.0
        round, _ = self.ask(3)
        assert len(round.replies) == 3, round.replies
        self.gather.close()
        self._lease.release()


def late_replies(manager: Any, lock: Any, prepared: LateReplies) -> None:
    prepared.run()


def with_late_nodes(manager: Any, lock: Any) -> LateReplies:
    return LateReplies(lock.acquire())


def closed_by_server(manager: Any, lock: Any, prepared: Any) -> None:
    """Find that a node has closed a connection which has been idle."""
    fail(manager, "down", 1)
    with lock:
        mend(manager)


# Races


class Emptied(list[Any]):
    """A list whose elements another thread takes as soon as it has been looked at."""

    def pop(self, index: Any = -1) -> Any:
        self.clear()
        raise IndexError


class EmptiedQueue(deque[Any]):
    """The same of a queue."""

    def popleft(self) -> Any:
        self.clear()
        raise IndexError


class Added(list[Any]):
    """A list to which another thread adds once, just as its end is reached."""

    added = False

    def pop(self, index: Any = -1) -> Any:
        if not self and not self.added:
            self.added = True
            self.append(lambda lease: None)
            raise IndexError
        return super().pop(index)


class Tends:
    """A watchdog that is given a lease just after it had none."""

    def __init__(self) -> None:
        self._asked = 0

    def tends(self, keeper: Any) -> bool:
        self._asked += 1
        return self._asked > 1

    def watch(self, tended: Any) -> None:
        """Do nothing."""

    forget = watch


def races(manager: Any, lock: Any, lease: Any) -> None:
    """Find that another thread was quicker."""
    with patch.object(manager.driver.gather.breakers, "news", EmptiedQueue([None])):
        manager.driver.follow_up(Round({}, lambda replies: True, 0.0))
    old = ConnectionSet()
    IdleConnections._trim(Emptied([old]), 1e9)
    heartbeat = manager.driver.heartbeat
    with patch.object(heartbeat, "_dog", Tends()):
        heartbeat.join()
        heartbeat.valid()
    waiter = Waiter("a waiter", 1)
    waiter.recall()
    Waiters(1, threading.Event).join(waiter)
    lease.hold.slack  # noqa: B018
    lease._loss._callbacks = Added()
    lease.on_lost(lambda lease: None)
    lease.hold.deadline = 0.0
    with suppress(LockLostError):
        lease.ensure()


def sent(manager: Any, lock: Any, lease: Any) -> None:
    """Look at releases that are over, and at none."""
    driver = manager.driver  # whose own ones the sweep counts
    unattended = UnattendedReleases(driver.gather, driver.follow_up, renewal.watchdog, steady)
    unattended.due()
    round = Round({0: Release((), "0" * 32)}, lambda replies: False, 0.0, unattended=True)
    round.close()
    unattended._over.append(Sent(round, weakref.ref(ConnectionSet()), 0.0, 0.0, lambda round: None))
    unattended.due()
    unattended.look()


def by_thread(manager: Any, lock: Any, prepared: Any) -> None:
    """Keep connections apart by thread, as under gevent."""
    unused, thread = IdleConnections(), Here()
    unused._by_thread = weakref.WeakKeyDictionary()
    with patch.object(idle, "here", lambda: thread):
        unused.give_back(unused.take(0.0))
        unused.take(0.0)
        unused.close()


def split(manager: Any, lock: Any, prepared: Any) -> None:
    """Repeat an attempt because the vote was split, without a place in the queue."""
    with closing(LockManager(manager.nodes, replace(manager.rules, node_timeout=0.02))) as hasty:
        with suppress(LockTakenError, QuorumUnavailableError):
            hasty.lock(lock.name, wait=0).acquire().release()


async def asplit(manager: Any, lock: Any, prepared: Any) -> None:
    """Do the same in an event loop."""
    hasty = LockManager(manager.nodes, replace(manager.rules, node_timeout=0.02))
    with suppress(LockTakenError, QuorumUnavailableError):
        await (await hasty.lock(lock.name, wait=0).aacquire()).arelease()
    await hasty.aclose()


class Others:
    """
    Two holders of the lock that have one node each, if the nodes are in memory.

    Args:
        manager: The manager with the nodes.
        lock: The lock.
    """

    def __init__(self, manager: Any, lock: Any) -> None:
        self._managers = [
            LockManager([node], Rules(1, ttl=2 * TTL, restart_guard=False))
            for node in manager.nodes[:2]
            if type(node) is MemoryNode
        ]
        self._leases = [each.lock(lock.name, wait=0, renew=False).acquire() for each in self._managers]

    def release(self) -> None:
        """Release both."""
        for lease in self._leases:
            lease.release()
        for manager in self._managers:
            manager.close()


# Notifications


class BrokenLink:
    """A connection for notifications that breaks when it is read."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair()
        self._theirs.close()

    def fileno(self) -> int:
        return self._ours.fileno()

    def read(self) -> list[str]:
        raise LinkError(Failure.RESET)

    def close(self) -> None:
        self._ours.close()


class AsyncBrokenLink(BrokenLink):
    """The same for an event loop, after it has notified somebody who waits no longer."""

    read_before = False

    async def read(self) -> list[str]:  # type: ignore[override]
        if self.read_before:
            raise LinkError(Failure.RESET)
        self.read_before = True
        return ["nobody"]


@contextmanager
def listening(manager: Any, *ways: Callable[..., Any]) -> Iterator[None]:
    """Have the nodes listened to in these ways, one after the other, then as always."""
    left = deque(ways)

    def way_of(node: Any) -> Callable[..., Any]:
        listen = node.listen
        return lambda *arguments: (left.popleft() if left else listen)(*arguments)

    with ExitStack() as stack:
        for node in manager.nodes:
            if type(node) is MemoryNode:
                stack.enter_context(patch.object(node, "listen", way_of(node)))
        yield


def listen(manager: Any, lock: Any, prepared: Any) -> None:
    """Wait over connections that break, that cannot be made, and that come when they are no longer needed."""
    driver = manager.driver

    def too_late(*arguments: Any) -> BrokenLink:
        driver.notifications.close()
        return BrokenLink()

    for ways in ((lambda *arguments: BrokenLink(), unfit), (too_late,)):
        driver.notifications.close()
        with listening(manager, *ways), suppress(LockTakenError):
            manager.lock(lock.name, wait=0.03).acquire().release()
    with suppress(LockTakenError):
        manager.lock(lock.name, wait=0.01).acquire().release()
    if driver.notifications._listener:
        driver.notifications._listener._used = -1e9  # nobody has waited for long
    with suppress(LockTakenError):
        manager.lock(lock.name, wait=0.01).acquire().release()


async def alisten(manager: Any, lock: Any, prepared: Any) -> None:
    """Wait over connections that break or cannot be made, and for longer than they are kept for nobody."""

    async def broken(*arguments: Any) -> AsyncBrokenLink:
        return AsyncBrokenLink()

    async def failing(*arguments: Any) -> Any:
        raise ValueError("a node has a defect")

    await manager.driver.loop_side().notifications.aclose()
    with ExitStack() as stack:
        stack.enter_context(patch.object(notifications, "LINGER", 0.005))
        stack.enter_context(patch.object(notifications, "RETRY", 0.005))
        for node, way in zip(manager.nodes[1:], (broken, failing), strict=True):
            if type(node) is MemoryNode:
                stack.enter_context(patch.object(node, "alisten", once(way, node.alisten)))
        async with lock:
            pass


def once(way: Callable[..., Any], listen: Callable[..., Any]) -> Callable[..., Any]:
    ways = deque([way])
    return lambda *arguments: (ways.popleft() if ways else listen)(*arguments)


# Watchdogs and connections of an event loop


class Calling(Background):
    """A thread that is always the calling one."""

    here = True  # type: ignore[assignment]


def apart(manager: Any, lock: Any, prepared: Any) -> None:
    """Have the thread of a watchdog leave a call to another thread."""
    dog, called = renewal.Watchdog(), threading.Event()
    dog._thread.__class__ = Calling
    dog.apart(called.set)
    assert called.wait(TTL)


class Fatal(BaseException):
    """An error that ends a task."""


async def atended(manager: Any, lock: Any, prepared: Any) -> None:
    """Have the task of a watchdog cancelled, and end with an error."""
    dog = renewal.AsyncWatchdog()
    for fatal in (False, True):
        unfit = Unfit(Fatal if fatal else ValueError)
        unfit.due = lambda: 0.0  # type: ignore[method-assign]
        with patch.object(renewal, "TICK", 0.01):
            dog.watch(unfit)
            dog._look()
            if dog._task and not fatal:
                dog._task.cancel()
            if dog._task:
                await asyncio.wait([dog._task])
            await asyncio.sleep(0)
        dog.forget(unfit)
        dog.rest()
    async with lock:
        pass


async def aclose_early(manager: Any, lock: Any, prepared: Any) -> None:
    """Close the connections while one is being made."""

    async def in_vain(timeout: float) -> Any:
        await asyncio.sleep(timeout)
        raise LinkError(Failure.TIMEOUT)

    await manager.aclose()
    with patch.object(manager.nodes[1], "aconnect", in_vain):
        with suppress(QuorumUnavailableError):
            await (await aside(manager, wait=0).aacquire()).arelease()
        await manager.aclose()
    async with lock:
        pass


class Slow:
    """A link to a server whose reply to a redelivered release is there at the second look."""

    def __init__(self) -> None:
        self._here, self._there = socket.socketpair()
        self._there.send(b".")
        self._looks: list[Any] = [INCOMPLETE, failed(Failure.TIMEOUT)]

    def fileno(self) -> int:
        return self._here.fileno()

    def receive(self, request: Any) -> Any:
        return self._looks.pop(0)

    def close(self) -> None:
        self._here.close()
        self._there.close()


def await_redelivered(manager: Any, lock: Any, lease: Any) -> None:
    """Wait for the reply to a release that is redelivered."""
    with closing(Slow()) as slow:
        manager.driver.redelivery._await(slow, Release(lease.hold._slugs, lease.secret, TTL))


LATE = [
    Scenario("redelivered, answered late", await_redelivered, acquired),
    Scenario("late replies", late_replies, with_late_nodes),
    Scenario("closed by the server", closed_by_server, overdue),
    Scenario("races", races, acquired),
    Scenario("sent and over", sent),
    Scenario("by thread", by_thread),
    Scenario("split vote", split, Others),
    Scenario("listen", listen, held),
    Scenario("apart", apart),
]

ASYNC_LATE = [
    Scenario("async split vote", asplit, Others),
    Scenario("async listen", alisten, taken),
    Scenario("async tended", atended),
    Scenario("async close early", aclose_early),
]
