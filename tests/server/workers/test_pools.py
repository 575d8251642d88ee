"""What differs between the pools: child processes, threads, gevent and one process that does it all."""

from contextlib import ExitStack
from importlib.util import find_spec

import pytest
from celery.exceptions import TaskRevokedError

from django_redlock import LockLostError
from tests.conftest import needs
from tests.held import held_by
from tests.managers import wait_until

from . import project
from .real import ON_REDIS, answer, free, task

pytestmark = ON_REDIS

GEVENT = bool(find_spec("gevent"))
POOLS = {"threads": 4, "gevent": 4, "solo": 1}  # with the number of bodies that run at a time


@pytest.fixture(scope="module")
def started(start):
    pools = {pool: number for pool, number in POOLS.items() if pool != "gevent" or GEVENT}
    return {pool: start(pool, pool=pool, concurrency=number) for pool, number in pools.items()}


@pytest.fixture(params=POOLS)
def pool(request, started):
    needs("gevent", request.param in started, "pip install gevent")
    return request.param


@pytest.fixture(scope="module")
def computed(started, stages):
    """A computing body in every pool, side by side."""
    results = {pool: send("compute", pool, f"compute in {pool}") for pool in started}
    for pool, result in results.items():
        stages(f"compute in {pool}").hear("started")
        assert send("compute", pool, f"compute in {pool}").id == result.id
        stages(f"compute in {pool}").allow()
    return results


@pytest.fixture(scope="module")
def prefork(start):
    start("prefork")
    return "prefork"


def send(name, queue, *args, **options):
    return task(name).apply_async(args, queue=queue, **options)


def test_computing_body_is_renewed(pool, computed):
    """A body that computes, and lets no other greenlet run, keeps its slot: it is renewed meanwhile."""
    assert answer(computed[pool]) is False
    assert free("compute", f"compute in {pool}")()


def test_overlap(pool, stage, what):
    """A message that was sent by name is skipped while its duplicate runs; in solo it comes afterwards."""
    send("hold", pool, what)
    stage.hear("started")

    by_name = project.app.send_task("tests.server.workers.project.hold", (what,), queue=pool)

    if pool != "solo":
        with pytest.raises(TaskRevokedError, match="Skipped"):
            answer(by_name)
    stage.allow()
    stage.hear("ended")
    if pool == "solo":
        stage.hear("started")
        stage.allow()
        assert answer(by_name) == f"{what} done"


def test_retry_and_copies(pool, what, stage):
    """In every pool a retry keeps the slot, and a chain of calls after each other's results is accepted."""
    first = send("once_more", pool, what)
    wait_until(lambda: first.state == "RETRY")
    assert send("once_more", pool, what).id == first.id
    stage.allow()
    assert answer(first) == f"{what} done"

    results = []
    for _ in range(10):
        results.append(send("double", pool, 4))
        assert answer(results[-1], pause=0.001) == 8
    assert not any(result.duplicate for result in results)


def test_body_notices_that_its_slot_was_lost(started, prefork, stages, what):
    """``check()`` ends a looping body in every pool when somebody else has the slot."""
    queues = [prefork, *(pool for pool in started if pool != "solo")]  # solo does nothing else until its body ends
    calls = {queue: f"{what} {queue}" for queue in queues}
    results = {queue: send("spin", queue, call) for queue, call in calls.items()}
    for call in calls.values():
        stages(call).hear("started")

    with ExitStack() as others:
        for call in calls.values():
            task("spin").singleton.release(call, force=True)
            name = task("spin").singleton.key(call)
            others.enter_context(held_by(name, "task", "else", "somebody else", wait=10, ttl=60, renew=True))
        for queue, call in calls.items():
            with pytest.raises(LockLostError):
                answer(results[queue])

            assert task("spin").singleton.holder(call).id == "somebody else"


def test_body_that_exits(prefork, stage, what):
    """``sys.exit()`` frees the slot and ends nothing else: the next task in the queue runs."""
    send("leave", prefork, what, 1)

    stage.hear("left")

    wait_until(free("leave", what, 1))
    assert answer(send("double", prefork, 7)) == 14
