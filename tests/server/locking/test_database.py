"""A database as a node: the decisions of its server, and the rows that are cleaned up."""

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import pytest
from django.core.management import call_command
from django.test import override_settings
from hypothesis import given, settings
from hypothesis import strategies as st

from django_redlock import inventory, lock, locks
from django_redlock.core.node_state import NodeState
from django_redlock.core.protocol import Acquire, Kind, Release, Request, Survey
from django_redlock.nodes.database.table import TABLE, LockTable
from tests.managers import Tables, connect

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
def test_database_answers_as_the_node_in_memory(table: LockTable, examples: int):
    """Whatever requests come in whatever order, at once or one by one, replies and queues are the same."""

    @settings(max_examples=examples, deadline=None)
    @given(st.lists(requests, min_size=1, max_size=25), st.booleans())
    def agrees(sequence: list[Request], together: bool) -> None:
        agree(table, sequence, together)

    agrees()


def agree(table: LockTable, sequence: list[Request], together: bool) -> None:
    """Send a request to both, and compare replies and contents."""
    table.query(f"DELETE FROM {TABLE}")
    store = NodeState(time.time)
    if together:
        sequence = [request for request in sequence if not isinstance(request, Survey)]

    expected = [comparable(store.execute(request)) for request in sequence]
    batches = [sequence] if together and sequence else [[request] for request in sequence]
    answers = [comparable(reply) for batch in batches for reply in table.execute(batch)]

    assert [forget_total(one) for one in answers] == [forget_total(one) for one in expected]
    states = [json.loads(state) for (state,) in table.query(f"SELECT state FROM {TABLE}")]
    for slug in ("{x}", "{y}", "{z}", "{queue}"):
        assert in_queue(states, slug) == store.waiters(slug)


def in_queue(states: list[Any], slug: str) -> list[str]:
    """Return the waiters queued for a name, from the rows of a table."""
    queue = next((state.get("queue", {}) for state in states if state.get("slug") == slug), {})
    return [waiter for waiter, (_, until) in queue.items() if until > time.time()]


def forget_total(answer: Any) -> Any:
    """Return an answer without the total, which has no meaning for a survey of given names."""
    return answer[:-1]


def test_survey_lists_page_by_page_what_is_held(table: LockTable):
    """The list is in the order of the ends, without locks that have ended."""
    table.execute([acquire(f"n{number}", f"{number:032}", ttl=60.0 + number) for number in range(5)])
    table.execute([acquire("over", ttl=0.001)])
    time.sleep(0.05)

    (first,) = table.execute([Survey(size=3)])
    (second,) = table.execute([Survey(after=first.cursor, size=3)])

    assert [row.slug for row in first.rows] == ["{n0}", "{n1}", "{n2}"]
    assert [row.slug for row in second.rows] == ["{n3}", "{n4}"]
    assert first.total == second.total == 5
    assert (bool(first.cursor), second.cursor) == (True, "")
    assert 59 < (first.rows[0].left or 0) <= 60


def test_operators_see_and_end_what_a_database_holds(tables: Tables):
    """The inventory and the commands treat it like any node."""
    output = io.StringIO()
    entry = {"NODES": tables.urls[:1], "KEY_PREFIX": "t", "OPTIONS": {"restart_guard": False, "node_timeout": 1.4}}
    with override_settings(REDLOCK={"default": entry}):
        connect(locks["default"])
        lease = lock("order:7", label="invoice run").acquire()
        (held,) = inventory.held_locks().locks
        call_command("redlock_list", stdout=output)
        call_command("redlock_clear", "--noinput", stdout=output)
        assert inventory.force_release(held.name, held.fingerprint) == "released"

        assert not lease.extend()
        locks.reset()

    assert (held.name, held.state, held.votes) == ("order:7", inventory.State.HELD, 1)
    assert "order:7" in output.getvalue()
    assert "Nothing is stale." in output.getvalue()


# Compare and set


