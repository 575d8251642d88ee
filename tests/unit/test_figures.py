"""Figures in the text of a page are those of the code, or of the tables that the benchmark writes."""

import re

import pytest

from tests.deployment import CHECKOUT
from tests.simulation import mutants as lock_mutants
from tests.slots import mutants as slot_mutants
from tests.slots.profiles import PROFILES

TABLES = CHECKOUT / "tests" / "lab" / "benchmarks" / "tables.md"


def text_of(page: str) -> str:
    """Return a page on one line, without the addresses of its links."""
    return re.sub(r"\]\([^)]*\)", "]", " ".join((CHECKOUT / page).read_text().split()))


def test_wrong_protocols_of_the_lock_are_counted():
    """The simulation of locks runs every mutant that is defined."""
    counted = set(map(int, re.findall(r"(\d+) wrong protocols of the lock", text_of("docs/trust/testing.md"))))

    assert counted == {len(lock_mutants.MUTANTS)}


def test_profiles_and_wrong_protocols_of_slots_are_counted():
    """The same for singleton tasks."""
    text = text_of("docs/trust/testing.md")

    assert f"It has {len(PROFILES)} profiles" in text
    assert f"and {len(slot_mutants.MUTANTS)} wrong protocols" in text


OURS = "django_redlock, acquire() and release()"


@pytest.mark.parametrize(
    ("page", "text", "section", "longer", "shorter"),
    [
        ("README.md", r"about \[([\d.]+) times as long\] as with redis-py", "free-n1", OURS, "redis-py Lock"),
        ("README.md", r"\[([\d.]+) times as fast\] as with redlock-py", "free-n5", "redlock-py", OURS),
        ("docs/howto/models.md", r"([\d.]+) times in the \[benchmark\]", "rows", "100 rows", "1 row"),
    ],
)
def test_figures_outside_the_tables_are_those_of_the_tables(
    page: str, text: str, section: str, longer: str, shorter: str
):
    """A ratio that a page quotes is that of the measured times, rounded."""
    (said,) = re.findall(text, text_of(page))

    assert said == f"{measured(section, longer) / measured(section, shorter):.1f}"


def measured(section: str, row: str) -> float:
    """Return the time in a row of the tables."""
    table = TABLES.read_text().partition(f"<!-- figures: {section} -->")[2].partition("<!-- end -->")[0]
    (found,) = re.findall(rf"^\| {re.escape(row)} \| ([\d.,]+) [µm]s \|", table, re.MULTILINE)
    return float(found.replace(",", ""))


def test_locks_at_a_distance_are_those_of_the_tables():
    """The table of the page on speed is made of rows of the tables, in milliseconds."""
    page, tables = (CHECKOUT / "docs/trust/benchmarks.md").read_text(), TABLES.read_text()
    rows = re.findall(r"^\| ([^|,]+)(, release sent)?, (one|five) nodes? \| (.*) \|$", page, re.MULTILINE)

    assert len(rows) == 8
    for name, sent, nodes, said in rows:
        section = tables.partition(f"<!-- figures: distance-n{1 if nodes == 'one' else 5} -->")[2]
        measured = [
            found
            for distance in ("no delay", "0.5 ms", "2 ms")
            for found in re.findall(
                rf"^\| {name}(?:, acquire\(\) and release\(\))?{sent}, {distance} \| ([\d,]+) µs",
                section.partition("<!-- end -->")[0],
                re.MULTILINE,
            )
        ]
        assert said.split(" | ") == [f"{int(each.replace(',', '')) / 1000:.1f}" for each in measured], name
