"""A Redis or Valkey Cluster as one node: failovers, slots that move, and what is refused."""

import asyncio
from collections.abc import Iterator
from contextlib import closing

import pytest

from django_redlock import LockManager, LockTakenError, QuorumUnavailableError
from django_redlock.nodes.inspection import inspect
from django_redlock.testing import Servers
from tests.clusters import PASSWORD, Cluster, cluster, until
from tests.endurance.test_acl import RIGHTS
from tests.managers import Asyncio, Blocking, Flavour, eventually, holders, on_each, real_manager, run_greenlets

from .test_replies import babbler

KEY = "{t}:served"  # one of the keys of the tests' managers
BRIEF = {"ttl": 3.0, "max_ttl": 4.0, "node_timeout": 0.7}


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """A cluster of three masters."""
    with cluster(3) as running:
        yield running


def guarded(cluster: Cluster) -> LockManager:
    """Return a manager whose node does not vote while the shard may have forgotten a lock."""
    return real_manager([cluster.url], restart_guard=True, **BRIEF)


async def held(flavour: Flavour, manager: LockManager, name: object = "a", **options: object):
    return await flavour.acquire(manager.lock(name, **{"wait": 30, **options}))


async def test_cluster_that_is_listed_twice_has_one_vote(three: Cluster, flavour: Flavour):
    """Its members are no majority of their own: the error says that they are one server."""
    urls = [f"redis+cluster://:{PASSWORD}@127.0.0.1:{server.port}" for server in three.servers]
    twice = real_manager(urls, ttl=60.0, node_timeout=10.0)

    with pytest.raises(QuorumUnavailableError, match="is the same server as"):
        await held(flavour, twice, wait=0)


async def test_locks_and_their_queues_are_found_where_the_slot_goes(three: Cluster, flavour: Flavour):
    """Nobody gets the lock while its slot moves; afterwards the holder and the waiter go on at the other shard."""
    manager, other = (real_manager([three.url], ttl=60.0, node_timeout=10.0) for _ in range(2))
    lease = await held(flavour, manager)
    waiter = asyncio.create_task(asyncio.to_thread(other.lock("a", wait=60).acquire))
    await eventually(lambda: any(row.waiting for row in manager.survey(slugs=("{a}",), waiters=0)[0].rows))
    target = (three.owner(KEY) + 1) % 3

    for step in three.migrate(KEY, target):
        with pytest.raises((QuorumUnavailableError, LockTakenError)) as refused:
            await held(flavour, other, wait=0)
        if isinstance(refused.value, QuorumUnavailableError):
            assert not refused.value.misconfigured, step

    assert three.owner(KEY) == target
    until(lambda: set(holders(manager, "{a}")) == {lease.secret})
    assert not waiter.done()
    assert await flavour.release(lease) in ("released", "unknown")
    later = await waiter
    assert later.fencing_token > lease.fencing_token
    assert later.release() == "released"


def test_failover_keeps_a_lock_that_was_replicated():
    """The promoted replica has the lock, so the holder goes on and no other caller gets it."""
    with cluster(3, replicas=True) as running, closing(real_manager([running.url], ttl=60.0)) as manager:
        lease = manager.lock("a", wait=30).acquire()
        place = running.owner(KEY)
        until(lambda: lease.secret in str(running.copy(place, "{t}:{a}:h")))
        running.fail_over(place)

        until(lease.extend)
        with closing(real_manager([running.url], ttl=60.0)) as other, pytest.raises(LockTakenError):
            other.lock("a", wait=5).acquire()
        assert lease.release() == "released"


async def test_shard_that_takes_the_slot_is_new_and_did_not_restart(three: Cluster, flavour: Flavour):
    """Under the restart guard, the error of a process that knew the other shard says why this one does not vote yet."""
    manager = guarded(three)
    three.serve(KEY)
    assert await flavour.release(await held(flavour, manager)) == "released"
    for _ in three.migrate(KEY, (three.owner(KEY) + 1) % 3):
        pass

    with pytest.raises(QuorumUnavailableError) as refused:
        await held(flavour, manager, wait=1.0)

    (words,) = refused.value.nodes.values()
    assert words.startswith("restarted or is new to these locks, votes again in ")


async def test_failover_after_replication_was_cut_makes_newcomers_wait():
    """If a replica that missed a lock is promoted, every process waits until such a lock has expired."""
    with cluster(3, replicas=True) as running:
        knew = guarded(running)
        running.serve(KEY)
        with knew.lock("a", wait=30):
            place = running.owner(KEY)
        running.cut_replication(place)
        lease = knew.lock("a", wait=0, renew=False).acquire()

        replica = running.fail_over(place)
        until(lambda: running.owner(KEY) == replica)

        newcomers = [(flavour, guarded(running)) for flavour in (Blocking(), Asyncio())]
        for flavour, manager in newcomers:
            with pytest.raises(QuorumUnavailableError, match=r"votes again in \d+ s") as refused:
                await held(flavour, manager, wait=0.5)
            assert not refused.value.misconfigured
        for flavour, manager in newcomers:
            later = await held(flavour, manager)
            assert not lease.valid()
            assert later.fencing_token > lease.fencing_token
            assert await flavour.release(later) == "released"
            await flavour.close(manager)


