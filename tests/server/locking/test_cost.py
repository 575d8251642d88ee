"""What a lock costs the nodes: the commands that the scripts call, counted by the server."""

from collections import Counter
from typing import Any

import pytest
from redis import Redis

from django_redlock import QuorumUnavailableError
from django_redlock.testing import Servers
from tests.deployment import CHECKOUT
from tests.managers import real_manager

CHANGES = " ".join((CHECKOUT / "CHANGELOG.md").read_text().split())

OWN = {"info", "evalsha", "eval", "config", "config|resetstat"}  # Redis 6.2 does not name the subcommand


def called(client: Redis) -> Counter[str]:
    """Return the commands that scripts have called since the last call, and reset the count."""
    stats = client.info("commandstats")
    client.config_resetstat()
    calls = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    return Counter({name: count for name, count in calls.items() if name not in OWN})


def test_free_lock_costs_few_commands(nodes: Servers):
    """One read of all keys, and no write that an earlier lock has made already, as the expiry of the index."""
    manager = real_manager(nodes.urls[:1])
    usual = Counter(["time", "mget", "exists", "zadd", "set", "pttl", "zrangebyscore", "set"])
    manager.lock("earlier", wait=0).acquire().release()

    with nodes[0].client() as client:
        for more in (["pexpire"], []):
            called(client)
            lease = manager.lock("free", wait=0).acquire()
            acquired = called(client)
            lease.release()
            released = called(client)
            assert acquired == usual + Counter(more)
            assert released == Counter(["time", "get", "zrange", "zrem", "del"])
            manager.lock(f"long {more}", wait=0, ttl=60.0, renew=False).acquire()  # so that the index lives for longer
    assert "executes eight or nine commands to grant it and five to release it" in CHANGES


@pytest.mark.parametrize(
    ("way", "commands"), [({}, (8, 11, 5)), ({"shared": True}, (17, 15, 10)), ({"limit": 2}, (16, 18, 11))]
)
def test_only_a_permit_pays_for_joining_the_name_of_its_lock(
    nodes: Servers, way: dict[str, Any], commands: tuple[int, int, int]
):
    """The commands of a grant, an extension and a release, while nobody else has the lock."""
    manager = real_manager(nodes.urls[:1])
    manager.lock("earlier", wait=0, ttl=60.0, renew=False).acquire()

    with nodes[0].client() as client:
        called(client)
        lease = manager.lock("free", wait=0, renew=False, **way).acquire()
        acquired = called(client).total()
        lease.extend()
        extended = called(client).total()
        lease.release()
        assert (acquired, extended, called(client).total()) == commands


def test_index_of_another_type_leaves_nothing_behind(nodes: Servers):
    """The index is written first, so a lock that cannot be listed is not taken and not released by half."""
    manager = real_manager(nodes.urls[:1])
    lease = manager.lock("held", wait=0).acquire()

    with nodes[0].client() as client:
        client.set("t:index", "not an index")
        assert lease.release() == "unknown"
        assert client.exists("t:{held}:h")
        with pytest.raises(QuorumUnavailableError, match="WRONGTYPE"):
            manager.lock("free", wait=0).acquire()
        assert not client.exists("t:{free}:h", "t:{free}:f")
        client.delete("t:index")
