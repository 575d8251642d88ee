"""Three real members of ZooKeeper whose leader dies, freezes or is replaced, and whose clocks differ."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from django_redlock import LockTakenError, QuorumUnavailableError
from django_redlock.testing import FaultProxy
from django_redlock.testing.proxy import Direction
from tests import zookeeper
from tests.conftest import needs
from tests.managers import Flavour, held_by, real_manager, wait_until
from tests.services import ServiceMissingError
from tests.zookeeper import Ensemble, Zoo

from .test_mixed_majority import contending

pytestmark = [pytest.mark.xdist_group("zookeeper"), pytest.mark.endurance]  # elections take seconds each
Cut = AbstractContextManager[None]
TTL = 5.0
ELECTION = 30.0  # seconds, with much to spare: it takes about four
APART = 60  # seconds between the clocks of two members


@pytest.fixture(scope="module")
def members() -> Iterator[Ensemble]:
    try:
        Zoo.find()
    except ServiceMissingError as error:
        needs("zookeeper", None, str(error))
    with zookeeper.ensemble(apart=APART) as three:
        yield three


@pytest.fixture
def ensemble(members: Ensemble) -> Ensemble:
    """Three running members, whatever the last test did to them."""
    members.start()
    return members


@contextmanager
def frozen_followers(ensemble: Ensemble, leader: Zoo) -> Iterator[None]:
    """The others are stopped (SIGSTOP)."""
    for member in ensemble.members:
        if member is not leader:
            member.freeze()
    yield
    ensemble.start()


@contextmanager
def silent_followers(ensemble: Ensemble, leader: Zoo) -> Iterator[None]:
    """Nothing passes between the leader and the others, which are alive."""
    assert leader.proxy is not None
    leader.proxy.black_hole("both")
    yield
    leader.proxy.heal()


@pytest.mark.parametrize("strike", [Zoo.kill, Zoo.freeze], ids=["killed", "frozen"])
def test_lock_of_a_dead_holder_is_free_after_an_election(ensemble: Ensemble, strike: Callable[[Zoo], None]):
    """
    A holder and the leader die together, and the clock of the next leader is a minute or two ahead of
    it, or behind it. The lock is not free before the holder's deadline, and is free at most one ttl and one election
    after it.
    """
    with closing(real_manager([ensemble.url], ttl=TTL, node_timeout=1.0)) as manager:
        lease = manager.lock("a", wait=60, renew=False).acquire()
        leader = ensemble.leader()
        strike(leader)
        deadline = time.monotonic() + lease.remaining()
        next_one = manager.lock("a", wait=120).acquire()
        later = time.monotonic() - deadline

    assert not lease.valid()
    assert next_one.fencing_token > lease.fencing_token
    assert 0 < later < TTL + 2.0 + ELECTION
    leader.start()


async def test_holder_keeps_its_lock_over_an_election(ensemble: Ensemble, flavour: Flavour):
    """A living holder whose leader dies goes on to extend; no other caller gets the lock meanwhile."""
    with closing(real_manager([ensemble.url], ttl=30.0, node_timeout=2.0)) as manager:
        lease = await flavour.acquire(manager.lock("b", wait=60))
        leader = ensemble.leader()
        leader.kill()
        until = time.monotonic() + 25
        while not await flavour.extend(lease):
            assert time.monotonic() < until
        with closing(real_manager([ensemble.url], node_timeout=2.0)) as other, pytest.raises(LockTakenError):
            await flavour.acquire(other.lock("b", wait=10))
        assert lease.valid()
        assert await flavour.release(lease) == "released"
        await flavour.close(manager)
        leader.start()


def test_contended_counter_survives_leaders(ensemble: Ensemble, tmp_path: Path):
    """
    Four processes increment a counter that only the lock protects, while the leader is killed, frozen
    and replaced by an empty member. Nothing is lost, and tokens increase.
    """
    options = {"ttl": TTL, "max_ttl": TTL, "node_timeout": 1.0, "retry_delay": 0.01}

    with contending(tmp_path, [ensemble.url], {"default": {}}, **options) as contenders:
        contenders.go_on(10)
        for strike, revive in ((Zoo.kill, Zoo.start), (Zoo.freeze, Zoo.thaw), (Zoo.wipe, Zoo.start)):
            leader = ensemble.leader()
            strike(leader)
            contenders.go_on(5)
            revive(leader)
            contenders.go_on(5)

    tokens = contenders.tokens
    assert tokens == sorted(set(tokens))
    assert (tmp_path / "counter").read_text() == str(len(tokens))


@pytest.mark.parametrize("direction", ["requests", "replies"])
def test_member_that_is_cut_off_is_left_for_the_next(
    ensemble: Ensemble, direction: Direction, monkeypatch: pytest.MonkeyPatch
):
    """
    A process that hears nothing of its member asks another. A write that failed leaves nothing behind: the
    lock is free again as soon as the release has arrived.
    """
    first, *others = ensemble.members
    with FaultProxy(first.url) as proxy:
        url = f"{proxy.url},{','.join(member.url.removeprefix('zookeeper://') for member in others)}"
        monkeypatch.setattr("django_redlock.nodes.records.replicated.secrets.randbelow", lambda members: 0)
        with closing(real_manager([url], ttl=60.0, node_timeout=1.0)) as manager:
            manager.lock("c", wait=60).acquire().release()
            proxy.black_hole(direction)
            with pytest.raises(QuorumUnavailableError):
                manager.lock("c", wait=0).acquire()
            lease = manager.lock("d", wait=60).acquire()
            with closing(real_manager([ensemble.url], ttl=60.0, node_timeout=5.0)) as other:
                assert held_by(other, "{c}")
                assert held_by(other, "{d}", lease.secret)
                with pytest.raises(LockTakenError):
                    other.lock("d", wait=0).acquire()
            assert lease.release() == "released"


@pytest.mark.parametrize("cut", [frozen_followers, silent_followers])
def test_leader_that_is_cut_off_gives_no_vote(ensemble: Ensemble, cut: Callable[[Ensemble, Zoo], Cut]):
    """The others elect a new leader; what the old one still says does not count."""
    with closing(real_manager([ensemble.url], ttl=60.0, node_timeout=5.0)) as manager:
        lease = manager.lock("e", wait=60).acquire()
        leader = ensemble.leader()
        with closing(real_manager([leader.url], ttl=60.0, node_timeout=5.0)) as beside:
            with pytest.raises(LockTakenError):
                beside.lock("e", wait=0).acquire()
            with cut(ensemble, leader), pytest.raises(QuorumUnavailableError):
                beside.lock("e", wait=0).acquire()
        manager.lock("f", wait=60).acquire().release()
        wait_until(lease.extend)  # the first connection may be to a member that still follows the old leader
        assert lease.release() == "released"
