"""An etcd cluster as a node (internal)."""

from contextlib import suppress
from urllib.parse import quote

from ..base import NodeSpec
from ..records.replicated import ReplicatedNode, Store, also, oldest, shortest
from .client import Client, EtcdError, link_error, number

EXAMPLE = "etcd://etcd-1:2379,etcd-2:2379,etcd-3:2379"


def refuse_path(path: str) -> None:
    """Raise ValueError if a URL has a path."""
    if path:
        raise ValueError(f"etcd has neither a path nor database numbers: write {EXAMPLE}, and choose a KEY_PREFIX")


ETCD = Store("etcd", "etcd", 2379, 2379, EXAMPLE, refuse_path)


class EtcdNode(ReplicatedNode):
    """
    All members of an etcd cluster: one vote, which is as available as the cluster.

    Args:
        spec: An ``etcd`` or ``etcds`` URL with some members, and the options for all of them.
        prefix: The beginning of every key.

    Raises:
        ValueError: The URL or the options cannot be used.
    """

    kind = "etcd"
    store = ETCD
    watch = EtcdWatch

    def table(self, patience: float) -> EtcdTable:
        """Return its records, not yet connected."""
        return EtcdTable(self.place, self.prefix, patience)

    def channel(self, process: str) -> str:
        """Return the key under which the notifications to a process are put."""
        return f"{self.prefix}w/{process}"

    def ask(self, number: int, timeout: float, facts: dict[str, str]) -> float:
        """Add what a member reports to the facts; return the time of the shortest round trip in seconds."""
        client = Client(self.place, number, timeout)
        try:
            client.open()
            trip = shortest(lambda: client.call("/v3/maintenance/status", {}))
            add_facts(client, facts)
            with suppress(EtcdError):  # the trial of the doctor reports it
                identity = self.table(timeout).greet(client)
                if facts.setdefault("identity", identity) != identity:
                    also(facts, "alone", self.place.members[number])
            return trip
        except (EtcdError, OSError) as error:
            raise link_error(error) from None
        finally:
            client.close()


def add_facts(client: Client, facts: dict[str, str]) -> None:
    """Add the version of a member, its share of used space, and its alarms."""
    status = client.call("/v3/maintenance/status", {})
    facts["version"] = oldest(str(status.get("version", ""))[:20], facts.get("version", ""))
    if quota := number(status, "dbSizeQuota"):  # from version 3.6 on
        used = number(status, "dbSize") / quota
        facts["used"] = f"{max(used, float(facts.get('used', 0))):.3f}"
    with suppress(EtcdError):  # the user may lack the right
        alarms = client.call("/v3/maintenance/alarm", {"action": "GET"}).get("alarms", [])
        if names := {str(alarm.get("alarm")) for alarm in alarms}:
            facts["alarms"] = ", ".join(sorted(names))


def open_node(spec: NodeSpec, prefix: str) -> EtcdNode:
    """Return the node of an ``etcd`` or ``etcds`` URL."""
    # Slashes separate the kinds of records: "app:x/y:" would begin with a kind of the alias "app:".
    return EtcdNode(spec, quote(prefix, safe=":"))
