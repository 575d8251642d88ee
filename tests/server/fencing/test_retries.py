"""How often ``run()`` calls its function, and what is committed, for every place at which an error can be raised."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.db import DatabaseError, OperationalError, connections, transaction

from django_redlock import Lease, fenced
from django_redlock.models import Fence
from tests.services import django_database

from .counting import CounterTable, prepare
from .sources import claim, lease_of
from .test_experiment import options
from .test_fenced_run import deadlock

FIRST, SECOND = "y", "x"  # in the order of their commits; the claims are in alphabetical order

PLACES = {  # the place of the error: what is committed by then
    "claim of x": [],
    "claim of y": [],
    "body": [],
    "commit of y": [],
    "end of y": ["y"],  # after COMMIT, when Django turns autocommit on again: MySQL and MariaDB need a statement for it
    "callback of y": ["y"],
    "commit of x": ["y"],
    "callback of x": ["y", "x"],
}


def prepare_another(alias: str) -> None:
    prepare(alias)


@pytest.fixture
def two(request, engine, prepared, django_db_blocker) -> Iterator[Lease]:
    """A lease with a fence in two databases of each kind in turn, which have a counter of 0."""
    lease = lease_of("counter")
    with django_db_blocker.unblock(), ExitStack() as stack:
        for alias, create in ((FIRST, prepare), (SECOND, prepare_another)):
            entry = engine.settings(prepared.database(engine, create), **getattr(request, "param", {}))
            stack.enter_context(django_database(alias, entry))
            CounterTable(alias).clear()
            Fence.objects.using(alias).all().delete()
            claim(lease, alias)  # so that the fence exists
        yield lease


def counters() -> dict[str, int]:
    return {alias: CounterTable(alias).read() for alias in (FIRST, SECOND)}


class Work:
    """A function that increments both counters, and meets a conflict at one place, a number of times."""

    def __init__(self, place: str, conflicts: int) -> None:
        self.place = place
        self.conflicts = conflicts
        self.calls = 0
        self.ended: list[str] = []
        self.error: DatabaseError | None = None

    def __call__(self) -> str:
        self.calls += 1
        for alias in (FIRST, SECOND):
            counter = CounterTable(alias)
            counter.write(counter.read() + 1)
            transaction.on_commit(lambda alias=alias: self.at(f"callback of {alias}"), using=alias)
        self.at("body")
        return "done"

    def at(self, place: str) -> None:
        if place == self.place and self.conflicts:
            self.conflicts -= 1
            self.error = deadlock(FIRST)
            raise self.error

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Let the claims and the commits of both databases meet the conflict, too."""
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            for alias in (FIRST, SECOND):
                stack.enter_context(connections[alias].execute_wrapper(self._claim(alias)))
                patch.setattr(connections[alias], "_commit", self._commit(alias, connections[alias]._commit))
                patch.setattr(connections[alias], "_set_autocommit", self._end(alias))
            yield

    def _claim(self, alias: str) -> Callable:
        def execute(execute, sql, params, many, context):
            if sql.startswith("UPDATE") and "redlock_fence" in sql:
                self.at(f"claim of {alias}")
            return execute(sql, params, many, context)

        return execute

    def _commit(self, alias: str, commit: Callable[[], None]) -> Callable[[], None]:
        def instead() -> None:
            self.at(f"commit of {alias}")
            commit()
            self.ended.append(alias)

        return instead

    def _end(self, alias: str) -> Callable[[bool], None]:
        set_autocommit = connections[alias]._set_autocommit

        def instead(autocommit: bool) -> None:
            if autocommit and alias in self.ended:
                self.at(f"end of {alias}")
            set_autocommit(autocommit)

        return instead


