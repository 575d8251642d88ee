"""A database as a node that is slow, gone, locked, too new or another server; and what a process leaves behind."""

import asyncio
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.test import override_settings

from django_redlock import LockManager, LockTakenError, QuorumUnavailableError
from django_redlock.core.protocol import Kind, Release
from django_redlock.nodes import LinkError, NodeSpec
from django_redlock.nodes.backends import open_node
from django_redlock.nodes.database.node import DatabaseNode
from django_redlock.nodes.database.table import TABLE, LockTable
from django_redlock.nodes.records.table import UntouchedError
from tests.managers import (
    SLOW_DATABASES,
    Flavour,
    Tables,
    connect,
    eventually,
    fork_and_lock,
    held_by,
    patient_manager,
    real_manager,
    run_greenlets,
)
from tests.services import Database, MariaDB, PostgreSQL, SQLite, django_database

from .test_database import SECRET, acquire

pytestmark = pytest.mark.usefixtures("unblocked")


@pytest.fixture
def one(tables: Tables) -> Iterator[LockManager]:
    """A manager whose only node is a database."""
    with closing(real_manager(tables.urls[:1])) as manager:
        connect(manager)
        yield manager


@contextmanager
def migrated(server: Database | SQLite, alias: str = "table") -> Iterator[str]:
    """Make a new database with the table available under an alias."""
    with server.database() as name, django_database(alias, server.settings(name)):
        call_command("migrate", "redlock", database=alias, verbosity=0, skip_checks=True)
        yield alias


def threads_of_ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("django_redlock database")}


# A working lock on one database, beyond what a unique row gives


def test_greenlets_wait_and_are_renewed(sqlite_tables: Tables):
    """The thread of a database and the watchdog of greenlets are real threads, each with a connection of its own."""
    sqlite_tables.empty()
    run_greenlets(sqlite_tables.urls[:1], {"default": {}, sqlite_tables.aliases[0]: sqlite_tables.entry()})


@pytest.mark.parametrize("tables", ["postgresql", "mariadb"], indirect=True)  # SQLite: see test_own_transaction
def test_lock_does_not_take_part_in_a_transaction(one: LockManager, tables: Tables):
    """Others see the lock before the commit, and a rollback does not release it."""
    with suppress(ZeroDivisionError), transaction.atomic(using=tables.aliases[0]):
        tables.query("SELECT 1")
        lease = one.lock("a").acquire()
        with closing(real_manager(tables.urls[:1])) as other, pytest.raises(LockTakenError):
            other.lock("a", wait=0).acquire()
        raise ZeroDivisionError

    assert held_by(one, "{a}", lease.secret)
    assert lease.release() == "released"


def test_hold_ends_by_the_clock_of_the_server(one: LockManager, monkeypatch: pytest.MonkeyPatch):
    """A client with a wrong clock holds as long as any other, and the node reports its own time."""
    one.runtime = replace(one.runtime, wall=lambda: 0.0)
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.time_ns", lambda: 0)

    with one.lock("a", wait=0):
        reply = one.survey(slugs=("{a}",))[0]

    assert 9 < (reply.rows[0].left or 0) <= 10
    assert reply.time > 1_700_000_000_000_000
    one.on_behalf("a", wait=0, ttl=0.5, detached=True).acquire()
    assert one.lock("a", wait=30).acquire().release() == "released"


def test_requests_to_a_database_are_not_logged(tables: Tables, caplog: pytest.LogCaptureFixture):
    """Django logs statements with their values while DEBUG is on; none contains a lock's secret."""
    caplog.set_level(logging.DEBUG, logger="django.db.backends")
    with override_settings(DEBUG=True), closing(real_manager(tables.urls[:1])) as manager:
        with manager.lock("a") as lease:
            pass

    assert lease.secret not in caplog.text


# Rows


def test_expired_rows_are_deleted_after_a_while(tables: Tables, monkeypatch: pytest.MonkeyPatch):
    """Expired rows no longer count and are deleted in time; rows without an end stay."""
    with closing(LockTable(tables.aliases[0], "cleaned:", 5.0)) as table:
        table.execute([acquire("short", ttl=0.01, keep=0.01), acquire("long"), acquire("ever", ttl=0.01, keep=None)])
        table.execute([Release((), "c" * 32, 0.01), Release(("{short}",), "d" * 32, 0.01)])
        time.sleep(0.1)
        table.execute([acquire("next")])
        monkeypatch.setattr("django_redlock.nodes.database.table.CLEANING", 0.0)
        table._clean_at = 0.0

        table.clean()
        # An earlier test's manager may still write, but under its own prefix.
        rows = tables.query(f"SELECT state FROM {TABLE} WHERE realm = '{table.realm}'")

    slugs = [json.loads(state).get("slug", "the mark") for (state,) in rows]
    assert sorted(slugs) == ["the mark", "{ever}", "{long}", "{next}"]


