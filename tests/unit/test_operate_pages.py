"""The pages for operators name checks, findings and settings that exist."""

import re
from pathlib import Path

import pytest

import django_redlock
from django_redlock.conf import read_alias
from django_redlock.core.rules import Rules
from tests.deployment import CHECKOUT

DOCS = CHECKOUT / "docs"
PAGES = sorted((DOCS / "operate").glob("*.md"))
SHOWING = [page for page in PAGES if "REDLOCK = " in page.read_text()]


def test_checks_and_findings_that_pages_name_exist():
    """Each `redlock.W001` and each "The doctor reports `clock`" is in the table that lists all of them."""
    listed = (DOCS / "operate" / "doctor.md").read_text() + (DOCS / "reference" / "checks.md").read_text()
    known = set(re.findall(r"^\| `([\w.-]+)` \|", listed, re.MULTILINE))
    text = "\n".join(page.read_text() for page in PAGES)
    checks = set(re.findall(r"`(redlock\.[EW]\d+)`", text))
    findings = set(re.findall(r"doctor\W+reports\s+`([a-z-]+)`", text))

    assert checks - known == set()
    assert findings - known == set()
    assert len(findings) >= 5


@pytest.mark.parametrize("page", SHOWING, ids=[page.stem for page in SHOWING])
def test_settings_on_a_page_can_be_used(page, settings):
    """Every value of REDLOCK that a page shows is read without an error; the tests have no database for locks alone."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for statement in re.split(r"^(?=REDLOCK = )", block, flags=re.MULTILINE)[1:]:
            namespace = {"SENTINELS": [("sentinel-1", 26379)]}
            exec(statement.replace("database://locks", "database://default"), namespace)
            settings.REDLOCK = namespace["REDLOCK"]
            assert read_alias("default").nodes


def test_nodes_that_may_be_down_are_those_of_the_rules():
    """The table of topologies and the quorum of the rules agree."""
    page = (DOCS / "operate" / "topologies.md").read_text().partition("\n## ")[0]
    down = {name.strip("* "): int(count) for name, count in re.findall(r"^\| ([^|]+) \| (\d+) \|", page, re.MULTILINE)}
    sizes = {"one Redis or Valkey": 1, "one master with Sentinel": 1, "one cluster": 1, "one database": 1}
    sizes |= {"two nodes": 2, "three masters": 3, "two Redis and a database": 3, "five masters": 5}
    rules = {name: Rules(size) for name, size in sizes.items()} | {"five masters with `quorum` 4": Rules(5, quorum=4)}

    assert down == {name: each.nodes - each.needed for name, each in rules.items()}


def test_costs_of_nodes_are_those_of_the_benchmark():
    """The times on the page are those of the tables, or were so before these were last measured on another day."""
    page = (DOCS / "operate" / "topologies.md").read_text()
    tables = (CHECKOUT / "tests" / "lab" / "benchmarks" / "tables.md").read_text()
    measured = {name: float(ms) for name, ms in re.findall(r"^\| ([^|]+) \| ([\d.]+) ms \|", tables, re.MULTILINE)}
    said = {name: float(ms) for name, ms in re.findall(r"^\| ([^|]+) \| ([\d.]+) ms \|", page, re.MULTILINE)}
    rows = {
        "one Redis or Valkey": "one Redis",
        "one cluster": "Redis Cluster of three masters",
        "one database": "PostgreSQL",
        "one etcd cluster": "etcd, three members",
        "one ZooKeeper ensemble": "ZooKeeper, three members",
        "three masters": "three Redis",
        "two Redis and an etcd cluster": "etcd and two Redis",
        "five masters": "five Redis",
    }

    assert said.keys() == rows.keys()
    assert {name for name, ms in said.items() if not 0.5 < ms / measured[rows[name]] < 2} == set()


def test_reasons_that_head_an_incident_are_those_of_nodes():
    """An operator searches the page for the words in the log: each quoted reason is in the source."""
    page = (DOCS / "operate" / "incidents.md").read_text()
    quoted = [
        words for title in re.findall(r"^## (.*)", page, re.MULTILINE) for words in re.findall(r'"([^"]+)"', title)
    ]
    reasons = [re.split(r" \.\.\. | \d+ ", words)[0] for words in quoted if not words.startswith("Held")]
    package = Path(django_redlock.__file__).parent
    source = "".join(path.read_text() for folder in ("core", "nodes") for path in (package / folder).rglob("*.py"))

    assert len(reasons) >= 8
    assert [reason for reason in reasons if reason.removesuffix(", votes again in") not in source] == []
