"""A Redis or Valkey Cluster as the only lock node of the demo: three embedded masters, and a replica for each."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import redis
from django.core.management.base import CommandError
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from django_redlock.testing import Server, ServerNotFoundError, ServerStartError

from .nodes import Nodes
from .processes import reserve_port

MASTERS = 3
BUS = 10_000  # how much higher the port is on which the members talk to each other
START_TIMEOUT = 60.0  # seconds in which the members must have formed a cluster
FAILOVER_TIMEOUT = 30.0  # seconds in which a replica must have taken the place of its master; usually 2
DECIDING = key_slot(b"{shop}:")  # the slot of all locks, as KEY_PREFIX in the settings decides
OPTIONS = ("--cluster-enabled", "yes", "--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0")


class ClusterServer(Server):
    """
    A member of the cluster.

    Attributes:
        partner: The replica of this master, or the other way round.
    """

    partner: "ClusterServer"

    def __init__(self) -> None:
        super().__init__(args=OPTIONS)
        self._bus: socket.socket | None = None

    def reserve_bus(self) -> bool:
        """Reserve the port for the other members; return whether it is free."""
        with suppress(OSError, OverflowError):
            _, self._bus = reserve_port(self.port + BUS)
        return self._bus is not None

    def ask(self, *command: object) -> str:
        """Return the reply to a CLUSTER command."""
        with self.client() as client:
            return str(client.execute_command("CLUSTER", *command))

    @property
    def leads(self) -> bool:
        """Whether it is a master."""
        return "myself,master" in self.ask("NODES")

    def has_replica(self) -> bool:
        """Return whether a replica has all its data."""
        with self.client() as client:
            return bool(client.info("replication").get("slave0", {}).get("state") == "online")

    def kill(self) -> None:
        """End it at once; if it is a master, as soon as its replica has all its data."""
        if self.running and self.leads:
            wait_until(self.has_replica, FAILOVER_TIMEOUT)
        super().kill()

    def restart(self, *, keep_data: bool = False) -> None:
        """Start it when its partner, if that is alive, has taken its place. Before that it would be an empty master."""
        if self.partner.running:
            wait_until(lambda: self.partner.leads, FAILOVER_TIMEOUT)
        self.start()


class RedisClusterNode(Nodes):
    """A Redis or Valkey Cluster: one node, which survives the loss of a server. The shard of the locks comes first."""

    title = "a Redis Cluster of three masters and three replicas as the only node"
    call = "cluster"
    losable = 1
    gaps = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pairs: list[tuple[ClusterServer, ClusterServer]] = []
        while len(self._pairs) < MASTERS:
            pair = ClusterServer(), ClusterServer()
            if all(server.reserve_bus() for server in pair):
                pair[0].partner, pair[1].partner = pair[1], pair[0]
                self._pairs.append(pair)
        self._all = [server for pair in self._pairs for server in pair]
        self.servers = self._all

    @property
    def setting(self) -> str:
        return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in self._all)

    def start(self) -> None:
        try:
            for server in self._all:
                server.start()
            self._join()
        except (ServerNotFoundError, ServerStartError, redis.RedisError) as error:
            raise CommandError(f"The cluster did not start: {error}") from None

    def stop(self) -> None:
        for server in self._all:
            server.stop()

    def _join(self) -> None:
        """Give the masters their slots, the replicas their masters, and wait until all know of it."""
        share = -(-REDIS_CLUSTER_HASH_SLOTS // MASTERS)
        first = self._all[0]
        for server in self._all[1:]:
            first.ask("MEET", "127.0.0.1", server.port)
        for place, (master, replica) in enumerate(self._pairs):
            part = (DECIDING // share + place) % MASTERS
            master.ask("ADDSLOTS", *range(part * share, min((part + 1) * share, REDIS_CLUSTER_HASH_SLOTS)))
            name = master.ask("MYID")
            wait_until(lambda known=replica, name=name: name in known.ask("NODES"), START_TIMEOUT)  # type: ignore[misc]
            replica.ask("REPLICATE", name)
        wait_until(lambda: all("cluster_state:ok" in server.ask("INFO") for server in self._all), START_TIMEOUT)
        wait_until(lambda: all(master.has_replica() for master, _ in self._pairs), START_TIMEOUT)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Wait for what the members of the cluster tell each other; raises CommandError if it does not happen."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise CommandError(f"The members of the cluster have not agreed within {seconds:.0f} s.")
        time.sleep(0.05)
