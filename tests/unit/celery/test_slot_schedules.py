"""A sample of the simulation of slots in ``tests/slots``; ``python -m tests.slots`` runs thousands of schedules."""

import pytest

from tests.slots.mutants import MUTANTS, Mutant, hunt
from tests.slots.profiles import PROFILES
from tests.slots.schedule import run


@pytest.mark.parametrize("name", PROFILES)
def test_schedules(name):
    """
    Whatever the turns of callers and workers, every call ends as its answer said.
    """
    outcomes = [run(PROFILES[name], seed) for seed in range(4)]

    assert [str(outcome) for outcome in outcomes if outcome.violations] == []


def test_right_protocol_is_not_caught():
    """
    A hunt finds nothing wrong with the protocol itself, so what it finds in a mutant is the mutant's.
    """
    haunts = {haunt for mutant in MUTANTS for haunt in mutant.haunts}
    nothing = Mutant("nothing", tuple(sorted(haunts)), MUTANTS[0].target, lambda right: right)

    assert hunt(nothing, 1).what is None


@pytest.mark.parametrize("mutant", [*MUTANTS[5:17], *MUTANTS[32:]], ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant):
    """An oracle objects to a wrong protocol; these are found within some schedules."""
    assert hunt(mutant).what
