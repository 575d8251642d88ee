"""Many processes, one lock, and a node that forgets."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from django_redlock import LockTakenError
from django_redlock.core.messages import Kind
from django_redlock.locks import LockManager
from django_redlock.nodes.redis import RedisLink
from django_redlock.testing import Servers

from .conftest import Manager, held_by, holders, real_manager


@contextmanager
def working(
    folder: Path, urls: list[str], processes: int, times: int, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Run processes that increment the counter; on exit they must have ended well."""
    (folder / "counter").write_text("0")
    (folder / "tokens").touch()
    order = {"folder": str(folder), "urls": urls, "processes": processes, "times": times, "options": options}
    command = [sys.executable, "-m", "tests.locking.workers", json.dumps(order)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield process
        errors = process.communicate(timeout=120)[1]
        assert process.returncode == 0, errors
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_for(folder: Path, acquisitions: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many acquisitions have been noted."""
    while len((folder / "tokens").read_text().splitlines()) < acquisitions:
        assert process.poll() is None, "the processes ended early"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.once
def test_contended_counter_loses_nothing_while_a_node_restarts_empty(nodes: Servers, tmp_path: Path):
    """
    P16, P20, L16, L62: twenty processes increment fifty times each, guarded by the lock alone.

    Half-way one of the five nodes restarts without data. It gives no vote until the longest lease has passed.
    """
    options = {"ttl": 2.0, "max_ttl": 2.0, "retry_delay": 0.005, "restart_guard": True}

    with working(tmp_path, nodes.urls, 20, 50, **options) as process:
        wait_for(tmp_path, 500, process)
        nodes[2].restart()

    assert (tmp_path / "counter").read_text() == "1000"
    tokens = [int(line) for line in (tmp_path / "tokens").read_text().split()]
    assert tokens == sorted(set(tokens))


def test_tokens_increase_across_processes_while_a_node_is_away(nodes: Servers, tmp_path: Path):
    """P1, P2: two hundred acquisitions in a row, by four processes, with a node down for part of the time."""
    options = {"ttl": 5.0, "retry_delay": 0.005, "restart_guard": False}

    with working(tmp_path, nodes.urls, 4, 50, **options) as process:
        wait_for(tmp_path, 50, process)
        nodes[0].kill()
        wait_for(tmp_path, 120, process)
        nodes[0].start()

    tokens = [int(line) for line in (tmp_path / "tokens").read_text().split()]
    assert len(tokens) == 200
    assert tokens == sorted(set(tokens))


def test_lock_of_a_killed_process_is_free_after_its_lease(nodes: Servers, tmp_path: Path):
    """P24, L28, L58: who dies extends nothing; the next one waits for the rest of the lease and no longer."""
    script = (
        "import os, signal\n"
        "from tests.locking.conftest import real_manager\n"
        f"manager = real_manager({nodes.urls!r}, ttl=1.0, node_timeout=0.2)\n"
        "lease = manager.lock('a').acquire()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = subprocess.run([sys.executable, "-c", script], check=False)
    assert died.returncode == -signal.SIGKILL
    manager = real_manager(nodes.urls, ttl=1.0, node_timeout=0.2)
    assert holders(manager, "{a}")

    lease = manager.lock("a", wait=5).acquire()

    assert lease.release() == "released"
    manager.close()


def fork(child: Any) -> int:
    """Run *child* in a forked process; returns its exit code, which is what it returned."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking a process with threads is the point
        pid = os.fork()
    if not pid:
        try:
            os._exit(child())
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_child_holds_nothing_and_releases_nothing(real: Manager):
    """P30, L28, L41: the child's lease is invalid from the start; the parent's goes on undisturbed."""
    manager = real()
    lease = manager.lock("a").acquire()

    def child() -> int:
        outcome = (lease.valid(), lease.remaining(), lease.reason, lease.release(), lease.extend())
        return 0 if outcome == (False, 0.0, "forked", "unknown", False) else 1

    assert fork(child) == 0
    assert lease.valid()
    assert held_by(manager, "{a}", lease.token)
    assert lease.extend()
    assert lease.release() == "released"


def test_lock_that_was_made_before_the_fork_is_taken_in_the_name_of_the_child(real: Manager):
    """L81, C87: a decorator in a module that a master process imported; its workers, not it, hold the lock."""
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
    """P30, C87: parent and child use one manager at once without reading each other's replies."""
    manager = real(retry_delay=0.002)
    manager.lock("warm up").acquire().release()

    def use(manager: LockManager) -> int:
        for _ in range(50):
            with manager.lock("shared") as lease:
                assert lease.valid()
        manager.close()
        return 0

    with pytest.MonkeyPatch.context():
        pid_code = []
        thread = threading.Thread(target=lambda: pid_code.append(use(manager)))
        thread.start()
        code = fork(lambda: use(manager))
        thread.join()

    assert (code, pid_code) == (0, [0])
    assert held_by(manager, "{shared}")


def test_threads_of_a_forked_child_wait_until_the_parents_connections_are_put_away(real: Manager):
    """P30, C87: two threads that a child begins with at once take no connection of the parent between them."""
    manager = real(3)
    manager.lock("warm up", detached=True).acquire().release()
    ports = {seat.link._sock.getsockname()[1] for bundle in manager._gather._bundles for seat in bundle.seats.values()}
    hang_up, send = manager._hang_up, RedisLink.send
    hanging_up, sent = threading.Event(), threading.Event()
    used = set()

    def hang_up_slowly() -> None:
        hanging_up.set()
        sent.wait(0.5)  # in vain, as a rule: nobody sends anything meanwhile
        hang_up()

    def note(link: RedisLink, *args: Any, **options: Any) -> None:
        used.add(link._sock.getsockname()[1])
        sent.set()
        send(link, *args, **options)

    def child() -> int:
        manager._hang_up = hang_up_slowly
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


# Threads that connect may still be at it. A child that Python knows nothing of would wait for one of them to take the
# interpreter, in vain.
ALONE = "for thread in threading.enumerate()[1:]: thread.join()\n"


def test_fork_that_python_is_not_told_of_is_noticed_by_the_next_acquisition(nodes: Servers):
    """P30, C87: uWSGI forks in C and calls none of Python's hooks; parent and child must not share connections."""
    script = (
        "import ctypes, os, sys, threading\n"
        "from tests.locking.conftest import real_manager\n"
        f"manager = real_manager({nodes.urls!r})\n"
        "def take(): manager.lock('a', detached=True).acquire().release()\n"  # detached: no thread while it forks
        "take()\n"
        f"{ALONE}"
        "(inherited,) = manager._gather._bundles\n"
        "child = ctypes.PyDLL(None).fork()\n"
        "if not child:\n"
        "    take()\n"
        "    os._exit(0 if inherited.closed else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "take()\n"
        "assert not inherited.closed\n"
        "manager.close()\n"
    )

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_fork_that_python_is_not_told_of_leaves_the_parents_lease_alone(nodes: Servers):
    """P30, L41: before it has taken any lock of its own, such a child neither has, sends nor releases anything."""
    script = (
        "import ctypes, os, threading\n"
        "from tests.locking.conftest import held_by, real_manager\n"
        f"manager = real_manager({nodes.urls!r})\n"
        "lease = manager.lock('a', detached=True).acquire()\n"  # detached: no thread while it forks
        f"{ALONE}"
        "(inherited,) = manager._gather._bundles\n"
        "def child():\n"
        "    said = (lease.valid(), lease.reason, lease.release(), lease.extend())\n"
        "    assert said == (False, 'forked', 'unknown', False), said\n"
        "def asking_child():\n"
        "    manager.survey()\n"
        "    assert inherited.closed\n"
        "def run(work):\n"
        "    pid = ctypes.PyDLL(None).fork()\n"
        "    if not pid:\n"
        "        try:\n"
        "            work()\n"
        "            os._exit(0)\n"
        "        finally:\n"
        "            os._exit(1)\n"
        "    assert os.waitpid(pid, 0)[1] == 0, work\n"
        "run(child)\n"
        "run(asking_child)\n"
        "assert lease.valid() and held_by(manager, '{a}', lease.token)\n"
        "assert lease.release() == 'released'\n"
        "manager.close()\n"
    )

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_forked_child_ends_though_the_parents_threads_were_busy(memory: Manager):
    """L40, L41: a lock that another thread had when the process forked is held for ever in the child; it waits not."""
    manager = memory()
    busy, done = threading.Event(), threading.Event()

    def at_work() -> None:
        with manager._hints._mutex:
            busy.set()
            done.wait(60)

    def child() -> int:
        signal.alarm(20)  # ends it if it waits
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


def test_process_that_was_stopped_longer_than_its_lease_knows_it(nodes: Servers, tmp_path: Path):
    """P31, L7, L34: the first look after SIGCONT says lost, and no extension revives it."""
    script = (
        "import sys\n"
        "from tests.locking.conftest import real_manager\n"
        f"manager = real_manager({nodes.urls!r}, ttl=1.0, node_timeout=0.2)\n"
        "lease = manager.lock('a').acquire()\n"
        "print('held', flush=True)\n"
        "sys.stdin.readline()\n"
        "print(lease.valid(), lease.reason, lease.extend(), flush=True)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        os.kill(process.pid, signal.SIGSTOP)
        manager = real_manager(nodes.urls, ttl=1.0, node_timeout=0.2)
        thief = manager.lock("a", wait=10).acquire()
        process.stdin.write("\n")
        process.stdin.flush()
        os.kill(process.pid, signal.SIGCONT)

        assert process.stdout.readline() == "False expired False\n"

        assert thief.valid()
        assert held_by(manager, "{a}", thief.token)
        thief.release()
        manager.close()


@pytest.mark.parametrize("ending", ["", "import sys; sys.exit(3)", "raise SystemExit"])
def test_interpreter_that_exits_with_a_held_lock_neither_hangs_nor_prints(nodes: Servers, ending: str):
    """L40: nothing is released in a finalizer, and no thread keeps the process alive."""
    script = (
        "from tests.locking.conftest import real_manager\n"
        f"manager = real_manager({nodes.urls!r})\n"
        "lease = manager.lock('a').acquire()\n"
        f"{ending}\n"
    )

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False)

    assert (ended.stdout, ended.stderr) == ("", "")


def test_dropped_lease_is_not_renewed(real: Manager):
    """L28: a lease that its holder dropped without a release ends by itself."""
    manager = real(ttl=1.0, node_timeout=0.2)
    manager.lock("a").acquire()  # dropped at once

    lease = manager.lock("a", wait=5).acquire()

    assert lease.valid()
    lease.release()
    replies = manager.survey(slugs=("{a}",))
    assert {reply.kind for reply in replies.values()} == {Kind.LISTED}


LEFTOVERS = """
import asyncio, os, sys, threading
from django_redlock import LockTakenError
from tests.locking.conftest import real_manager

def sockets():
    folder = "/proc/self/fd"
    if not os.path.isdir(folder):
        return 0
    links = [os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder) if os.path.exists(f"{folder}/{fd}")]
    return sum(link.startswith("socket:") for link in links)

def contend(manager):
    with manager.lock("a"):
        try:
            with manager.lock("a", wait=0.1):
                pass
        except LockTakenError:
            pass

async def acontend(manager):
    asyncio.get_running_loop().slow_callback_duration = 60  # a machine that stands still is not what is tested
    async with manager.lock("a"):
        try:
            async with manager.lock("a", wait=0.1):
                pass
        except LockTakenError:
            pass
    await manager.aclose()
    return len(asyncio.all_tasks())

before = sockets()
manager = real_manager(URLS)
contend(manager)
manager.close()
print(len(threading.enumerate()), sockets() - before)
print(asyncio.run(acontend(manager)))
manager.close()
print(len(threading.enumerate()), sockets() - before)
"""


def test_nothing_is_left_when_the_last_lease_is_released_and_the_manager_closed(nodes: Servers):
    """L40: no thread, no socket and no task; in development mode nothing warns."""
    script = LEFTOVERS.replace("URLS", repr(nodes.urls))

    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ended.stdout.split("\n"), ended.stderr) == (["1 0", "1", "1 0", ""], "")
