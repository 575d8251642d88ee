"""
The rights that docs/operate/security.md lists are sufficient, and each of them is needed.

The page is the only list of them.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis

from django_redlock import Lease, LockManager, LockTakenError, RedlockError
from django_redlock.testing import Server
from tests.managers import Asyncio, Blocking, Flavour, real_manager
from tests.waiting import eventually

PAGE = (Path(__file__).parents[2] / "docs" / "operate" / "security.md").read_text()
(LINE,) = re.findall(r"```text\n(ACL SETUSER .*?)```", PAGE, re.DOTALL)
RULES = LINE.replace("myproject:", "t:").replace("PASSWORD", "secret").split()
RIGHTS = [rule for rule in RULES if rule.startswith(("+", "~", "&"))]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as one:
        yield one


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make waiters rely on the notification of their turn."""
    monkeypatch.setattr("django_redlock.core.acquisition.POLL", 30.0)


@pytest.fixture
def admin(server: Server) -> Iterator[redis.Redis]:
    with server.client(db=1) as client:
        client.execute_command("SELECT", 1)
        client.flushall()
        client.execute_command("ACL", "LOG", "RESET")
        yield client


@asynccontextmanager
async def manager_with(
    server: Server, admin: redis.Redis, flavour: Flavour, without: str = ""
) -> AsyncIterator[LockManager]:
    """Let a user with the documented rights, minus one, connect to a database other than the first."""
    admin.execute_command("ACL", "DELUSER", "locks")
    admin.execute_command(*(rule for rule in RULES if rule != without))
    place = f"127.0.0.1:{server.port}"
    manager = real_manager([f"redis://locks:secret@{place}/1"], restart_guard=True, durable=(place,))
    yield manager
    await flavour.close(manager)
    manager.close()


async def everything(manager: LockManager, admin: redis.Redis, flavour: Flavour) -> None:
    """Use every operation of the engine once, and every branch of its scripts; raise if something does not work."""
    lease = await flavour.acquire(manager.lock("a", wait=0))
    admin.pexpire("t:index", 1000)  # as when the longest earlier lease has nearly ended
    assert await flavour.extend(lease)
    assert admin.pttl("t:index") > 1000
    with pytest.raises(LockTakenError):
        await flavour.acquire(manager.lock("a", wait=0.1))

    admin.delete("t:{a}:h")
    assert await flavour.extend(lease)
    assert admin.exists("t:{a}:h"), "not healed"

    await passed_on(manager, flavour, lease)
    lease = await flavour.acquire(manager.lock("a", wait=0))
    assert manager.survey(slugs=("{a}",))[0].rows[0].value.startswith(lease.secret)
    assert [row.slug for row in manager.survey(count=10)[0].rows] == ["{a}"]
    assert await flavour.release(lease) == "released"
    assert manager.survey(count=10)[0].kind.name == "LISTED"

    readers = [await flavour.acquire(manager.lock("r", shared=True, wait=0)) for _ in range(2)]
    for reader in readers:
        assert await flavour.extend(reader)
        assert await flavour.release(reader) == "released"

    admin.set("t:{high}:f", 2**52)  # the token must be raised in a second round
    admin.zadd("t:index", {"{died}": 1})  # a holder that died leaves the index
    both = await flavour.acquire(manager.lock(["high", "b"], wait=0))
    assert both.fencing_token == 2**52 + 1
    assert admin.zscore("t:index", "{died}") is None
    assert await flavour.release(both) == "released"

    admin.set("t:{endless}:h", "no lock of ours")  # is listed, so that people find it
    with pytest.raises(LockTakenError):
        await flavour.acquire(manager.lock("endless", wait=0))
    assert admin.zscore("t:index", "{endless}") == float("inf")

    admin.script_flush()  # as when the server has restarted
    again = await flavour.acquire(manager.lock("a", wait=0))
    interrupted = manager.acquirer.acquisition(manager.lock("c").description().wanted)
    manager.driver.ask(interrupted.undo(0.2))
    assert await flavour.release(again) == "released"


async def passed_on(manager: LockManager, flavour: Flavour, lease: Lease) -> None:
    """Release a lock while a waiter waits for it that listens and rarely asks, and that releases it in turn."""
    other = LockManager(manager.nodes, manager.rules)  # as another process, which only the server can tell apart
    lock = other.lock("a", wait=2)
    blocking = isinstance(flavour, Blocking)
    waiting = asyncio.ensure_future(asyncio.to_thread(lock.acquire) if blocking else lock.aacquire())
    notifications = other.driver.notifications if blocking else other.driver.loop_side().notifications
    try:
        await eventually(lambda: notifications.waiters.notified or waiting.done())
        assert await flavour.release(lease) == "released"
    finally:
        try:
            taken = await waiting
            assert await flavour.release(taken) == "released"
        finally:
            await flavour.close(other)
            other.close()


async def test_documented_rights_are_enough(server: Server, admin: redis.Redis, flavour: Flavour):
    """All commands of the engine and its connections are allowed; the server has recorded no attempt at another."""
    async with manager_with(server, admin, flavour) as manager:
        await everything(manager, admin, flavour)

    assert admin.execute_command("ACL", "LOG") == []


@pytest.mark.parametrize("right", RIGHTS)
async def test_each_documented_right_is_needed(server: Server, admin: redis.Redis, right: str):
    """Without any one of the rights something fails, with one of our errors and never with a grant."""
    for flavour in (Blocking(), Asyncio()):
        admin.flushall()
        async with manager_with(server, admin, flavour, without=right) as manager:
            with pytest.raises((RedlockError, AssertionError, IndexError, TimeoutError)):
                await everything(manager, admin, flavour)
