"""fenced().run() and its retries, and fenced transactions in coroutines and inside other transactions."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import pytest
from asgiref.sync import ThreadSensitiveContext, async_to_sync, sync_to_async
from django.db import DatabaseError, OperationalError, connections, transaction
from django.db.transaction import TransactionManagementError
from django.utils import timezone

from django_redlock import LockLostError, StaleTokenError, fenced, lock, locks
from django_redlock.models import Fence
from tests.services import django_database
from tests.waiting import wait_until

from .counting import CounterTable, prepare
from .sources import lease_of
from .test_experiment import options
from .test_rows import WAITING


def increment(alias: str, by: int = 1) -> int:
    counter = CounterTable(alias)
    counter.write(counter.read() + by)
    return counter.read()


def test_function_is_repeated_when_asked(counting):
    """run() returns what the function returns; it repeats conflicts, as often as it may, while the lease is valid."""
    calls = []

    def fail_with(error: OperationalError) -> None:
        calls.append(1)
        raise error

    def run(error: OperationalError, retries: int) -> int:
        calls.clear()
        with pytest.raises(OperationalError) as raised:
            fenced(lease_of("counter"), using=counting, retries=retries).run(fail_with, error)
        assert raised.value is error
        return len(calls)

    assert fenced(lease_of("counter"), using=counting).run(increment, counting, by=3) == 3
    assert run(deadlock(counting), retries=0) == 1
    assert run(deadlock(counting), retries=2) == 3
    assert run(OperationalError("the disk is full"), retries=2) == 1

    lease = lease_of("counter")

    def release_and_fail() -> None:
        lease.release()
        raise deadlock(counting)

    with pytest.raises(LockLostError):
        fenced(lease, using=counting, retries=5).run(release_and_fail)
    with pytest.raises(ValueError, match=r"fenced\(lease, retries=\.\.\.\)\.run\(function\)"):
        fenced(lease_of("counter"), using=counting, retries=1).__enter__()
    with pytest.raises(ValueError, match="only the outermost transaction"):
        fenced(lease_of("counter"), using=counting, retries=1, nested=True)


async def later(alias: str) -> None:
    increment(alias)


def one_by_one(alias: str) -> Iterator[int]:
    yield increment(alias)


class Later:
    async def __call__(self, alias: str) -> None:
        increment(alias)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (later, "later is a coroutine function; use 'async with'"),
        (one_by_one, "one_by_one is a generator function; use"),
        (Later(), "is a coroutine function"),
        (lambda alias: later(alias), "returned an awaitable, which would run after the transaction"),
        (lambda alias: one_by_one(alias), "returned a generator, which would run after the transaction"),
    ],
    ids=["coroutine function", "generator function", "object with a coroutine function", "awaitable", "generator"],
)
def test_work_that_would_come_after_the_commit_is_refused(counting, function, message):
    """A function has to do its work during the call; what it would do later has no fence."""
    with pytest.raises(TypeError, match=re.escape(message)):
        fenced(lease_of("counter"), using=counting).run(function, counting)

    assert CounterTable(counting).read() == 0


def deadlock(alias: str) -> OperationalError:
    """Return the error by which each database reports a conflict between transactions."""
    import sqlite3

    import psycopg
    import pymysql

    error = OperationalError("deadlock")
    match connections[alias].vendor:
        case "postgresql":
            error.__cause__ = psycopg.errors.DeadlockDetected()
        case "mysql":
            error.__cause__ = pymysql.err.OperationalError(1213, "Deadlock found")
        case _:
            error.__cause__ = sqlite3.OperationalError("database is locked")
            error.__cause__.sqlite_errorcode = sqlite3.SQLITE_BUSY_SNAPSHOT
    return error


@contextmanager
def refused_by_trigger(alias: str, engine) -> Iterator[Callable[[], object]]:
    """On SQLite, a trigger may end the transaction."""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "CREATE TEMP TRIGGER refuse BEFORE INSERT ON history WHEN NEW.value < 0 "
            "BEGIN SELECT RAISE(ROLLBACK, 'refused'); END"
        )
    yield partial(CounterTable(alias)._execute, "INSERT INTO history VALUES (-1, 1, '')")
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP TRIGGER refuse")


@contextmanager
def deadlocked(alias: str, engine) -> Iterator[Callable[[], object]]:
    """On MariaDB, a deadlock ends that of two transactions which has written less."""

    def rival() -> None:
        with transaction.atomic(using=alias):
            for value in range(50):
                CounterTable(alias)._execute("INSERT INTO history VALUES (%s, 1, '')", [value])
            has_history.set()
            CounterTable(alias)._execute("UPDATE counter SET value = value")
            transaction.set_rollback(True, using=alias)
        connections.close_all()

    def read_history() -> None:
        CounterTable(alias)._execute("SELECT value FROM counter FOR UPDATE")
        other.append(pool.submit(rival))
        assert has_history.wait(60)
        wait_until(lambda: engine.execute(WAITING["mariadb"]), pause=0.2)
        CounterTable(alias)._execute("SELECT value FROM history FOR UPDATE")

    has_history, other = threading.Event(), []
    with ThreadPoolExecutor(1) as pool:
        yield read_history
        other[0].result(60)


@pytest.mark.parametrize("engine", ["sqlite", "mariadb"], indirect=True)
def test_block_that_the_database_has_ended_commits_nothing(counting, engine):
    """Its claim has ended, too. If the block catches that error, it can write no more, and does not end in silence."""
    ending = {"sqlite": refused_by_trigger, "mariadb": deadlocked}[engine.scheme]

    counter = CounterTable(counting)

    def work(fail: Callable[[], object]) -> None:
        counter._execute("UPDATE counter SET value = 1")
        with suppress(DatabaseError):
            fail()
        with pytest.raises(TransactionManagementError, match="until the end of the 'atomic' block"):
            counter._execute("UPDATE counter SET value = 2")

    block = fenced(lease_of("counter"), using=counting)
    with (
        ending(counting, engine) as fail,
        pytest.raises(TransactionManagementError, match=r"rolled back .*claim is lost") as caught,
    ):
        block.run(work, fail)

    assert re.search("refused|Deadlock", str(caught.value.__cause__))
    assert counter.read() == 0


@pytest.mark.parametrize("engine", ["mariadb"], indirect=True)
def test_block_goes_on_after_a_lock_wait_timeout_as_any_transaction(counting, engine):
    """As a rule, that ends the statement alone; after a write of Django's, no query follows, as in ``atomic()``."""
    counter, has_row, over = CounterTable(counting), threading.Event(), threading.Event()
    others = Fence.objects.using(counting).filter(key="other")
    Fence.objects.using(counting).create(key="other", name="other", updated=timezone.now())

    def rival() -> None:
        with transaction.atomic(using=counting):
            others.update(token=1)
            has_row.set()
            over.wait(60)
        connections.close_all()

    def work(wait: Callable[[], object]) -> None:
        counter._execute("SET SESSION innodb_lock_wait_timeout = 1")
        with suppress(OperationalError):
            wait()
        increment(counting)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(rival)
        assert has_row.wait(60)
        block = fenced(lease_of("counter"), using=counting)
        block.run(work, lambda: list(others.select_for_update()))
        with pytest.raises(TransactionManagementError, match="until the end of the 'atomic' block"):
            block.run(work, lambda: others.update(token=2))
        over.set()

    assert counter.read() == 1


