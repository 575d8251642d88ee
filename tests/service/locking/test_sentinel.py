"""A node whose master a real sentinel monitors, and its failover."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, Popen

import pytest
import redis

from django_redlock import LockManager, QuorumUnavailableError
from django_redlock.testing import Servers, find_server, start_servers
from django_redlock.testing.servers import reserve_port, spawn
from tests.clusters import served
from tests.managers import Asyncio, Blocking, Flavour, real_manager
from tests.waiting import wait_until

CONFIGURATION = """\
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor mymaster 127.0.0.1 {master} 1
sentinel down-after-milliseconds mymaster 500
sentinel failover-timeout mymaster 5000
"""


class Sentinel:
    """A sentinel that monitors the first of two servers, which the second replicates."""

    def __init__(self, servers: Servers, folder: Path) -> None:
        self.servers = servers
        self.port = reserve_port(self)
        self._file = folder / "sentinel.conf"
        self._file.write_text(CONFIGURATION.format(port=self.port, folder=folder, master=servers[0].port))
        self._process: Popen[bytes] | None = None

    def start(self) -> None:
        with self.servers[1].client() as client:
            client.replicaof("127.0.0.1", self.servers[0].port)
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        self._process = spawn([str(find_server()), str(self._file), "--sentinel"], stdin=DEVNULL, stdout=DEVNULL)
        wait_until(lambda: self.known("slaves"))

    def known(self, what: str) -> object:
        """Return what the sentinel knows of the service, or nothing while it does not answer."""
        with suppress(redis.ConnectionError), self.client() as client:
            return client.execute_command("SENTINEL", what, "mymaster")
        return None

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port, decode_responses=True, socket_timeout=5)

    def stop(self) -> None:
        if self._process:
            self._process.terminate()
            self._process.wait()


@contextmanager
def watched(folder: Path) -> Iterator[Sentinel]:
    with start_servers(2, args=("--repl-diskless-sync-delay", "0")) as servers:
        sentinel = Sentinel(servers, folder)
        try:
            sentinel.start()
            yield sentinel
        finally:
            sentinel.stop()


def manager_of(*sentinels: str, guard: bool = False, service: str = "mymaster") -> LockManager:
    how = {"ttl": 2.0, "max_ttl": 4.0, "restart_guard": guard, "node_timeout": 0.4}
    return real_manager([f"redis://{service}"], sentinels=sentinels, **how)


async def test_promoted_replica_gives_no_vote_until_the_guard_has_passed(tmp_path: Path):
    """After a failover the new master may lack the last locks, however long it has been running."""
    with watched(tmp_path) as sentinel:
        url = f"redis://127.0.0.1:{sentinel.port}"
        knew = [(flavour, manager_of(url, guard=True)) for flavour in (Blocking(), Asyncio())]
        careless = manager_of(url)
        with sentinel.servers[0].client() as client:
            served(client)
        for flavour, manager in knew:
            await flavour.release(await flavour.acquire(manager.lock("a", wait=30)))

        sentinel.servers[0].kill()
        killed = time.monotonic()
        with careless.lock("a", wait=30):
            newcomers = [(flavour, manager_of(url, guard=True)) for flavour in (Blocking(), Asyncio())]
            for flavour, manager in knew + newcomers:
                said = ""
                while "votes again in " not in said:  # a connection may be found closed, or a sentinel be late
                    with pytest.raises(QuorumUnavailableError) as caught:
                        await flavour.acquire(manager.lock("b", wait=0.3))
                    said = str(caught.value)

        for flavour, manager in knew + newcomers:
            lease = await flavour.acquire(manager.lock("b", wait=30))
            assert time.monotonic() - killed > 4.0
            assert await flavour.release(lease) == "released"
            await flavour.close(manager)


async def test_demoted_master_is_left_for_the_new_one(tmp_path: Path, flavour: Flavour):
    """A connection to a master that became a replica is closed, and the wait continues at the new master."""
    with watched(tmp_path) as sentinel:
        nowhere = f"redis://127.0.0.1:{reserve_port(sentinel)}"
        manager = manager_of(nowhere, f"redis://127.0.0.1:{sentinel.port}")
        await flavour.release(await flavour.acquire(manager.lock("a", wait=10)))
        first, second = sentinel.servers
        # As in the middle of a failover: the old master is demoted, and the sentinel does not know the new one yet.
        with first.client() as client:
            client.execute_command("CLIENT", "PAUSE", "0")
            client.replicaof("127.0.0.1", second.port)
        with pytest.raises(QuorumUnavailableError, match="no master at present") as caught:
            await flavour.acquire(manager.lock("a", wait=0.2))
        assert not caught.value.misconfigured

        with second.client() as client:
            client.replicaof("NO", "ONE")
        with sentinel.client() as client:
            client.execute_command("SENTINEL", "REMOVE", "mymaster")
            client.execute_command("SENTINEL", "MONITOR", "mymaster", "127.0.0.1", second.port, 1)

        lease = await flavour.acquire(manager.lock("a", wait=30))
        with second.client() as client:
            assert client.get("t:{a}:h").startswith(lease.secret)
        await flavour.release(lease)


async def test_useless_sentinel_and_useless_node_have_different_errors(tmp_path: Path, flavour: Flavour):
    """A missing sentinel, an unknown service and another server are told apart; only a wrong mode ends a wait."""
    with watched(tmp_path) as sentinel:
        url, server = f"redis://127.0.0.1:{sentinel.port}", sentinel.servers[0].url
        for at, service, said in (
            (f"redis://127.0.0.1:{reserve_port(sentinel)}", "mymaster", "sentinel: refused"),
            (url, "other", "is unknown to the sentinel"),
            (server, "mymaster", "sentinel: lacks a command that locks need: SENTINEL"),
        ):
            manager = manager_of(at, service=service)
            with pytest.raises(QuorumUnavailableError) as caught:
                await flavour.acquire(manager.lock("a", wait=0))
            assert (list(caught.value.nodes.values()), caught.value.misconfigured) == ([said], False)

        manager = real_manager([url])
        with pytest.raises(QuorumUnavailableError, match="runs in sentinel mode") as caught:
            await flavour.acquire(manager.lock("a", wait=60))
        assert caught.value.attempts == 1
