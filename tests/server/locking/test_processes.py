"""Many processes, one lock, and a node that forgets."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from django_redlock import LockManager, LockTakenError
from django_redlock.core.protocol import Kind
from django_redlock.engine import process
from django_redlock.nodes.redis.link import RedisLink
from django_redlock.testing import Servers
from tests.managers import Manager, held_by, real_manager, unwatched, wait_until

PATIENCE = 120.0  # seconds


def start(child: Callable[[], Any]) -> int:
    """Run *child* in a forked process; return its id. It exits with 0 unless *child* raises or returns a true value."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the test forks a process with threads on purpose
        pid = os.fork()
    if not pid:
        try:
            os._exit(1 if child() else 0)  # not a status of another process, whose lowest byte is 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(99)
    return pid


def fork(child: Callable[[], Any]) -> int:
    """Run *child* in a forked process to its end; return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(start(child), 0)[1])


def test_tokens_increase_across_processes_while_a_node_is_away(nodes: Servers, tmp_path: Path):
    """Consecutive acquisitions by four processes, with a node down for part of the time."""
    log = tmp_path / "tokens"
    log.touch()

    def child() -> None:
        manager = real_manager(nodes.urls, ttl=30.0, retry_delay=0.005)
        for _ in range(25):
            with manager.lock("a") as lease:
                log.write_text(f"{log.read_text()}{lease.fencing_token} ")  # only the lock protects the file

    def taken() -> list[int]:
        return list(map(int, log.read_text().split()))

    children = [start(child) for _ in range(4)]
    wait_until(lambda: len(taken()) >= 20)
    nodes[0].kill()
    wait_until(lambda: len(taken()) >= 60)
    nodes[0].start()

    assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
    assert len(taken()) == 100
    assert taken() == sorted(set(taken()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # on purpose; Python 3.15 raises it
@pytest.mark.parametrize("page", [True, False], ids=["page", "process id"])
@pytest.mark.parametrize("fork_again", [os.fork, ctypes.PyDLL(None).fork], ids=["Python", "C"])
def test_child_does_not_hold_the_locks_of_its_parent(
    memory: Manager, monkeypatch: pytest.MonkeyPatch, page: bool, fork_again: Callable[[], int]
):
    """The child notices, whoever forked, and whether or not the system empties a page in the child."""

    def parent() -> int:
        sys.setswitchinterval(60.0)  # see below: so that nobody asks for the interpreter
        if not page:
            monkeypatch.setattr(process.process, "mark", process.Pid())
            process.process.mark[0] = 1
        # Without a watchdog: forked in C by a process with more threads, a child may wait for ever for the interpreter,
        # which a thread that it does not have has asked for.
        lease = unwatched(memory(3)).lock("a", renew=False).acquire()
        if not (child := fork_again()):
            said = (lease.reason, lease.valid(), lease.remaining(), lease.release(), lease.extend())
            os._exit(0 if said == ("forked", False, 0.0, "unknown", False) else 1)
        status = os.waitpid(child, 0)[1]
        return status or not lease.valid()

    assert fork(parent) == 0


def test_lock_that_was_made_before_the_fork_is_taken_in_the_name_of_the_child(real: Manager):
    """A module that a master process imported has a decorator; the master's workers, not the master, hold the lock."""
    manager = real()
    lock = manager.lock("a", wait=0)
    lock.acquire().release()

    def child() -> int:
        lease = lock.acquire()
        try:
            lock.acquire()
        except LockTakenError as error:
            holder = error.holder
        lease.release()
        manager.close()
        return 0 if holder["pid"] == os.getpid() and holder["process"].startswith(f"{os.getpid():x}.") else 1

    assert fork(child) == 0


def test_forked_child_uses_connections_of_its_own(real: Manager):
    """Parent and child use one manager at once without reading each other's replies."""
    manager = real(retry_delay=0.002, ttl=60.0, node_timeout=10.0)
    manager.lock("warm up").acquire().release()

    def use(manager: LockManager) -> int:
        for _ in range(25):
            with manager.lock("shared") as lease:
                assert lease.valid()
        manager.close()
        return 0

    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(use(manager)))
    thread.start()
    codes.append(fork(lambda: use(manager)))
    thread.join()

    assert codes == [0, 0]
    assert held_by(manager, "{shared}")


