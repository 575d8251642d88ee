"""The history of locks: what is recorded, when, and the advice it gives."""

import html
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from io import StringIO

import pytest
from celery.signals import worker_process_shutdown
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.core import mail
from django.core.management import CommandError, call_command
from django.db import DatabaseError, InterfaceError, ProgrammingError, connection, transaction
from django.test import Client
from django.test.utils import _TestState
from django.utils import timezone
from django.utils.formats import date_format
from django.utils.timezone import localtime

from django_redlock import LockTakenError, lock, locks
from django_redlock.contrib.history import models
from django_redlock.contrib.history import recorder as recorders
from django_redlock.contrib.history.admin import DASH, OUTCOMES
from django_redlock.contrib.history.models import Hold, kinds
from django_redlock.contrib.history.recorder import KEEP, Recorder
from django_redlock.contrib.telemetry import unlisten
from django_redlock.core.protocol import EndReason, Outcome
from tests.held import client_of, nodes_in_memory

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/redlock_history/hold/"


@pytest.fixture
def recorder(monkeypatch) -> Iterator[Recorder]:
    """A recorder that writes on command, as without a test runner."""
    monkeypatch.delattr(_TestState, "saved_data")
    recorder = Recorder()
    monkeypatch.setattr(recorder._thread, "start", lambda: None)
    with nodes_in_memory():
        recorder.listen()
        yield recorder
        unlisten(recorders.UID)
        worker_process_shutdown.disconnect(dispatch_uid=recorders.UID)


def held(
    name: str, count: int, seconds: float | None, *, ttl: float = 30.0, outcome: str = "released", waited: float = 0.0
):
    """Record the given number of holds of a lock."""
    about = {"alias": "default", "name": name, "template": name, "host": "web-1", "pid": 7, "ended": timezone.now()}
    row = {**about, "outcome": outcome, "waited": waited, "held": seconds, "ttl": ttl}
    Hold.objects.bulk_create(Hold(**row) for _ in range(count))


def test_ended_locks_are_recorded(recorder):
    """A release, a loss and an attempt that was given up each are a row with name, kind, times and token."""
    with lock("orders:7", ttl=20) as lease:
        with pytest.raises(LockTakenError):
            lock("orders:7", wait=0).acquire()
    gone = lock("orders:8", renew=False).acquire()
    for node in locks["default"].nodes:
        node.store.reset()
    with lock("orders:8"):
        gone.extend()

    assert recorder.flush() == 4
    rows = {(row.name, row.outcome): row for row in Hold.objects.all()}
    assert set(rows) == {
        ("orders:7", "taken"),
        ("orders:7", "released"),
        ("orders:8", "superseded"),
        ("orders:8", "released"),
    }
    assert rows["orders:7", "taken"].held is None
    released = rows["orders:7", "released"]
    assert (released.template, released.ttl, released.fencing_token) == ("orders:*", 20.0, lease.fencing_token)
    assert released.held >= 0
    assert recorder.flush() == 0


def test_a_test_run_of_a_project_records_nothing(recorder, monkeypatch):
    """The rows of a test would be written when its database is gone, into that of the project."""
    with monkeypatch.context() as runner:
        runner.setattr(_TestState, "saved_data", None, raising=False)
        lock("orders:7").acquire().release()

    assert recorder.flush() == 0


def test_mail_that_is_kept_in_memory_does_not_end_the_history(recorder, monkeypatch):
    """The backend of a project under development keeps its mail in an outbox, as Django's tests do."""
    monkeypatch.setattr(mail, "outbox", ["a mail"], raising=False)
    lock("orders:7").acquire().release()

    assert recorder.flush() == 1


def test_rows_are_written_by_a_thread_of_its_own(monkeypatch):
    """A lock that ends sends no query; a thread records it a moment later, also after something beside that failed."""
    monkeypatch.delattr(_TestState, "saved_data")
    monkeypatch.setattr(recorders, "EVERY", 0.01)
    recorder, failed, done = Recorder(), threading.Event(), threading.Event()
    recorder.flush = lambda: done.set() or recorder._rows.clear() or 0  # type: ignore[method-assign]

    def close() -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("not now")

    monkeypatch.setattr(recorders, "close_old_connections", close)
    monkeypatch.setattr(recorders.connections, "close_all", lambda: None)
    recorder._note("default", "orders:7", "taken", 0.5)

    assert done.wait(30)
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("django_redlock")]
    assert all(thread.daemon for thread in ours)


