"""The experiment on every database and isolation level: the losses without the fence, and behind it."""

import itertools
from collections.abc import Iterator

import pytest

from django_redlock import fenced
from tests.services import django_database

from .counting import CounterTable, prepare
from .experiment import Experiment
from .sources import lease_of

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
def at_level(engine, level, prepared, django_db_blocker) -> Iterator[str]:
    """The alias of a database whose connections have an isolation level."""
    with django_db_blocker.unblock():
        settings = engine.settings(prepared.database(engine, prepare), OPTIONS=options(engine.scheme, level))
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
    """The experiment can fail: without the fence, increments are lost, unless its threads happen to miss each other."""
    while not Experiment(at_level, "naked", fence=False).run():
        pass


@pytest.mark.parametrize(("engine", "level"), [("sqlite", "DEFERRED")], indirect=["engine"])
def test_lock_spares_the_work_that_the_fence_would_throw_away(at_level, engine, level):
    """The lock is not pointless: without it, the fence cuts sections short; with it, none."""
    without, locked = Experiment(at_level, "fenced"), Experiment(at_level, "locked and fenced", locked=True)

    without.run()
    locked.run()

    assert without.seen["stale"] > 0
    assert locked.seen["stale"] == 0


@pytest.mark.parametrize(("engine", "level"), [("sqlite", "DEFERRED")], indirect=["engine"])
def test_tokens_that_are_only_compared_when_writing_lose_an_increment(at_level, engine, level):
    """Two delayed writers whose tokens arrive in order: so the claim comes before the first read."""
    counter, leases = CounterTable(at_level), [lease_of("writers", fencing_token=token) for token in (33, 34)]
    reads = [counter.read() for _ in leases]

    for lease, read in zip(leases, reads, strict=True):
        with fenced(lease, using=at_level):  # as a resource does that checks the tokens of its requests
            counter.write(read + 1)

    assert counter.read() == 1


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
