"""Schedules of every profile, from new seeds in each run, checked by every oracle."""

import os
from collections.abc import Iterator
from secrets import randbelow

import pytest

from tests.simulation.profiles import PROFILES, Profile
from tests.simulation.runs import HEADS, Runs, line
from tests.simulation.schedule import run

EACH = 300  # schedules of most profiles: 3,780 in all


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Runs(os.cpu_count() or 1) as runs:
        yield runs


@pytest.fixture(scope="module")
def seed() -> int:
    """Return the first of the seeds; they are new in each run, unless ``REDLOCK_SEED`` repeats a run."""
    return int(os.environ.get("REDLOCK_SEED") or randbelow(10**9))


@pytest.mark.parametrize("profile", PROFILES.values(), ids=lambda profile: profile.name.replace(" ", "-"))
def test_oracles_hold_in_every_schedule(profile: Profile, runs: Runs, seed: int, capsys: pytest.CaptureFixture[str]):
    """The oracles hold in every profile."""
    number = round(EACH * profile.share)
    figures, failures = runs.run(profile, range(seed, seed + number))

    with capsys.disabled():
        if profile.name == next(iter(PROFILES)):
            print(f"\nseed {seed}, or REDLOCK_SEED={seed}\n{HEADS}", end="")
        print("\n" + line(profile.name, figures), end="")
    assert figures.schedules == number
    assert not failures, "\n\n".join(map(str, failures[:2]))


def test_one_seed_is_one_schedule():
    """The same seed gives the same trace, to the last line, so that a failure can be repeated."""
    first, second = (run(PROFILES["everything"], 7, traced=True) for _ in range(2))

    assert first.trace == second.trace
    assert len(first.trace) > 100


def test_calm_acquisitions_take_one_round():
    """With clocks that agree, every acquisition takes one round trip, also under contention."""
    figures = [run(PROFILES["calm"], seed).figures for seed in range(10)]

    assert sum(each.acquisitions for each in figures) > 100
    assert all(each.one_round == each.acquisitions for each in figures)


@pytest.mark.parametrize("name", ["pause", "slow database"])
def test_hazards_lose_increments_without_the_fence(name: str):
    """Increments without the fence are lost, so the absence of losses behind the fence means something."""
    assert any(run(PROFILES[name], seed).figures.lost["no fence"] for seed in range(400))
