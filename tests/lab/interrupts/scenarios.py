"""The code to interrupt: what blocking callers do with a lock."""

import asyncio
import threading
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import redis

from django_redlock import LockLostError, LockTakenError, QuorumUnavailableError
from django_redlock.core.protocol import Failure, Release
from django_redlock.core.round import Round
from django_redlock.engine import rounds
from django_redlock.engine.connections import ConnectionSet, IdleConnections
from django_redlock.engine.lease import fence_out, passed_on, resume_renewal, stop_renewal
from django_redlock.engine.lock import Block
from django_redlock.engine.manager import LockManager
from django_redlock.engine.reentrancy import Waiting, this_thread
from django_redlock.engine.watchdog import Watchdog, note_drops, release_abandoned
from django_redlock.nodes import threads
from django_redlock.nodes.base import LinkError
from django_redlock.nodes.clock import steady
from django_redlock.nodes.memory import MemoryNode

TTL = 2.0  # seconds
LATEST = 20.0  # seconds after which something counts as hanging
METHODS = ("connect", "aconnect", "listen", "alisten")  # of a node, which connect to it


class Scenario(NamedTuple):
    """
    The code to interrupt.

    Args:
        name: Its name.
        run: Runs it, or returns a coroutine that does; gets the manager, the lock, and what *prepare* returned.
        prepare: Runs before it, and is not interrupted. Its result is released at the end, if it is not None.
    """

    name: str
    run: Callable[[Any, Any, Any], Any]
    prepare: Callable[[Any, Any], Any] = lambda manager, lock: None


class Prepared(NamedTuple):
    """
    What a scenario needs.

    Args:
        lease: A lease of the scenario's own.
        others: Further leases to release at the end.
    """

    lease: Any
    others: tuple[Any, ...] = ()

    def release(self) -> None:
        """Release everything."""
        for each in (self.lease, *self.others):
            each.release()


