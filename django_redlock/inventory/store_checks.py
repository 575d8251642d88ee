"""The doctor's checks of an etcd cluster or a ZooKeeper ensemble, based on what its members report (internal)."""

from collections.abc import Callable, Iterator

from ..core.rules import Rules
from ..nodes.redis.inspect import Inspection
from .node_checks import Finding, Level

OLDEST = {"etcd": (3, 4), "ZooKeeper": (3, 5)}
CORRUPTING = {"etcd": ((3, 5, 0), (3, 5, 1), (3, 5, 2))}
NEWEST = {"etcd": "the last release of 3.5 or later", "ZooKeeper": "a release that is maintained"}
SHARED_IDS = frozenset(
    f"{kind.lower()}-{what}" for kind in OLDEST for what in ("version", "election", "member", "alone")
)
"""The ids of findings that each kind of store may have."""

LIST_MEMBERS = {"etcd": "`etcdctl endpoint status --cluster`", "ZooKeeper": "`echo srvr | nc host 2181`"}
FULL = 0.8  # share of the quota above which a store is nearly full
LONG_TTL = 15.0  # seconds: long enough to extend a lease after an election of five seconds
LONG_TIMEOUT = 1.0


def _kind(node: Inspection) -> str:
    return node.facts.get("kind", "")


def _id(node: Inspection, what: str) -> str:
    return f"{_kind(node).lower()}-{what}"


def _version(node: Inspection, rules: Rules) -> Iterator[Finding]:
    written = node.facts.get("version", "")
    version = tuple(int(part) for part in written.split(".") if part.isdigit())
    corrupting = version in CORRUPTING.get(_kind(node), ())
    why = "may lose what it has written" if corrupting else "is not supported"
    if version and (version < OLDEST[_kind(node)] or corrupting):
        yield Finding(
            _id(node, "version"),
            Level.ERROR if corrupting else Level.WARNING,
            node.name,
            f"A member is version {written}, which {why}.",
            f"Upgrade all members to {NEWEST[_kind(node)]}.",
        )


def _alarms(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if alarms := node.facts.get("alarms"):
        yield Finding(
            "etcd-alarm",
            Level.ERROR,
            node.name,
            f"It has raised an alarm: {alarms}. It takes no locks.",
            "NOSPACE: compact and defragment (`etcdctl compact`, `etcdctl defrag`), then `etcdctl alarm disarm`; use "
            "--auto-compaction-retention. CORRUPT: replace the member that differs.",
        )


def _space(node: Inspection, rules: Rules) -> Iterator[Finding]:
    used = float(node.facts.get("used", 0))
    if used > FULL:
        yield Finding(
            "etcd-space",
            Level.WARNING,
            node.name,
            f"{used:.0%} of its space quota is used: when it is full, it takes no locks.",
            "Compact and defragment, use --auto-compaction-retention, or raise --quota-backend-bytes.",
        )


def _election(node: Inspection, rules: Rules) -> Iterator[Finding]:
    timeout = rules.timeout(rules.ttl)
    if node.facts and (rules.ttl < LONG_TTL or timeout < LONG_TIMEOUT):
        yield Finding(
            _id(node, "election"),
            Level.WARNING,
            node.name,
            f"An election of a leader takes one to five seconds. With a ttl of {rules.ttl:g} s and a node timeout of "
            f"{timeout:g} s, holders may lose their locks meanwhile, and slow disks cost votes.",
            f"OPTIONS['ttl'] of at least {LONG_TTL:g}, and OPTIONS['node_timeout'] of {LONG_TIMEOUT:g}.",
        )


def _members(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if silent := node.facts.get("silent"):
        yield Finding(
            _id(node, "member"),
            Level.WARNING,
            node.name,
            f"Not every member answers: {silent}. If one more fails, locks may stop.",
            f"Check that it runs and that its address in NODES is right: {LIST_MEMBERS[_kind(node)]}.",
        )


def _alone(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if alone := node.facts.get("alone"):
        yield Finding(
            _id(node, "alone"),
            Level.ERROR,
            node.name,
            f"Not all of its members belong together. These grant the same lock as the others: {alone}.",
            "List the members of one cluster, or one server that runs alone.",
        )


CHECKS: tuple[Callable[[Inspection, Rules], Iterator[Finding]], ...] = (
    *(_version, _alarms, _space, _election),
    *(_members, _alone),
)
