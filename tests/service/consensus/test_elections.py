"""
Three real members of a store, whose clocks differ, when one of them dies or is cut off.

That nobody else gets the lock meanwhile, and that it is free in time after its holder, is shown by chaos (the profiles
*etcd* and *zookeeper*).
"""

import select
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from django_redlock import LockTakenError, QuorumUnavailableError
from django_redlock.nodes import LinkError, NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.testing import FaultProxy
from django_redlock.testing.proxy import Direction
from tests import etcd, zookeeper
from tests.conftest import needs_service
from tests.etcd import Cluster, Member
from tests.managers import Flavour, held_by, real_manager
from tests.zookeeper import Ensemble, Zoo

pytestmark = pytest.mark.endurance  # elections take seconds each
Store = Cluster | Ensemble
KINDS = [pytest.param(kind, marks=pytest.mark.xdist_group(kind)) for kind in ("etcd", "zookeeper")]


@pytest.fixture(scope="module", params=KINDS)
def members(request: pytest.FixtureRequest) -> Iterator[Store]:
    needs_service(request.param, Member if request.param == "etcd" else Zoo)
    with etcd.cluster("--snapshot-count", "100") if request.param == "etcd" else zookeeper.ensemble() as three:
        yield three


@pytest.fixture
def cluster(members: Store) -> Store:
    """Three running members, whatever the last test did to them."""
    if isinstance(members, Ensemble):
        members.start()
    for member in members.members:
        member.start()
    return members


async def test_holder_keeps_its_lock_over_an_election(cluster: Store, flavour: Flavour):
    """A living holder whose leader dies goes on to extend; no other caller gets the lock meanwhile."""
    with closing(real_manager([cluster.url], ttl=60.0, node_timeout=2.0)) as manager:
        lease = await flavour.acquire(manager.lock("b", wait=60))
        leader = cluster.leader()
        leader.kill()
        until = time.monotonic() + 55  # an election takes long on a machine with much else to do
        while not await flavour.extend(lease):
            assert time.monotonic() < until
        with closing(real_manager([cluster.url], node_timeout=2.0)) as other, pytest.raises(LockTakenError):
            await flavour.acquire(other.lock("b", wait=10))
        assert lease.valid()
        assert await flavour.release(lease) == "released"
        await flavour.close(manager)
        leader.start()


@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_member_that_is_cut_off_is_left_for_the_next(
    cluster: Store, direction: Direction, monkeypatch: pytest.MonkeyPatch
):
    """A process that hears nothing of its member asks another, and a write that failed leaves nothing behind."""
    first, *others = cluster.members
    with FaultProxy(first.url) as proxy:
        url = f"{proxy.url},{','.join(member.url.partition('://')[2] for member in others)}"
        monkeypatch.setattr("django_redlock.contrib.consensus.replicated.secrets.randbelow", lambda members: 0)
        with closing(real_manager([url], ttl=60.0, node_timeout=1.0)) as manager:
            manager.lock("c", wait=60).acquire().release()
            proxy.black_hole(direction)
            with pytest.raises(QuorumUnavailableError):
                manager.lock("c", wait=0).acquire()
            lease = manager.lock("d", wait=60).acquire()
            usual = 1.0 if isinstance(cluster, Cluster) else 5.0
            with closing(real_manager([cluster.url], ttl=60.0, node_timeout=usual)) as other:
                assert held_by(other, "{c}")
                assert held_by(other, "{d}", lease.secret)
                with pytest.raises(LockTakenError):
                    other.lock("d", wait=0).acquire()
            assert lease.release() == "released"


def test_watch_at_a_member_without_a_leader_ends(cluster: Store):
    """Such a member is silent for as long as it is alone; another one may still notify."""
    alone, *others = cluster.members
    cluster.leader()
    node = open_node(NodeSpec(alone.url), "t:")
    with closing(node.listen("p", 30.0, print)) as link:
        for member in others:
            member.freeze()
        poll = select.poll()
        poll.register(link.fileno(), select.POLLIN)
        ended = poll.poll(30_000)
        for member in others:
            member.thaw()
        assert ended
        with pytest.raises(LinkError):
            link.read()
