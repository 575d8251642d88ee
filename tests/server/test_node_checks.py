"""The doctor's checks of what a node reports, and that each finding is tested and documented."""

import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from django_redlock.core.protocol import Failure
from django_redlock.core.rules import Rules
from django_redlock.inventory import doctor, node_checks
from django_redlock.inventory.node_checks import GUIDES, REMEDIES, check
from django_redlock.nodes.inspection import Inspection
from django_redlock.nodes.redis import inspect
from django_redlock.nodes.redis.inspect import commands
from tests.server.test_doctor import OPEN, RIGHTS, found, only

HERE = Path(__file__)
TESTS = HERE.read_text() + HERE.with_name("test_doctor.py").read_text()
FINDINGS = (HERE.parents[2] / "docs" / "operate" / "doctor.md").read_text().partition("## Findings")[2]
SOURCE = "".join(Path(module.__file__).read_text() for module in (doctor, node_checks))
MADE = r"(?:Finding|note|warning|error)\(\s*"
IDS = set(re.findall(MADE + r'"([a-z-]+)"', SOURCE)) | GUIDES.keys()


def findings(node: Inspection, **options: Any) -> dict[str, tuple[str, str]]:
    """Return the level and the text of each finding about a node."""
    rules = Rules(1, **{"ttl": 30.0, "node_timeout": 1.0, **options})
    return {each.id: (each.level, each.text) for each in check(node, rules)}


@pytest.mark.parametrize(
    ("info", "name", "level", "text"),
    [
        ({"redis_version": "6.0.9"}, "version", "warning", "the oldest that is supported is 6.2"),
        ({"maxmemory": "100", "used_memory": "95"}, "memory-full", "warning", "95% of"),
        ({"maxmemory": "100", "used_memory": "203"}, "memory-full", "error", "203% of its maxmemory is used: it refus"),
    ],
)
def test_findings_about_servers(info: dict[str, str], name: str, level: str, text: str):
    """A server that is too old, and one that is full: above its limit it refuses now, not soon."""
    said = findings(Inspection("n0", info=info, local=True), restart_guard=True)

    assert (said[name][0], text in said[name][1]) == (level, True)


@pytest.mark.parametrize("failure", REMEDIES, ids=str)
def test_every_reason_has_its_remedy(failure: Failure):
    """The remedy is that of the reason why a node cannot be reached."""
    node = Inspection("n0", detail=failure.value, failure=failure)
    [finding] = [each for each in check(node, Rules(3)) if each.id == "unreachable"]

    assert finding.remedy == REMEDIES[failure]


def test_all_documented_rights_are_tried():
    """The doctor tries all documented rights and no others."""
    assert {right for right, _ in commands("t:", 1) if right} == {right for right in RIGHTS if right.startswith("+")}


class Clock(threading.local):
    """A steady clock per thread that advances only by the round trips."""

    now = 0.0


@pytest.mark.parametrize(("delay", "level"), [(0.35, "warning"), (0.7, "error")])
def test_slow(nodes, monkeypatch, delay, level):
    """A node is slow if the shortest of its round trips takes half of the node timeout; the remedy has a number."""
    clock, said = Clock(), inspect._command
    delays = {nodes[0].port: [delay] * 5, nodes[1].port: [9.0, 9.0, 0.001, 9.0, 9.0], nodes[2].port: [0.001] * 5}

    def late(connection: Any, *command: Any) -> Any:
        if command == ("TIME",) and delays[connection.port]:  # the check of the rights comes last
            clock.now += delays[connection.port].pop()
        return said(connection, *command)

    monkeypatch.setattr(inspect, "_command", late)
    monkeypatch.setattr(inspect, "steady", lambda: clock.now)
    monkeypatch.setattr(inspect, "time", SimpleNamespace(time=lambda: time.time() - clock.now / 2))
    said_of = found(nodes.urls[:3], {**OPEN, "node_timeout": 0.5, "ttl": 10.0})

    assert only(said_of, "slow").level == level
    assert only(said_of, "slow").node.endswith(str(nodes[0].port))
    assert f"OPTIONS['node_timeout'] to {4 * delay:.2f}" in only(said_of, "slow").remedy
    assert ("OPTIONS['ttl'] to 12" in only(said_of, "slow").remedy) is (delay == 0.7)


def test_every_finding_has_a_test_and_is_documented():
    """The findings in the source, in these tests and in the documentation are the same."""
    documented = set(re.findall(r"^\| `([a-z-]+)` \|", FINDINGS, re.MULTILINE))

    assert [name for name in IDS if f'"{name}"' not in TESTS] == []
    assert {name for name in documented if not name.startswith(("etcd-", "zookeeper-"))} == IDS