def test_nested_transaction_claims_and_commits_with_the_outer_one(counting):
    """With nested=True, the claim and the writes of the block are part of the transaction around it."""
    counter, lease = CounterTable(counting), lease_of("counter", fencing_token=33)

    with transaction.atomic(using=counting):
        with fenced(lease, using=counting, nested=True):
            counter.write(1)
        transaction.set_rollback(True, using=counting)

    assert counter.read() == 0
    assert not Fence.objects.using(counting).filter(token=33).exists()


@pytest.mark.parametrize(
    ("engine", "level"),
    [("postgresql", "repeatable read"), ("mariadb", "serializable")],
    indirect=["engine"],
)
def test_nested_transaction_needs_read_committed(engine, level, prepared, django_db_blocker):
    """Where an earlier statement fixes what is read after the claim, nested=True is refused."""
    with django_db_blocker.unblock():
        entry = engine.settings(prepared.database(engine, prepare), OPTIONS=options(engine.scheme, level))
        with django_database("strict", entry), transaction.atomic(using="strict"):
            with pytest.raises(RuntimeError, match=f"needs READ COMMITTED.*is at {level.upper()}"):
                with fenced(lease_of("counter"), using="strict", nested=True):
                    pytest.fail("the body ran")


async def test_block_of_a_coroutine_is_one_transaction(counting):
    """``async with`` commits the writes of its body or nothing, and has no other task in its transaction."""
    lease, inside, done = lease_of("counter"), asyncio.Event(), asyncio.Event()

    async def other() -> int:
        await inside.wait()
        thread = await sync_to_async(threading.get_ident)()
        done.set()
        return thread

    async def block() -> int:
        async with fenced(lease, using=counting):
            inside.set()
            await done.wait()
            await sync_to_async(increment)(counting)
            assert await sync_to_async(lambda: connections[counting].in_atomic_block)()
            return await sync_to_async(threading.get_ident)()

    threads = await asyncio.gather(other(), block())
    with suppress(ZeroDivisionError):
        async with fenced(lease, using=counting):
            await sync_to_async(increment)(counting)
            raise ZeroDivisionError

    assert await sync_to_async(CounterTable(counting).read)() == 1
    assert len(set(threads)) == 2
    await sync_to_async(connections.close_all)()


