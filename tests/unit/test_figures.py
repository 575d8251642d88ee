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
    ("page", "text", "row"),
    [
        ("README.md", r"about \[([\d.]+) times as long\] as with redis-py", "`free-n1` | against redis-py's Lock"),
        ("README.md", r"\[([\d.]+) times as fast\] as with redlock-py", "`free-n5` | against redlock-py"),
        ("docs/howto/models.md", r"([\d.]+) times in the \[benchmark\]", "`rows` | 100 rows against one"),
    ],
)
def test_figures_outside_the_tables_are_those_of_the_tables(page: str, text: str, row: str):
    """
    A ratio that a page quotes is the measured one, rounded.
    """
    ((said,), measured) = (re.findall(text, text_of(page)), measured_in(row))

    assert round(measured, 1) == float(said)


def measured_in(row: str) -> float:
    (found,) = re.findall(
        rf"^\| {re.escape(row)} \| [^|]+ \| [^|]* \| ([\d.]+) ×(?: faster)? \|",
        TABLES.read_text(),
        re.MULTILINE,
    )
    return float(found)


def test_locks_at_a_distance_are_those_of_the_tables():
    """
    The table of the page on speed is made of rows of the tables, in milliseconds.
    """
    page, tables = (CHECKOUT / "docs/trust/benchmarks.md").read_text(), TABLES.read_text()
    rows = re.findall(r"^\| ([^|]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    contender = ""

    assert len(rows) == 8
    for name, *said in rows:
        contender = f"{contender}, release sent" if name.startswith("the same") else name.partition(",")[0]
        nodes = "n5" if "five" in name or name.startswith("the same") and "five" in previous else "n1"
        section = tables.partition(f"<!-- figures: distance-free-{nodes} -->")[2].partition("<!-- end -->")[0]
        for distance, ms in zip(("no delay", "0.5 ms", "2 ms"), said, strict=True):
            (measured,) = re.findall(rf"^\| {re.escape(contender)}, {distance} \| ([\d,]+) µs", section, re.MULTILINE)
            assert float(ms) == round(int(measured.replace(",", "")) / 1000, 1), (name, distance)
        contender, previous = name.partition(",")[0], name
