"""
The doctor's checks of a replicated store, based on what its members report (internal).
"""

from collections.abc import Iterator

from ...core.rules import Rules
from ...nodes.inspection import Finding, Inspection, Level, error, warning

OLDEST_STORES = {"etcd": (3, 4), "ZooKeeper": (3, 5)}
CORRUPTING = {"etcd": ((3, 5, 0), (3, 5, 1), (3, 5, 2))}
NEWEST_STORES = {"etcd": "the last release of 3.5 or later", "ZooKeeper": "a release that is maintained"}
LIST_MEMBERS = {"etcd": "`etcdctl endpoint status --cluster`", "ZooKeeper": "`echo srvr | nc host 2181`"}
FULL_STORE = 0.8  # share of the quota above which a store is nearly full
LONG_TTL = 15.0  # seconds: long enough to extend a lease after an election of five seconds
LONG_TIMEOUT = 1.0


def members(node: Inspection, rules: Rules) -> Iterator[Finding]:
    """Yield what is wrong with a replicated store, all of whose members are one node."""
    facts, kind, timeout = node.facts, node.facts.get("kind", ""), rules.timeout(rules.ttl)
    if not facts:
        return
    written = facts.get("version", "")
    version = tuple(int(part) for part in written.split(".") if part.isdigit())
    corrupting = version in CORRUPTING.get(kind, ())
    if version and (version < OLDEST_STORES[kind] or corrupting):
        yield Finding(
            f"{kind.lower()}-version",
            Level.ERROR if corrupting else Level.WARNING,
            f"A member is version {written}, which "
            + ("may lose what it has written." if corrupting else "is not supported."),
            f"Upgrade all members to {NEWEST_STORES[kind]}.",
        )
    if rules.ttl < LONG_TTL or timeout < LONG_TIMEOUT:
        yield warning(
            f"{kind.lower()}-election",
            f"An election of a leader takes one to five seconds. With a ttl of {rules.ttl:g} s and a node timeout of "
            f"{timeout:g} s, holders may lose their locks meanwhile, and slow disks cost votes.",
            f"OPTIONS['ttl'] of at least {LONG_TTL:g}, and OPTIONS['node_timeout'] of {LONG_TIMEOUT:g}.",
        )
    if silent := facts.get("silent"):
        yield warning(
            f"{kind.lower()}-member",
            f"Not every member answers: {silent}. If one more fails, locks may stop.",
            f"Check that it runs and that its address in NODES is right: {LIST_MEMBERS[kind]}.",
        )
    if alone := facts.get("alone"):
        yield error(
            f"{kind.lower()}-alone",
            f"Not all of its members belong together. These grant the same lock as the others: {alone}.",
            "List the members of one cluster, or one server that runs alone.",
        )


def etcd(node: Inspection, rules: Rules) -> Iterator[Finding]:
    """Yield what is wrong with the space of an etcd cluster."""
    if alarms := node.facts.get("alarms"):
        yield error(
            "etcd-alarm",
            f"It has raised an alarm: {alarms}. It takes no locks.",
            "NOSPACE: compact and defragment (`etcdctl compact`, `etcdctl defrag`), then `etcdctl alarm disarm`; use "
            "--auto-compaction-retention. CORRUPT: replace the member that differs.",
        )
    used = float(node.facts.get("used", 0))
    if used > FULL_STORE:
        yield warning(
            "etcd-space",
            f"{used:.0%} of its space quota is used: when it is full, it takes no locks.",
            "Compact and defragment, use --auto-compaction-retention, or raise --quota-backend-bytes.",
        )