async def test_cancelled_coroutine_leaves_no_transaction(counting):
    """A task that is cancelled while its claim waits leaves no transaction and no claim."""
    claimed, leave = threading.Event(), threading.Event()

    def hold() -> None:
        try:
            with fenced(lease_of("counter", fencing_token=33), using=counting):
                claimed.set()
                leave.wait(30)
        finally:
            connections.close_all()

    async def wait_with_the_claim() -> None:
        async with fenced(lease_of("counter", fencing_token=34), using=counting):
            pytest.fail("the body ran")

    holder = threading.Thread(target=hold)
    holder.start()
    await sync_to_async(claimed.wait, thread_sensitive=False)(30)
    task = asyncio.ensure_future(wait_with_the_claim())
    await asyncio.sleep(0.3)  # it waits now, or soon will; either way it must leave nothing
    task.cancel()
    leave.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    holder.join(30)
    assert await Fence.objects.using(counting).values_list("token", flat=True).aget() == 33
    async with fenced(lease_of("counter", fencing_token=35), using=counting):
        pass
    await sync_to_async(connections.close_all)()


@pytest.mark.parametrize("how", ["async with", "async with, in a request", "arun()"])
async def test_cancelled_coroutine_has_its_lock_until_its_transaction_has_ended(counting, how):
    """The thread cannot be cancelled; if the lock were free before its commit, the next holder would read old rows."""
    ends, may_end = threading.Event(), threading.Event()

    def work() -> None:
        increment(counting)
        transaction.on_commit(lambda: (ends.set(), may_end.wait(30)), using=counting)

    async def hold() -> None:
        async with lock("counter", wait=5) as lease:
            if how == "arun()":
                await fenced(lease, using=counting).arun(work)
            else:
                async with fenced(lease, using=counting):
                    await sync_to_async(work)()

    async def request() -> None:
        async with ThreadSensitiveContext():  # as Django's handler for ASGI
            try:
                await hold()
            finally:
                await sync_to_async(connections.close_all)()

    task = asyncio.create_task(request() if "request" in how else hold())
    await asyncio.to_thread(ends.wait, 30)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.05)  # the lock would be free by then
        assert await lock("counter", wait=0).atry_acquire() is None
    may_end.set()

    with pytest.raises(asyncio.CancelledError):
        await task
    async with lock("counter", wait=0):
        assert await sync_to_async(CounterTable(counting).read)() == 1
    await sync_to_async(connections.close_all)()


async def test_work_that_is_cancelled_before_it_begins_never_begins(counting):
    """Its caller hears at once that nothing is committed, though another task occupies the thread."""
    occupied, go_on = threading.Event(), threading.Event()
    other = asyncio.create_task(sync_to_async(lambda: (occupied.set(), go_on.wait(30)))())
    await asyncio.to_thread(occupied.wait, 30)

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(fenced(lease_of("counter"), using=counting).arun(increment, counting), 0.05)
    assert not other.done()
    go_on.set()
    await other

    assert await sync_to_async(CounterTable(counting).read)() == 0
    await sync_to_async(connections.close_all)()


async def test_cancellation_reaches_coroutines_that_the_work_waits_for(counting):
    """What waits in a coroutine below ``arun()`` ends with its task, whose lock is free afterwards."""
    waits = asyncio.Event()

    async def listen() -> None:
        waits.set()
        await asyncio.Event().wait()

    async def hold() -> None:
        async with lock("counter", wait=5) as lease:
            await fenced(lease, using=counting).arun(async_to_sync(listen))

    task = asyncio.create_task(hold())
    await waits.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(asyncio.shield(task), 30)
    async with lock("counter", wait=0):
        pass
    await sync_to_async(connections.close_all)()


async def test_function_runs_from_a_coroutine(counting):
    """arun() runs a plain function in the transaction, and refuses a coroutine function with a hint."""

    async def increment_later() -> None:
        pytest.fail("it ran")

    assert await fenced(lease_of("counter"), using=counting).arun(increment, counting, by=2) == 2
    with pytest.raises(TypeError, match="use 'async with'"):
        await fenced(lease_of("counter"), using=counting).arun(increment_later)
    await sync_to_async(connections.close_all)()


async def test_overtaken_coroutine_is_refused_and_told_in_its_loop(counting):
    """A task that waits for the loss of its lease wakes when the database refuses the lease in another thread."""
    lease = await lock("counter", renew=False).aacquire()
    waiting = asyncio.ensure_future(lease.lost.wait())
    late = lease_of("counter", fencing_token=2**52)
    async with fenced(late, using=counting):
        pass

    with pytest.raises(StaleTokenError):
        async with fenced(lease, using=counting):
            pytest.fail("the body ran")

    assert await asyncio.wait_for(waiting, 30)
    assert lease.reason == "fenced"
    await lease.arelease()
    await locks["default"].aclose()
    await sync_to_async(connections.close_all)()