def test_rows_are_committed_where_the_project_commits_by_hand(recorder):
    """With autocommit off, the rows are committed, and the work that a process has not committed at its end is not."""
    lock("orders:7").acquire().release()
    transaction.set_autocommit(False)
    try:
        held("uncommitted", 1, 1.0)
        recorder.flush()
        connection.rollback()
    finally:
        transaction.set_autocommit(True)

    assert [row.name for row in Hold.objects.all()] == ["orders:7"]


def test_a_child_process_of_celery_writes_at_its_end(recorder):
    """Celery's prefork children end without Python's exit handlers, so a signal reports their end."""
    lock("orders:7").acquire().release()
    assert Hold.objects.count() == 0

    worker_process_shutdown.send(sender=None, pid=1, exitcode=0)

    assert Hold.objects.count() == 1


PROJECT = """
import multiprocessing, sys, django
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["django_redlock", "django_redlock.contrib.history"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[2]}},
    REDLOCK={"default": {"NODES": "memory://a"}},
)
django.setup()
from django.core.management import call_command
from django_redlock import lock

def work():
    lock("orders:7").acquire().release()

if __name__ == "__main__":
    from django_redlock.contrib.history.models import Hold
    call_command("migrate", verbosity=0)
    child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    child.start()
    child.join()
    print(*Hold.objects.values_list("name", flat=True))
"""


@pytest.mark.server
@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_process_of_python_writes_at_its_end(tmp_path, method):
    """A child of multiprocessing, which may end without Python's exit handlers, writes its rows before it ends."""
    program = tmp_path / "program.py"
    program.write_text(PROJECT, encoding="utf-8")
    command = [sys.executable, str(program), method, str(tmp_path / "db.sqlite3")]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    assert (ended.stdout, ended.stderr) == ("orders:7\n", "")


def test_hostile_names_are_bounded_and_old_rows_go(recorder, monkeypatch):
    """A name is cut and escaped; the first rows of a process replace those of last month, even just after a boot."""
    held("old", 1, 1.0)
    Hold.objects.update(ended=timezone.now() - KEEP - timedelta(days=1))
    monkeypatch.setattr(recorders, "steady", lambda: 600.0)
    lock("x" * 5000 + "\x00\n").acquire().release()

    assert recorder.flush() == 1
    assert len(Hold.objects.get().name) <= 200
    assert "\x00" not in Hold.objects.get().name


@pytest.mark.parametrize("error", [DatabaseError, InterfaceError])
def test_a_database_that_fails_costs_rows_only(recorder, monkeypatch, caplog, error):
    """Rows that cannot be written are counted in the log, and nothing else happens."""

    def fail(*args, **options):
        raise error("secret details")

    monkeypatch.setattr(Hold.objects, "bulk_create", fail)
    lock("orders:7").acquire().release()

    assert recorder.flush() == 0
    assert f"the history of 1 locks was not written: {error.__name__}" in caplog.text
    assert "secret" not in caplog.text


def test_old_rows_that_cannot_be_deleted_are_no_loss(recorder, caplog):
    """The rows of a user who may not delete any are written, and the log says what failed."""
    held("old", 1, 1.0)
    Hold.objects.update(ended=timezone.now() - KEEP - timedelta(days=1))
    lock("orders:7").acquire().release()

    def refuse(execute, sql, *about):
        if sql.startswith("DELETE"):
            raise ProgrammingError("secret details")
        return execute(sql, *about)

    with connection.execute_wrapper(refuse):
        written = recorder.flush()

    assert (written, Hold.objects.filter(name="orders:7").count()) == (1, 1)
    assert "old rows of the history were not deleted: ProgrammingError" in caplog.text
    assert "not written" not in caplog.text


# Advice


