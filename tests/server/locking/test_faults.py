"""Nodes that are down, frozen, restarted, late or full: real servers, and the behaviour of the lock."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from django_redlock import Lease, LockManager, LockTakenError, QuorumUnavailableError
from django_redlock.core.protocol import Failure, Kind, Reply
from django_redlock.engine import connections, redelivery, rounds, rounds_async
from django_redlock.nodes.base import LinkError
from django_redlock.testing import Server, Servers
from django_redlock.testing.proxy import FaultProxy
from tests.managers import Blocking, Flavour, eventually, held_by, in_threads, on_each, renew_now, wait_until
from tests.managers import patient_manager as real_manager
from tests.unit.locking.test_rounds import no_quorum, works

HASTE = 0.3  # seconds: the node timeout where nodes stay silent; a free lock is requested until it is granted
PATIENCE = 60.0  # seconds that a failure of two nodes must not cost
FAULTS = {"refused": Server.kill, "frozen": Server.freeze, "missing at start": Server.kill}


@pytest.fixture(autouse=True)
def restless_redelivery(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redeliver missed releases as soon as nodes can be reached again, not seconds later."""
    monkeypatch.setattr(redelivery, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(redelivery, "LONGEST_PAUSE", 0.05)


@pytest.mark.parametrize("fault", FAULTS)
async def test_nodes_that_fail_one_after_the_other(nodes: Servers, flavour: Flavour, fault: str):
    """Two of five may fail, and nobody waits for them; with three gone the result is *no quorum* until they return."""
    managers = [real_manager(nodes.urls, node_timeout=limit) for limit in (PATIENCE, HASTE)]
    if fault != "missing at start":
        for manager in managers:
            await flavour.release(await flavour.acquire(manager.lock("warm up")))
    for failed, node in enumerate((3, 0, 4, 1, 2), 1):
        FAULTS[fault](nodes[node])
        started = time.monotonic()

        await (works(managers[0], flavour) if failed <= 2 else no_quorum(managers[1], flavour))

        assert time.monotonic() - started < PATIENCE
    nodes.reset()
    await flavour.release(await flavour.acquire(managers[0].lock("a", wait=60)))


@pytest.mark.parametrize("linked", [True, False], ids=["linked", "not linked"])
async def test_many_releases_wait_once_for_silent_nodes(nodes: Servers, flavour: Flavour, linked: bool):
    """Only the first of many releases waits for silent nodes, and all arrive when the nodes are back."""
    timeout, count = 0.3, 100  # less than a link may rest: one that has rested gets no second wait in any case
    manager = real_manager(nodes.urls[:3], node_timeout=timeout)
    leases = [await flavour.acquire(manager.lock(f"n{number}", renew=False)) for number in range(count)]
    if not linked:
        other = real_manager(nodes.urls[:3], node_timeout=timeout)
        for lease in leases:
            lease.hold.keeper = other
    for node in (nodes[0], nodes[2]):
        node.freeze()
    started = time.monotonic()

    outcomes = {await flavour.release(lease) for lease in leases}
    took = time.monotonic() - started
    for node in (nodes[0], nodes[2]):
        node.thaw()

    assert outcomes == {"unknown"}
    assert took < count * timeout / 3
    for number in (0, 1, count - 1):
        assert held_by(manager, f"{{n{number}}}")


@pytest.mark.parametrize("rest", [0.0, 10.0], ids=["used", "rested"])
def test_threads_that_release_at_once_wait_one_node_timeout(
    nodes: Servers, monkeypatch: pytest.MonkeyPatch, rest: float
):
    """Those that have no connection do not wait until a frozen node accepts one, as its first connection was quick."""
    monkeypatch.setattr(connections, "CONNECT_TIMEOUT", PATIENCE)
    monkeypatch.setattr(connections, "STEPS", PATIENCE / HASTE)
    monkeypatch.setattr(rounds, "GRACE", 0.0)
    manager = real_manager(nodes.urls[:1], node_timeout=HASTE)
    leases = [manager.lock(f"n{number}", renew=False).acquire() for number in range(3)]
    for idle in manager.driver.gather.idle.sets:
        idle.used -= rest
    nodes[0].freeze()
    started = time.monotonic()

    in_threads(3, lambda number: leases[number].release())

    took = time.monotonic() - started
    nodes[0].thaw()
    assert took < 10 * HASTE
    wait_until(lambda: not has_key(nodes[0], *(f"t:{{n{number}}}:h" for number in range(3))))


def has_key(node: Server, *keys: str) -> bool:
    with node.client() as client:
        return bool(client.exists(*keys))


async def free_on(nodes: Sequence[Server]) -> None:
    """Wait until no node has the lock."""
    await eventually(lambda: not any(has_key(node, "t:{a}:h") for node in nodes))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize(
    ("cut", "rests"), [(FaultProxy.reset, True), (FaultProxy.reset, False), (FaultProxy.cut, True)]
)
async def test_idle_connections_that_were_cut(
    nodes: Servers,
    flavour: Flavour,
    size: int,
    cut: Callable[[FaultProxy], None],
    rests: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    """
    A firewall or a server that ends idle connections costs no caller its lock and no listing a node, and no node is
    reported down.
    """
    for module in (rounds, rounds_async):
        monkeypatch.setattr(module, "IDLE", 0.0 if rests else 60.0)
    with ExitStack() as stack:
        proxies = [stack.enter_context(FaultProxy(url)) for url in nodes.urls[:size]]
        manager = real_manager([proxy.url for proxy in proxies], node_timeout=1.0 if cut is FaultProxy.cut else 10.0)
        await flavour.release(await flavour.acquire(manager.lock("a", wait=0)))
        for _ in range(1 if cut is FaultProxy.cut else 3):  # one that is cut is found by its time alone
            for proxy in proxies:
                cut(proxy)
            lease = await flavour.acquire(manager.lock("a", wait=0))
            for proxy in proxies:
                cut(proxy)
            assert {reply.kind for reply in (await survey(manager, flavour)).values()} == {Kind.LISTED}
            assert await flavour.release(lease) == "released"
        assert "node down" not in caplog.text


async def survey(manager: LockManager, flavour: Flavour) -> dict[int, Reply]:
    return manager.survey(count=1) if isinstance(flavour, Blocking) else await manager.asurvey(count=1)


async def test_lock_that_is_taken_is_not_tried_again_for_a_connection_that_was_cut(nodes: Servers, flavour: Flavour):
    """The other nodes have said all that there is to know."""
    other = real_manager(nodes.urls[:3])
    with FaultProxy(nodes[0].url) as proxy:
        manager = real_manager([proxy.url, *nodes.urls[1:3]])
        await flavour.release(await flavour.acquire(manager.lock("warm up", wait=0)))
        held = other.lock("a", wait=0).acquire()
        proxy.reset()

        with pytest.raises(LockTakenError) as taken:
            await flavour.acquire(manager.lock("a", wait=0))

        assert taken.value.attempts == 1
        held.release()


async def test_request_behind_its_own_release_is_refused(nodes: Servers):
    """A request that arrives after its release finds the tombstone."""
    manager = real_manager(nodes.urls[:1])
    manager.lock("warm up").acquire().release()
    acquisition = manager.acquirer.acquisition(manager.lock("a").description().wanted)
    round = next(acquisition.steps(manager.runtime.instant()))
    manager.driver.ask(acquisition.undo())  # while the request is delayed somewhere

    manager.driver.ask(round)  # and arrives now

    assert round.replies[0].kind is Kind.CANCELLED
    assert held_by(manager, "{a}")


async def test_restarted_node_gives_no_vote_until_the_longest_lease_has_passed(nodes: Servers, flavour: Flavour):
    """Forgotten locks could still be held; the error has the seconds left and the option."""
    for node in nodes[:3]:
        node.kill()
    nodes.start()
    manager = real_manager(nodes.urls, restart_guard=True)

    with pytest.raises(QuorumUnavailableError, match=r"votes again in \d+ s \(OPTIONS\['restart_guard'\]\)"):
        await flavour.acquire(manager.lock("a", wait=0))

    assert held_by(manager, "{a}")


@pytest.mark.parametrize(
    ("kind", "put", "name", "how"),
    [
        *(("h", "rpush", "a", {}), ("h", "rpush", ["0", "a"], {}), ("f", "rpush", ["0", "a"], {})),
        *(("q", "set", "a", {}), ("r", "set", "a", {"limit": 2})),
    ],
)
async def test_foreign_key_under_the_name_is_an_error_not_a_holder(
    nodes: Servers, flavour: Flavour, kind: str, put: str, name: Any, how: dict[str, int]
):
    """A key of another type gives no vote, and nothing is half written."""
    manager = real_manager(nodes.urls)
    for node in nodes:
        with node.client() as client:
            getattr(client, put)(f"t:{{a}}:{kind}", "not a lock")

    with pytest.raises(QuorumUnavailableError, match="WRONGTYPE"):
        await flavour.acquire(manager.lock(name, wait=0, **how))

    with nodes[0].client() as client:
        # A node that replies too late gets a release of the request, which leaves a tombstone for a while; and leases
        # of other tests may have this process give a sign of life.
        of_lock = [key for key in client.keys("t:*") if key.startswith(("t:{a}:", "t:{0}:"))]
        assert of_lock == [f"t:{{a}}:{kind}"]


@pytest.mark.parametrize("kind", ["h", "f"])
@pytest.mark.parametrize("put", [("set", "abc"), ("rpush", "abc")], ids=["text", "type"])
def test_damaged_key_ends_the_lease_of_its_own_lock_only(nodes: Servers, kind: str, put: tuple[str, str]):
    """All leases of a process are extended in one request."""
    manager = real_manager(nodes.urls, renew=False)
    leases = [manager.lock(name).acquire() for name in ("good", "bad", "better")]
    command, value = put
    for node in nodes:
        with node.client() as client:
            client.delete(f"t:{{bad}}:{kind}")
            getattr(client, command)(f"t:{{bad}}:{kind}", value)

    manager.extend(leases)

    assert [lease.extensions for lease in leases] == [1, 0, 1]


def test_right_that_is_missing_for_a_moment_ends_no_lease(nodes: Servers):
    """The nodes have refused nothing, so the leases are extended when they can be."""
    manager = real_manager(nodes.urls, renew=False)
    lease = manager.lock("a").acquire()

    extended = []
    for right in ("-pttl", "+pttl"):
        for node in nodes:
            with node.client() as client:
                client.execute_command("ACL", "SETUSER", "default", right)
        extended.append((manager.extend([lease]), lease.valid()))

    assert extended == [(0, True), (1, True)]


async def test_foreign_key_of_the_queue_leaves_nothing_without_expiry(nodes: Servers, flavour: Flavour):
    """A waiter that cannot join the queue because of this leaves no half of a queue behind."""
    manager = real_manager(nodes.urls[:1])
    holder = await flavour.acquire(manager.lock("a"))
    with nodes[0].client() as client:
        client.set("t:{a}:s", "foreign")

        with pytest.raises(QuorumUnavailableError, match="WRONGTYPE"):
            await flavour.acquire(manager.lock("a", wait=0.1))

        assert not client.exists("t:{a}:q")
    await flavour.release(holder)


async def test_cancelled_attempt_leaves_nothing_at_every_await(nodes: Servers):
    """Whenever an acquisition is cancelled, no key stays, and the cancellation continues."""
    manager = real_manager(nodes.urls)
    await (await manager.lock("warm up").aacquire()).arelease()
    for turns in range(12):
        task = asyncio.ensure_future(manager.lock("a").aacquire())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            lease = await task
            await lease.arelease()
        except asyncio.CancelledError:
            pass

        lease = await manager.lock("a", wait=5).aacquire()
        found = await manager.asurvey(slugs=("{a}",))
        assert {reply.rows[0].value[:32] for reply in found.values() if reply.rows} <= {lease.secret, ""}
        await lease.arelease()
    await manager.aclose()


async def connected(manager: LockManager, flavour: Flavour) -> None:
    """Connect to all nodes, because the first lock of a process is decided without slow ones."""
    until, answers = time.monotonic() + 30, 0
    while answers < len(manager.nodes):
        assert time.monotonic() < until
        answers = sum(bool(reply.time) for reply in (await survey(manager, flavour)).values())


def owner_on(node: Server, key: str) -> str:
    """Return the secret of the holder of a key on one node; empty if there is none."""
    with node.client() as client:
        return (client.get(key) or "")[:32]


def test_dead_nodes_are_not_connected_to_for_each_lock(nodes: Servers, monkeypatch: pytest.MonkeyPatch):
    """A node that certainly never got the request needs no release, neither now nor by redelivery."""
    threads, start = list[str](), threading.Thread.start

    def note(thread: threading.Thread) -> None:
        threads.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    manager = real_manager([*nodes.urls[:3], "redis://127.0.0.1:1", "redis://127.0.0.1:2"])

    for _ in range(200):
        assert manager.lock("a").acquire().release() == "released"

    assert threads.count("django_redlock connect") < 50  # three, and two after each of ever longer rests
    assert "django_redlock redelivery" not in threads


async def test_attempt_whose_connection_broke_is_taken_back_all_the_same(nodes: Servers, flavour: Flavour):
    """A key that was written before the reset does not stay, nor is it in the way of the next attempt."""
    with FaultProxy(nodes[0].url) as proxy:
        manager = real_manager([proxy.url, nodes[1].url])
        await flavour.release(await flavour.acquire(manager.lock("warm up")))
        proxy.drop_next_reply(reset=True)
        with patch.object(manager.driver.redelivery, "take", lambda *about: None):  # it would be too late
            await flavour.release(await flavour.acquire(manager.lock("a", wait=0)))
        await eventually(lambda: not has_key(nodes[0], "t:{a}:h"))
        proxy.drop_next_reply(reset=True)

        refused = {"side_effect": LinkError(Failure.REFUSED)}
        with (
            patch.object(manager.nodes[0], "connect", **refused),
            patch.object(manager.nodes[0], "aconnect", **refused),
        ):
            with pytest.raises(QuorumUnavailableError):
                await flavour.acquire(manager.lock("a", wait=0))
            assert has_key(nodes[0], "t:{a}:h")

        await free_on(nodes[:2])
        await eventually(lambda: not manager.driver.redelivery)


@pytest.mark.parametrize("thawed", ["before the release", "after the release"])
@pytest.mark.parametrize("link", ["a link to it", "no link to it", "a link that broke"])
async def test_takeover_that_a_node_missed(
    nodes: Servers, flavour: Flavour, thawed: str, link: str, monkeypatch: pytest.MonkeyPatch
):
    """When the node can be reached again, it learns that the earlier hold has ended, however long that was to last."""
    for module in (rounds_async, rounds):
        monkeypatch.setattr(module, "GRACE", 0.02)
    with FaultProxy(nodes[2].url) as proxy:
        urls = [*nodes.urls[:2], proxy.url]
        before, after = real_manager(urls), real_manager(urls)
        for manager in [before] if link == "no link to it" else [before, after]:
            await connected(manager, flavour)
        left = await flavour.acquire(before.on_behalf("a", ttl=7200, detached=True))
        await eventually(lambda: has_key(nodes[2], "t:{a}:h"))
        nodes[2].freeze()

        lease = await flavour.acquire(after.on_behalf("a", adopt=left.secret, renew=False))
        if link == "a link that broke":
            proxy.reset()
        if thawed == "before the release":
            nodes[2].thaw()
            await eventually(lambda: owner_on(nodes[2], "t:{a}:h") != left.secret)
            await eventually(lambda: not after.driver.redelivery)
            await flavour.extend(lease)  # restores it on a node that lacks it
            await eventually(lambda: owner_on(nodes[2], "t:{a}:h") == lease.secret)
        assert await flavour.release(lease) == "released"
        if thawed == "after the release":
            nodes[2].thaw()

        await eventually(lambda: not after.driver.redelivery)
        await free_on(nodes[:3])


async def test_end_of_one_hold_does_not_disturb_the_next(nodes: Servers, flavour: Flavour):
    """The renewal of a hold that has just been released does not affect the next one, even for a moment."""
    manager = real_manager(nodes.urls)
    for _ in range(20):
        lease = await flavour.acquire(manager.lock("a"))
        renew_now(lease)
        assert await flavour.release(lease) == "released"

    last = await flavour.acquire(manager.lock("a"))
    for extensions in (1, 2):
        renew_now(last)
        await eventually(lambda extensions=extensions: last.extensions == extensions)

    assert last.valid()
    assert held_by(manager, "{a}", last.secret)
    await flavour.release(last)


@pytest.mark.parametrize("by_token", [False, True])
async def test_link_that_ends_with_a_release_on_its_way(nodes: Servers, flavour: Flavour, by_token: bool):
    """A node that misses a release gets it again, even if the outcome was certain before its link ended."""
    with FaultProxy(nodes[2].url) as proxy:
        manager = real_manager([*nodes.urls[:2], proxy.url], node_timeout=0.5)
        await connected(manager, flavour)
        lease = await flavour.acquire(manager.lock("a", renew=False))
        await eventually(lambda: all(has_key(node, "t:{a}:h") for node in nodes[:3]))
        proxy.black_hole("requests")
        assert (manager.release("a", lease.secret) if by_token else await flavour.release(lease)) == "released"
        proxy.reset()
        proxy.heal()

        await flavour.release(await flavour.acquire(manager.lock("b")))  # now it notices
        if by_token:
            manager.lock("b").acquire().release()

        await eventually(lambda: not has_key(nodes[2], "t:{a}:h"))


async def test_release_of_a_token_reaches_a_node_that_has_seen_a_later_fence(nodes: Servers, flavour: Flavour):
    """A node that granted the lock although it knew a higher fence releases it like the others."""
    manager = real_manager(nodes.urls[:3])
    await connected(manager, flavour)
    with nodes[2].client() as client:
        client.set("t:{a}:f", str(time.time_ns() // 1000 + 5_000_000), px=60_000)
    lease = await flavour.acquire(manager.on_behalf("a", secret="ab" * 16, renew=False))
    await eventually(lambda: all(has_key(node, "t:{a}:h") for node in nodes[:3]))

    assert await flavour.release(lease) == "released"

    await free_on(nodes[:3])


@contextmanager
def redelivery_held_back(manager: LockManager) -> Iterator[None]:
    """Have releases that nodes missed brought to them after the block."""
    visit, over = manager.driver.redelivery._visit, threading.Event()
    with patch.object(manager.driver.redelivery, "_visit", lambda node: over.wait(30) and visit(node)):
        yield
        over.set()


async def test_late_release_of_a_token_does_not_end_its_next_hold(nodes: Servers, flavour: Flavour):
    """Nodes that missed a release get it later, when the same token holds the lock again."""
    with FaultProxy(nodes[1].url) as first, FaultProxy(nodes[2].url) as second:
        manager = real_manager([nodes[0].url, first.url, second.url], node_timeout=0.5)
        lock = manager.on_behalf("a", secret="ab" * 16, renew=False)
        before = await flavour.acquire(lock)
        with redelivery_held_back(manager):
            for proxy in (first, second):
                proxy.black_hole("requests")
            assert await flavour.release(before) == "unknown"
            for proxy in (first, second):
                proxy.reset()
                proxy.heal()
            again = await flavour.acquire(lock)
        await eventually(lambda: not manager.driver.redelivery)

        assert again.fencing_token > before.fencing_token
        assert sum(has_key(node, "t:{a}:h") for node in nodes[:3]) >= 2  # all that granted it again
        assert await flavour.release(again) == "released"
        assert held_by(manager, "{a}")


async def test_late_release_of_an_attempt_does_not_end_the_hold_of_the_next_one(nodes: Servers, flavour: Flavour):
    """A release that is redelivered when the next attempt has the lock, under the same secret, frees nothing."""
    with FaultProxy(nodes[1].url) as first, FaultProxy(nodes[2].url) as second:
        manager = real_manager([nodes[0].url, first.url, second.url], node_timeout=0.5)
        await flavour.release(await flavour.acquire(manager.on_behalf("b", renew=False)))
        with redelivery_held_back(manager):
            for proxy in (first, second):
                proxy.drop_next_reply(reset=True)
            lease = await flavour.acquire(manager.on_behalf("a", secret="ab" * 16, renew=False, wait=5))
        await eventually(lambda: not manager.driver.redelivery)

        assert sum(has_key(node, "t:{a}:h") for node in nodes[:3]) >= 2
        assert await flavour.extend(lease)
        await flavour.close(manager)


# Nodes that pause, or failed lately


async def test_only_node_that_pauses_for_most_of_a_second_is_waited_for(nodes: Servers, flavour: Flavour):
    """With one node, patience costs nothing: a fork for a snapshot, or a slow command, refuses nobody."""
    manager = real_manager(nodes.urls[:1], ttl=30.0, node_timeout=None)
    await flavour.release(await flavour.acquire(manager.lock("warm up", wait=0)))
    outcomes: list[object] = []
    while len(outcomes) < 5 and "released" not in outcomes:  # a pause of the machine may add to that of the node
        nodes[0].freeze()
        thaw = threading.Timer(0.8, nodes[0].thaw)
        thaw.start()
        try:
            outcomes.append(await flavour.release(await flavour.acquire(manager.lock("a", wait=0))))
        except QuorumUnavailableError as error:
            outcomes.append(error)
        thaw.join()

    assert outcomes[-1] == "released", outcomes


async def test_node_that_the_quorum_needs_is_asked_although_it_failed_lately(nodes: Servers, flavour: Flavour):
    """A breaker spares the others a node that failed; it never refuses a lock that this node could give."""
    manager = real_manager(nodes.urls[:3])
    nodes[0].kill()
    await flavour.release(await flavour.acquire(manager.lock("a", wait=0)))
    breaker = manager.driver.gather.breakers[0]
    breaker.failed(manager.runtime.clock(), "refused")
    breaker.until = manager.runtime.clock() + 3600.0
    nodes[0].start()
    nodes[1].kill()

    lease = await flavour.acquire(manager.lock("a", wait=0))

    assert await flavour.release(lease) == "released"


async def test_tasks_that_come_back_to_a_node_one_after_another_use_one_link(nodes: Servers):
    """A task that has spared a node for a while uses the link that another made meanwhile, and leaves none open."""
    manager = real_manager(nodes.urls[:3], node_timeout=2.0)
    breaker, now = manager.driver.gather.breakers[0], manager.runtime.clock()
    breaker.failed(now, "refused")
    breaker.until = now + 3600.0
    await (await manager.lock("warm up", wait=0).aacquire()).arelease()
    nodes[1].freeze()

    async def take(number: int) -> Lease:
        await asyncio.sleep(number * 0.05)
        return await manager.lock(f"a{number}", wait=0).aacquire()

    leases = await asyncio.gather(*map(take, range(3)))
    await asyncio.gather(*(lease.arelease() for lease in leases))
    await manager.aclose()

    assert not [task for task in asyncio.all_tasks() if task.get_name() == "django_redlock link"]


def test_threads_wait_for_the_one_that_tries_a_node_that_failed(nodes: Servers):
    """One thread tries to connect, and the others share what it finds instead of giving up at once."""
    manager = real_manager(nodes.urls[:1])
    manager.driver.gather.breakers[0].failed(manager.runtime.clock(), "refused")
    outcomes: Counter[str] = Counter()

    def work(number: int) -> None:
        outcomes[manager.lock(f"a{number}", wait=0).acquire().release()] += 1

    in_threads(20, work)

    assert outcomes == {"released": 20}


# What nodes say of a lease that they no longer know


def later_attempt_that_failed(nodes: Servers, lease: Lease) -> None:
    """The nodes lose the keys and accept the token of an attempt whose quorum then comes too late."""
    on_each(nodes[:3], "DEL", "t:{a}:h")
    on_each(nodes[:3], "SET", "t:{a}:f", str(lease.fencing_token + 1))


def earlier_data(nodes: Servers, lease: Lease) -> None:
    """The nodes are restored from a time when another owner had the lock; that hold has long ended."""
    on_each(nodes[:3], "SET", "t:{a}:h", "f" * 32 + '{"host":"h"}')
    on_each(nodes[:3], "SET", "t:{a}:f", str(lease.fencing_token - 1))


@pytest.mark.parametrize(
    ("happen", "reason"),
    [(later_attempt_that_failed, "superseded"), (earlier_data, "forgotten")],
)
async def test_refused_extension_has_the_reason_that_the_nodes_gave(
    nodes: Servers, flavour: Flavour, happen: Callable[..., object], reason: str
):
    """A later token means that another caller came; without one, the nodes only do not know the holder."""
    manager = real_manager(nodes.urls[:3])
    lease = await flavour.acquire(manager.lock("a", renew=False))
    happen(nodes, lease)

    assert not await flavour.extend(lease)

    assert lease.reason == reason
