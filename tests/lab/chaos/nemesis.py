"""Faults and their lengths: one nemesis per run begins a fault from time to time and later ends it."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tests.clusters import Cluster as RedisCluster
from tests.etcd import Member

if TYPE_CHECKING:
    from django_redlock.testing import Server
    from tests.zookeeper import Zoo

    from .arena import Arena, WorkerProcess

TTL = 2.0  # seconds
SERVED = "{t}:served"  # a key of the workers' locks, by which a Redis Cluster is asked who has them

Fault = Callable[["Arena"], "Iterator[None]"]


# Each of these begins a fault, yields, and ends it. The network


def delay(arena: "Arena") -> Iterator[None]:
    """Messages to or from one node are late: by more than a node timeout, or by more than a lease."""
    proxy = arena.any_proxy()
    proxy.delay(random.choice((0.05, 0.3, 1.5 * TTL)), random.choice(("requests", "replies", "both")))
    yield
    proxy.heal()


def black_hole(arena: "Arena") -> Iterator[None]:
    """Nothing passes in one direction, or in both; at the end all of it arrives, or none of it ever does."""
    proxy = arena.any_proxy()
    proxy.black_hole(random.choice(("requests", "replies", "both")))
    yield
    if random.random() < 0.3:
        proxy.reset()
    proxy.heal()


def reset(arena: "Arena") -> Iterator[None]:
    """All connections to one node break."""
    arena.any_proxy().reset()
    yield


def lost_reply(arena: "Arena") -> Iterator[None]:
    """One node executes a request, and its reply is lost."""
    arena.any_proxy().drop_next_reply(reset=random.random() < 0.5)
    yield


# Whatever can be stopped and killed


def frozen(pick: "Callable[[Arena], Any]") -> Fault:
    """One of them is stopped (SIGSTOP), as in a long garbage collection, and continues where it was."""

    def fault(arena: "Arena") -> Iterator[None]:
        victim = pick(arena)
        victim.freeze()
        yield
        victim.thaw()

    return fault


def killed(pick: "Callable[[Arena], Any]", back: str = "start") -> Fault:
    """One of them is killed (SIGKILL), and starts again with what it has acknowledged, or restarts empty."""

    def fault(arena: "Arena") -> Iterator[None]:
        victim = pick(arena)
        victim.kill()
        yield
        getattr(victim, back)()

    return fault


def any_server(arena: "Arena") -> "Server":
    return random.choice(arena.servers)


def any_worker(arena: "Arena") -> "WorkerProcess":
    return random.choice(arena.workers)


# Members of a cluster of etcd or ZooKeeper


def wiped_member(arena: "Arena") -> Iterator[None]:
    """A member is killed and loses its data, and joins again, in etcd as a new member."""
    member = any_member(arena)
    member.wipe()
    yield
    arena.rejoin(member)


def partitioned_member(arena: "Arena") -> Iterator[None]:
    """Nothing passes between a member and clients, nor between it and the others, in ZooKeeper if it leads them."""
    assert arena.cluster is not None
    member = any_member(arena)
    proxies = [arena.proxies[arena.members.index(member)]]
    if member.proxy:
        proxies.append(member.proxy)
    for proxy in proxies:
        proxy.black_hole("both")
    yield
    for proxy in proxies:
        if random.random() < 0.3:
            proxy.reset()
        proxy.heal()


def any_member(arena: "Arena") -> "Member | Zoo":
    """Return the leader or any other member."""
    cluster = arena.cluster
    assert cluster is not None
    assert not isinstance(cluster, RedisCluster)
    return cluster.leader() if random.random() < 0.5 else random.choice(arena.members)


# Masters and replicas of a Redis Cluster


def killed_master(arena: "Arena") -> Iterator[None]:
    """The master that has the locks is killed (SIGKILL). Its replica takes its place, unless it is back before that."""
    master(arena).kill()
    yield
    redis_cluster(arena).repair()


def emptied_master(arena: "Arena") -> Iterator[None]:
    """The master that has the locks is killed, and is back without data before its replica takes its place."""
    emptied = master(arena)
    emptied.kill()
    emptied.start()
    yield
    redis_cluster(arena).repair()


def frozen_master(arena: "Arena") -> Iterator[None]:
    """The master that has the locks is stopped (SIGSTOP) and continues, after a while as a replica."""
    stopped = master(arena)
    stopped.freeze()
    yield
    stopped.thaw()
    redis_cluster(arena).repair()


def stale_replica(arena: "Arena") -> Iterator[None]:
    """A replica that has missed the last locks takes the place of its master."""
    cluster = redis_cluster(arena)
    place = cluster.owner(SERVED)
    cluster.cut_replication(place)
    time.sleep(random.uniform(0, TTL))
    cluster.fail_over(place)
    yield
    cluster.repair()


def moved_slot(arena: "Arena") -> Iterator[None]:
    """The locks move to another shard step by step, while workers hold them and wait for them."""
    cluster = redis_cluster(arena)
    target = random.choice([place for place in cluster.masters() if place != cluster.owner(SERVED)])
    for _ in cluster.migrate(SERVED, target):
        time.sleep(random.choice((0.0, 0.05, TTL)))
    yield


def redis_cluster(arena: "Arena") -> RedisCluster:
    assert isinstance(arena.cluster, RedisCluster)
    return arena.cluster


def master(arena: "Arena") -> "Server":
    cluster = redis_cluster(arena)
    return cluster.servers[cluster.owner(SERVED)]


# Clients


def killed_worker(arena: "Arena") -> Iterator[None]:
    """A worker is killed (SIGKILL) wherever it is, and another begins."""
    arena.replace(any_worker(arena))
    yield


# Clocks


def stepped_clock(arena: "Arena") -> Iterator[None]:
    """The wall clock of one node is wrong for a while, and then right again."""
    clock = random.choice(arena.clocks)
    clock.set(random.choice((0.3, TTL, 3600.0, -1.0, -60.0)))
    yield
    clock.set(0.0)
    time.sleep(3 * TTL)  # one at a time: what the jump took from a node has ended when the next node jumps


@dataclass(frozen=True)
class Profile:
    """The faults that may occur in a run."""

    name: str
    faults: tuple[Fault, ...] = ()
    lasting: tuple[float, float] = (0.05, 1.5 * TTL)  # seconds
    pause: float = 0.5  # seconds between two faults at most
    durable: bool = False  # nodes keep what they acknowledged, and are declared durable
    slow: float = 0.0  # the chance that a worker pauses for up to two leases between reading and writing
    clocks: bool = False  # the nodes' clocks can be set
    tolerated: bool = False  # overlaps are only counted, because an assumption does not hold
    store: Literal["", "cluster", "etcd", "zookeeper"] = ""  # if one node has several members
    ttl: float = TTL
    node_timeout: float = 0.2
    restart_guard: bool | None = None  # by default, with three nodes or more


NETWORK = (delay, black_hole, reset, lost_reply, frozen(any_server))
CLIENTS = (frozen(any_worker), killed_worker)
MASTERS = (killed_master, emptied_master, frozen_master, stale_replica, moved_slot)
MEMBERS = (frozen(any_member), killed(any_member), wiped_member, partitioned_member)
REPLICATED = (delay, black_hole, reset, lost_reply, *CLIENTS, killed_worker)
LONG: dict[str, Any] = {"lasting": (0.05, 8.0), "pause": 3.0, "slow": 0.01}

PROFILES = {
    profile.name: profile
    for profile in (
        Profile("calm"),
        Profile("network", NETWORK),
        Profile("pause", CLIENTS),
        Profile("slow database", (frozen(any_worker),), slow=0.1),
        Profile("crash with data", (killed(any_server),), durable=True, pause=2.0),
        Profile("crash without data", (killed(any_server, "restart"),), pause=6 * TTL),
        Profile("clock jump", (stepped_clock,), clocks=True),
        Profile("etcd", (*MEMBERS, *MEMBERS, *REPLICATED), store="etcd", ttl=5.0, node_timeout=1.0, **LONG),
        Profile("zookeeper", (*MEMBERS, *MEMBERS, *REPLICATED), store="zookeeper", ttl=5.0, node_timeout=1.0, **LONG),
        Profile(
            "cluster",
            (*MASTERS, *MASTERS, *REPLICATED),
            store="cluster",
            ttl=4.0,
            node_timeout=0.5,
            restart_guard=True,
            **LONG,
        ),
        Profile(
            "everything",
            (*NETWORK, *CLIENTS, killed(any_server, "restart"), stepped_clock),
            slow=0.03,
            clocks=True,
            tolerated=True,
        ),
    )
}


def rage(arena: "Arena", profile: Profile, seconds: float) -> int:
    """Inject faults for the given time; at the end everything works again. Return how many there were."""
    count, until = 0, time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, random.uniform(0, profile.pause)))
        if profile.faults:
            count += 1
            with contextmanager(random.choice(profile.faults))(arena), suppress(ValueError):
                time.sleep(min(random.uniform(*profile.lasting), until - time.monotonic()))
    return count
