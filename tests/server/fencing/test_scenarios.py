"""The stories of ``python -m tests.lab.fencing``, on every database, and holders that are stopped in a transaction."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from tests.lab.fencing import scenarios
from tests.lab.fencing.counting import CounterTable, prepare
from tests.lab.fencing.holder import FAILED, Process
from tests.lab.fencing.scenarios import Stage
from tests.services import django_database


@pytest.fixture
def stage(counting, engine, prepared, nodes) -> Iterator[Stage]:
    """Two databases of each kind in turn, and three real nodes."""
    entry = engine.settings(prepared.database(engine))
    with engine.database() as name, django_database("archive", engine.settings(name)):
        prepare("archive")
        yield Stage(counting, "archive", entry, nodes.urls[:3], lambda line: None)


def each(*usual: str) -> pytest.MarkDecorator:
    """Run a story on the *usual* kinds of database, and nightly on the others, whose differences other tests cover."""
    kinds = ("sqlite", "postgresql", "mariadb")
    chosen = [pytest.param(kind, marks=[] if kind in usual else pytest.mark.endurance) for kind in kinds]
    return pytest.mark.parametrize("engine", chosen, indirect=True)


@each("sqlite")  # there is no fence
def test_paused_holder_overwrites_without_a_fence(stage):
    """The figure without a fence: a holder stopped past its lease overwrites what its successor wrote."""
    assert scenarios.paused_without_a_fence(stage) == 1


@each("sqlite")  # test_fenced.py shows that each database refuses
def test_paused_holder_is_refused_with_a_fence(stage):
    """
    A holder is stopped (SIGSTOP) between its check of the clock and its claim for longer than its lease. When it
    wakes, the database refuses it, and its lease is lost. Its successor's increment stays.
    """
    refusal, reason, counter = scenarios.paused_before_its_claim(stage)

    assert refusal.startswith(f"{FAILED}StaleTokenError: Lock 'story': fencing token")
    assert reason in ("fenced", "expired")  # its watchdog woke, too
    assert counter == 1


@each("sqlite")  # the databases are the experiment's
def test_lock_spares_the_work_that_the_fence_would_throw_away(stage):
    """Doubt 2, is the lock pointless: without the lock, the fence cuts sections short; with it, none."""
    without, with_lock = scenarios.is_the_lock_pointless(stage)

    assert without > 0
    assert with_lock == 0


@each("sqlite")  # test_fenced.py shows that a successor's claim waits
def test_two_delayed_writers_in_order(stage):
    """
    Doubt 4: tokens that are only compared when writing lose an increment although they arrive in order; tokens that are
    claimed before reading lose none.
    """
    assert scenarios.two_delayed_writers(stage) == (1, 2)


IMPATIENT: dict[str, dict[str, Any]] = {
    "sqlite": {"timeout": 1},
    "postgresql": {"options": "-c lock_timeout=700ms"},
    "mysql": {"init_command": "SET innodb_lock_wait_timeout=1"},
}


@each("sqlite", "postgresql")  # MariaDB waits and gives up as PostgreSQL does
def test_holder_stopped_inside_its_transaction_holds_up_its_successor(stage):
    """
    A holder stopped (SIGSTOP) inside its transaction keeps the fence. Its successor's claim times out as configured in
    the database. When the holder wakes, it may not commit, because its lease has ended, and the successor continues.
    """
    vendor = connections[stage.database].vendor
    entry = stage.entry | {"OPTIONS": IMPATIENT[vendor]}
    with stage.holder() as one, Process({"default": entry}, stage.nodes) as two:
        one.ask("acquire", "inside", scenarios.TTL, 0)
        one.ask("begin")
        one.ask("write", 1)
        one.ask("shorten")
        one.stop()
        two.ask("acquire", "inside", 30, 60)
        two.tell("begin")
        held_up = two.answer()
        one.wake()
        one.tell("commit")
        refused = one.answer()
        two.ask("begin")
        seen = two.ask("read")
        two.ask("commit")
        two.ask("release")

    assert held_up.startswith(f"{FAILED}OperationalError")
    assert refused.startswith(f"{FAILED}LockLostError")
    assert seen == "0"


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_database_ends_a_transaction_that_stands_still(stage):
    """With idle_in_transaction_session_timeout, PostgreSQL ends a stopped holder; its successor continues at once."""
    with stage.holder() as one, stage.holder() as two:
        one.ask("acquire", "idle", scenarios.TTL, 0)
        one.ask("begin")
        one.ask("write", 1)
        one.ask("shorten")
        one.ask("execute", "SET idle_in_transaction_session_timeout = 500")
        one.stop()
        two.ask("acquire", "idle", 30, 60)
        two.ask("begin")
        seen = two.ask("read")
        two.ask("commit")
        two.ask("release")
        one.wake()
        one.tell("commit")
        refused = one.answer()

    assert seen == "0"
    assert refused.startswith(FAILED)
    assert CounterTable(stage.database).read() == 0