def test_locks_of_another_prefix_are_other_locks(tables: Tables):
    """Two projects may share a table."""
    with closing(real_manager(tables.urls[:1])) as one, closing(real_manager(tables.urls[:1], "u:")) as two:
        first, second = (manager.lock("a", wait=0, renew=False).acquire() for manager in (one, two))

        assert [row.value[:32] for row in one.survey(count=5)[0].rows] == [first.secret]
        assert [row.value[:32] for row in two.survey(count=5)[0].rows] == [second.secret]


# Requests that are not executed, and unknown outcomes


def test_locked_row_counts_as_no_reply(one: LockManager, tables: Tables):
    """The statement is given up in time and certainly not executed, and the next one is."""
    with closing(LockTable(tables.aliases[0], "t:", 0.5)) as table:
        table.execute([acquire()])
        with transaction.atomic(using=tables.aliases[0]):
            tables.query(f"UPDATE {TABLE} SET kept = kept + 1")
            (reply,) = table.execute([Release(("{x}",), SECRET)])
        assert (reply.kind, reply.detail) == (Kind.FAILED, "locked" if tables.scheme == "sqlite" else "timeout")
        assert table.execute([Release(("{x}",), SECRET)])[0].kind is Kind.RELEASED


@pytest.fixture(params=["postgresql", "mariadb"])
def server(request: pytest.FixtureRequest) -> Database:
    """A database server that can be killed and frozen."""
    found: Database = request.getfixturevalue(request.param)
    return found


def test_commit_with_an_unknown_outcome_is_no_reply(server: Database, monkeypatch: pytest.MonkeyPatch):
    """A server that dies while it writes may have written; one that dies while it reads has not."""
    with migrated(server) as alias, closing(LockTable(alias, "t:", 2.0)) as table:
        table.execute([acquire()])
        write = table.write

        def killed(do: Any, asked: Any) -> Any:
            server.kill()
            return do(asked)

        with monkeypatch.context() as patched:
            patched.setattr(table, "write", lambda decision: killed(write, decision))
            with pytest.raises(LinkError) as unclear:
                table.execute([Release(("{x}",), SECRET)])
        assert not isinstance(unclear.value, UntouchedError)
        server.start()
        with closing(LockTable(alias, "t:", 2.0)) as table:
            table.execute([acquire("y")])
            decide = table._decide
            monkeypatch.setattr(table, "_decide", lambda asked: killed(decide, asked))
            with pytest.raises(UntouchedError):
                table.execute([acquire("z")])
        server.start()


# Threads and pauses are the same for both servers. Only the end of their connections differs, see the test before.
@pytest.mark.parametrize("server", ["postgresql", *SLOW_DATABASES[1:]], indirect=True)
@pytest.mark.parametrize("fault", ["kill", "freeze"])
async def test_database_that_fails_keeps_nobody_longer_than_the_node_timeout(
    server: Database, flavour: Flavour, fault: str, monkeypatch: pytest.MonkeyPatch
):
    """Each attempt ends in time, closing leaves no thread behind, and afterwards everything works again."""
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # the test itself migrates in an event loop
    with migrated(server) as alias:
        before = threads_of_ours()
        manager = real_manager([f"database://{alias}"], node_timeout=1.0)
        connect(manager)
        getattr(server, fault)()

        for _ in range(2):
            with pytest.raises(QuorumUnavailableError):
                await flavour.acquire(manager.lock("a", wait=0))
        await flavour.close(manager)
        manager.close()
        await eventually(lambda: threads_of_ours() <= before)
        await asyncio.to_thread(server.start)

        await flavour.release(await flavour.acquire(manager.lock("a", wait=30)))


async def test_end_of_an_event_loop_ends_its_link(one: LockManager, tables: Tables):
    """Asyncio.run() ends although nobody closed anything, and nothing is left behind."""
    node = one.nodes[0]
    assert isinstance(node, DatabaseNode)

    async def once() -> None:
        async with one.lock("a"):
            pass

    await asyncio.to_thread(lambda: asyncio.run(once()))

    (worker,) = node._workers.values()
    await eventually(lambda: len(worker._links) == 1)


