"""The doctor's checks of what the members of a store report, and that each finding is tested and documented."""

import re
from pathlib import Path
from typing import Any

import pytest

from django_redlock.contrib.consensus import checks
from django_redlock.core.rules import Rules
from django_redlock.inventory.node_checks import check
from django_redlock.nodes.inspection import Inspection, Level

HERE = Path(__file__)
FINDINGS = (HERE.parents[3] / "docs" / "operate" / "doctor.md").read_text().partition("## Findings")[2]
SOURCE = Path(checks.__file__).read_text()
MADE = r"(?:Finding|note|warning|error)\(\s*"
KINDS = ("etcd", "zookeeper")
EVERY = set(re.findall(MADE + r'f"\{kind.lower\(\)\}(-[a-z]+)"', SOURCE))  # every kind of store may have them
IDS = {f"{kind}{what}" for kind in KINDS for what in EVERY} | set(re.findall(MADE + r'"([a-z-]+)"', SOURCE))


def findings(node: Inspection, **options: Any) -> dict[str, Level]:
    """Return the level of each finding about a node."""
    rules = Rules(1, **{"ttl": 30.0, "node_timeout": 1.0, **options})
    return {each.id: each.level for each in check(node, rules)}


@pytest.mark.parametrize(
    ("facts", "options", "expected"),
    [
        ({"version": "3.4.23"}, {}, {}),
        ({"kind": "ZooKeeper", "version": "3.4.14"}, {}, {"zookeeper-version": Level.WARNING}),
        ({"kind": "ZooKeeper"}, {"node_timeout": 0.2}, {"zookeeper-election": Level.WARNING}),
        ({"kind": "ZooKeeper", "silent": "z1:2181 (refused)"}, {}, {"zookeeper-member": Level.WARNING}),
        ({"kind": "ZooKeeper", "alone": "z1:2181, z2:2181"}, {}, {"zookeeper-alone": Level.ERROR}),
        ({"alone": "e2:2379"}, {}, {"etcd-alone": Level.ERROR}),
        ({"version": "3.3.27"}, {}, {"etcd-version": Level.WARNING}),
        ({"version": "3.5.1"}, {}, {"etcd-version": Level.ERROR}),
        ({"version": "3.5.21", "alarms": "NOSPACE"}, {}, {"etcd-alarm": Level.ERROR}),
        ({"version": "3.6.0", "used": "0.850"}, {}, {"etcd-space": Level.WARNING}),
        ({"version": "3.6.0"}, {"ttl": 10.0}, {"etcd-election": Level.WARNING}),
        ({"version": "3.6.0", "silent": "e1:2379 (refused)"}, {}, {"etcd-member": Level.WARNING}),
        ({}, {"ttl": 10.0}, {}),
    ],
    ids=str,
)
def test_findings_about_stores_with_members(facts: dict[str, str], options: dict[str, Any], expected: dict[str, Level]):
    """Versions that lose data, alarms, space, elections and members; another kind of node has no such facts."""
    about = facts and {"kind": "etcd", **facts}
    node = Inspection("store", known=False, facts=about, checks=(checks.members, checks.etcd))

    assert findings(node, **options) == expected


def test_every_finding_has_a_test_and_is_documented():
    """The findings in the source, in these tests and in the documentation are the same."""
    documented = set(re.findall(r"^\| `((?:etcd|zookeeper)-[a-z-]+)` \|", FINDINGS, re.MULTILINE))

    assert [name for name in IDS if f'"{name}"' not in HERE.read_text()] == []
    assert documented == IDS
