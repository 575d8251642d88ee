"""Clusters as the only lock node of the demo: three members of etcd or of ZooKeeper, which must be installed."""

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from signal import SIGKILL
from typing import ClassVar
from urllib.request import Request, urlopen

from django.core.management.base import CommandError

from django_redlock.testing.servers import spawn

from .nodes import Nodes, RedisNodes
from .processes import reserve_port
from .redis_cluster import RedisClusterNode

MEMBERS = 3
START_TIMEOUT = 60.0  # seconds in which the members must have elected a leader
ZOOKEEPER = "/usr/share/java/zookeeper.jar"


class ClusterMember:
    """
    A member of a cluster.

    Args:
        number: Its number, from 1.
        folder: For its files.
        kind: What its name begins with.

    Attributes:
        cluster: The members and their addresses, as the settings of the members have them.
    """

    def __init__(self, number: int, folder: Path, kind: str) -> None:
        self.number = number
        self.name = f"{kind}-{number}"
        self.folder = folder
        self.cluster: list[str] = []
        self.port, self._reservation = reserve_port()
        self.peer_port, self._peers = reserve_port()
        self._started: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id; 0 before the first start."""
        return self._started.pid if self._started else 0

    @property
    def running(self) -> bool:
        """Whether it is running."""
        return self._started is not None and self._started.poll() is None

    def restart(self) -> None:
        """Start it, with the data that it had."""
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._started = spawn(
                self.command(),
                env=os.environ | {"ETCD_UNSUPPORTED_ARCH": "arm64"},  # etcd runs there, without a promise of support
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        """End it at once."""
        if self._started:
            self._started.send_signal(SIGKILL)
            self._started.wait()

    def address(self) -> str:
        """Return what the settings of all members say of it."""
        raise NotImplementedError

    def command(self) -> list[str]:
        """Return the command line that starts it."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Return whether it answers and knows a leader."""
        raise NotImplementedError


class EtcdMember(ClusterMember):
    """A member of an etcd cluster."""

    def address(self) -> str:
        return f"{self.name}=http://127.0.0.1:{self.peer_port}"

    def command(self) -> list[str]:
        url, peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{self.peer_port}"
        return [
            "etcd",
            *("--name", self.name),
            *("--data-dir", str(self.folder / self.name)),
            *("--listen-client-urls", url),
            *("--advertise-client-urls", url),
            *("--listen-peer-urls", peer),
            *("--initial-advertise-peer-urls", peer),
            *("--initial-cluster", ",".join(self.cluster)),
            *("--heartbeat-interval", "50", "--election-timeout", "500"),
            *("--logger", "zap", "--log-level", "error"),
        ]

    def ready(self) -> bool:
        try:
            with urlopen(Request(f"http://127.0.0.1:{self.port}/v3/maintenance/status", b"{}"), timeout=1.0) as reply:
                return bool(int(json.load(reply).get("leader", 0)))
        except (OSError, ValueError, HTTPException):
            return False


class ZookeeperMember(ClusterMember):
    """A member of a ZooKeeper ensemble."""

    def __init__(self, number: int, folder: Path, kind: str) -> None:
        super().__init__(number, folder, kind)
        self.election_port, self._elections = reserve_port()

    def address(self) -> str:
        return f"server.{self.number}=127.0.0.1:{self.peer_port}:{self.election_port}"

    def command(self) -> list[str]:
        data, settings = self.folder / self.name, self.folder / f"{self.name}.cfg"
        data.mkdir(exist_ok=True)
        (data / "myid").write_text(str(self.number))
        lines = ["tickTime=500", "initLimit=20", "syncLimit=4", f"dataDir={data}", *self.cluster]
        lines += ["admin.enableServer=false", "clientPortAddress=127.0.0.1", f"clientPort={self.port}"]
        settings.write_text("\n".join(lines) + "\n")
        small = ("-Xmx64m", "-XX:+UseSerialGC", "-Dzookeeper.admin.enableServer=false")
        server = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
        return ["java", *small, "-cp", ZOOKEEPER, server, str(settings)]

    def ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0) as connection:
                connection.sendall(b"srvr")
                said = b""
                while more := connection.recv(4096):
                    said += more
                return b"Mode: " in said
        except OSError:
            return False


class ClusterNode(Nodes):
    """A cluster of three members, which is one node and survives the loss of one member."""

    losable = 1
    gaps = True
    member: ClassVar[type[ClusterMember]]

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        if missing := self.missing():
            raise CommandError(f"{missing}, or run the demo on the servers that come with it: --nodes redis.")
        self._members = [self.member(number, folder, self.call) for number in range(1, MEMBERS + 1)]
        self.servers = self._members

    @property
    def setting(self) -> str:
        return f"{self.call}://" + ",".join(f"127.0.0.1:{member.port}" for member in self._members)

    def start(self) -> None:
        for member in self._members:
            member.cluster = [each.address() for each in self._members]
            member.restart()
        deadline = time.monotonic() + START_TIMEOUT
        while not all(member.ready() for member in self._members):
            if time.monotonic() > deadline:
                raise CommandError(f"The members have not elected a leader within {START_TIMEOUT:.0f} s: {self.title}.")
            time.sleep(0.1)

    def stop(self) -> None:
        for member in self._members:
            member.kill()

    def missing(self) -> str:
        """Return what is not installed, and how to install it; nothing if all is there."""
        raise NotImplementedError


class EtcdNode(ClusterNode):
    """An etcd cluster."""

    title = "an etcd cluster of three members as the only node"
    call = "etcd"
    member = EtcdMember

    def missing(self) -> str:
        if shutil.which("etcd"):
            return ""
        return "etcd is not installed. Install it, on Debian and Ubuntu with `apt-get install etcd-server`"


class ZookeeperNode(ClusterNode):
    """A ZooKeeper ensemble."""

    title = "a ZooKeeper ensemble of three members as the only node"
    call = "zookeeper"
    member = ZookeeperMember

    def missing(self) -> str:
        if not find_spec("kazoo"):
            return "kazoo is not installed. Install it with `pip install django-redlock[zookeeper]`"
        if shutil.which("java") and Path(ZOOKEEPER).exists():
            return ""
        return "ZooKeeper is not installed. Install it, on Debian and Ubuntu with `apt-get install zookeeper`"


KINDS: Mapping[str, type[Nodes]] = {
    "redis": RedisNodes,
    "cluster": RedisClusterNode,
    "etcd": EtcdNode,
    "zookeeper": ZookeeperNode,
}
"""What ``--nodes`` can name. Nodes in memory are of one process, and the shop has several."""
