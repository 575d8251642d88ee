"""A sample of the simulation of slots in ``tests/slots``; ``python -m tests.slots`` runs thousands of schedules."""

from typing import Any

import pytest

from django_redlock.engine.watchdog import unreleased
from tests.slots.profiles import PROFILES, burst
from tests.slots.schedule import History, run


@pytest.mark.parametrize("name", PROFILES)
def test_schedules(name):
    """Whatever the turns of callers and workers, every call ends as its answer said."""
    outcomes = [run(PROFILES[name], seed) for seed in range(4)]

    assert [str(outcome) for outcome in outcomes if outcome.failures] == []


def test_slot_that_stays_taken_after_its_run_keeps_nothing_in_memory():
    """Its process has handed it over, and no longer has to notice that it was dropped."""
    before = set(unreleased)

    run(PROFILES["serial, held"], 1000)

    assert unreleased.keys() <= before


def played(calls: int, length: float) -> History:
    """Play calls of one key that are made at once, for four workers; return what happened."""
    histories: list[Any] = []
    outcome = run(burst(calls, length, lambda history: histories.append(history) or []), 1)
    assert not outcome.failures, outcome
    return histories[0]


@pytest.mark.parametrize(
    ("calls", "length", "longest"), [(12, 1.0, 15.0), (8, 0.5, 6.0), (6, 3.0, 20.0), (40, 0.02, 3.0)]
)
def test_calls_of_one_key_run_one_after_another(calls: int, length: float, longest: float):
    """In the order in which workers got them, and with little time between two runs."""
    history = played(calls, length)

    assert len(history.runs) == calls
    assert max(run.end for run in history.runs) <= longest


@pytest.mark.parametrize("calls", [200, pytest.param(1000, marks=pytest.mark.endurance)])
def test_calls_that_wait_cost_the_broker_little(calls: int):
    """Each is put back twice at most, on average."""
    broker = played(calls, 0.05).broker

    assert sum(visit.pause > 0 for visits in broker.visits.values() for visit in visits) <= 2 * calls
