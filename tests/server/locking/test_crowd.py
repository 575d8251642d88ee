"""
A process that gets too little processor time, or stands still, is late; its nodes are not to blame.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from django_redlock.testing import Server, Servers, ServerStartError
from tests.managers import Flavour, Manager, in_threads, real_manager

from . import crowd

PATIENCE = 300.0  # seconds


@pytest.fixture
def pausing() -> Iterator[Server]:
    """A server that can be told to stand still, which Redis before 7 always allows."""
    try:
        server = Server(args=("--enable-debug-command", "local")).start()
    except ServerStartError:
        server = Server().start()
    with server:
        yield server


TIMES = [1, pytest.param(10, marks=pytest.mark.endurance)]


def crowds(kind: str, count: int, urls: list[str], turn: int) -> "tuple[Counter[str], Counter[str]]":
    """Run some processes at the same time; return what became of their locks, and the reports of nodes."""
    module = "tests.server.locking.crowd"
    commands = [[sys.executable, "-m", module, kind, f"{kind}-{turn}-{number}", *urls] for number in range(count)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    outcomes: Counter[str] = Counter()
    down: Counter[str] = Counter()
    try:
        for process in processes:
            told = json.loads(process.communicate(timeout=PATIENCE)[0])
            outcomes.update(told["outcomes"])
            down.update(told["down"])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return outcomes, down


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("count", [1, 3])
def test_more_threads_than_processors_are_not_refused(nodes: Servers, count: int, times: int):
    """
    Two processes of sixty threads, each with work under a lock that nobody else wants: every lock is taken.

    For long, with the machine to themselves, there are four.
    """
    processes = 4 if times > 1 else 2
    for turn in range(times):
        outcomes, _ = crowds("threads", processes, nodes.urls[:count], turn)

        assert outcomes == {"taken": processes * crowd.THREADS * crowd.TURNS}


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("count", [1, 3])
def test_tasks_that_keep_their_event_loop_busy_are_not_refused(nodes: Servers, count: int, times: int):
    """200 tasks of one event loop that each compute under a lock, so that a turn of the loop lasts a second."""
    for turn in range(times):
        outcomes, down = crowds("tasks", 1, nodes.urls[:count], turn)

        assert outcomes == {"taken": crowd.TASKS * crowd.TASK_TURNS}
        assert down == {}


STOPPED = """
import os, signal, sys
from django_redlock.core.rules import Rules
from django_redlock.engine.connections import Connection
from django_redlock.engine.manager import LockManager
from django_redlock.nodes import NodeSpec, open_node

urls = sys.argv[1:]
manager = LockManager([open_node(NodeSpec(url), "t:") for url in urls], Rules(len(urls), restart_guard=False))
down = []
manager.notify = lambda event, **about: down.append(event) if event == "node_down" else None
manager.lock("warm up", wait=0).acquire().release()
send, stops = Connection.send, [True]

def send_and_stop(*args):
    send(*args)
    if stops:
        stops.pop()
        print("stops", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)

