"""The lock nodes of the demo: five servers, or a cluster; see :mod:`.redis_cluster` and :mod:`.clusters`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Protocol

from django.core.management.base import CommandError

from django_redlock.testing import ServerNotFoundError, Servers, ServerStartError


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
        self.kills: list[float] = []  # when a server was killed, on the monotonic clock

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
        super().__init__(folder)
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
