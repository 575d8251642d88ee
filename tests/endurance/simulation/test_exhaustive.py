"""Every schedule of the token core for three nodes and two clients."""

import pytest

from tests.simulation.exhaustive import Search
from tests.simulation.mutants import MUTANTS


@pytest.mark.parametrize(
    ("walls", "numbers"),
    [((2, 2), (0, 0, 0)), ((3, 2), (2, 1, 0)), ((2, 2), (4, 1, 1))],
    ids=["same proposals", "failed attempts left different numbers", "a minority knows a greater number"],
)
def test_every_schedule_keeps_the_order_of_tokens(walls: tuple[int, int], numbers: tuple[int, int, int]):
    """Whatever is lost, late or expired in whatever order, tokens are unique and in order."""
    search = Search(walls, numbers)

    assert search.run() == []
    assert search.states > 5_000
    assert search.won > 1_000


@pytest.mark.parametrize(
    "name",
    [
        "a node accepts a number that it has accepted before",
        "one vote fewer than a majority is enough",
        "votes for the lock count as votes for its token",
        "accepts of the first number count for the second",
    ],
)
def test_wrong_protocols_fail(name: str):
    """The search finds the shortest schedule in which a wrong protocol fails."""
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]

    with mutant.change():
        way = Search().run()

    assert way[-1].startswith("token"), "\n".join(way)
