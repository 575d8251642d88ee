"""The checks of an etcd cluster, which use what its members say (internal)."""

from collections.abc import Callable, Iterator

from ..core.rules import Rules
from ..nodes.redis.inspect import Inspection
from .findings import Finding, Level

OLDEST = (3, 4)
CORRUPTING = ((3, 5, 0), (3, 5, 1), (3, 5, 2))
FULL = 0.8  # share of the quota
LONG_TTL = 15.0  # seconds: a holder can extend its lease after an election of five seconds
LONG_TIMEOUT = 1.0


def _version(node: Inspection, rules: Rules) -> Iterator[Finding]:
    said = node.facts.get("version", "")
    version = tuple(int(part) for part in said.split(".") if part.isdigit())
    if version and (version < OLDEST or version in CORRUPTING):
        why = "may lose what it has written" if version in CORRUPTING else "is not supported"
        yield Finding(
            "etcd-version",
            Level.ERROR if version in CORRUPTING else Level.WARNING,
            node.name,
            f"A member is version {said}, which {why}.",
            "Upgrade all members to the last release of 3.5 or later.",
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
            "etcd-election",
            Level.WARNING,
            node.name,
            f"An election of a leader takes one to five seconds. With a ttl of {rules.ttl:g} s and a node timeout of "
            f"{timeout:g} s, holders may lose their locks meanwhile, and slow disks cost votes.",
            f"OPTIONS['ttl'] of at least {LONG_TTL:g}, and OPTIONS['node_timeout'] of {LONG_TIMEOUT:g}.",
        )


def _members(node: Inspection, rules: Rules) -> Iterator[Finding]:
    if silent := node.facts.get("silent"):
        yield Finding(
            "etcd-member",
            Level.WARNING,
            node.name,
            f"Not every member answers: {silent}. One more that fails may stop all locks.",
            "See that it runs and that its address in NODES is right: `etcdctl endpoint status --cluster`.",
        )


CHECKS: tuple[Callable[[Inspection, Rules], Iterator[Finding]], ...] = (_version, _alarms, _space, _election, _members)
