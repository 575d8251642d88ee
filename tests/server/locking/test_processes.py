"""Processes that fork, stop or end, and one lock for many of them."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from django_redlock import LockTakenError
from django_redlock.engine.connections import Connection
from django_redlock.nodes.redis.link import RedisLink
from django_redlock.runtime import process
from django_redlock.testing import Servers
from tests.managers import Manager, fork, held_by, real_manager, start, unwatched, wait_until

PATIENCE = 120.0  # seconds


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_child_that_is_forked_inside_a_block_waits_for_its_parent(real: Manager, reentrant: bool):
    """The child is another caller: it does not wait for itself, and it is not inside a reentrant lock."""
    lock = real(3).lock("a", wait=PATIENCE, reentrant=reentrant)

    def child() -> None:
        with lock as lease:
            assert lease.valid()

    with lock:
        pid = start(child)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    assert code == 0


def test_forked_child_has_connections_and_a_name_of_its_own(real: Manager):
    """Parent and child use one lock at once; neither reads the other's replies, and each holds it in its own name."""
    manager = real(retry_delay=0.002, ttl=60.0, node_timeout=10.0)
    lock = manager.lock("shared")  # as in a module that a master process has imported
    lock.acquire().release()

    def use() -> int:
        for _ in range(25):
            with lock:
                with pytest.raises(LockTakenError) as taken:
                    manager.lock("shared", wait=0).acquire()
                assert taken.value.holder["pid"] == os.getpid()
                assert taken.value.holder["process"].startswith(f"{os.getpid():x}.")
        manager.close()
        return 0

    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(use()))
    thread.start()
    codes.append(fork(use))
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


def test_fork_without_pythons_hooks_is_noticed(nodes: Servers):
    """UWSGI forks in C and calls none of Python's hooks; parent and child share neither leases nor connections."""

    def parent() -> None:
        manager = real_manager(nodes.urls, ttl=60.0)
        lease = manager.on_behalf("a", detached=True).acquire()  # detached: no thread while it forks
        (inherited,) = manager.driver.gather.idle.sets

        def child_with_the_lease() -> None:
            said = (lease.valid(), lease.reason, lease.release(), lease.extend())
            assert said == (False, "forked", "unknown", False)

        def child_that_asks() -> None:
            manager.survey()
            assert inherited.closed

        def child_that_locks() -> None:
            assert manager.on_behalf("b", detached=True).acquire().release() == "released"
            assert inherited.closed

        def child_with_an_event_loop() -> None:
            async def take() -> tuple[bool, str]:
                own = await manager.on_behalf("b", detached=True).aacquire()
                try:
                    return own.valid(), await own.arelease()
                finally:
                    await manager.aclose()

            assert asyncio.run(take()) == (True, "released")

        for child in (child_with_the_lease, child_that_asks, child_that_locks, child_with_an_event_loop):
            assert unannounced_fork(child) == 0
        assert not inherited.closed
        assert lease.valid()
        assert held_by(manager, "{a}", lease.secret)
        assert lease.release() == "released"
        manager.close()

    assert fork(parent) == 0  # has no threads, unlike this process


def test_forked_child_ends_though_the_parents_threads_were_busy(memory: Manager):
    """An internal lock that another thread held at the fork stays held; the child does not wait for it."""
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


@pytest.mark.parametrize("count", [1, 3])
def test_process_that_was_stopped_between_request_and_reply_gets_its_lock(nodes: Servers, count: int):
    """The reply came while the process could not read it; that is no fault of the nodes."""

    def child() -> None:
        manager = real_manager(nodes.urls[:count], node_timeout=None)
        manager.lock("warm up", wait=0).acquire().release()
        events, send, stops = list[str](), Connection.send, [True]
        manager.notify = lambda event, **about: events.append(event)

        def send_and_stop(*args: Any) -> None:
            send(*args)
            if stops:
                stops.pop()
                os.kill(os.getpid(), signal.SIGSTOP)

        Connection.send = send_and_stop
        assert manager.lock("a", wait=0).acquire().release() == "released"
        assert "node_down" not in events

    pid = start(child)
    os.waitpid(pid, os.WUNTRACED)
    threading.Event().wait(1.1)  # longer than any node timeout: that is what is tested
    os.kill(pid, signal.SIGCONT)

    assert os.waitpid(pid, 0)[1] == 0


LEFTOVERS = """
import asyncio, os, sys, threading
from django_redlock import LockTakenError
from django_redlock.core.rules import Rules
from django_redlock.engine.manager import LockManager
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node

def left():
    for thread in threading.enumerate()[1:]:
        thread.join(3)  # its work is done, but it may not be gone yet; a watchdog that was not ended stays longer
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    sockets = [file for file in files if "socket:" in file and file not in before]
    return [thread.name for thread in threading.enumerate()[1:]] + sockets

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

before = []
before = left()
rules = Rules(5, ttl=60.0, node_timeout=10.0, restart_guard=False)
manager = LockManager([open_node(NodeSpec(url), "t:") for url in sys.argv[1:]], rules)
contend(manager)
manager.close()
print(left())
print(asyncio.run(acontend(manager)))
manager.close()
print(left())
"""


def test_nothing_is_left_when_the_last_lease_is_released_and_the_manager_closed(nodes: Servers):
    """No thread, no socket and no task is left; in development mode nothing warns."""
    strict = ["-W", "error", "-W", "ignore:'asyncio.iscoroutinefunction' is:DeprecationWarning"]  # of redis-py 8.1
    command = [sys.executable, "-X", "dev", *strict, "-c", LEFTOVERS, *nodes.urls]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert (ended.stdout.split("\n"), ended.stderr) == (["[]", "1", "[]", ""], "")


PROJECT = """
import os, signal, sys
import django
from django.conf import settings

options = {"restart_guard": False, "node_timeout": 5.0, "ttl": 60.0}
settings.configure(
    INSTALLED_APPS=["django_redlock"], REDLOCK={"default": {"NODES": [sys.argv[1]], "OPTIONS": options}}
)
django.setup()
from django_redlock import lock
"""

HANDLER = """
class Signals:
    def find_spec(self, name, path, target=None):
        if name == "redis.connection":
            os.kill(os.getpid(), signal.SIGUSR1)

def handle(*arguments):
    with lock("of the handler", wait=0):
        print("the handler's")

sys.meta_path.insert(0, Signals())
signal.signal(signal.SIGUSR1, handle)
with lock("of the program", wait=0):
    print("the program's")
"""

CHILD = """
print("redis" in sys.modules)
if not os.fork():
    before = set(sys.modules)
    with lock("a", wait=0):
        print([name for name in set(sys.modules) - before if "redis" in name], flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [(HANDLER, {"the handler's", "the program's"}), (CHILD, {"False", "[]"})],
    ids=["signal handler", "forked child"],
)
def test_first_lock_of_a_process_finds_whole_modules(nodes: Servers, program: str, said: set[str]):
    """A handler may interrupt the first lock and take one; a child finds loaded what its parent did not need."""
    command = [sys.executable, "-c", PROJECT + program, nodes.urls[0]]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)

    assert (set(ended.stdout.splitlines()), ended.stderr) == (said, "")
