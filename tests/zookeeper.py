"""Real ZooKeeper for the tests: one member, or an ensemble of three whose members are killed, frozen and wiped."""

import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from subprocess import Popen
from typing import Any, ClassVar

from django_redlock.testing import FaultProxy
from django_redlock.testing.servers import reserve_port
from tests.lab.chaos.clock import Clock, build, compiler
from tests.services import APART, Members, Service, ServiceMissingError

NETTY = ":".join(f"/usr/share/java/netty-{part}.jar" for part in ("codec", "resolver"))
"""What Debian's package needs for TLS and does not name."""


class Zoo(Service):
    """A member of a ZooKeeper ensemble, alone unless :attr:`ensemble` names others."""

    scheme = "zookeeper"
    program = "/usr/share/java/zookeeper.jar"
    remedy = "apt-get install zookeeper"
    user = ""
    small: ClassVar[tuple[str, ...]] = ("-Xmx64m", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC")

    def __init__(self, number: int = 0, *, lines: tuple[str, ...] = (), java: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.number = number
        self.lines = lines
        self.java = java
        self._peer, self._election = reserve_port(self), reserve_port(self)
        self.ensemble: tuple[str, ...] = ()
        self.proxy: FaultProxy | None = None  # between its followers and this one while it leads
        self.environment: dict[str, str] = {}
        self.secure_port = 0

    @property
    def peer(self) -> str:
        """Where its followers connect to while it leads."""
        return f"tcp://127.0.0.1:{self._peer}"

    def line(self, *, proxied: bool) -> str:
        """Return the line that names it in the settings of a member, directly or with its proxy."""
        port = self.proxy.port if proxied and self.proxy else self._peer
        return f"server.{self.number}=127.0.0.1:{port}:{self._election}"

    def private_url(self) -> str:
        return f"zookeeper://127.0.0.1:{self.port}"

    @classmethod
    def find(cls) -> str:
        path = Path(cls.program)
        if not path.exists() or not shutil.which("java") or not find_spec("kazoo"):
            raise ServiceMissingError(f"{cls.remedy} and pip install kazoo")
        return str(path)

    def prepare(self) -> None:
        (self.folder / "data").mkdir()
        (self.folder / "data" / "myid").write_text(str(self.number))

    def launch(self) -> Popen[bytes]:
        settings = [
            "tickTime=500",
            "initLimit=6",  # a follower that comes before the leader listens makes the leader wait this long
            "syncLimit=4",
            "maxClientCnxns=0",
            "admin.enableServer=false",
            "forceSync=no",
            f"dataDir={self.folder / 'data'}",
            "clientPortAddress=127.0.0.1",
            f"clientPort={self.port}",
            *self.ensemble,
            *self.lines,
        ]
        (self.folder / "zoo.cfg").write_text("\n".join(settings) + "\n")
        return self.spawn(
            "java",
            *self.small,
            "-Dzookeeper.admin.enableServer=false",
            "-Dzookeeper.forceSync=no",
            "-Dzookeeper.fastleader.maxNotificationInterval=1000",  # a minute, otherwise
            *self.java,
            *("-cp", f"{self.find()}:{NETTY}"),
            "org.apache.zookeeper.server.quorum.QuorumPeerMain",
            str(self.folder / "zoo.cfg"),
            **self.environment,
        )

    def wipe(self) -> None:
        super().wipe()
        self.prepare()

    def say(self, command: bytes) -> str:
        """Return the reply to a command of four letters."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            connection.sendall(command)
            said = b""
            while more := connection.recv(4096):
                said += more
        return said.decode()

    @property
    def leads(self) -> bool:
        """Whether it is the leader."""
        return "Mode: leader" in self.say(b"srvr")

    def ping(self) -> None:
        assert "Mode: " in self.say(b"srvr")

    @contextmanager
    def client(self) -> Iterator[Any]:
        """Connect as an operator."""
        with operator(self.url) as client:
            yield client

    def clear(self) -> None:
        """Delete all records; the folders stay."""
        with self.client() as client:
            transaction = client.transaction()
            for path in records(client):
                transaction.delete(path)
            transaction.commit()

    def records(self) -> list[str]:
        """Return the paths of all records."""
        with self.client() as client:
            return records(client)


def records(client: Any) -> list[str]:
    """Return the paths of all records."""
    roots = [f"/{name}" for name in client.get_children("/") if name.endswith(":")]
    folders = [path for paths in below(client, roots) for path in paths]
    return [path for paths in below(client, folders) for path in paths]


def below(client: Any, paths: list[str]) -> list[list[str]]:
    """Return the paths directly below some paths."""
    listed = [client.get_children_async(path) for path in paths]
    return [[f"{path}/{name}" for name in each.get()] for path, each in zip(paths, listed, strict=True)]


@contextmanager
def operator(url: str) -> Iterator[Any]:
    """Connect to some members as an operator."""
    from kazoo.client import KazooClient  # other tests do not need it

    client = KazooClient(url.removeprefix("zookeeper://"))
    client.start(60)
    try:
        yield client
    finally:
        client.stop()
        client.close()


class Ensemble(Members):
    """Three members."""

    def start(self) -> None:
        """Have all members run: start those that were killed, and let those go on that were frozen."""
        for member in self.members:
            member.begin()
        for member in self.members:
            member.start()


@contextmanager
def ensemble() -> Iterator[Ensemble]:
    """Start three members, whose clocks differ; followers reach their leader through a proxy, so it can be cut off."""
    members = [Zoo(number) for number in (1, 2, 3)]
    if compiler():
        library = build(members[0].folder)
        for member in members:
            clock = Clock(library, member.folder / "clock")
            clock.set((2 - member.number) * APART)  # the member with the highest number leads first
            member.environment = clock.environment
    with ExitStack() as stack:
        for member in members:
            member.proxy = stack.enter_context(FaultProxy(member.peer))
        for member in members:
            member.ensemble = tuple(other.line(proxied=other is not member) for other in members)
            member.prepare()
            member.begin()
        for member in members:
            stack.enter_context(member)
        yield Ensemble(members)
