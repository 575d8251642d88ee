"""A sample of the simulation of slots in ``tests/slots``; ``python -m tests.slots`` runs thousands of schedules."""

import pytest

from tests.slots.mutants import MUTANTS, hunt
from tests.slots.profiles import PROFILES
from tests.slots.schedule import run


@pytest.mark.parametrize("name", PROFILES)
def test_schedules(name):
    """
    Whatever the turns of callers and workers, every call ends as its answer said. C30 C96 C97 C99
    """
    outcomes = [run(PROFILES[name], seed) for seed in range(4)]

    assert [str(outcome) for outcome in outcomes if outcome.violations] == []


@pytest.mark.parametrize("mutant", MUTANTS[:6], ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant):
    """
    An oracle objects to a wrong protocol.
    """
    assert hunt(mutant, 20).what
