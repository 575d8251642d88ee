"""The experiment on every database and isolation level: the losses without the fence, and behind it."""

import itertools
from collections.abc import Iterator

import pytest

from tests.lab.fencing.counting import CounterTable
from tests.lab.fencing.experiment import Experiment
from tests.lab.fencing.scenarios import increments_lost
from tests.services import django_database

from .conftest import Prepared

STRONG = [("postgresql", "repeatable read"), ("mariadb", "repeatable read"), ("sqlite", "DEFERRED")]
# The other levels differ in which conflicts the database reports, and so in how much work is thrown away.
OTHERS = [
    *(("postgresql", level) for level in ("read uncommitted", "read committed", "serializable")),
    *(("mariadb", level) for level in ("read uncommitted", "read committed", "serializable")),
    *(("sqlite", mode) for mode in ("IMMEDIATE", "EXCLUSIVE")),
]
LEVELS = [*STRONG, *(pytest.param(*level, marks=pytest.mark.endurance) for level in OTHERS)]


def options(engine: str, level: str) -> dict:
    """Return the OPTIONS of a database for an isolation level."""
    match engine:
        case "postgresql":
            import psycopg

            return {"isolation_level": psycopg.IsolationLevel[level.upper().replace(" ", "_")]}
        case "mariadb":
            return {"isolation_level": level}
        case _:
            return {"timeout": 60, "transaction_mode": level}


@pytest.fixture
def at_level(engine, level, prepared: Prepared, django_db_blocker) -> Iterator[str]:
    """The alias of a database whose connections have an isolation level."""
    with django_db_blocker.unblock():
        settings = engine.settings(prepared.database(engine), OPTIONS=options(engine.scheme, level))
        with django_database("counting", settings):
            CounterTable("counting").clear()
            yield "counting"


@pytest.mark.parametrize(("engine", "level"), LEVELS, indirect=["engine"])
def test_no_increment_is_lost_behind_the_fence(at_level, engine, level):
    """
    With no lock and tokens from a broken source, every committed increment is in the counter, and
    those of one holder follow each other, on every database and isolation level.
    """
    experiment = Experiment(at_level, f"counter {level}")

    experiment.run()

    history = experiment.counter.history()
    assert experiment.seen["committed"] > 0
    assert experiment.seen["stale"] > 0
    assert experiment.lost == 0
    assert [value for value, _, _ in history] == list(range(1, len(history) + 1))
    blocks = [holder for holder, _ in itertools.groupby((token, owner) for _, token, owner in history)]
    assert len(blocks) == len(set(blocks)), "a holder's increments are not together"
    tokens = [token for token, _ in blocks]
    assert sorted(set(tokens)) == tokens, "an earlier token follows a later one, or one token had two owners"


@pytest.mark.parametrize(("engine", "level"), [("postgresql", "read committed")], indirect=["engine"])
def test_increments_are_lost_without_the_fence(at_level, engine, level):
    """The experiment can fail: without the fence, increments are lost. test_scenarios.py shows it on every database."""
    assert increments_lost(at_level).lost > 0


@pytest.mark.parametrize(
    ("engine", "level"),
    [
        ("postgresql", "repeatable read"),
        pytest.param("postgresql", "serializable", marks=pytest.mark.endurance),
        ("mariadb", "serializable"),
        ("sqlite", "DEFERRED"),
    ],
    indirect=["engine"],
)
def test_conflicts_are_retried_when_asked(at_level, engine, level):
    """run() repeats a section after a conflict, so that only overtaken holders give up."""
    experiment = Experiment(at_level, f"retried {level}", retries=1000)

    experiment.run()

    assert experiment.seen["conflicts"] == 0
    assert experiment.lost == 0
