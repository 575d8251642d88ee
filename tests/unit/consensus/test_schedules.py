"""Schedules of the simulation over replicated stores whose leaders change."""

import pytest

from tests.simulation.profiles import OF_STORES, Profile
from tests.simulation.schedule import run


@pytest.mark.parametrize("profile", OF_STORES, ids=lambda profile: profile.name.replace(" ", "-"))
def test_leaders_change(profile: Profile):
    """A few schedules; many more run from new seeds elsewhere."""
    assert [str(outcome) for seed in range(8) if (outcome := run(profile, seed)).failures] == []
