"""A ZooKeeper ensemble as a node (internal)."""

from contextlib import closing
from importlib.util import find_spec

from ...core.protocol import Failure
from ..base import LinkError, NodeSpec
from ..records.replicated import ReplicatedNode, Store, also, oldest, shortest
from .client import connected, link_error

EXAMPLE = "zookeeper://zoo-1:2181,zoo-2:2181,zoo-3:2181/redlock"
SASL = ("sasl_mechanism", "sasl_service", "sasl_principal")
MECHANISMS = ("DIGEST-MD5", "GSSAPI")
LONGEST = 10_000  # bytes of a member's report about itself


def check_path(path: str) -> None:
    """Raise ValueError if ZooKeeper does not accept the path."""
    names = path.split("/")[1:]
    if len(names) == 1 and names[0].isdigit():
        raise ValueError(f"ZooKeeper has no database numbers: write {EXAMPLE}, and choose a KEY_PREFIX")
    if "," in path:
        raise ValueError(f"its path comes once, after the last member: write, for example, {EXAMPLE}")
    if any(not name.isprintable() or name in ("", ".", "..", "zookeeper") for name in names):
        raise ValueError(f"its path is not valid in ZooKeeper: write, for example, {EXAMPLE}")


ZOOKEEPER = Store("ZooKeeper", "zookeeper", 2181, 2281, EXAMPLE, check_path, SASL)


class ZookeeperNode(ReplicatedNode):
    """
    All members of a ZooKeeper ensemble: one vote, which is as available as the ensemble.

    Args:
        spec: A ``zookeeper`` or ``zookeepers`` URL with some members, and the options for all of them.
        prefix: The beginning of every key.

    Raises:
        ValueError: The URL or the options cannot be used.
    """

    kind = "zookeeper"
    store = ZOOKEEPER
    watch = ZookeeperWatch

    def __init__(self, spec: NodeSpec, prefix: str) -> None:
        super().__init__(spec, prefix)
        options = self.place.options
        mechanism = options.get("sasl_mechanism")
        if mechanism is None and (given := [name for name in SASL if options.get(name)]):
            raise ValueError(f"its option {given[0]!r} is for SASL: add sasl_mechanism=GSSAPI")
        if mechanism not in (None, *MECHANISMS):
            raise ValueError(f"its sasl_mechanism must be one of {', '.join(MECHANISMS)}")
        if mechanism == "DIGEST-MD5" and not options.get("password"):
            raise ValueError("SASL with DIGEST-MD5 needs a user: write zookeeper://user:password@zoo-1")
        if mechanism and find_spec("puresasl") is None:
            raise ValueError("SASL needs one more package: pip install kazoo[sasl]")

    @property
    def authenticated(self) -> bool:
        """Whether a password, a ticket or a certificate of the client is sent."""
        return super().authenticated or bool(self.place.options.get("sasl_mechanism"))

    def table(self, patience: float) -> ZookeeperTable:
        """Return the records, not yet connected."""
        return ZookeeperTable(self.place, self.prefix, patience)

    def channel(self, process: str) -> str:
        """Return the path of the znode to which the notifications to a process are written."""
        return f"{root_of(self.place, self.prefix)}/w/{process}"

    def ask(self, number: int, timeout: float, facts: dict[str, str]) -> float:
        """Add what a member reports to the facts; return the time of the shortest round trip in seconds."""
        outputs: list[str] = []
        try:
            trip = shortest(lambda: outputs.append(self._command(number, timeout)))
        except OSError as error:
            raise link_error(error, known=False) from None
        values = dict(line.partition(": ")[::2] for line in outputs[-1].splitlines())
        if "Mode" not in values and "srvr" not in outputs[-1]:  # otherwise the member does not accept this command
            raise LinkError(Failure.NO_LEADER)
        if version := values.get("Zookeeper version", "").partition("-")[0][:20]:
            facts["version"] = oldest(version, facts.get("version", ""))
        if values.get("Mode") == "standalone" and len(self.members) > 1:
            also(facts, "alone", self.place.members[number])
        return trip

    def _command(self, number: int, timeout: float) -> str:
        """Return a member's report about itself."""
        data, member = b"", self.place.members[number]
        with closing(connected(member, member[0], self.place, timeout)) as connection:
            connection.sendall(b"srvr")
            while len(data) < LONGEST and (more := connection.recv(LONGEST)):
                data += more
        return data.decode("utf-8", "replace")


def open_node(spec: NodeSpec, prefix: str) -> ZookeeperNode:
    """Return the node of a ``zookeeper`` or ``zookeepers`` URL."""
    return ZookeeperNode(spec, prefix)