def test_advice():
    """Locks that are lost, held for long, waited for by many or leased for too long each have their advice."""
    held("fine", 50, 1.0)
    held("lost", 50, 40.0)
    held("lost", 1, 40.0, outcome="expired")
    held("long", 50, 20.0)
    held("lazy", 50, 0.1, ttl=600.0)
    held("hot", 50, 0.5, waited=9.0)
    held("busy", 50, 0.5)
    held("busy", 50, None, outcome="taken")
    held("rare", 3, 100.0, outcome="expired")

    said = {kind.template: " ".join(kind.suggestions) for kind in kinds()[0]}
    call_command("redlock_doctor", "--advise", stdout=(out := StringIO()), no_color=True)

    assert said["fine"] == said["rare"] == ""
    assert "1 of 51 holds were lost: leave renewal on, or set ttl to 80 s." in said["lost"]
    assert "more than half of its ttl: leave renewal on, or set ttl to 40 s." in said["long"]
    assert "after a crash all wait that long; set it to 10 s." in said["lazy"]
    assert "make it narrower" in said["hot"]
    assert said["busy"] == "50 gave up: wait=2 would let most of them in."  # and none was lost
    assert "lost: held 51 times, 40.00 s (median)" in out.getvalue()
    assert "1 of 51 holds were lost" in out.getvalue()


def test_no_ttl_or_wait_helps_where_others_are_not_the_cause(viewer):
    """Holds that were ended at a limit, and callers that gave up without a quorum, are counted without such advice."""
    held("limited", 40, 3600.0, outcome="max_hold")
    held("dark", 40, 0.1)
    held("dark", 40, None, outcome="no_quorum", waited=5.0)
    held("both", 40, 40.0, outcome="max_hold")
    held("both", 2, 40.0, outcome="superseded")
    call_command("redlock_doctor", "--advise", stdout=(out := StringIO()), no_color=True)

    said = {kind.template: list(kind.suggestions) for kind in kinds()[0]}
    page = viewer.get(f"{LIST}kinds/").content.decode()

    assert (said["limited"], said["dark"]) == ([], [])
    assert said["both"] == ["2 of 42 holds were lost: leave renewal on, or set ttl to 80 s."]
    assert "waited 0.00 s, 0.00 s; 0 gave up, 40 lost." in out.getvalue()
    assert "waited 0.00 s, 0.00 s; 40 gave up, 0 lost." in out.getvalue()
    assert "</span> 42</td>" in page


def test_statistics_of_many_locks_say_since_when_they_count(viewer, monkeypatch):
    """If more locks ended than are read, the page and the command do not claim to show seven days."""
    held("early", 30, 1.0)
    Hold.objects.update(ended=timezone.now() - timedelta(days=2))
    held("late", 30, 1.0)
    since = Hold.objects.filter(name="late").earliest("ended").ended

    def said() -> list[bool]:
        call_command("redlock_doctor", "--advise", stdout=(out := StringIO()), no_color=True)
        page = viewer.get(f"{LIST}kinds/").content.decode()
        assert ("early" in page, "The last seven days" in page) == ("early: held" in out.getvalue(),) * 2
        told = f"Only the latest locks, since {date_format(localtime(since), 'DATETIME_FORMAT')}." in page
        return [
            "early" in page,
            told,
            f"Only the latest locks, since {since.isoformat(' ', 'minutes')}:" in out.getvalue(),
        ]

    assert said() == [True, False, False]
    monkeypatch.setattr(models, "ROWS", 30)
    assert said() == [False, True, True]


def test_a_lock_that_nobody_got_was_neither_held_nor_lost(viewer):
    """A kind of which every attempt was given up has no holding times, on the page and in the doctor's advice."""
    held("wanted", 30, None, outcome="taken")
    call_command("redlock_doctor", "--advise", stdout=(out := StringIO()), no_color=True)

    page = viewer.get(f"{LIST}kinds/").content.decode()

    assert "wanted: held 0 times; waited 0.00 s" in out.getvalue()
    assert f"held: {DASH}<br>" in page
    assert "waited: 0.0 ms, 0.0 ms<br>" in page
    assert 'class="redlock-lost"' not in page


@pytest.mark.parametrize(
    ("arguments", "installed", "table", "message"),
    [
        ([], ["django_redlock"], True, r"add 'django_redlock\.contrib\.history' to INSTALLED_APPS"),
        ([], None, False, r"manage\.py migrate redlock_history"),
        (["--format=json"], None, True, "leave out --format json"),  # a program would get text
        (["--using=nope"], None, True, "no alias 'nope'"),  # and not one without any locks
    ],
)
def test_advice_that_cannot_be_given_says_what_to_type(settings, arguments, installed, table, message):
    settings.INSTALLED_APPS = installed or settings.INSTALLED_APPS
    with connection.schema_editor() as editor:
        if not table:
            editor.delete_model(Hold)
    try:
        with pytest.raises(CommandError, match=message) as refused:
            call_command("redlock_doctor", "--advise", *arguments)
    finally:
        with connection.schema_editor() as editor:
            if not table:
                editor.create_model(Hold)
    assert refused.value.returncode == 2


