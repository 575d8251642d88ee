"""Long-running processes: renewal after cancellation, and resources that are freed, or that there are none of."""

import asyncio
import gc
import re
import subprocess
import sys
import threading
import weakref
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from redis.credentials import CredentialProvider

from django_redlock import LockManager
from django_redlock.core.protocol import Kind, Survey
from django_redlock.core.round import Round
from django_redlock.engine import watchdog as renewal
from django_redlock.engine.connections import MAX_IDLE
from django_redlock.nodes import NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.testing import FaultProxy, Servers
from tests.managers import eventually, in_threads, real_manager, renew_now, rules


async def test_closed_event_loops_are_forgotten(nodes: Servers):
    """A process that makes an event loop per call, as ``async_to_sync`` does, does not keep all of them."""
    manager = real_manager(nodes.urls)
    loops = []

    async def call() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async with manager.lock("a", wait=5):
            pass

    def freed() -> bool:
        gc.collect()
        return sum(loop() is not None for loop in loops) <= 1

    await asyncio.to_thread(lambda: [async_to_sync(call)() for _ in range(5)])

    await eventually(freed)  # the thread of asgiref that ran a loop refers to it for a moment more


async def test_renewal_goes_on_after_all_tasks_were_cancelled(nodes: Servers, monkeypatch: pytest.MonkeyPatch):
    """Work that continues after its event loop's tasks were cancelled keeps its lock."""
    monkeypatch.setattr(renewal, "TICK", 0.05)
    manager = real_manager(nodes.urls[:3], ttl=60.0, node_timeout=10.0)
    lease = await manager.lock("a").aacquire()
    for node in nodes[:3]:
        node.freeze()
    renew_now(lease)

    def renewing() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name() == "django_redlock watchdog"]

    await eventually(lambda: bool(renewing()))
    renewing()[0].cancel()
    for node in nodes[:3]:
        node.thaw()
    lease.hold._renew_at = 0.0  # due at the next check

    await eventually(lambda: lease.extensions > 0)

    assert await lease.arelease() == "released"
    await manager.aclose()


def test_connections_of_a_burst_are_closed(nodes: Servers, monkeypatch: Any):
    """Connections that many threads needed for a moment are not kept for ever."""
    manager = real_manager(nodes.urls)
    in_threads(8, lambda number: manager.lock(f"a{number}").acquire().release())
    idle = list(manager.driver.gather.idle.sets)
    manager.lock("a").acquire().release()
    monkeypatch.setattr("django_redlock.engine.connections.MAX_IDLE", 0.0)

    for _ in range(len(idle)):
        manager.lock("a").acquire().release()

    assert len(manager.driver.gather.idle.sets) == 1
    assert manager.driver.gather.idle.sets[0] not in idle
    assert all(connections.closed for connections in idle)


async def test_connections_that_were_long_idle_are_not_used(nodes: Servers):
    """A firewall may have dropped them, and the first call after a quiet night must not fail."""
    manager = real_manager(nodes.urls)
    await (await manager.lock("a").aacquire()).arelease()
    lines = manager.driver.loop_side().gather._lines
    await eventually(lambda: len(lines) == 5 and not any(line.in_flight for line in lines.values()))
    before = {node: line.link for node, line in lines.items()}
    for line in lines.values():
        line.silent_since -= 2 * MAX_IDLE

    await (await manager.lock("a").aacquire()).arelease()

    assert all(before[node].broken for node in before)
    await manager.aclose()


async def test_round_in_a_hurry_does_not_close_the_link_of_another(nodes: Servers):
    """The request that waits for a node sets how long it may be silent, not the next request."""
    manager = real_manager(nodes.urls[:1])
    await (await manager.lock("a").aacquire()).arelease()
    asking = manager.driver.loop_side().gather

    def survey(timeout: float) -> Round:
        return Round({0: Survey(size=1)}, lambda replies: False, timeout, 1)

    patient, hurried = survey(30.0), survey(0.05)
    nodes[0].freeze()
    waiting = asyncio.create_task(asking.ask(patient))
    await asyncio.sleep(0.1)  # longer than the second round would wait
    await asking.ask(hurried)
    nodes[0].thaw()
    await waiting

    assert hurried.replies[0].kind is Kind.UNKNOWN
    assert patient.replies[0].kind not in (Kind.UNKNOWN, Kind.FAILED)
    await manager.aclose()


class Away(Exception):
    """An exception that a cloud's credential provider may raise."""


class Provider(CredentialProvider):
    away = True

    def get_credentials(self) -> tuple[str, str]:
        if self.away:
            raise Away("the token service is away")
        return "default", ""


async def test_credential_provider_that_fails_is_a_node_that_fails(nodes: Servers, caplog: Any):
    """Whatever a node's connection raises, the round gets it, and listening begins again later."""
    provider = Provider()
    odd = open_node(NodeSpec(nodes[0].url, options={"credential_provider": provider}), "t:")
    manager = LockManager([odd, *(open_node(NodeSpec(url), "t:") for url in nodes.urls[1:3])], rules(3))

    holder = await manager.lock("a", wait=0).aacquire()
    waiting = asyncio.create_task(manager.lock("a", wait=None).aacquire())
    listening = manager.driver.loop_side().notifications.waiters.listening
    await eventually(lambda: "listening to" in caplog.text)
    provider.away = False
    with nodes[0].client() as client:
        client.acl_setuser("default", enabled=True, nopass=True, categories=["+@all"], keys=["*"], channels=["*"])
    await eventually(lambda: listening == {0, 1, 2})
    await holder.arelease()

    await (await waiting).arelease()
    await manager.aclose()
    manager.close()


async def test_process_that_cannot_start_threads_still_locks(nodes: Servers, monkeypatch: pytest.MonkeyPatch):
    """Locks work at the limit of threads, and at the end of a process, when Python starts no more threads."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("django_redlock"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with FaultProxy(nodes[0].url) as proxy:
        manager = real_manager([proxy.url], ttl=60.0, node_timeout=0.3)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            manager.lock("a").acquire().release()
            lease = manager.lock("a").acquire()
            other = manager.lock("b").acquire()
            proxy.black_hole("requests")
            assert lease.release() == "unknown"  # nobody can redeliver it now
        assert len(manager.driver.redelivery) == 1
        assert other.release() == "unknown"  # but when there are threads again
        proxy.reset()
        proxy.heal()
        with nodes[0].client() as client:
            await eventually(lambda: not client.exists("t:{a}:h", "t:{b}:h"))


FEW_FILES = """
import asyncio, logging, os, resource, sys
import django
from django.conf import settings
redlock = {"default": {"NODES": sys.argv[1:], "OPTIONS": {"restart_guard": False, "node_timeout": 2.0}}}
settings.configure(INSTALLED_APPS=["django_redlock"], DATABASES={}, REDLOCK=redlock)
django.setup()
from django_redlock import lock, locks
lock("warm up").acquire().release()
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 12, most))
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
    command = [sys.executable, "-c", FEW_FILES + way, *nodes.urls[:count]]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False)

    told, *then = ended.stdout.splitlines()
    assert (told.partition(":")[0], then) == ("lock a waits for a quorum", ["taken"]), ended.stderr
    assert set(re.findall(r":\d+: ([^,]+)", told)) == {"too many open files"}