# Forks


def test_child_has_a_connection_of_its_own(tables: Tables):
    """After a fork both processes continue; the child neither uses nor ends anything of its parent."""
    with closing(real_manager(tables.urls[:1])) as manager:
        fork_and_lock(manager)
        assert manager.lock("b", wait=0).acquire().release() == "released"


# Who may vote


def test_table_that_is_missing_is_named_with_what_to_type(tmp_path: Path):
    """No caller waits for a quorum that needs a command first; the lock works as soon as that command has run."""
    server = SQLite(tmp_path)
    with server.database() as name, django_database("empty", server.settings(name)):
        with closing(real_manager(["database://empty"])) as manager:
            with pytest.raises(
                QuorumUnavailableError, match=r"lacks its table: run manage\.py migrate redlock"
            ) as caught:
                manager.lock("a", wait=60).acquire()
            assert caught.value.misconfigured
            call_command("migrate", "redlock", database="empty", verbosity=0, skip_checks=True)
            assert manager.lock("a", wait=10).acquire().release() == "released"


def fill(path: Path) -> dict[str, Any]:
    """Leave no room in the file beyond its present pages; SQLite reports that like a full disk."""
    return {"OPTIONS": {"init_command": "PRAGMA max_page_count = 1"}}


def corrupt(path: Path) -> dict[str, Any]:
    """Overwrite all pages but the first with what a failing disk may return."""
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(b"\xff" * (path.stat().st_size - 4096))
    return {}


def write_protect(path: Path) -> dict[str, Any]:
    """Open the file for reading only, as on a file system that the system has protected after an error."""
    return {"NAME": f"file:{path}?mode=ro", "OPTIONS": {"uri": True}}


def take_many(manager: LockManager, wait: float) -> None:
    """Take more locks than fit into the pages that a file has."""
    for number in range(200):
        manager.lock(f"{number}:{'x' * 150}", wait=wait, renew=False).acquire()


@pytest.mark.parametrize(
    ("harm", "word", "waits"),
    [(fill, "its disk is full", True), (corrupt, "cannot use its disk", False), (write_protect, "READONLY", True)],
)
def test_disk_of_a_file_that_fails_is_named(
    tmp_path: Path, harm: Callable[[Path], dict[str, Any]], word: str, waits: bool
):
    """A full disk may have room again in a moment, and take writes again; nobody waits for one that is broken."""
    server = SQLite(tmp_path)
    with server.database() as name:
        with django_database("file", server.settings(name)):
            call_command("migrate", "redlock", database="file", verbosity=0, skip_checks=True)
            with connections["file"].cursor() as cursor:
                cursor.execute("PRAGMA journal_mode = DELETE")
            connections["file"].close()
        with django_database("file", server.settings(name, **harm(Path(name)))):
            with closing(real_manager(["database://file"])) as one, pytest.raises(QuorumUnavailableError) as caught:
                take_many(one, wait=1.0 if waits else 60.0)

    assert (set(caught.value.nodes.values()), caught.value.misconfigured) == ({word}, not waits)
    assert (caught.value.attempts > 1) is waits


def test_one_server_under_two_aliases_has_one_vote(sqlite_tables: Tables, tmp_path: Path):
    """A link to the same file is the same node."""
    entry = connections.settings[sqlite_tables.aliases[0]]
    link = tmp_path / "link.sqlite3"
    os.link(entry["NAME"], link)
    with django_database("again", {**entry, "NAME": str(link)}):
        with closing(patient_manager([sqlite_tables.urls[0], "database://again"])) as manager:
            with pytest.raises(QuorumUnavailableError, match=r"is the same server as database:"):
                manager.lock("twice", wait=0).acquire()


def served_for_long(table: LockTable) -> None:
    """Let a table say that it has served the locks since 1970."""
    mark = json.dumps({"server": table.open().run_id, "since": 1})
    table.query(f"UPDATE {TABLE} SET state = %s WHERE ends = 0", [mark])
    table.close()


def test_server_that_may_forget_says_its_age(server: Database):
    """One without fsync is guarded after a restart, like a Redis server; one that confirms what is on disk is not."""
    with migrated(server) as alias, closing(LockTable(alias, "t:", 5.0)) as table:
        server.kill()
        server.start()
        served_for_long(table)

        assert table.open().age < 60.0
        if isinstance(server, MariaDB):
            server.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 1")
            with closing(LockTable(alias, "t:", 5.0)) as again:
                durable = again.open().age
            server.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 0")
            assert durable > 1e6