@pytest.fixture
def between(table: LockTable, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Let something happen between the next request's read and its write."""
    decide, events = table._decide, list[Callable[[], object]]()

    def decide_slowly(asked: Sequence[Request]) -> Any:
        decided = decide(asked)
        if events:
            events.pop()()
        return decided

    monkeypatch.setattr(table, "_decide", decide_slowly)
    return events.append


@pytest.fixture
def overtaken(other: LockTable, between: Callable[[Callable[[], object]], None]) -> Callable[[Request], None]:
    """Let another connection execute a request between the first one's read and its write."""
    return lambda request: between(partial(other.execute, [request]))


@pytest.mark.parametrize("known", [False, True])
def test_slower_of_two_decides_again(table: LockTable, overtaken: Any, known: bool):
    """Another client's write between our read and our write is not overwritten, whether the row is new or not."""
    if known:
        table.execute([acquire()])
        table.execute([Release(("{x}",), SECRET)])
    overtaken(acquire(secret="b" * 32))

    (reply,) = table.execute([acquire()])

    assert reply.kind is Kind.BUSY


SEEDED = """
import ctypes, json, os, random, sys
from django.conf import settings
settings.configure(DATABASES=json.loads(sys.argv[1]))
from tests.drivers import install_mysql
install_mysql()
import django
django.setup()
from django_redlock.core.protocol import Acquire, Extend, Release, Term
from django_redlock.nodes.database.table import LockTable

def acquire(secret):
    return Acquire(("{x}",), secret, secret + '{"host":"h"}', 60.0, int(sys.argv[3]), 3600.0, 1e9)

def extend(secret):
    return Extend((Term(("{x}",), secret, secret + '{"host":"h"}', 60.0, int(sys.argv[3])),), 3600.0)

def release(secret):
    return Release(("{x}",), secret)

random.seed(0)
for line in sys.stdin:
    # Python's own fork gives the child a new seed, which a library may overwrite; uWSGI forks without Python's hooks.
    child = ctypes.PyDLL(None).fork() if sys.argv[2] == "forked" else os.fork()
    if not child:
        if sys.argv[2] == "seeded":
            random.seed(0)
        table = LockTable("held", "t:", 5.0)
        table.open()
        secret, *steps = line.split()
        kinds = [table.execute([globals()[step](secret)])[0].kind.value for step in steps]
        print(*kinds, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("how", ["seeded", "forked"])
def test_processes_with_equal_seeds_write_different_versions(tables: Tables, table: LockTable, between: Any, how: str):
    """
    A write is refused if the row has changed twice since it was read, though all processes seeded ``random``
    alike, or were forked from one parent.
    """
    entries = json.dumps({"default": {}, "held": tables.entry()})
    command = [sys.executable, "-c", SEEDED, entries, how, str(BASE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def others(line: str) -> list[str]:
            print(line, file=process.stdin, flush=True)
            return process.stdout.readline().split()

        told = [others(f"{'b' * 32} acquire release")]
        between(lambda: told.append(others(f"{'c' * 32} acquire extend")))
        (reply,) = table.execute([acquire()])
        process.stdin.close()

    assert told == [["accepted", "released"], ["granted", "held"]]
    assert reply.kind is Kind.BUSY


@pytest.mark.parametrize("known", [False, True])
def test_many_names_are_written_all_or_none(table: LockTable, overtaken: Any, known: bool):
    """If one of the rows has changed, the others are not written."""
    slugs = tuple(sorted(("{a}", "{b}", "{c}"), key=lambda slug: table.key("h", slug)))
    if known:
        table.execute([acquire(slugs=slugs)])
        table.execute([Release(slugs, SECRET)])
    overtaken(acquire(slugs[-1][1:-1], "b" * 32))  # the last to be written

    (reply,) = table.execute([acquire(slugs=slugs)])

    assert reply.kind is Kind.BUSY
    rows = table.execute([Survey(slugs)])[0].rows
    assert [bool(row.value) for row in rows] == [False, False, True]


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