def test_threads_of_a_forked_child_wait_until_the_parents_connections_are_put_away(real: Manager):
    """Two threads that start in a child at once take no connection of the parent between them."""
    manager = real(3)
    manager.on_behalf("warm up", detached=True).acquire().release()
    ports = {
        connection.link._sock.getsockname()[1]
        for connections in manager.driver.gather.idle.sets
        for connection in connections.by_node.values()
    }
    hang_up, send = manager.driver._hang_up, RedisLink.send
    hanging_up, sent = threading.Event(), threading.Event()
    used = set()

    def hang_up_slowly() -> None:
        hanging_up.set()
        sent.wait(0.5)  # usually in vain: nobody sends anything meanwhile
        hang_up()

    def note(link: RedisLink, *args: Any, **options: Any) -> None:
        used.add(link._sock.getsockname()[1])
        sent.set()
        send(link, *args, **options)

    def child() -> int:
        manager.driver._hang_up = hang_up_slowly
        RedisLink.send = note
        first, second = (threading.Thread(target=manager.survey, kwargs={"count": 1}) for _ in range(2))
        first.start()
        hanging_up.wait()
        second.start()
        first.join()
        second.join()
        return 1 if used & ports or not used else 0

    assert ports
    assert fork(child) == 0


def unannounced_fork(child: Callable[[], Any]) -> int:
    """Fork as uWSGI does, in C and without Python's hooks; only in a process without other threads."""
    # Those that connect; threading does not list a thread that is about to start another one.
    wait_until(lambda: len(os.listdir("/proc/self/task")) == 1)
    pid = ctypes.PyDLL(None).fork()
    if not pid:
        try:
            child()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(99)
    return os.waitpid(pid, 0)[1]


def test_fork_without_pythons_hooks_is_noticed_by_the_next_acquisition(nodes: Servers):
    """UWSGI forks in C and calls none of Python's hooks; parent and child must not share connections."""

    def parent() -> None:
        manager = real_manager(nodes.urls)

        def take() -> None:
            manager.on_behalf("a", detached=True).acquire().release()  # detached: no thread while it forks

        def child() -> None:
            take()
            assert inherited.closed

        take()
        (inherited,) = manager.driver.gather.idle.sets
        assert unannounced_fork(child) == 0
        take()
        assert not inherited.closed
        manager.close()

    assert fork(parent) == 0  # has no threads, unlike this process


def test_fork_without_pythons_hooks_is_noticed_by_the_next_acquisition_of_an_event_loop(nodes: Servers):
    """An asynchronous view in a worker of uWSGI has a lease of its own process, which it can release."""

    def parent() -> None:
        manager = real_manager(nodes.urls)

        def child() -> None:
            async def take() -> tuple[bool, str]:
                lease = await manager.on_behalf("a", detached=True).aacquire()
                try:
                    return lease.valid(), await lease.arelease()
                finally:
                    await manager.aclose()

            assert asyncio.run(take()) == (True, "released")

        assert unannounced_fork(child) == 0
        manager.close()

    assert fork(parent) == 0  # has no threads, unlike this process


def test_fork_without_pythons_hooks_does_not_affect_the_parents_lease(nodes: Servers):
    """Before it has taken a lock of its own, a child of such a fork neither has, sends nor releases anything."""

    def parent() -> None:
        manager = real_manager(nodes.urls, ttl=60.0)
        lease = manager.on_behalf("a", detached=True).acquire()  # detached: no thread while it forks

        def child() -> None:
            said = (lease.valid(), lease.reason, lease.release(), lease.extend())
            assert said == (False, "forked", "unknown", False)

        def asking_child() -> None:
            manager.survey()
            assert inherited.closed

        (inherited,) = manager.driver.gather.idle.sets
        assert unannounced_fork(child) == 0
        assert unannounced_fork(asking_child) == 0
        assert lease.valid()
        assert held_by(manager, "{a}", lease.secret)
        assert lease.release() == "released"
        manager.close()

    assert fork(parent) == 0  # has no threads, unlike this process


