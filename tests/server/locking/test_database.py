"""A database as a node: the decisions of its server, and the rows that are cleaned up."""

import ctypes
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_redlock import QuorumUnavailableError
from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import Acquire, Kind, Release, Reply, Request, Survey
from django_redlock.nodes.database.table import TABLE, LockTable
from django_redlock.nodes.records.record import Names, load
from tests.managers import Tables, empty_tables, fork, real_manager

from .test_differential import BASE, comparable, requests

SECRET = "a" * 32


def acquire(name: str = "x", secret: str = SECRET, **changed: Any) -> Acquire:
    request = Acquire(("{" + name + "}",), secret, secret + '{"host":"h"}', 60.0, BASE, 3600.0, 1e9)
    return request._replace(**changed)


@pytest.fixture
def table(tables: Tables) -> Iterator[LockTable]:
    """The table of one database, empty."""
    with closing(LockTable(tables.aliases[0], "t:", 5.0)) as found:
        found.open()
        yield found


@pytest.fixture
def other(tables: Tables) -> Iterator[LockTable]:
    """The same table over another connection, as in another process."""
    with closing(LockTable(tables.aliases[0], "t:", 5.0)) as found:
        found.open()
        yield found


# The same replies


@pytest.mark.parametrize("examples", [20, pytest.param(300, marks=pytest.mark.endurance)])
def test_database_answers_as_the_node_in_memory(tables: Tables, examples: int):
    """Whatever requests come in whatever order, at once or one by one, replies and queues are the same."""

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(requests, min_size=1, max_size=25), st.booleans())
    def agrees(sequence: list[Request], together: bool) -> None:
        with closing(LockTable(tables.aliases[0], f"{uuid4()}:", 5.0)) as own:
            own.open()
            agree(own, sequence, together, comparable)

    agrees()


def agree(own: Any, sequence: list[Request], together: bool, comparable: Callable[[Reply], Any]) -> None:
    """Send requests to an empty table and to a node in memory, and compare replies and queues."""
    memory = NodeState(time.time)
    if together:
        sequence = [request for request in sequence if not isinstance(request, Survey)]
    batches = [sequence] if together and sequence else [[request] for request in sequence]

    expected = [memory.execute(request) for request in sequence]
    answers = [reply for batch in batches for reply in own.execute(batch)]

    # The total has no meaning for a survey of given names.
    assert [comparable(reply._replace(total=0)) for reply in answers] == [
        comparable(reply._replace(total=0)) for reply in expected
    ]
    for slug in ("{x}", "{y}", "{z}"):
        known = load(Names({slug}, set()), own.key, own.read)
        assert known.store.waiters(slug) == memory.waiters(slug)


# Compare and set


def between(table: Any, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Have something happen once between a table's next read and its write."""
    decide, todo = table._decide, [act]

    def decide_slowly(asked: Sequence[Request]) -> Any:
        decided = decide(asked)
        while todo:
            todo.pop()()
        return decided

    monkeypatch.setattr(table, "_decide", decide_slowly)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("names", ["a", "abc"])
def test_slower_of_two_decides_again(
    table: LockTable, other: LockTable, monkeypatch: pytest.MonkeyPatch, names: str, known: bool
):
    """A row that has changed since it was read is not overwritten, whether it is new or not, nor are the others."""
    slugs = tuple(sorted((f"{{{name}}}" for name in names), key=lambda slug: table.key("h", slug)))
    if known:
        table.execute([acquire(slugs=slugs)])
        table.execute([Release(slugs, SECRET)])
    theirs = acquire(slugs[-1][1:-1], "b" * 32)  # the last to be written
    between(table, monkeypatch, lambda: other.execute([theirs]))

    (reply,) = table.execute([acquire(slugs=slugs)])

    assert reply.kind is Kind.BUSY
    rows = table.execute([Survey(slugs)])[0].rows
    assert [row.value[:32] for row in rows] == [""] * (len(names) - 1) + ["b" * 32]


def test_processes_with_equal_seeds_write_different_versions(tables: Tables, table: LockTable):
    """A row that has changed twice since it was read has another version, also if two forks seeded ``random`` alike."""

    def parent() -> None:
        for name in ("y", "z"):
            if not (child := ctypes.PyDLL(None).fork()):  # without Python's hooks, which seed it anew
                random.seed(0)
                with closing(LockTable(tables.aliases[0], "t:", 5.0)) as own:
                    own.open()
                    own.execute([acquire(name)])
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

    assert fork(parent) == 0
    assert len(set(tables.query(f"SELECT version FROM {TABLE} WHERE ends > 0"))) == 2


def test_two_writers_of_overlapping_names_never_deadlock(table: LockTable, other: LockTable):
    """Rows are written in one order, whatever the order of the names; every request gets a reply."""
    kinds: list[Kind] = []

    def contend(mine: LockTable, slugs: tuple[str, ...], secret: str) -> None:
        for _ in range(30):
            kinds.append(mine.execute([acquire(slugs=slugs, secret=secret)])[0].kind)
            mine.execute([Release(slugs, secret)])

    threads = [
        threading.Thread(target=contend, args=(table, ("{a}", "{b}", "{c}"), "a" * 32)),
        threading.Thread(target=contend, args=(other, ("{c}", "{b}", "{a}"), "b" * 32)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(kinds) == 60
    assert Kind.FAILED not in kinds


@pytest.fixture
def sqlite(request: pytest.FixtureRequest) -> Tables:
    """Five empty files."""
    return empty_tables(request, "sqlite")


def test_table_that_is_emptied_lets_no_second_holder_in(sqlite: Tables):
    """A process that is connected notices it with its next request, and gives the node no vote for the guard time."""
    first, holder, other = (real_manager(sqlite.urls[:1], restart_guard=True) for _ in range(3))
    with pytest.raises(QuorumUnavailableError, match="new to these locks, votes again in"):
        first.lock("first", wait=0).acquire()
    ((mark,),) = sqlite.query(f"SELECT state FROM {TABLE} WHERE ends = 0")
    long_ago = json.dumps(json.loads(mark) | {"since": 1})
    sqlite.query(f"UPDATE {TABLE} SET state = '{long_ago}' WHERE ends = 0")
    other.lock("other", wait=0).acquire().release()
    lease = holder.lock("held", wait=0).acquire()

    sqlite.query(f"DELETE FROM {TABLE}")

    with pytest.raises(QuorumUnavailableError, match="was emptied, votes again in"):
        other.lock("held", wait=0).acquire()
    assert lease.valid()