def test_greenlets_wait_and_are_renewed(three: Cluster, nodes: Servers):
    """Under gevent, waiters are notified by the shard and by Redis servers, and the watchdog renews."""
    run_greenlets([*nodes.urls[:2], three.url])


NOWHERE = b"*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$15\r\nnowhere.invalid\r\n:6379\r\n"


@pytest.mark.parametrize("hosts", ["{}", "{},127.0.0.1:1", "127.0.0.1:1,{}"], ids=["alone", "first", "last"])
async def test_address_that_a_member_announces_is_named(flavour: Flavour, hosts: str):
    """A cluster may announce names that nobody can resolve; they tell more than a member that is down."""
    with babbler(b"", NOWHERE + b"*0\r\n") as member:
        manager = real_manager([f"redis+cluster://{hosts.format(f'127.0.0.1:{member.port}')}"])
        with pytest.raises(QuorumUnavailableError, match=r"unknown host: nowhere\.invalid:6379, says a member"):
            await held(flavour, manager, wait=0)
        assert inspect(manager.nodes[0], 5.0).detail == "unknown host: nowhere.invalid:6379, says a member"


async def test_cluster_that_lost_another_shard_says_so(three: Cluster):
    """With full coverage no shard serves; the error is what the living members say, and not that a dead one is dead."""
    dead = (three.owner(KEY) + 1) % 3
    managers: list[tuple[Flavour, LockManager]] = []
    for flavour in (Blocking(), Asyncio()):
        for place in (0, 2):  # the dead member is asked first, or last
            ports = [server.port for at, server in enumerate(three.servers) if at != dead]
            ports.insert(place, three.servers[dead].port)
            url = f"redis+cluster://:{PASSWORD}@{','.join(f'127.0.0.1:{port}' for port in ports)}"
            managers.append((flavour, real_manager([url], ttl=60.0, node_timeout=10.0)))
    for flavour, manager in managers:
        assert await flavour.release(await held(flavour, manager)) == "released"
    on_each(three.servers, "CONFIG", "SET", "cluster-require-full-coverage", "yes")
    three.servers[dead].kill()
    until(lambda: all("state:fail" in str(three.ask(at, "INFO")) for at in range(3) if at != dead))

    said = set()
    for flavour, manager in managers:
        with pytest.raises(QuorumUnavailableError) as refused:
            await held(flavour, manager, wait=0)
        said |= set(refused.value.nodes.values())
    three.servers[dead].start()
    until(lambda: all("state:ok" in str(three.ask(at, "INFO")) for at in range(3)))
    on_each(three.servers, "CONFIG", "SET", "cluster-require-full-coverage", "no")

    assert said == {"no master at present"}
    for flavour, manager in managers:
        assert await flavour.release(await held(flavour, manager)) == "released"
        await flavour.close(manager)


async def test_server_without_cluster_mode_is_a_configuration_error(nodes, flavour: Flavour):
    """The scheme and the server's mode must agree."""
    manager = real_manager([nodes.urls[0].replace("redis:", "redis+cluster:")])

    with pytest.raises(QuorumUnavailableError, match="runs in another mode") as refused:
        await held(flavour, manager, wait=60)

    assert (refused.value.misconfigured, refused.value.attempts) == (True, 1)


async def test_user_needs_one_more_right_than_elsewhere(three: Cluster, flavour: Flavour):
    """The rights that docs/operate/security.md lists, for keys with braces, and the right to ask for the slots."""
    rights = [right for right in RIGHTS if right.startswith("+")] + ["~{t}:*", "&{t}:w:*"]
    ports = ",".join(f"127.0.0.1:{server.port}" for server in three.servers)
    managers = []
    for more in (["+cluster|slots"], []):
        for server in three.servers:
            with server.client() as client:
                user = f"locks{len(more)}"
                client.execute_command(
                    "ACL", "SETUSER", user, "reset", "on", ">secret", "resetchannels", *rights, *more
                )
        managers.append(real_manager([f"redis+cluster://{user}:secret@{ports}"], ttl=60.0, node_timeout=10.0))

    assert await flavour.release(await held(flavour, managers[0], ["a", "b"], wait=0)) == "released"
    with pytest.raises(QuorumUnavailableError, match="NOPERM") as refused:
        await held(flavour, managers[1], wait=60)
    assert refused.value.misconfigured
