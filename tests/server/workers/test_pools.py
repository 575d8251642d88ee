"""The other pools: threads, gevent and one process that does it all."""

import os
import signal
import time
from importlib.util import find_spec

import pytest
from celery.exceptions import TaskRevokedError

from django_redlock import LockLostError, locks
from tests.conftest import needs

from . import project
from .real import LEASE, free, task, until

pytestmark = [pytest.mark.parametrize("broker", ["redis"], indirect=True, scope="module")]

POOLS = ["threads", "gevent", "solo"]


@pytest.fixture(scope="module", params=POOLS)
def pool(request, start):
    """A queue whose worker has this pool."""
    if request.param == "gevent":
        needs("gevent", find_spec("gevent"), "pip install gevent")
    start(request.param, pool=request.param, concurrency=1 if request.param == "solo" else 4)
    return request.param


@pytest.fixture(scope="module")
def prefork(start):
    """A queue whose worker has child processes."""
    start("prefork")
    return "prefork"


def send(name, queue, *args, **options):
    return task(name).apply_async(args, queue=queue, **options)


def test_body_longer_than_its_lease(pool, stage, what):
    """
    In every pool a body of several leases keeps its slot, and frees it at its end. C81 C86
    """
    result = send("hold", pool, what)
    stage.hear("started")
    time.sleep(1.5 * LEASE)  # what is tested is that time passes and nothing happens

    assert send("hold", pool, what).id == result.id
    stage.allow()
    assert result.get(timeout=30) == f"{what} done"
    assert free("hold", what)()


def test_computing_body_longer_than_its_lease(pool, what):
    """
    A body that computes for several leases, and lets no other greenlet run, keeps its slot. C81 C82
    """
    lost, extensions = send("compute", pool, what, 2.5 * LEASE).get(timeout=30)

    assert not lost
    assert extensions >= 2


def test_overlap(pool, stage, what):
    """
    In every pool a message that was sent by name is skipped while its equal runs; in solo it comes afterwards. C36
    """
    send("hold", pool, what)
    stage.hear("started")

    by_name = project.app.send_task("tests.server.workers.project.hold", (what,), queue=pool)

    if pool != "solo":
        with pytest.raises(TaskRevokedError, match="Skipped"):
            by_name.get(timeout=20)
    stage.allow()
    stage.hear("ended")
    if pool == "solo":
        stage.hear("started")
        stage.allow()
        assert by_name.get(timeout=20) == f"{what} done"


def test_retry_and_copies(pool, what, stage):
    """
    In every pool a retry keeps the slot, and a chain of calls after each other's results is accepted. C39 C51
    """
    first = send("once_more", pool, what)
    until(lambda: first.state == "RETRY")
    assert send("once_more", pool, what).id == first.id
    stage.allow()
    assert first.get(timeout=20) == f"{what} done"

    results = []
    for _ in range(10):
        results.append(send("double", pool, 4))
        assert results[-1].get(timeout=20, interval=0.001) == 8
    assert not any(result.duplicate for result in results)


def test_killed_worker_of_every_pool(start, stage, what, broker):
    """
    SIGKILL of a worker that runs bodies in its own process frees their slots within a lease. C62
    """
    for pool in ("threads", "solo"):
        doomed = start(f"doomed-{pool}", pool=pool)
        send("hold", f"doomed-{pool}", f"{what}", headers={})
        stage.hear("started")
        doomed.kill()
        assert until(free("hold", what), timeout=20) < 20


@pytest.mark.parametrize("queue", ["prefork", "threads", "gevent"])
def test_interrupted_when_lost(queue, request, stage, what, prefork, start):
    """
    With ``on_lost="raise"`` a looping body is interrupted when somebody else has the slot. C84 C85
    """
    if queue != "prefork":
        if queue == "gevent":
            needs("gevent", find_spec("gevent"), "pip install gevent")
        start(f"spin-{queue}", pool=queue)
        queue = f"spin-{queue}"
    result = send("spin", queue, what)
    stage.hear("started")
    name = task("spin").singleton.key(what)

    task("spin").singleton.release(what, force=True)
    with locks["default"].lock(name, wait=10, ttl=20, kind="task", ref="somebody else", label="else"):
        with pytest.raises(LockLostError):
            result.get(timeout=30)

        assert task("spin").singleton.holder(what).id == "somebody else"


def test_body_that_stops_the_interpreter(prefork, what):
    """
    A body that keeps the interpreter for longer than its lease is told that it lost its slot. C83
    """
    lost, reason = send("stall", prefork, what, 4).get(timeout=30)

    assert (lost, reason) == (True, "expired")


def test_body_that_exits(prefork, stage, what):
    """
    ``sys.exit()`` frees the slot and ends nothing else: the next task in the queue runs. C41 C86
    """
    send("leave", prefork, what, 1)

    until(lambda: "left" in stage.heard(), timeout=20)

    until(free("leave", what, 1))
    assert send("double", prefork, 7).get(timeout=20) == 14


def test_threads_of_a_child(prefork, what):
    """
    A child has a heartbeat thread of its own while it runs a task, and nothing of its parent's. C86 C87
    """
    pid, names = send("report", prefork, what).get(timeout=20)

    assert pid != os.getpid()
    assert "django_redlock watchdog" in names
    assert free("report", what)()


def test_recycled_children_leave_no_slot(start, what):
    """
    A worker that replaces its children after each task leaves no slot behind. C73
    """
    start("recycling", TEST_MAX_TASKS="1")
    pids = set()

    for number in range(6):
        pid, _ = send("report", "recycling", f"{what} {number}").get(timeout=30)
        pids.add(pid)

    assert len(pids) == 6
    assert all(free("report", f"{what} {number}")() for number in range(6))


def test_killed_by_memory_limit_signal(prefork, stage, what):
    """
    A child that a signal of the system ends, as a segfault or the memory's limit does, frees its slot. C63
    """
    result = send("hold_long", prefork, what)
    os.kill(stage.hear("started"), signal.SIGSEGV)

    until(result.ready, timeout=20)

    until(free("hold_long", what), timeout=20)