Connection.send = send_and_stop
lease = manager.lock("a", wait=0).acquire()
print(lease.release(), down, flush=True)
manager.close()
"""


@pytest.mark.parametrize("count", [1, 3])
def test_process_that_was_stopped_between_request_and_reply_gets_its_lock(nodes: Servers, count: int):
    """The reply came while the process could not read it."""
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED, *nodes.urls[:count]], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "stops\n"
        os.waitpid(process.pid, os.WUNTRACED)
        threading.Event().wait(1.1)  # longer than any node timeout: that is what is tested
        os.kill(process.pid, signal.SIGCONT)

        assert process.communicate(timeout=PATIENCE)[0] == "released []\n"
    finally:
        process.kill()
        process.communicate()


async def test_only_node_that_pauses_for_most_of_a_second_is_waited_for(pausing: Server, flavour: Flavour):
    """With one node, patience costs nothing: a fork for a snapshot, or a slow command, refuses nobody."""
    manager = real_manager([pausing.url], ttl=30.0, node_timeout=None)
    await flavour.release(await flavour.acquire(manager.lock("warm up", wait=0)))
    with socket.create_connection(("127.0.0.1", pausing.port)) as pause:
        pause.sendall(b"DEBUG SLEEP 0.8\r\n")
        lease = await flavour.acquire(manager.lock("a", wait=0))
        assert pause.recv(100) == b"+OK\r\n"

    assert await flavour.release(lease) == "released"


# Nodes that failed lately


async def test_node_that_the_quorum_needs_is_asked_although_it_failed_lately(
    real: Manager, nodes: Servers, flavour: Flavour
):
    """A breaker spares the others a node that failed; it never refuses a lock that this node could give."""
    manager = real(3, ttl=60.0, node_timeout=10.0)
    nodes[0].kill()
    await flavour.release(await flavour.acquire(manager.lock("a", wait=0)))
    breaker = manager.driver.gather.breakers[0]
    breaker.failed(manager.runtime.clock(), "refused")
    breaker.until = manager.runtime.clock() + 3600.0
    nodes[0].start()
    nodes[1].kill()

    lease = await flavour.acquire(manager.lock("a", wait=0))

    assert await flavour.release(lease) == "released"


def test_threads_wait_for_the_one_that_tries_a_node_that_failed(pausing: Server):
    """One thread tries to connect, and the others share what it finds instead of giving up at once."""
    manager = real_manager([pausing.url], ttl=30.0)
    manager.driver.gather.breakers[0].failed(manager.runtime.clock(), "refused")
    outcomes: Counter[str] = Counter()

    def work(number: int) -> None:
        outcomes[manager.lock(f"a{number}", wait=0).acquire().release()] += 1

    in_threads(20, work)

    assert outcomes == {"released": 20}


FEW_FILES = """
import asyncio, json, logging, os, resource, sys, threading
import django
from django.conf import settings
redlock = {"default": {"NODES": sys.argv[1:], "OPTIONS": {"restart_guard": False}}}
settings.configure(INSTALLED_APPS=["django_redlock"], DATABASES={}, REDLOCK=redlock)
django.setup()
from django_redlock import lock, locks
lock("warm up").acquire().release()
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, most))
"""

THREADS = """
barrier, said = threading.Barrier(30), []

def take(number):
    barrier.wait()
    try:
        lock(f"n{number}", wait=0).acquire().release()
    except Exception as error:
        said.append(type(error).__name__)
    else:
        said.append("taken")

threads = [threading.Thread(target=take, args=(number,)) for number in range(30)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
with lock("afterwards", wait=10):
    print(json.dumps(sorted(set(said))))
"""


def test_process_with_too_many_open_files_cannot_reach_its_nodes(nodes: Servers):
    """That is an error about the nodes like any other, and it passes, although the process opens no more files."""
    command = [sys.executable, "-c", FEW_FILES + THREADS, *nodes.urls[:3]]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert not ended.returncode, ended.stderr

    assert set(json.loads(ended.stdout)) <= {"taken", "QuorumUnavailableError"}
    assert "QuorumUnavailableError" in ended.stdout


NO_FILES = """
files = []

class GiveBack(logging.Handler):
    def emit(self, record):
        if getattr(record, "event", "") == "no_quorum":
            print(record.getMessage())
            while files:
                os.close(files.pop())

def open_all():
    logging.getLogger("django_redlock").addHandler(GiveBack())
    try:
        while True:
            files.append(os.dup(0))
    except OSError:
        pass

def blocking():
    locks["default"].close()
    open_all()
    with lock("a", wait=60):
        print("taken")

async def in_a_loop():
    async with lock("warm up", wait=60):
        pass
    await locks["default"].aclose()
    open_all()
    async with lock("a", wait=60):
        print("taken")

"""


@pytest.mark.parametrize("way", ["blocking()", "asyncio.run(in_a_loop())"])
@pytest.mark.parametrize("count", [1, 3])
def test_caller_waits_until_its_process_can_open_files_again(nodes: Servers, count: int, way: str):
    """Threads and event loops say alike why they wait, and go on as soon as files are closed."""
    command = [sys.executable, "-c", FEW_FILES + NO_FILES + way, *nodes.urls[:count]]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False)

    told, *then = ended.stdout.splitlines()
    assert (told.partition(":")[0], then) == ("lock a waits for a quorum", ["taken"]), ended.stderr
    assert set(re.findall(r":\d+: ([^,]+)", told)) == {"too many open files"}
