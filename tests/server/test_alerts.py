"""Each alert rule of the documentation fires in the situation that it names, and not in the healthy one."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

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


def case(alert: str, series: Series, at: list[str], expected: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a test of promtool: what an alert does at these times, with series that differ from the healthy ones."""
    return {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in {**HEALTHY, **series}.items()],
        "alert_rule_test": [{"eval_time": each, "alertname": alert, "exp_alerts": expected} for each in at],
    }


def filled(text: str, labels: dict[str, str], value: str) -> str:
    """Return an annotation with the labels and the value of an alert that fires."""
    for name, label in labels.items():
        text = text.replace(f"{{{{ $labels.{name} }}}}", label)
    return text.replace("{{ $value }}", value)


def test_alerts_fire_in_the_situations_that_they_name_and_in_no_other(tmp_path: Path):
    """
    The texts have nothing left to fill in. None fires for a system whose locks are taken and released, nor for what an
    operator does.
    """
    needs("promtool", shutil.which("promtool"), "apt-get install prometheus")
    cases = [case(alert, {}, [f"{minutes}m" for minutes in range(1, 20)], []) for alert in ALERTS]
    for alert, _, series, at, labels, value in FIRING:
        rule = ALERTS[alert]
        texts = {name: filled(text, labels, value) for name, text in rule["annotations"].items()}
        assert "{{" not in str(texts)
        fires = {"exp_labels": {**labels, **rule["labels"]}, "exp_annotations": texts}
        cases.append(case(alert, series, [at], [fires]))
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "15s", "tests": cases}))

    ran = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ALERTS.keys() == {alert for alert, *_ in FIRING}
