"""The oracles find what is wrong with wrong protocols."""

import pytest

from .mutants import MUTANTS, Mutant, hunt, score


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_mutant_is_killed(mutant: Mutant):
    """P40: an oracle objects to every wrong protocol."""
    kill = hunt(mutant)

    assert kill.oracle is not None, f"No oracle objected in {kill.schedules} schedules: {mutant.name}"


def test_score(capsys: pytest.CaptureFixture[str]):
    """P40: at least twelve mutants, and all of them die; the score is printed."""
    kills = [hunt(mutant) for mutant in MUTANTS]

    with capsys.disabled():
        print("\n" + score(kills).splitlines()[-1])
    assert len(kills) >= 12
    assert all(kill.oracle is not None for kill in kills)
