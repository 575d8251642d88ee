"""Each alert rule of the documentation fires in the situation that it names, and not in the healthy one."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import needs

RULES = Path(__file__).parents[2] / "docs" / "monitoring" / "alerts.yml"
ALERTS = {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}

# Scrapes every 15 seconds, in promtool's notation: ``0x8 1x2`` is nine scrapes of 0, then three of 1.
Series = dict[str, str]
ALIAS, NODE, ORDERS = (
    {"alias": "default"},
    {"alias": "default", "node": "lock-1"},
    {"alias": "default", "lock": "orders:*"},
)
HEALTHY: Series = {
    'redlock_spare_nodes{alias="default"}': "1x80",
    'redlock_node_up{alias="default",node="lock-1"}': "1x80",
    'redlock_held_locks{alias="default",state="held"}': "7x80",
    'redlock_held_locks{alias="default",state="orphaned"}': "0x80",
    'redlock_held_locks{alias="default",state="no_expiry"}': "0x80",
    'redlock_lost_total{alias="default",lock="orders:*",outcome="expired"}': "0x80",
    'redlock_lost_total{alias="default",lock="orders:*",outcome="revoked"}': "0x40 1x39",
    'redlock_wait_seconds_bucket{alias="default",lock="orders:*",outcome="acquired",le="1"}': "0+10x80",
    'redlock_wait_seconds_bucket{alias="default",lock="orders:*",outcome="acquired",le="60"}': "0+10x80",
    'redlock_wait_seconds_bucket{alias="default",lock="orders:*",outcome="acquired",le="+Inf"}': "0+10x80",
    'redlock_waiting_seconds{alias="default",lock="orders:*"}': "1x20 _x20 4x39",
}
ORPHANED = 'redlock_held_locks{alias="default",state="orphaned"}'
LOST = 'redlock_lost_total{alias="default",lock="orders:*",outcome="%s"}'
QUICK = 'redlock_wait_seconds_bucket{alias="default",lock="orders:*",outcome="acquired",le="1"}'
WAITING = 'redlock_waiting_seconds{alias="default",lock="orders:*"}'

# The alert, what happens, the series that differ from the healthy ones, when it fires, with which labels and value.
FIRING: list[tuple[str, str, Series, str, dict[str, str], str]] = [
    (
        "RedlockNoQuorum",
        "two of three nodes fail",
        {'redlock_spare_nodes{alias="default"}': "1x8 -1x8"},
        "3m",
        ALIAS,
        "-1",
    ),
    (
        "RedlockNoSpareNode",
        "one of three nodes fails",
        {'redlock_spare_nodes{alias="default"}': "1x8 0x40"},
        "8m",
        ALIAS,
        "0",
    ),
    ("RedlockNodeDown", "a node dies", {'redlock_node_up{alias="default",node="lock-1"}': "1x8 0x20"}, "5m", NODE, "0"),
    (
        "RedlockLocksLost",
        "a holder is paused",
        {LOST % "expired": "0x8 1x20"},
        "3m",
        {**ORDERS, "outcome": "expired"},
        "",
    ),
    (
        "RedlockLocksLost",
        "a first lock is lost",
        {LOST % "taken": "_x8 1x20"},
        "3m",
        {**ORDERS, "outcome": "taken"},
        "1",
    ),
    ("RedlockOrphanedLocks", "one process dies", {ORPHANED: "0x8 1 0x40"}, "3m", ALIAS, "1"),
    ("RedlockOrphanedLocks", "a deployment kills processes, again and again", {ORPHANED: "0x8 3x60"}, "9m", ALIAS, "3"),
    (
        *("RedlockEndlessLocks", "another program writes a key"),
        *({'redlock_held_locks{alias="default",state="no_expiry"}': "0x8 1x40"}, "8m", ALIAS, "1"),
    ),
    ("RedlockSlowLocks", "callers get the lock late", {QUICK: "0x80"}, "15m", ORDERS, ""),
    ("RedlockSlowLocks", "callers still wait", {WAITING: "0+15x80"}, "15m", ORDERS, ""),
]


def objections(tmp_path: Path, alert: str, series: Series, at: list[str], expected: list[dict[str, Any]]) -> str:
    """Return what promtool objects to, if an alert is not as expected at one of these times."""
    needs("promtool", shutil.which("promtool"), "apt-get install prometheus")
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": values} for name, values in {**HEALTHY, **series}.items()],
                "alert_rule_test": [{"eval_time": each, "alertname": alert, "exp_alerts": expected} for each in at],
            }
        ],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps(tests))
    ran = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)
    return "" if ran.returncode == 0 else f"{ran.stdout}{ran.stderr}"


def filled(text: str, labels: dict[str, str], value: str) -> str:
    """Return an annotation with the labels and the value of an alert that fires."""
    for name, label in labels.items():
        text = text.replace(f"{{{{ $labels.{name} }}}}", label)
    return text.replace("{{ $value }}", value)


@pytest.mark.parametrize(
    ("alert", "happens", "series", "at", "labels", "value"), FIRING, ids=lambda part: str(part)[:40]
)
def test_alert_fires(
    tmp_path: Path, alert: str, happens: str, series: Series, at: str, labels: dict[str, str], value: str
):
    """It fires in the situation that it names, with texts in which nothing is left to fill in."""
    rule = ALERTS[alert]
    texts = {name: filled(text, labels, value) for name, text in rule["annotations"].items()}

    expected = [{"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": texts}]

    assert objections(tmp_path, alert, series, [at], expected) == ""
    assert "{{" not in str(texts)


@pytest.mark.parametrize("alert", ALERTS)
def test_alert_is_silent_while_all_is_well(tmp_path: Path, alert: str):
    """It never fires for a system whose locks are taken and released, nor for what an operator does."""
    assert alert in {fires for fires, *_ in FIRING}
    assert objections(tmp_path, alert, {}, [f"{minutes}m" for minutes in range(1, 20)], []) == ""


def test_rules_are_valid():
    needs("promtool", shutil.which("promtool"), "apt-get install prometheus")

    ran = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