def test_forked_child_ends_though_the_parents_threads_were_busy(memory: Manager):
    """
    An internal lock that another thread held at the fork stays held in the child for ever; the child does not
    wait for it.
    """
    manager = memory()
    busy, done = threading.Event(), threading.Event()

    def at_work() -> None:
        with manager.driver.notifications._mutex:
            busy.set()
            done.wait(60)

    def child() -> int:
        signal.alarm(60)  # ends it if it waits
        manager.close()
        return 0

    thread = threading.Thread(target=at_work)
    thread.start()
    busy.wait()
    try:
        assert fork(child) == 0
    finally:
        done.set()
        thread.join()


def test_process_that_was_stopped_longer_than_its_lease_knows_it(nodes: Servers):
    """The first check after SIGCONT reports the loss, and no extension revives the lease."""
    (held, hold), (went_on, go_on) = os.pipe(), os.pipe()

    def child() -> None:
        manager = real_manager(nodes.urls, ttl=1.0, node_timeout=0.2)
        lease = manager.lock("a").acquire()
        os.write(hold, b"held")
        os.read(went_on, 1)
        assert (lease.valid(), lease.reason, lease.extend()) == (False, "expired", False)

    pid = start(child)
    assert os.read(held, 4) == b"held"
    os.kill(pid, signal.SIGSTOP)
    manager = real_manager(nodes.urls, ttl=60.0)
    thief = manager.lock("a", wait=60).acquire()
    os.write(go_on, b"!")
    os.kill(pid, signal.SIGCONT)

    assert os.waitpid(pid, 0)[1] == 0
    assert thief.valid()
    assert held_by(manager, "{a}", thief.secret)
    thief.release()
    manager.close()
    for end in (held, hold, went_on, go_on):
        os.close(end)


def test_dropped_lease_is_not_renewed(real: Manager):
    """A lease that its holder dropped without a release ends with its ttl."""
    manager = real(ttl=1.0, node_timeout=0.2)
    manager.lock("a").acquire()  # dropped at once

    lease = manager.lock("a", wait=60).acquire()

    lease.release()
    replies = manager.survey(slugs=("{a}",))
    assert {reply.kind for reply in replies.values()} == {Kind.LISTED}


MANAGER = """
import sys
from django_redlock.core.rules import Rules
from django_redlock.engine.manager import LockManager
from django_redlock.nodes import NodeSpec, open_node

def manager_of_nodes():
    rules = Rules(5, ttl=60.0, node_timeout=10.0, restart_guard=False)
    return LockManager([open_node(NodeSpec(url), "t:") for url in sys.argv[1:]], rules)

"""
# Without tests.managers, whose imports take longer than the rest of these processes.


LEFTOVERS = """
import asyncio, os, threading
from django_redlock import LockTakenError

def sockets():
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return 0
    links = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.exists(f"{folder}/{fd}")]
    return sum(link.startswith("socket:") for link in links)

def contend(manager):
    with manager.lock("a").acquire():
        try:
            with manager.lock("a", wait=0.1):
                pass
        except LockTakenError:
            pass

async def acontend(manager):
    asyncio.get_running_loop().slow_callback_duration = 60  # a machine that stands still is not what is tested
    async with await manager.lock("a").aacquire():
        try:
            async with manager.lock("a", wait=0.1):
                pass
        except LockTakenError:
            pass
    await manager.aclose()
    return len(asyncio.all_tasks())

before = sockets()
manager = manager_of_nodes()
contend(manager)
manager.close()
print(len(threading.enumerate()), sockets() - before)
print(asyncio.run(acontend(manager)))
manager.close()
print(len(threading.enumerate()), sockets() - before)
"""


def test_nothing_is_left_when_the_last_lease_is_released_and_the_manager_closed(nodes: Servers):
    """No thread, no socket and no task is left; in development mode nothing warns."""
    strict = ["-W", "error", "-W", "ignore:'asyncio.iscoroutinefunction' is:DeprecationWarning"]  # of redis-py 8.1
    command = [sys.executable, "-X", "dev", *strict, "-c", MANAGER + LEFTOVERS, *nodes.urls]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert (ended.stdout.split("\n"), ended.stderr) == (["1 0", "1", "1 0", ""], "")
