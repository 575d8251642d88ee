"""The lock nodes of the demo: five servers, or the members of an etcd cluster."""

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from signal import SIGKILL
from typing import ClassVar, Protocol
from urllib.request import Request, urlopen

from django.core.management.base import CommandError

from django_redlock.testing import ServerNotFoundError, Servers, ServerStartError
from django_redlock.testing.processes import spawn

from .processes import reserve_port

MEMBERS = 3
START_TIMEOUT = 60.0  # seconds in which the members of a cluster must have elected a leader
ETCD = "etcd"


class Member(Protocol):
    """A server that can be killed."""

    @property
    def pid(self) -> int:
        """The process id."""

    @property
    def port(self) -> int:
        """The port for clients."""

    @property
    def running(self) -> bool:
        """Whether it is running."""

    def kill(self) -> None:
        """End it at once."""

    def restart(self) -> object:
        """Start it again."""


class Nodes:
    """
    What the shop's locks are on.

    Args:
        folder: For the files of servers.

    Attributes:
        title: What is started, in words.
        call: What the name of each server begins with.
        votes: How many votes the page of held locks may show; the first is that of healthy nodes.
        seen: Which of them must be seen while servers are killed.
        losable: How many servers may be dead at one time.
        votes_after: Seconds for which a server that has started gives no vote.
        gaps: Whether there are moments in which no lock can be taken, as when a cluster elects a leader. Views then
            answer 503, and an import may be submitted that ends when it finds another one running.
        empty: Whether a server that was restarted has lost its data.
        options: Environment variables for the shop's settings.
    """

    title: ClassVar[str]
    call: ClassVar[str] = ""
    votes: ClassVar[tuple[int, ...]] = (1,)
    seen: ClassVar[tuple[int, ...]] = (1,)
    losable: ClassVar[int] = 0
    votes_after: ClassVar[float] = 0.0
    gaps: ClassVar[bool] = False
    empty: ClassVar[bool] = False
    options: ClassVar[Mapping[str, str]] = {"REDLOCK_NODE_TIMEOUT": "1"}

    def __init__(self, folder: Path) -> None:
        self.servers: Sequence[Member] = ()

    @property
    def setting(self) -> str:
        """The value of ``NODES``."""
        raise NotImplementedError

    def start(self) -> None:
        """Start everything; raises CommandError if that fails."""

    def stop(self) -> None:
        """End everything."""


class RedisNodes(Nodes):
    """Five embedded servers: five nodes."""

    title = "five nodes"
    call = "lock"
    votes = (5, 4, 3)
    seen = (5, 4)
    losable = 2
    # A node may have forgotten leases when it started, and votes when all of them have ended: after max_ttl in the
    # settings, 6 seconds, and a little more, because it counts its age in whole seconds.
    votes_after = 8.5
    empty = True
    options: ClassVar[Mapping[str, str]] = {}

    def __init__(self, folder: Path) -> None:
        self._servers = Servers(5)
        self.servers = list(self._servers)

    @property
    def setting(self) -> str:
        return ",".join(self._servers.urls)

    def start(self) -> None:
        try:
            self._servers.start()
        except (ServerNotFoundError, ServerStartError) as error:
            raise CommandError(str(error)) from None

    def stop(self) -> None:
        self._servers.stop()


class EtcdMember:
    """A member of an etcd cluster."""

    def __init__(self, number: int, folder: Path, program: str) -> None:
        self.name = f"etcd-{number}"
        self._folder = folder
        self._program = program
        self._started: subprocess.Popen[bytes] | None = None
        (self.port, self._reservation), (peer, self._peers) = reserve_port(), reserve_port()
        self.url, self.peer = f"http://127.0.0.1:{self.port}", f"http://127.0.0.1:{peer}"
        self.cluster = ""

    @property
    def pid(self) -> int:
        return self._started.pid if self._started else 0

    @property
    def running(self) -> bool:
        return self._started is not None and self._started.poll() is None

    def restart(self) -> None:
        """Start it, with the data that it had."""
        with (self._folder / f"{self.name}.log").open("ab") as log:
            self._started = spawn(
                [
                    self._program,
                    *("--name", self.name),
                    *("--data-dir", str(self._folder / self.name)),
                    *("--listen-client-urls", self.url),
                    *("--advertise-client-urls", self.url),
                    *("--listen-peer-urls", self.peer),
                    *("--initial-advertise-peer-urls", self.peer),
                    *("--initial-cluster", self.cluster),
                    *("--heartbeat-interval", "50", "--election-timeout", "500"),
                    *("--logger", "zap", "--log-level", "error"),
                ],
                env=os.environ | {"ETCD_UNSUPPORTED_ARCH": "arm64"},  # it runs there, without a promise of support
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        if self._started:
            self._started.send_signal(SIGKILL)
            self._started.wait()

    def ready(self) -> bool:
        """Return whether it answers and knows a leader."""
        try:
            with urlopen(Request(f"{self.url}/v3/maintenance/status", b"{}"), timeout=1.0) as reply:
                return bool(int(json.load(reply).get("leader", 0)))
        except (OSError, ValueError, HTTPException):
            return False


class EtcdNode(Nodes):
    """A cluster of three members: one node, of which one member may die."""

    title = "an etcd cluster of three members as the only node"
    call = "etcd"
    losable = 1
    gaps = True

    def __init__(self, folder: Path) -> None:
        program = shutil.which(ETCD)
        if not program:
            raise CommandError(
                "etcd is not installed. Install it, on Debian and Ubuntu with `apt-get install etcd-server`, or run "
                "the demo on the servers that come with it: --nodes redis."
            )
        self._members = [EtcdMember(number, folder, program) for number in range(1, MEMBERS + 1)]
        self.servers = self._members

    @property
    def setting(self) -> str:
        return "etcd://" + ",".join(f"127.0.0.1:{member.port}" for member in self._members)

    def start(self) -> None:
        for member in self._members:
            member.cluster = ",".join(f"{one.name}={one.peer}" for one in self._members)
            member.restart()
        deadline = time.monotonic() + START_TIMEOUT
        while not all(member.ready() for member in self._members):
            if time.monotonic() > deadline:
                raise CommandError(f"The etcd cluster has not elected a leader within {START_TIMEOUT:.0f} s.")
            time.sleep(0.1)

    def stop(self) -> None:
        for member in self._members:
            member.kill()


KINDS: Mapping[str, type[Nodes]] = {"redis": RedisNodes, "etcd": EtcdNode}
"""What ``--nodes`` can name. Nodes in memory are of one process, and the shop has several."""
