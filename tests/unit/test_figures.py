"""Figures in the text of a page are those of the code, or of the tables that the benchmark writes."""

import re

import pytest

from tests.deployment import CHECKOUT
from tests.simulation import mutants as lock_mutants
from tests.slots import mutants as slot_mutants
from tests.slots.profiles import PROFILES

TABLES = CHECKOUT / "docs" / "reference" / "benchmark-tables.md"


def text_of(page: str) -> str:
    """Return a page on one line, without the addresses of its links."""
    return re.sub(r"\]\([^)]*\)", "]", " ".join((CHECKOUT / page).read_text().split()))


def test_wrong_protocols_of_the_lock_are_counted():
    """
    The simulation of locks runs every mutant that is defined.
    """
    counted = set(map(int, re.findall(r"(\d+) wrong protocols of the lock", text_of("docs/trust/testing.md"))))

    assert counted == {len(lock_mutants.MUTANTS)}


def test_profiles_and_wrong_protocols_of_slots_are_counted():
    """
    The same for singleton tasks.
    """
    text = text_of("docs/trust/testing.md")

    assert f"It has {len(PROFILES)} profiles" in text
    assert f"and {len(slot_mutants.MUTANTS)} wrong protocols" in text


@pytest.mark.parametrize(
    ("page", "text", "section", "row"),
    [
        ("README.md", r"about \[([\d.]+) times as long\] as with redis-py", "free-n1", "against redis-py"),
        ("README.md", r"\[([\d.]+) times as fast\] as with redlock-py", "free-n5", "against redlock-py"),
        ("docs/howto/models.md", r"([\d.]+) times in the \[benchmark\]", "rows", "100 rows"),
    ],
)
def test_figures_outside_the_tables_are_those_of_the_tables(page: str, text: str, section: str, row: str):
    """
    A ratio that a page quotes is the measured one, rounded.
    """
    (said,) = re.findall(text, text_of(page))
    table = re.search(f"figures: {section} -->(.*?)<!-- end", TABLES.read_text(), re.DOTALL)
    found = re.search(rf"^\| [^|]*{row}[^|]* \| ([\d.]+) × \|", table[1] if table else "", re.MULTILINE)
    measured = float(found[1]) if found else 0.0

    assert (1 / measured if "fast" in text else measured) == pytest.approx(float(said), abs=0.1)


def test_locks_at_a_distance_are_those_of_the_tables():
    """
    The table of the page on speed is made of rows of the tables, in milliseconds.
    """
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
