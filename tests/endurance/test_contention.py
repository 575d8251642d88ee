"""Many contenders for one lock: no increment is lost, and no waiter is passed by a later one."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from django_redlock.testing import Servers
from tests.managers import Flavour, real_manager

CONTENDERS, TIMES = 100, 3
QUEUED = 0.2  # seconds after which a contender is surely in the queue, however busy the machine is


async def test_nothing_is_lost_and_no_waiter_is_passed(nodes: Servers, flavour: Flavour):
    """A hundred threads or tasks increment a counter that the lock alone protects, in the order of their arrival."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(CONTENDERS))
    manager = real_manager(nodes.urls, ttl=30.0)
    counter, turns = 0, list[tuple[float, int]]()

    async def contend(mine: Flavour) -> None:
        nonlocal counter
        connecting = await mine.acquire(manager.lock(f"elsewhere:{time.time_ns()}"))
        await mine.release(connecting)
        for _ in range(TIMES):
            began = time.monotonic()
            lease = await mine.acquire(manager.lock("counter"))
            value = counter
            await asyncio.sleep(0.001)
            counter = value + 1
            turns.append((began, lease.fencing_token))
            await mine.release(lease)

    await flavour.at_once(CONTENDERS, contend)

    assert counter == len(turns) == CONTENDERS * TIMES
    tokens = [token for _, token in turns]
    assert tokens == sorted(set(tokens))
    for place, (began, _) in enumerate(turns):
        assert sum(earlier > began + QUEUED for earlier, _ in turns[:place]) <= 1, "passed by later contenders"
