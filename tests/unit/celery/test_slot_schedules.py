"""A sample of the simulation of slots in ``tests/slots``; ``python -m tests.slots`` runs thousands of schedules."""

import pytest

from tests.slots.profiles import PROFILES
from tests.slots.schedule import run


@pytest.mark.parametrize("name", PROFILES)
def test_schedules(name):
    """Whatever the turns of callers and workers, every call ends as its answer said."""
    outcomes = [run(PROFILES[name], seed) for seed in range(4)]

    assert [str(outcome) for outcome in outcomes if outcome.failures] == []