@pytest.mark.parametrize(("conflicts", "way"), [(1, "run"), (9, "arun")])
@pytest.mark.parametrize("place", PLACES)
def test_function_is_repeated_only_while_nothing_is_committed(two, place, conflicts, way):
    """A conflict is repeated as often as asked until something is committed; then the error says what is."""
    committed, work = PLACES[place], Work(place, conflicts)
    block = fenced(two, using=[FIRST, SECOND], retries=2)
    run = block.run if way == "run" else async_to_sync(block.arun)
    tries = 1 if committed else 3

    with work.watched():
        if conflicts < tries:
            assert run(work) == "done"
            committed = [FIRST, SECOND]
        else:
            with pytest.raises(OperationalError) as raised:
                run(work)
            assert raised.value is work.error
            assert said(raised.value) == committed

    assert work.calls == (conflicts < tries if "claim" in place else min(conflicts + 1, tries))
    assert counters() == {alias: int(alias in committed) for alias in (FIRST, SECOND)}


def said(error: BaseException) -> list[str]:
    """Return which databases the notes of an error call committed."""
    notes = " ".join(getattr(error, "__notes__", []))
    kept, _, lost = notes.partition(" That of ")
    found = [alias for alias in (FIRST, SECOND) if repr(alias) in kept]
    assert [alias for alias in (FIRST, SECOND) if repr(alias) in lost] == ([SECOND] if found == [FIRST] else [])
    return found


def test_error_of_a_block_says_what_is_committed(two):
    """An error that leaves a ``with`` or ``async with`` block after the first commit says so, whatever its type."""

    def with_block() -> None:
        with fenced(two, using=[FIRST, SECOND]):
            transaction.on_commit(lambda: 1 / 0, using=FIRST)

    async def async_with_block() -> None:
        async with fenced(two, using=SECOND):
            await sync_to_async(transaction.on_commit)(lambda: 1 / 0, using=SECOND)

    with pytest.raises(ZeroDivisionError) as first:
        with_block()
    with pytest.raises(ZeroDivisionError) as second:
        async_to_sync(async_with_block)()

    assert said(first.value) == [FIRST]
    assert said(second.value) == [SECOND]


def test_lost_connection_leaves_open_what_is_committed(two, monkeypatch):
    """If the connection is lost during the commit, the error says that nobody knows whether it is committed."""
    connection = connections[FIRST]

    def lose() -> None:
        connection.close()
        raise OperationalError("server closed the connection unexpectedly")

    monkeypatch.setattr(connection, "_commit", lose)
    with pytest.raises(OperationalError) as raised:
        fenced(two, using=FIRST, retries=2).run(CounterTable(FIRST).read)

    assert raised.value.__notes__ == [
        "Whether the transaction of database 'y' has been committed is not known: its connection was lost."
    ]


def test_error_without_autocommit_reports_no_lost_connection(two):
    """A block inside a transaction of the caller, who has turned autocommit off, does not turn it on at its end."""
    transaction.set_autocommit(False, using=SECOND)

    with pytest.raises(ZeroDivisionError) as raised, fenced(two, using=[FIRST, SECOND], nested=True):
        transaction.on_commit(lambda: 1 / 0, using=FIRST)

    assert "lost" not in raised.value.__notes__[0]
    assert said(raised.value) == [FIRST]


@pytest.mark.parametrize(
    ("engine", "two"), [("postgresql", {"OPTIONS": options("postgresql", "serializable")})], indirect=True
)
def test_write_skew_in_the_second_database_books_the_first_once(two):
    """A serialization failure in the second commit reaches the caller, and the first database is written once."""
    calls, rival = [], transaction.atomic(using="rival")

    def skew() -> None:
        """Read in each transaction what the other one writes, and commit the rival's first."""
        calls.append(1)
        CounterTable(FIRST).write(CounterTable(FIRST).read() + 1)
        rival.__enter__()
        for alias in (SECOND, "rival"):
            CounterTable(alias).history()
            connections[alias].cursor().execute("INSERT INTO history VALUES (1, 0, '')")
        rival.__exit__(None, None, None)

    with django_database("rival", connections[SECOND].settings_dict), pytest.raises(OperationalError) as raised:
        fenced(two, using=[FIRST, SECOND], retries=2).run(skew)

    assert said(raised.value) == [FIRST]
    assert (calls, counters()[FIRST]) == ([1], 1)
