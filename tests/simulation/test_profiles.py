"""Schedules of every profile, judged by every oracle."""

import pytest

from .profiles import PROFILES, Profile
from .schedule import run

pytestmark = pytest.mark.once

EACH = 8  # schedules per test
CHUNKS = 4  # tests per profile, so that they spread over the processors


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name.replace(" ", "-"))
def test_oracles_hold_in_every_schedule(profile: Profile, chunk: int):
    """P1, P2, P3, P4, P9, P10, P11, P16, P17, P18, P19, P20, P24, P26, P29, P39: whatever the profile does."""
    for seed in range(chunk * EACH, chunk * EACH + EACH):
        outcome = run(profile, seed)

        assert not outcome.failures, str(outcome)


def test_one_seed_is_one_schedule():
    """The same seed gives the same trace, to the last line, so that a failure can be looked at again."""
    first, second = (run(PROFILES["everything"], 7, traced=True) for _ in range(2))

    assert first.trace == second.trace
    assert len(first.trace) > 100


def test_calm_acquisitions_take_one_round():
    """P26: with clocks that agree every acquisition is one round trip, also under contention."""
    figures = [run(PROFILES["calm"], seed).figures for seed in range(10)]

    assert sum(each.acquisitions for each in figures) > 100
    assert all(each.one_round == each.acquisitions for each in figures)


@pytest.mark.parametrize("name", ["pause", "slow database"])
def test_hazards_are_worth_the_name(name: str):
    """Without the fence increments are lost, so that those which are not lost behind it mean something."""
    assert any(run(PROFILES[name], seed).figures.lost["no fence"] for seed in range(400))
