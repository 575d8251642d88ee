"""The oracles find the faults of wrong protocols."""

import pytest

from tests.simulation.mutants import MUTANTS, hunt
from tests.simulation.mutation import score


def test_all_mutants_are_killed(capsys: pytest.CaptureFixture[str]):
    """An oracle objects to every wrong protocol within a bounded number of schedules; the test prints the score."""
    kills = [hunt(mutant) for mutant in MUTANTS]

    with capsys.disabled():
        print("\n" + score(kills))
    assert len(kills) >= 12
    assert all(kill.what is not None for kill in kills), score(kills)