def eventually(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + LATEST
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def variant(lock: Any, **options: Any) -> Any:
    """Return another lock of the same name."""
    return lock.description().manager.lock(lock.name, **{"ttl": TTL, "wait": 10 * TTL, **options})


class Waiter:
    """
    A thread that waits for a lock.

    Args:
        lock: The lock.
        lease: Keeps the thread waiting.
    """

    def __init__(self, lock: Any, lease: Any) -> None:
        self.lease = lease
        self._thread = threading.Thread(target=lambda: variant(lock).acquire().release(), daemon=True)
        self._thread.start()
        waiters = lock.description().manager.driver.notifications.waiters
        until = time.monotonic() + LATEST
        while not len(waiters) and time.monotonic() < until:
            time.sleep(0.002)

    def release(self) -> None:
        """Let the thread have the lock, and wait until it has ended."""
        self.lease.release()
        self._thread.join(LATEST)
        assert not self._thread.is_alive(), "a waiter hangs"


class LoopThread:
    """
    A lease of a task, and its event loop, which runs in a thread of its own.

    Args:
        lock: The lock.
    """

    def __init__(self, lock: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.lease = self._call(lock.aacquire())
        self._manager = lock.description().manager
        self.event = self.lease.lost

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LATEST)

    def release(self) -> None:
        """Check that the task is notified; then release the lease and end."""
        self._call(asyncio.wait_for(self.event.wait(), LATEST))
        self._call(self.lease.arelease())
        self._call(self._manager.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LATEST)
        self._loop.close()


def aside(manager: Any, **options: Any) -> Any:
    """Return a lock whose name nobody else uses, and which may be left to its ttl."""
    return manager.lock(f"aside {uuid.uuid4()}", **{"ttl": TTL, "wait": 10 * TTL, **options})


def tell(manager: Any, *command: str) -> None:
    """Send a command to the nodes, if all are servers that run."""
    if not any(isinstance(node, MemoryNode) for node in manager.nodes):
        for node in manager.nodes:
            host, _, port = node.name.rpartition(":")
            with closing(redis.Redis(host, int(port))) as client:
                client.execute_command(*command)


def unfit(*arguments: Any) -> Any:
    raise ValueError("a node has a defect")


def fail(manager: Any, fault: str, nodes: int) -> None:
    """Set a fault of as many nodes, if all are in memory and work; the sweep mends them at the end of the scenario."""
    if all(type(node) is MemoryNode for node in manager.nodes):
        for node in manager.nodes[:nodes]:
            if fault == "defect":
                node.__dict__ |= dict.fromkeys(METHODS, unfit)
            else:
                setattr(node, fault, True)


def mend(manager: Any) -> None:
    """End all faults."""
    for node in manager.nodes:
        if isinstance(node, MemoryNode):
            node.down = node.silent = node.deaf = False
            for method in METHODS:
                node.__dict__.pop(method, None)
    for breaker in manager.driver.gather.breakers:
        breaker.until = breaker.tried = 0.0


# Prepared


def acquired(manager: Any, lock: Any) -> Any:
    return lock.acquire()


def held(manager: Any, lock: Any) -> Any:
    """Let another owner hold the lock."""
    return manager.lock(lock.name, wait=10 * TTL, renew=False).acquire()


def taken(manager: Any, lock: Any) -> Any:
    """Let another owner hold the lock for a moment, so that the scenario waits for it."""
    lease = manager.lock(lock.name, wait=10 * TTL, ttl=TTL, renew=False).acquire()
    threading.Timer(0.1, lease.release).start()
    return lease


def taken_anew(manager: Any, lock: Any) -> Any:
    """Do the same without connections to listen on, and with another waiter that comes soon."""
    manager.driver.notifications.close()
    lease = taken(manager, lock)
    threading.Timer(0.03, lambda: variant(lock).acquire().release()).start()
    return lease


def queued(manager: Any, lock: Any) -> Any:
    """Let another owner hold the lock for a moment, and another thread wait for it and read the notifications."""
    lease = manager.lock(lock.name, wait=10 * TTL, ttl=TTL, renew=False).acquire()
    waiter = Waiter(lock, lease)
    threading.Timer(0.1, lease.release).start()
    return waiter


def awaited(manager: Any, lock: Any) -> Any:
    """Hold a lock that another thread waits for."""
    return Waiter(lock, lock.acquire())


def in_a_loop(manager: Any, lock: Any) -> Any:
    return LoopThread(lock)


def closing_soon(manager: Any, lock: Any) -> Any:
    """Let another owner hold the lock for a moment, and another thread close the connections meanwhile."""
    threading.Timer(0.05, manager.driver.notifications.close).start()
    return taken(manager, lock)


def usurped(manager: Any, lock: Any) -> Any:
    """Have a lease whose lock another owner took."""
    lease = variant(lock, renew=False).acquire()
    manager.release(lock.name, lease.secret)
    return Prepared(lease, (variant(lock, renew=False).acquire(),))


def overdue(manager: Any, lock: Any) -> None:
    """Have idle connections that count as unused for long."""
    lock.acquire().release()
    for connections in manager.driver.gather.idle.sets:
        connections.used = -1e9


def dropped_block(manager: Any, lock: Any) -> None:
    """Leave a block as an exception does that comes before the first line of its end."""
    way_out = lock.__exit__
    lock.__enter__()
    del way_out


# Run


def enter(manager: Any, lock: Any, prepared: Any) -> None:
    with lock:
        pass


def by_hand(manager: Any, lock: Any, prepared: Any) -> None:
    lease = lock.acquire()
    lease.extend()
    lease.names, lease.ttl, lease.waited, lease.remaining(), repr(lease)
    lease.release()
    lease.release()


def extend(manager: Any, lock: Any, lease: Any) -> None:
    lease.extend()


def release(manager: Any, lock: Any, lease: Any) -> None:
    lease.release()


def send(manager: Any, lock: Any, lease: Any) -> None:
    lease.release(wait=False)


def look(manager: Any, lock: Any, lease: Any) -> None:
    """Send two releases, and read the replies to them."""
    lease.release(wait=False)
    with aside(manager, release="send"):
        pass
    manager.driver.unattended.extend([])
    manager.driver.unattended.look(wait=True)


def lose(manager: Any, lock: Any, lease: Any) -> None:
    with suppress(LockLostError):
        lease.ensure(margin=99.0)
    lease.on_lost(lambda lease: None)
    lease.lost.is_set()
    lease.hold.deadline = 0.0
    lease.hold.check(steady())
    lease.hold.due()
    with suppress(LockLostError):
        lease.ensure()
    lease.on_lost(lambda lease: None)
    lease.on_lost(raising)
    with suppress(LockLostError):
        lease.ensure(margin=1.0)
    other = aside(manager, renew=False).acquire()
    other.hold.deadline = 0.0
    other.valid()
    other.lost.is_set()


def raising(lease: Any) -> None:
    raise ValueError("a callback fails")


def lose_in_block(manager: Any, lock: Any, prepared: Any) -> None:
    """End blocks whose lock was lost: by the clock, and by the nodes' replies to the release."""
    for options in ({}, {"release": "send"}):
        with suppress(LockLostError), variant(lock, **options) as lease:
            lease.on_lost(lambda lease: None)
            lease.hold.deadline = 0.0
    with suppress(LockLostError), variant(lock, renew=False) as lease:
        manager.release(lock.name, lease.secret)
    lease = lock.acquire()
    with suppress(LockLostError), lease:
        lease.hold.deadline = 0.0
    with lock as lease:
        lease.release()


def lose_unnoticed(manager: Any, lock: Any, lease: Any) -> None:
    """Send the release of a lock that the nodes have lost."""
    manager.release(lock.name, lease.secret)
    lease.release(wait=False)
    manager.driver.unattended.look(wait=True)


def lose_elsewhere(manager: Any, lock: Any, loop: LoopThread) -> None:
    """Notice the loss of a task's lease in a thread."""
    loop.lease.hold.deadline = 0.0
    loop.lease.valid()


def release_to_waiter(manager: Any, lock: Any, waiter: Waiter) -> None:
    waiter.lease.release()


def close_on_waiter(manager: Any, lock: Any, waiter: Waiter) -> None:
    """Close the connections while another thread reads the notifications."""
    manager.driver.notifications.close()
    len(manager.driver.notifications.waiters)
    waiter.lease.release()


def barge(manager: Any, lock: Any, prepared: Any) -> None:
    """Wait without a place in the queue."""
    with variant(lock, barge=True):
        pass


def refused(manager: Any, lock: Any, prepared: Prepared) -> None:
    """Have an extension refused, which ends the lease."""
    prepared.lease.lost.is_set()
    prepared.lease.extend()
    with suppress(LockLostError):
        prepared.lease.ensure()


def stopped(manager: Any, lock: Any, lease: Any) -> None:
    """Have an extension refused, because an operator asked the holder to stop."""
    tombstone = Release((), lease.secret, TTL, revoke=True)
    manager.ask(Round(dict.fromkeys(range(len(manager.nodes)), tombstone), lambda replies: False, 0.4))
    lease.extend()
    with suppress(LockLostError):
        lease.ensure()


def unknown(manager: Any, lock: Any, lease: Any) -> None:
    """Extend and release while two nodes are silent; then they answer again."""
    fail(manager, "silent", 2)
    lease.extend()
    lease.release()
    mend(manager)


def unavailable(manager: Any, lock: Any, prepared: Any) -> None:
    """Give up, because too few nodes can be reached."""
    for fault in ("down", "defect"):
        fail(manager, fault, 3)
        with suppress(QuorumUnavailableError, LockTakenError):
            manager.lock(lock.name, wait=0.1).acquire().release()
        mend(manager)
        manager.driver.gather.close()


def tried_by_another(manager: Any, lock: Any, prepared: Any) -> None:
    """Find that another thread tries to connect to the nodes that failed, and that nodes are new."""
    manager.driver.gather.close()
    for breaker in manager.driver.gather.breakers:
        breaker.rest, breaker.tried = 0.1, steady() + 60.0
    with suppress(QuorumUnavailableError, LockTakenError):
        manager.lock(lock.name, wait=0).acquire().release()
    mend(manager)
    manager.ask(Round({}, lambda replies: True, 0.0))


def without_threads(manager: Any, lock: Any, prepared: Any) -> None:
    """Connect, wait, lose a lease and miss a release when the system has no more threads."""
    manager.close()
    with patch.object(threads, "_start", no_thread):
        lease = lock.acquire()
        with suppress(LockTakenError):
            manager.lock(lock.name, wait=0.02).acquire()
        fail(manager, "down", 1)
        lease.release()
    mend(manager)
    aside(manager).acquire().release()  # which makes the connection that was lost
    lease = aside(manager).acquire()
    fail(manager, "down", 1)
    lease.release()  # the next release that a node misses starts the thread
    mend(manager)


def no_thread(thread: Any) -> None:
    raise RuntimeError("can't start new thread")


def scripts_flushed(manager: Any, lock: Any, prepared: Any) -> None:
    """Use servers that have forgotten the scripts."""
    tell(manager, "SCRIPT", "FLUSH")
    lease = lock.acquire()
    lease.extend()
    tell(manager, "SCRIPT", "FLUSH")
    lease.release(wait=False)
    manager.driver.unattended.look(wait=True)


def killed(manager: Any, lock: Any, prepared: Any) -> None:
    """Use connections that the servers have closed, idle ones and one with a reply in flight."""
    tell(manager, "CLIENT", "KILL", "TYPE", "normal")
    lease = lock.acquire()
    tell(manager, "CLIENT", "KILL", "TYPE", "normal")
    lease.release()


def paused(manager: Any, lock: Any, lease: Any) -> None:
    """Use servers that answer late, and later than a round waits."""
    tell(manager, "CLIENT", "PAUSE", "60")
    with aside(manager, release="send"):
        pass
    lease.extend()
    tell(manager, "CLIENT", "PAUSE", "60")
    lease.release(wait=False)
    manager.driver.unattended.extend([])
    manager.driver.unattended.look(wait=True)
    tell(manager, "CLIENT", "PAUSE", "450")
    for _ in range(2):
        with suppress(QuorumUnavailableError):
            aside(manager, wait=0).acquire().release()
    with patch.object(rounds, "MAX_IN_FLIGHT", 0), suppress(QuorumUnavailableError, LockTakenError):
        manager.lock(lock.name, wait=0).acquire().release()
    tell(manager, "CLIENT", "UNPAUSE")


def missed(manager: Any, lock: Any, lease: Any) -> None:
    """Release while a node is down; it gets the release when it is up again."""
    fail(manager, "down", 1)
    lease.release()
    mend(manager)


def limited(manager: Any, lock: Any, prepared: Any) -> None:
    """Hold a lock that is renewed only for a while, or only while its work reports progress."""
    lease = variant(lock, max_hold=0.001).acquire()
    lease.extend()
    lease.hold.deadline = 0.0
    lease.release()
    lease = variant(lock, heartbeat=60.0).acquire()
    lease.heartbeat()
    lease.extend()
    lease.hold._beat = 0.0
    lease.extend()
    lease.release()


def other_ways(manager: Any, lock: Any, prepared: Any) -> None:
    """Take the lock by a lease's own block, by a decorated function, together with another name, as a permit."""
    lease = lock.try_acquire()
    if lease:
        with lease:
            pass
    lock(lambda: None)()
    variant(lock, if_taken="skip", wait=0)(lambda: None)()
    with manager.lock([lock.name, f"{lock.name} as well"], ttl=TTL, wait=10 * TTL):
        pass
    variant(lock, shared=True).acquire().release(wait=False)
    with manager.lock(f"{lock.name}, permits", ttl=TTL, wait=10 * TTL, limit=2) as lease:
        lease.hold.slots(), lease.hold.owner()
    with ExitStack() as stack:
        stack.enter_context(lock)


class Pair(Block[Any]):
    """
    A block that takes a lock, as fences and the locks of models do.

    Args:
        lock: The lock.
    """

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self._lock = lock

    @contextmanager
    def _hold(self) -> Any:
        with self._lock as lease:
            yield lease

    def _ahold(self) -> Any:
        return self._lock


def nested(manager: Any, lock: Any, prepared: Any) -> None:
    """Enter a lock twice, where it may be, and where the thread would wait for itself."""
    again = variant(lock, reentrant=True)
    with again, again as lease:
        pass
    with variant(lock, reentrant=True, shared=True), suppress(RuntimeError):
        again.acquire()
    with suppress(RuntimeError), lock:
        lock.__enter__()
    with suppress(RuntimeError), lock:
        variant(lock).acquire()
    with Pair(lock) as lease:
        waiting = Waiting((manager, (lock.name,), 1, False), this_thread(), 0.0, steady)
        with suppress(RuntimeError):
            waiting()
    lease = lock.acquire()
    waiting = Waiting((manager, (lock.name,), 1, False), object(), 0.0, steady)
    waiting()
    waiting()
    lease.release()


def from_elsewhere(manager: Any, lock: Any, prepared: Any) -> None:
    """Leave a block that another thread entered, one that nobody entered, and one that two threads are in."""
    shared = variant(lock, shared=True)
    for _ in range(2):
        thread = threading.Thread(target=shared.__enter__)
        thread.start()
        thread.join()
    try:
        with suppress(RuntimeError):
            type(shared).__exit__(shared, None, None, None)
        entries = [entry for some in list(shared._threads._entries.values()) for entry in some]
        entries[0].lease.release()
        shared._threads.forget(entries[0])
        type(shared).__exit__(shared, None, None, None)
        with suppress(RuntimeError):
            type(shared).__exit__(shared, None, None, None)
    finally:
        for entry in [entry for some in list(shared._threads._entries.values()) for entry in some]:
            entry.lease.release()


def many(manager: Any, lock: Any, prepared: Any) -> None:
    """Hold more locks than a context remembers without looking which of them go on."""
    leases = [aside(manager, wait=0, shared=True).acquire() for _ in range(4)]
    for _ in range(8):
        leases[0].release()
        leases[0] = aside(manager, wait=0).acquire()
    manager.extend(leases)
    for lease in leases:
        lease.release(wait=False)


def abandoned(manager: Any, lock: Any, prepared: Any) -> None:
    """Enter again where the release of the block before is still to be made; have a second one made at once."""
    dropped_block(manager, lock)
    with lock:
        pass
    again = variant(lock, reentrant=True)
    dropped_block(manager, again)
    release_abandoned()
    with again:
        pass


def drop(manager: Any, lock: Any, prepared: Any) -> None:
    """Drop a lease without a release."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        aside(manager).acquire()
        note_drops()
        warnings.simplefilter("error")
        aside(manager).acquire()
        note_drops()
    manager.driver.heartbeat.valid()


def pass_on(manager: Any, lock: Any, lease: Any) -> None:
    """Have another holder take the lock over."""
    fail(manager, "silent", 1)
    with suppress(LockTakenError, QuorumUnavailableError):  # a busy machine makes a second node silent
        successor = manager.claim(lock.name, ttl=TTL, wait=0, adopt=lease.secret).acquire()
        passed_on(lease)
        successor.release()
    mend(manager)


def detach(manager: Any, lock: Any, lease: Any) -> None:
    """Take the lock over without a lease of its own, and release it by its secret."""
    acquirer = manager.acquirer
    wanted = acquirer.left_alone(
        lock.name, ttl=TTL, kind="task", label="", ref="", secret="a" * 32, adopt=lease.secret, strict=True
    )
    acquirer.run(wanted)
    passed_on(lease)
    manager.release(lock.name, wanted.secret)
    manager.claim(lock.name, wait=10 * TTL, ttl=TTL, secret="b" * 32, detached=True).acquire().release()


def pause_renewal(manager: Any, lock: Any, lease: Any) -> None:
    """Have the lease extended no longer, and then again."""
    stop_renewal(lease)
    resume_renewal(lease)


def fence(manager: Any, lock: Any, lease: Any) -> None:
    """Have a database end the lease."""
    fence_out(lease, lease.fencing_token)


def give_up(manager: Any, lock: Any, other: Any) -> None:
    with suppress(LockTakenError):
        manager.lock(lock.name, wait=0.02).acquire()
    lock.description().manager.lock(lock.name, wait=0).try_acquire()
    manager.lock(lock.name, if_taken="skip", wait=0)(lambda: None)()


def close(manager: Any, lock: Any, lease: Any) -> None:
    """Close the connections while a release is under way and a lease goes on; then use them again."""
    with aside(manager):
        lease.release(wait=False)
        manager.close()
    with lock:
        pass


def begin_anew(manager: Any, lock: Any, prepared: Any) -> None:
    """Drop the connections and what runs in the background, as a forked child does."""
    notifications = manager.driver.notifications
    manager.driver._pid = 0
    with lock:
        pass
    notifications.forked()
    Watchdog()
    wanted = lock.description().wanted
    wanted = wanted._replace(owner=wanted.owner._replace(pid=0))
    manager.acquirer.take(wanted, True, lambda lease: None).release()


def make(manager: Any, lock: Any, prepared: Any) -> None:
    """Make a manager, and use it."""
    new = LockManager(manager.nodes, manager.rules)
    with new.lock(lock.name, ttl=TTL, wait=10 * TTL):
        pass
    new.close()


def connections(manager: Any, lock: Any, prepared: Any) -> None:
    """Keep, take and drop connections that are idle, closed, overdue, or wait for replies that nobody reads."""
    idle, (first, second, third, fourth) = IdleConnections(), (ConnectionSet() for _ in range(4))
    first.used = second.used = fourth.used = 1e9
    first.close()
    idle.give_back(second)
    idle.give_back(first)
    idle.take(0.0)
    idle.borrow(second)
    second.thread = 1
    idle._kept[1] = first
    idle.borrow(second)
    idle._kept[1] = second
    idle.borrow(second)
    idle.give_back(third)
    idle.give_back(fourth)
    idle.take(1e9)
    idle._kept[1] = second
    idle.close()
    third.expect(0)
    third.close()
    third.deliver(0, LinkError(Failure.CLOSED))
    third.deliver(1, MemoryNode("unused").connect(0.0))
    unattended = manager.driver.unattended
    for timeout in (5.0, 0.0):
        sent = Round({0: Release((), "0" * 32)}, lambda replies: False, 0.0, unattended=True)
        unattended.add(sent, ConnectionSet(), timeout, lambda round: None)
        unattended.due(), unattended.keeper, len(unattended)
        unattended.look()
        unattended._open.clear()


def beat(manager: Any, lock: Any, lease: Any) -> None:
    """Send a heartbeat of the process, and stop."""
    heartbeat = manager.driver.heartbeat
    heartbeat.extend([heartbeat])
    heartbeat.valid()
    lease.release()
    heartbeat.valid()
    heartbeat.leave()


FOREGROUND = [
    Scenario("enter", enter),
    Scenario("by hand", by_hand),
    Scenario("extend", extend, acquired),
    Scenario("release", release, acquired),
    Scenario("release, sent", send, acquired),
    Scenario("release, sent and looked after", look, acquired),
    Scenario("lose", lose, acquired),
    Scenario("lose in a block", lose_in_block),
    Scenario("lose unnoticed", lose_unnoticed, acquired),
    Scenario("refused", refused, usurped),
    Scenario("lose, seen elsewhere", lose_elsewhere, in_a_loop),
    Scenario("stopped", stopped, acquired),
    Scenario("unknown", unknown, acquired),
    Scenario("unavailable", unavailable),
    Scenario("missed", missed, acquired),
    Scenario("limited", limited),
    Scenario("wait", enter, taken),
    Scenario("wait behind another", enter, queued),
    Scenario("wait first", enter, taken_anew),
    Scenario("wait without the queue", barge, taken),
    Scenario("wait, closed meanwhile", enter, closing_soon),
    Scenario("release to a waiter", release_to_waiter, awaited),
    Scenario("close on a waiter", close_on_waiter, awaited),
    Scenario("tried by another", tried_by_another),
    Scenario("without threads", without_threads),
    Scenario("scripts flushed", scripts_flushed),
    Scenario("killed", killed),
    Scenario("paused", paused, acquired),
    Scenario("other ways", other_ways),
    Scenario("nested", nested),
    Scenario("from elsewhere", from_elsewhere),
    Scenario("many", many),
    Scenario("abandoned", abandoned),
    Scenario("drop", drop),
    Scenario("pass on", pass_on, acquired),
    Scenario("detach", detach, acquired),
    Scenario("pause renewal", pause_renewal, acquired),
    Scenario("fence", fence, acquired),
    Scenario("give up", give_up, held),
    Scenario("overdue", enter, overdue),
    Scenario("close", close, acquired),
    Scenario("begin anew", begin_anew),
    Scenario("make", make),
    Scenario("connections", connections),
    Scenario("beat", beat, acquired),
]
