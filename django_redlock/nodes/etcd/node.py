"""An etcd cluster as a node (internal)."""

from collections.abc import Callable

from ..base import NodeSpec
from ..cas.node import RecordNode
from .inspect import examine
from .place import read_place
from .table import EtcdTable
from .watch import AsyncEtcdNotificationLink, EtcdNotificationLink


class EtcdNode(RecordNode):
    """
    All members of an etcd cluster: one vote, which is as available as the cluster.

    Args:
        spec: An ``etcd`` or ``etcds`` URL with some members, and the options for all of them.
        prefix: What every key begins with.

    Raises:
        ValueError: The URL or the options cannot be used.
    """

    kind = "etcd"
    calls = True

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        self.place = read_place(spec)
        self.members = self.place.addresses
        address = ", ".join(self.members)
        super().__init__(spec.name or address, address)
        self._prefix = prefix

    @property
    def replicated(self) -> bool:
        """Whether it survives the loss of a member, as far as its URL shows."""
        return len(self.members) > 2

    @property
    def encrypted(self) -> bool:
        """Whether its connections are encrypted."""
        return self.place.encrypted

    @property
    def authenticated(self) -> bool:
        """Whether a password or a certificate of the client is sent."""
        return bool(self.place.options.get("password") or self.place.options.get("ssl_certfile"))

    @property
    def remote(self) -> bool:
        """Whether its connections leave this machine."""
        return not self.place.local

    def table(self, patience: float) -> EtcdTable:
        """Return its records, not yet connected."""
        return EtcdTable(self.place, self._prefix, patience)

    def examine(self, timeout: float) -> tuple[float, dict[str, str]]:
        """Return the seconds of a round trip, and facts for the doctor; raises LinkError if no member answers."""
        return examine(self.place, timeout)

    def listen(self, process: str, timeout: float, on_notification: Callable[[str], object]) -> EtcdNotificationLink:
        """Open a link for notifications; see :class:`~django_redlock.nodes.base.Node`."""
        return EtcdNotificationLink(self.place, f"{self._prefix}w/{process}", timeout)

    async def alisten(
        self, process: str, timeout: float, on_notification: Callable[[str], object]
    ) -> AsyncEtcdNotificationLink:
        """Open a link for notifications to the running event loop."""
        link = AsyncEtcdNotificationLink(self.place, f"{self._prefix}w/{process}", timeout)
        await link.begin(timeout)
        return link


def open_node(spec: NodeSpec, prefix: str) -> EtcdNode:
    """Return the node of an ``etcd`` or ``etcds`` URL."""
    return EtcdNode(spec, prefix)
