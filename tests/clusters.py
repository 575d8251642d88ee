"""A Redis or Valkey Cluster of real servers that fails over and moves its slots when a test wants it to."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from django_redlock.testing import FaultProxy, Server, ServerStartError
from tests.waiting import wait_until

HIGHEST_CLUSTER_PORT = 55_535
PASSWORD = "sesame"
WEEK = 7 * 86_400.0
until = partial(wait_until, despite=redis.ConnectionError)
OPTIONS = ("--cluster-node-timeout", "1000", "--repl-diskless-sync-delay", "0", "--masterauth", PASSWORD)


def served(client: redis.Redis, key: str = "t:served", **change: object) -> str:
    """Write the key of this server as of a week ago, so that it votes at once; return the ids."""
    ids = f"{client.info('server')['run_id']}/{client.info('replication')['master_replid']}"
    seconds, micros = client.time()
    about = {"ids": ids, "since": seconds * 10**6 + micros - int(WEEK * 1e6), **change}
    client.set(key, f"{about['ids']} {about['since']}")
    return ids


@contextmanager
def cluster_nodes(
    count: int, options: Sequence[str] = (), password: str = "", proxies: list[FaultProxy] | None = None
) -> Iterator[list[Server]]:
    """Start servers in cluster mode, and if *proxies* is given a proxy for each, whose address the server announces."""
    with ExitStack() as stack:
        servers: list[Server] = []
        while len(servers) < count:
            server = Server(
                args=("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no", *options), password=password
            )
            proxy = FaultProxy(server.url)
            if proxies is not None:
                server.args += ("--cluster-announce-port", str(proxy.port))
            if server.port <= HIGHEST_CLUSTER_PORT:  # it also listens 10,000 higher, where nobody has reserved a port
                with suppress(ServerStartError):
                    servers.append(stack.enter_context(server))
                    if proxies is not None:
                        proxies.append(stack.enter_context(proxy))
        yield servers


class Cluster:
    """Some masters with a share of the slots each, and a replica for each if asked for."""

    def __init__(self, servers: list[Server], masters: int, proxies: Sequence[FaultProxy] = ()) -> None:
        self.servers = servers
        self.proxies = proxies
        self._masters = masters
        self._clients = [server.client() for server in servers]
        self._ids: list[str] = [self.ask(place, "MYID") for place in range(len(servers))]

    @property
    def url(self) -> str:
        """The URL of the node, with two of the members; with all of them if there are proxies, which may fail."""
        ports = [proxy.port for proxy in self.proxies] or [self.servers[-1].port, self.servers[0].port]
        return f"redis+cluster://:{PASSWORD}@" + ",".join(f"127.0.0.1:{port}" for port in ports)

    def ask(self, place: int, *command: object) -> object:
        """Return the reply of one server to a CLUSTER command."""
        return self._clients[place].execute_command("CLUSTER", *command)

    def build(self) -> None:
        """Have the servers meet, and give each master its slots and each replica its master."""
        for place in range(len(self.servers)):
            # Two servers of one epoch settle that later, and a slot that moves meanwhile may go back to its old owner.
            self.ask(place, "SET-CONFIG-EPOCH", place + 1)
        for server in self.servers[1:]:
            self.ask(0, "MEET", "127.0.0.1", server.port)
        share = -(-REDIS_CLUSTER_HASH_SLOTS // self._masters)
        for place in range(self._masters):
            slots = range(place * share, min((place + 1) * share, REDIS_CLUSTER_HASH_SLOTS))
            self.ask(place, "ADDSLOTS", *slots)
        for place in range(self._masters, len(self.servers)):
            master = self._ids[place - self._masters]
            until(lambda place=place, master=master: master in self.ask(place, "NODES"))
            self.ask(place, "REPLICATE", master)
        for place in range(len(self.servers)):
            until(lambda place=place: "cluster_state:ok" in self.ask(place, "INFO"))
        until(lambda: all(self.has_replica(place) for place in range(len(self.servers) - self._masters)))

    def has_replica(self, place: int) -> bool:
        """Return whether a master has a replica that is up to date."""
        return self._clients[place].info("replication").get("slave0", {}).get("state") == "online"

    def owner(self, key: str) -> int:
        """Return which server is the master of the slot of a key."""
        slot = key_slot(key.encode())
        for place, client in enumerate(self._clients):
            if self.servers[place].running:
                for first, last, (_, port, *_), *_ in client.execute_command("CLUSTER", "SLOTS"):
                    if first <= slot <= last:
                        announced = self.proxies or self.servers
                        return next(at for at, server in enumerate(announced) if server.port == port)
        raise LookupError(key)

    def masters(self) -> list[int]:
        """Return which servers are masters now."""
        return [place for place in range(len(self.servers)) if "myself,master" in str(self.ask(place, "NODES"))]

    def partner(self, place: int) -> int:
        """Return which server is the replica of a master, or the other way round."""
        return (place + self._masters) % len(self.servers)

    def serve(self, key: str) -> None:
        """Have the master of the slot of a key vote at once; the key is that of the service."""
        served(self._clients[self.owner(key)], key)

    def clear(self) -> None:
        """Delete all keys."""
        for client in self._clients:
            client.flushall()

    def fail_over(self, place: int) -> int:
        """Kill a master; return which server has taken its place."""
        replica = self.partner(place)
        self.servers[place].kill()
        until(lambda: "myself,master" in self.ask(replica, "NODES") and "cluster_state:ok" in self.ask(replica, "INFO"))
        return replica

    def copy(self, place: int, key: str) -> object:
        """Return what the replica of a master has under a key."""
        replica = self._clients[self.partner(place)]
        with replica.client() as one:
            one.execute_command("READONLY")
            return one.execute_command("GET", key)

    def cut_replication(self, place: int) -> None:
        """Have the replica of a master miss everything from now on, while the members still hear each other."""
        self._clients[self.partner(place)].config_set("masterauth", "wrong")
        self._clients[place].execute_command("CLIENT", "KILL", "TYPE", "replica")
        until(lambda: not self.has_replica(place))

    def repair(self) -> None:
        """Have all servers run, and wait until each pair has a master with a replica that is up to date."""
        for server, client in zip(self.servers, self._clients, strict=True):
            server.start()
            client.config_set("masterauth", PASSWORD)
        until(lambda: all("cluster_state:ok" in self.ask(place, "INFO") for place in range(len(self.servers))))
        pairs = [(place, self.partner(place)) for place in range(self._masters)]
        until(lambda: all(any(map(self.has_replica, pair)) for pair in pairs))

    def migrate(self, key: str, target: int) -> Iterator[str]:
        """Move the slot of a key step by step to another master; what happens between the steps is up to the test."""
        slot, source = key_slot(key.encode()), self.owner(key)
        self._set_slot(target, slot, "IMPORTING", self._ids[source])
        self._set_slot(source, slot, "MIGRATING", self._ids[target])
        yield "begun"
        while keys := self.ask(source, "GETKEYSINSLOT", slot, 100):
            for each in keys:
                self._clients[source].migrate("127.0.0.1", self.servers[target].port, each, 0, 10_000, auth=PASSWORD)
            yield "moved some"
        for place in (target, source):
            self._set_slot(place, slot, "NODE", self._ids[target])

    def _set_slot(self, place: int, *command: object) -> None:
        """Change a slot at one server; Valkey refuses that while its replica is away."""

        def changed() -> bool:
            try:
                self.ask(place, "SETSLOT", *command)
            except redis.ResponseError as error:
                if "NOREPLICAS" not in str(error):
                    raise
                return False
            return True

        until(changed)

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()


@contextmanager
def cluster(masters: int = 3, replicas: bool = False, *, proxied: bool = False) -> Iterator[Cluster]:
    """Start a cluster."""
    proxies: list[FaultProxy] | None = [] if proxied else None
    with cluster_nodes(masters * (2 if replicas else 1), OPTIONS, password=PASSWORD, proxies=proxies) as servers:
        it = Cluster(servers, masters, proxies or ())
        it.build()
        yield it
        it.close()


@contextmanager
def single_masters(count: int) -> Iterator[list[Cluster]]:
    """Start clusters of one master each. All begin at once, because each waits two seconds before it takes writes."""
    with cluster_nodes(count, OPTIONS, password=PASSWORD) as servers:
        found = [Cluster([server], 1) for server in servers]
        for one in found:
            one.build()
        yield found
        for one in found:
            one.close()
