"""What the pages say is so: names, settings, figures and pictures."""

import re

import django
import pytest

from django_redlock import locks
from django_redlock.conf import read_alias
from tests import consensus
from tests.deployment import CHECKOUT
from tests.simulation import mutants as lock_mutants
from tests.simulation.scenarios import SCENARIOS
from tests.slots import mutants as slot_mutants
from tests.slots.profiles import PROFILES

DOCS = CHECKOUT / "docs"
PAGES = sorted((DOCS / "operate").glob("*.md"))
OF_STORES = "etcd-zookeeper"  # the page of nodes that a checkout may lack
SHOWING = [page for page in PAGES if "REDLOCK = " in page.read_text() and (consensus.PRESENT or page.stem != OF_STORES)]
TRUST = "".join((DOCS / "trust" / f"{name}.md").read_text() for name in ("guarantees", "criticism", "testing"))


# Pages for operators


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


def test_nodes_that_may_be_down_are_those_of_the_rules(settings):
    """The table of topologies and the quorum of the rules agree."""
    page = (DOCS / "operate" / "topologies.md").read_text().partition("\n## ")[0]
    down = {name.strip("* "): int(count) for name, count in re.findall(r"^\| ([^|]+) \| (\d+) \|", page, re.MULTILINE)}
    sizes = {"one Redis or Valkey": 1, "one master with Sentinel": 1, "one cluster": 1, "one database": 1}
    sizes |= {"two nodes": 2, "three masters": 3, "two Redis and a database": 3, "five masters": 5}
    settings.REDLOCK = {name: {"NODES": [f"memory://{node}" for node in range(size)]} for name, size in sizes.items()}
    settings.REDLOCK["five masters with `quorum` 4"] = settings.REDLOCK["five masters"] | {"OPTIONS": {"quorum": 4}}

    assert down == {name: len(locks[name].nodes) - locks[name].rules.needed for name in settings.REDLOCK}


# Pages about guarantees


def test_tests_and_files_that_the_pages_name_exist():
    """A reader who wants to see a guarantee tested finds the test, under the name and in the file that they give."""
    names = set(re.findall(r"`(?:tests/[\w/]+/)?(test_\w+)`", TRUST))
    tests = "".join(path.read_text() for path in (CHECKOUT / "tests").rglob("test_*.py"))
    paths = set(re.findall(r"`(tests/[\w/]+(?:\.py)?)`", TRUST))

    scenarios = set(re.findall(r"scenario \*([\w ]+)\*", TRUST))

    assert (len(names) > 6, len(scenarios) > 1, len(paths) > 5) == (True, True, True)
    assert scenarios <= SCENARIOS.keys()
    assert names <= set(re.findall(r"def (test_\w+)", tests))
    assert [path for path in paths if not (CHECKOUT / path).exists()] == []


# Figures: those of the code, or of the tables that the benchmark writes


def text_of(page: str) -> str:
    """Return a page on one line, without the addresses of its links."""
    return re.sub(r"\]\([^)]*\)", "]", " ".join((CHECKOUT / page).read_text().split()))


def test_profiles_and_wrong_protocols_are_counted():
    """The simulations of locks and of singleton tasks run every mutant that is defined."""
    text = text_of("docs/trust/testing.md")

    if consensus.PRESENT:
        assert set(re.findall(r"(\d+) wrong protocols of the lock", text)) == {str(len(lock_mutants.MUTANTS))}
    if django.VERSION >= (6, 0):  # those of Django's tasks as well
        assert set(re.findall(r"(\d+) profiles", text)) == {str(len(PROFILES))}
        assert set(re.findall(r"(\d+) wrong protocols(?! of the lock)", text)) == {str(len(slot_mutants.MUTANTS))}
