"""
Holders in processes of their own that are stopped (SIGSTOP), outside their transactions and inside.

The first is Martin Kleppmann's figure of the client that is paused past its lease ("How to do distributed locking",
2016).
"""

from collections.abc import Iterator

import pytest
from django.db import connections

from .counting import CounterTable, prepare
from .holder import FAILED, Process

TTL = 30.0  # seconds
IMPATIENT = {
    "sqlite": "PRAGMA busy_timeout = 1000",
    "postgresql": "SET lock_timeout = 700",
    "mysql": "SET innodb_lock_wait_timeout = 1",
}

Pair = tuple[Process, Process]


@pytest.fixture
def pair(counting, engine, prepared, nodes) -> Iterator[Pair]:
    """Two holders, with locks on three real nodes, and a database of each kind in turn."""
    entry = engine.settings(prepared.database(engine, prepare))
    with Process(entry, nodes.urls[:3]) as one, Process(entry, nodes.urls[:3]) as two:
        yield one, two


def each(*usual: str) -> pytest.MarkDecorator:
    """Run a story on the *usual* kinds of database, and nightly on the others, whose differences other tests cover."""
    kinds = ("sqlite", "postgresql", "mariadb")
    chosen = [pytest.param(kind, marks=[] if kind in usual else pytest.mark.endurance) for kind in kinds]
    return pytest.mark.parametrize("engine", chosen, indirect=True)


def stop_inside(one: Process, *statements: str) -> None:
    """Stop a holder inside its transaction for longer than its lease."""
    one.ask("acquire", "inside", TTL, 0)
    one.ask("begin")
    one.ask("write", 1)
    one.ask("shorten")
    for statement in statements:
        one.ask("execute", statement)
    one.stop()


def refusal(one: Process) -> str:
    """Let a stopped holder go on to its commit; return why it is refused."""
    one.wake()
    one.tell("commit")
    return one.answer()


def succeed(two: Process) -> str:
    """Read the counter in a transaction of the next holder."""
    two.ask("begin")
    seen = two.ask("read")
    two.ask("commit")
    two.ask("release")
    return seen


@each("sqlite")  # there is no fence
def test_paused_holder_overwrites_without_a_fence(pair: Pair):
    """A holder that is stopped past its lease overwrites what its successor wrote: two increments count one."""
    one, two = pair
    one.ask("acquire", "file", TTL, 0)
    value = int(one.ask("read"))
    one.ask("shorten")
    one.stop()
    two.ask("acquire", "file", TTL, 60)
    two.ask("write", int(two.ask("read")) + 1)
    one.wake()
    one.ask("write", value + 1)

    assert two.ask("read") == "1"


@each("sqlite")  # test_fenced.py shows that each database refuses
def test_paused_holder_is_refused_with_a_fence(pair: Pair):
    """
    A holder is stopped between its check of the clock and its claim for longer than its lease. When it wakes, the
    database refuses it, and its lease is lost. Its successor's increment stays.
    """
    one, two = pair
    one.ask("acquire", "story", TTL, 0)
    one.ask("stop_before_claiming")
    one.tell("begin")
    one.await_stop()
    two.ask("acquire", "story", TTL, 60)
    two.ask("begin")
    two.ask("write", int(two.ask("read")) + 1)
    two.ask("commit")
    one.wake()

    assert one.answer().startswith(f"{FAILED}StaleTokenError: Lock 'story': fencing token")
    assert one.ask("reason") in ("fenced", "expired")  # its watchdog woke, too
    assert two.ask("read") == "1"


@each("sqlite", "postgresql")  # MariaDB waits and gives up as PostgreSQL does
def test_holder_stopped_inside_its_transaction_holds_up_its_successor(pair: Pair, counting: str):
    """
    A holder stopped inside its transaction keeps the fence. Its successor's claim times out as configured in the
    database. When the holder wakes, it may not commit, because its lease has ended, and the successor continues.
    """
    one, two = pair
    stop_inside(one)
    two.ask("acquire", "inside", TTL, 60)
    two.ask("execute", IMPATIENT[connections[counting].vendor])
    two.tell("begin")

    assert two.answer().startswith(f"{FAILED}OperationalError")
    assert refusal(one).startswith(f"{FAILED}LockLostError")
    assert succeed(two) == "0"


@pytest.mark.parametrize("engine", ["postgresql"], indirect=True)
def test_database_ends_a_transaction_that_stands_still(pair: Pair, counting: str):
    """With idle_in_transaction_session_timeout, PostgreSQL ends a stopped holder; its successor continues at once."""
    one, two = pair
    stop_inside(one, "SET idle_in_transaction_session_timeout = 500")
    two.ask("acquire", "inside", TTL, 60)

    assert succeed(two) == "0"
    assert refusal(one).startswith(FAILED)
    assert CounterTable(counting).read() == 0
