"""The figures of docs/operate/topologies.md are those that the command beside them measures."""

import re

import pytest

from tests.deployment import CHECKOUT
from tests.lab.sizing import measure

PAGE = (CHECKOUT / "docs" / "operate" / "topologies.md").read_text().partition("\n## Sizing\n")[2]
PUBLISHED = {what: int(value) for what, value in re.findall(r"^\| ([^|]+?) \| (\d+) \|$", PAGE, re.MULTILINE)}


def published(measured: dict[str, int]) -> dict[str, int]:
    return {what: PUBLISHED[what] for what in measured}


def test_requests_are_the_published_ones():
    """Each step of a lock is one request to a node, and so are 200 names at once."""
    measured = measure.requests()

    assert measured == published(measured)


def test_connections_are_the_published_ones():
    """Threads that never meet need fewer connections than threads; nobody needs more than published."""
    measured = measure.connections()
    several = f"{measure.THREADS} threads that take locks at the same time"

    assert measured.pop(several) <= PUBLISHED[several] == measure.THREADS
    assert measured == published(measured)


def test_formula_counts_every_connection_of_a_process():
    """Renewal and waiting each add what the table shows; the example is calculated with the formula."""
    one = PUBLISHED["one thread that takes locks"]
    renewing = PUBLISHED["one thread that takes locks while an earlier one is renewed"] - one
    more = renewing + PUBLISHED["a thread that holds a lock, and one that waits for it"] - one
    text = " ".join(PAGE.split())

    assert f"count processes × (threads + {more})." in text
    assert f"8 × (4 + {more}) + 16 × (1 + {more}) = {8 * (4 + more) + 16 * (1 + more)} connections" in text


def test_a_name_costs_about_as_much_memory_as_published():
    """The overhead of the server's tables depends on their sizes, so a quarter more or less is the same figure."""
    measured = measure.memory()

    assert measured == {what: pytest.approx(value, rel=0.25) for what, value in published(measured).items()}