def test_file_survives_a_power_cut_and_is_another_node_when_it_is_replaced(tmp_path: Path):
    """SQLite waits for the disk on this connection, whatever the project configured for its own."""
    server = SQLite(tmp_path)
    careless = {"init_command": "PRAGMA synchronous = OFF"}
    with server.database() as name, django_database("file", server.settings(name, OPTIONS=careless)):
        call_command("migrate", "redlock", database="file", verbosity=0, skip_checks=True)
        connections["file"].close()
        shutil.copy(name, f"{name}.copy")
        with closing(LockTable("file", "t:", 5.0)) as table:
            before = table.open()
            assert table.query("PRAGMA synchronous") == [(3,)]  # EXTRA
        os.replace(f"{name}.copy", name)
        with closing(LockTable("file", "t:", 5.0)) as table:
            after = table.open()

    assert before.run_id != after.run_id
    assert before.mark != after.mark


@pytest.mark.service
def test_standby_does_not_vote_and_is_another_server_when_promoted():
    """Every process notices a failover, whether it knew the earlier server or not."""
    with PostgreSQL() as server, migrated(server) as alias:
        with closing(LockTable(alias, "t:", 5.0)) as table:
            served_for_long(table)
            before = table.open()
            server.stop()
            (server.folder / "data/standby.signal").touch()
            server.start()
            with pytest.raises(LinkError, match="is a replica"):
                table.open()
            server.execute("SELECT pg_promote()")
            with pytest.raises(LinkError, match="restarted"):
                table.open()
        with closing(LockTable(alias, "t:", 5.0)) as table:
            after = table.open()
            ((state,),) = table.query(f"SELECT state FROM {TABLE} WHERE ends = 0")
    assert before.run_id != after.run_id
    assert json.loads(state)["since"] > 1  # so a process that did not know it lets it wait, too


def test_wrong_password_is_reported_without_showing_it(postgresql: PostgreSQL):
    """The error has the code, and neither user, host nor password."""
    entry = postgresql.settings("nowhere_at_all", PASSWORD="sesame")
    with django_database("shut", entry), closing(real_manager(["database://shut"])) as manager:
        with pytest.raises(QuorumUnavailableError, match="no such database") as caught:
            manager.lock("a", wait=60).acquire()
    assert caught.value.misconfigured
    assert "sesame" not in str(caught.value) + repr(manager) + repr(manager.nodes)


def test_rights_that_are_documented_suffice(server: Database):
    """A user that may only read and write the table takes, lists and clears locks."""
    rights = "SELECT, INSERT, UPDATE, DELETE"
    with migrated(server) as alias:
        entry = connections.settings[alias]
        if server.scheme == "postgresql":
            with connections[alias].cursor() as cursor:
                cursor.execute("DROP ROLE IF EXISTS locker")
                cursor.execute("CREATE ROLE locker LOGIN PASSWORD 'sesame'")
                cursor.execute(f"GRANT {rights} ON {TABLE} TO locker")
        else:
            server.execute("CREATE OR REPLACE USER locker@'%' IDENTIFIED BY 'sesame'")
            server.execute(f"GRANT {rights} ON {entry['NAME']}.{TABLE} TO locker@'%'")
        with django_database("mine", {**entry, "USER": "locker", "PASSWORD": "sesame"}):
            with closing(real_manager(["database://mine"])) as manager:
                lease = manager.lock(["a", "b"], wait=10).acquire()
                assert lease.extend()
                assert manager.survey(count=5)[0].total == 2
                assert lease.release() == "released"
            with closing(LockTable("mine", "t:", 5.0)) as table:
                assert table.open().run_id
                table._clean_at = 0.0
                table.clean()
        if server.scheme == "postgresql":
            with connections[alias].cursor() as cursor:
                cursor.execute("DROP OWNED BY locker")
                cursor.execute("DROP ROLE locker")


def test_entry_that_cannot_be_a_node_is_refused():
    """The error lists the kinds of databases that can be nodes."""
    with django_database("nothing", {"ENGINE": "django.db.backends.dummy"}):
        with pytest.raises(ValueError, match="is not SQLite, PostgreSQL, MySQL or MariaDB"):
            open_node(NodeSpec("database://nothing"), "t:")
