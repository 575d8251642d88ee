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


@pytest.mark.parametrize("page", ["docs/trust/testing.md", "docs/trust/simulation.md", "docs/trust/figures.md"])
def test_wrong_protocols_of_the_lock_are_counted(page: str):
    """
    The simulation of locks runs every mutant that is defined.
    """
    counted = set(map(int, re.findall(r"(\d+) wrong protocols", text_of(page))))

    assert counted == {len(lock_mutants.MUTANTS)}


def test_profiles_and_wrong_protocols_of_slots_are_counted():
    """
    The same for singleton tasks.
    """
    text = text_of("docs/trust/testing-celery.md")

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
