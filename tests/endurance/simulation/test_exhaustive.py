"""Every schedule of the token core for three nodes and two clients."""

from collections.abc import Callable

import pytest

from tests.simulation.exhaustive import CONFIGURATIONS, Naive, Production, Search
from tests.simulation.mutants import MUTANTS


@pytest.mark.parametrize(("walls", "numbers"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_every_schedule_keeps_the_order_of_tokens(walls: tuple[int, int], numbers: tuple[int, int, int]):
    """Whatever is lost, late or expired in whatever order, tokens are unique and in order."""
    search = Search(Production(walls=walls), numbers=numbers)

    assert search.run() == []
    assert search.states > 5_000
    assert search.won > 1_000


@pytest.mark.parametrize("name", ["highest", "sum", "lowest", "written back"])
def test_naive_designs_fail(name: str):
    """Counters on the nodes, combined in any simple way, give one token to two clients."""
    designs: dict[str, Callable[[], Naive]] = {
        "highest": lambda: Naive(max),
        "sum": lambda: Naive(sum),
        "lowest": lambda: Naive(min),
        "written back": lambda: Naive(max, write_back=True),
    }

    way = Search(designs[name](), attempts=(2, 1) if name == "lowest" else (1, 1)).run()

    assert way[-1].startswith("token"), "\n".join(way)


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
        way = Search(Production()).run()

    assert way[-1].startswith("token"), "\n".join(way)