# The admin


@pytest.fixture
def viewer() -> Client:
    """A user who may see the history, and the held locks, to which its rows lead."""
    return client_of("view_hold", "view_heldlock")


def test_the_list_and_the_chart(viewer):
    """Former locks are listed, and shown by kind with a chart and advice; names are text, outcomes are words."""
    held("<script>alert(1)</script>", 30, 40.0, outcome="expired")
    held("fast", 1, 0.0004, waited=0.25)
    held("slow", 1, 840.0, outcome="expired")
    held("new", 1, 5.0, outcome="surprised")

    listed = viewer.get(LIST).content.decode()
    chart = viewer.get(f"{LIST}kinds/").content.decode()

    assert f"{LIST}kinds/" in listed
    assert "/admin/redlock/heldlock/?q=fast&amp;using=default" in listed
    assert "<svg" in chart
    assert "30 of 30 holds were lost" in chart
    assert "<script>alert" not in chart + listed
    assert [text for text in ("0.4 ms", "250 ms", "14 min", "5.0 s") if text not in listed] == []
    assert 'redlock-good">released<' in listed
    assert 'redlock-bad">lost: expired<' in listed
    assert 'redlock-warn">surprised<' in listed
    counted = viewer.get(LIST, {"_facets": "True"}).content.decode()
    assert ("lost: expired (31)" in counted, ">expired (31)" in counted) == (True, False)
    assert [text for text in ("held: 0.4 ms, 0.4 ms", "held: 14 min, 14 min") if text not in chart] == []


def test_the_filter_of_outcomes_lists_the_rows_of_its_label(recorder, viewer):
    """A lock whose loss the release finds is listed as superseded, and not among attempts that were given up."""
    lost = lock("lost", renew=False).acquire()
    for node in locks["default"].nodes:
        node.store.reset()
    with lock("lost"):
        assert lost.release() == "taken"
        with pytest.raises(LockTakenError):
            lock("lost", wait=0).acquire()
    recorder.flush()

    def rows(outcome: str) -> list[bool]:
        return [row.held is None for row in viewer.get(LIST, {"outcome": outcome}).context["cl"].result_list]

    assert (rows("taken"), rows("superseded")) == ([True], [False])
    assert {*OUTCOMES} == {*EndReason, *Outcome, "no_quorum"} - {"forked"}


@pytest.mark.parametrize(
    ("names", "found"),
    [("orders:7", 1), (["stock:1", "stock:2"], 2), ("orders:" + "7" * 220, 1), ("Заказ:" + "ж" * 120, 1)],
    ids=["short", "several", "long", "many bytes"],
)
def test_a_former_lock_leads_to_that_which_is_held_now(recorder, viewer, names, found):
    """The link of a row finds a lock with the same names, also where names are cut short."""
    lock(names).acquire().release()
    recorder.flush()
    [link] = re.findall(r'href="([^"]*/heldlock/\?q=[^"]*)"', viewer.get(LIST).content.decode())
    with lock("beside"), lock(names):
        listed = viewer.get(html.unescape(link)).context["cl"].result_list

    assert len(listed) == found
    assert "beside" not in [row.name for row in listed]


def test_numbers_that_people_copy_have_no_separator(viewer, monkeypatch):
    """With USE_THOUSAND_SEPARATOR, the list and the page of a row show process and token as other programs do."""
    monkeypatch.setattr(settings, "USE_THOUSAND_SEPARATOR", True)
    held("a", 1, 1.0)
    Hold.objects.update(id=1, pid=54321, fencing_token=1796032652405249)

    pages = [viewer.get(LIST + path).content.decode() for path in ("", "1/change/")]

    assert [(">54321<" in page, ">1796032652405249<" in page) for page in pages] == [(True, True)] * 2


def test_the_history_needs_its_permission_and_cannot_be_changed():
    """Staff without the permission sees nothing; with it, nobody can add or delete rows."""
    client = client_of()
    held("a", 1, 1.0)
    Hold.objects.update(id=1)

    assert [client.get(LIST + path).status_code for path in ("", "kinds/")] == [403] * 2
    User.objects.get().user_permissions.add(Permission.objects.get(codename="view_hold"))
    assert [client.get(LIST + path).status_code for path in ("add/", "1/delete/")] == [403] * 2
