"""What must go on for days: renewal under gevent, beside other aliases, after cancellation; and what is let go of."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from importlib.util import find_spec
from typing import Any

from asgiref.sync import async_to_sync
from redis.credentials import CredentialProvider

from django_redlock.core.messages import Ballot, Kind, Survey
from django_redlock.locks import LockManager
from django_redlock.nodes import NodeSpec, aio, gather, open_node
from django_redlock.testing import Servers
from tests.conftest import needs

from .conftest import eventually, real_manager, rules

GREENLETS = """
from gevent import monkey
monkey.patch_all()
import os, sys, time
import gevent
from django_redlock import watchdog
from tests.locking.conftest import real_manager

watchdog.LINGER = 0.3
manager = real_manager(sys.argv[1:], ttl=6.0, node_timeout=0.8)
for _ in range(3):
    lease = manager.lock("a", wait=0, ttl=4.5).acquire()
    until = time.monotonic() + 20
    while not lease.extensions and lease.valid() and time.monotonic() < until:
        gevent.sleep(0.02)
    print(lease.extensions > 0, lease.reason)
    lease.release()
    while watchdog.watchdog._thread is not None and time.monotonic() < until:
        gevent.sleep(0.02)
    gevent.sleep(0.1)
    print(len(os.listdir("/proc/self/fd")), file=sys.stderr)
manager.close()
"""


def test_renewal_goes_on_after_the_watchdog_of_greenlets_has_rested(nodes: Servers):
    """P33, L45: the thread that renews ends when idle; the next one opens its own connections, and nothing piles up."""
    needs("gevent", find_spec("gevent"), "pip install gevent")

    ended = subprocess.run(
        [sys.executable, "-c", GREENLETS, *nodes.urls[:3]], capture_output=True, text=True, timeout=120, check=False
    )

    assert ended.stdout.splitlines() == ["True None"] * 3, ended.stderr
    before, _, after = ended.stderr.split()
    assert before == after


def test_closed_event_loops_are_forgotten(nodes: Servers):
    """L40: a process that makes an event loop per call, as ``async_to_sync`` does, does not keep them all."""
    manager = real_manager(nodes.urls)
    loops = []

    async def call() -> None:
        loops.append(weakref.ref(asyncio.get_running_loop()))
        async with manager.lock("a", wait=5):
            pass

    for _ in range(10):
        async_to_sync(call)()
    gc.collect()

    assert sum(loop() is not None for loop in loops) <= 1
    manager.close()


async def test_nodes_that_do_not_answer_do_not_delay_other_aliases(nodes: Servers):
    """P35, L27: the leases of one alias go to waste, those of another are extended all the while."""
    ill = real_manager(nodes.urls[:3], ttl=20.0, node_timeout=1.0)
    well = real_manager(nodes.urls[3:], prefix="w:", ttl=6.0, node_timeout=1.0)
    wasted = [ill.lock(f"a{number}").acquire() for number in range(600)]
    lease = well.lock("b").acquire()
    for node in nodes[:3]:
        node.freeze()
    try:
        # Six hundred leases are six rounds of one node timeout each, again and again.
        assert await asyncio.to_thread(wasted[0].lost.wait, 60)
        assert lease.valid()
        assert lease.extensions >= 2
    finally:
        for node in nodes[:3]:
            node.thaw()
    for one in wasted:
        one.release(wait=False)
    lease.release()
    ill.close()
    well.close()


async def test_renewal_goes_on_after_all_tasks_were_cancelled(nodes: Servers):
    """P34, L44: work that goes on after its event loop's tasks were cancelled keeps its lock."""
    manager = real_manager(nodes.urls[:3], ttl=9.0, node_timeout=2.0)
    lease = await manager.lock("a").aacquire()
    for node in nodes[:3]:
        node.freeze()

    def renewing() -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name() == "django_redlock watchdog"]

    await eventually(lambda: bool(renewing()))
    renewing()[0].cancel()
    for node in nodes[:3]:
        node.thaw()

    await eventually(lambda: lease.extensions > 0)

    assert await lease.arelease() == "released"
    await manager.aclose()
    manager.close()


def test_connections_of_a_burst_are_closed(nodes: Servers, monkeypatch: Any):
    """L40: connections that many threads needed for a moment are not kept for ever."""
    manager = real_manager(nodes.urls)
    together = threading.Barrier(20)

    def work(number: int) -> None:
        together.wait()
        manager.lock(f"a{number}").acquire().release()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    idle = list(manager._gather._bundles)
    manager.lock("a").acquire().release()
    monkeypatch.setattr(gather, "MAX_IDLE", 0.0)

    for _ in range(len(idle)):
        manager.lock("a").acquire().release()

    assert len(manager._gather._bundles) == 1
    assert manager._gather._bundles[0] not in idle
    assert all(bundle.closed for bundle in idle)
    manager.close()


async def test_connections_that_were_long_idle_are_not_used(nodes: Servers, monkeypatch: Any):
    """L5: a firewall may have forgotten them, and the first call after a quiet night must not fail."""
    manager = real_manager(nodes.urls)
    await (await manager.lock("a").aacquire()).arelease()
    lines = manager._loop_side().gather._lines
    await eventually(lambda: len(lines) == 5 and not any(line.owed for line in lines.values()))
    before = {node: line.link for node, line in lines.items()}
    monkeypatch.setattr(aio, "MAX_IDLE", 0.0)

    await (await manager.lock("a").aacquire()).arelease()

    assert all(before[node].broken for node in before)
    await manager.aclose()
    manager.close()


async def test_round_in_a_hurry_does_not_close_the_link_of_another(nodes: Servers):
    """L4: how long a node may be silent is said by the request that waits for it, not by the next one."""
    manager = real_manager(nodes.urls[:1])
    await (await manager.lock("a").aacquire()).arelease()
    asking = manager._loop_side().gather

    def survey(timeout: float) -> Ballot:
        return Ballot({0: Survey(size=1)}, lambda replies: False, timeout, 1)

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
    manager.close()


class Away(Exception):
    """What a cloud's credential provider may raise."""


class Provider(CredentialProvider):
    away = True

    def get_credentials(self) -> tuple[str, str]:
        if self.away:
            raise Away("the token service is away")
        return "default", ""


async def test_credential_provider_that_fails_is_a_node_that_fails(nodes: Servers, caplog: Any):
    """L3, L45: whatever a node's connection raises, the round is told, and listening for hints begins again later."""
    provider = Provider()
    odd = open_node(NodeSpec(nodes[0].url, options={"credential_provider": provider}), "t:")
    manager = LockManager([odd, *(open_node(NodeSpec(url), "t:") for url in nodes.urls[1:3])], rules(3))

    holder = await manager.lock("a", wait=0).aacquire()
    waiting = asyncio.create_task(manager.lock("a", wait=None).aacquire())
    listening = manager._loop_side().hints.waiters.listening
    await eventually(lambda: "listening to" in caplog.text)
    provider.away = False
    with nodes[0].client() as client:
        client.acl_setuser("default", enabled=True, nopass=True, categories=["+@all"], keys=["*"], channels=["*"])
    await eventually(lambda: listening == {0, 1, 2})
    await holder.arelease()

    await (await waiting).arelease()
    await manager.aclose()
    manager.close()
