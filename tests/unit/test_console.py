"""The pages, commands and metrics tell the truth, also when nodes are silent or somebody meddled."""

import errno
import json
import re
from collections import OrderedDict
from io import StringIO
from traceback import walk_tb
from typing import Any
from unicodedata import combining, east_asian_width

import pytest
from celery import Celery
from django.core.management import CommandError, call_command
from django.test import override_settings
from django.utils.functional import SimpleLazyObject
from django.views.debug import ExceptionReporter, get_default_exception_reporter_filter

from django_redlock import LockLostError, LockTakenError, QuorumUnavailableError, lock, locks
from django_redlock.conf import InvalidRedlockError
from django_redlock.contrib.telemetry import MAX_LABELS, Labels
from django_redlock.inventory import (
    MAX_NAMES,
    find_lock,
    force_release,
    held_locks,
)
from tests.held import DETAIL, LIST, B, Terminal, put, row_key, run, value

WORDS = [f"{a}{b}{c}" for a in "bdfgk" for b in "aei" for c in "lmnr"]


def test_locks_that_ended_are_no_more_locks(five, operator):
    """Their names stay in an index for a while, and do not count as locks that were not asked for."""
    for node in five:
        for number in range(2 * MAX_NAMES):
            node.store.put(f"{{over:{number}}}", "", -1)
    for number in range(5):
        put(f"held:{number}")

    snapshot = held_locks(seconds=60)

    assert (len(snapshot.locks), snapshot.complete) == (5, True)
    assert "The list may lack locks" not in operator.get(LIST).content.decode()


# Several holders


def test_a_lock_that_several_share_has_no_host(five, operator):
    """The nodes do not record who shares a lock, only how many do; nothing is made up."""
    with lock("orders:7", shared=True), lock("orders:7", shared=True):
        text = run("redlock_inspect", "orders:7")[0]
        listed = run("redlock_list")[0]
        data = json.loads(run("redlock_inspect", "orders:7", "--format=json")[0])
        page = operator.get(LIST).content.decode()
        key = row_key("orders:7")
        detail = operator.get(DETAIL, {"key": key}).content.decode()

    nobody = {"label": "", "ref": "", "host": None, "pid": None}
    assert data["lock"]["holder"] == {"kind": "shared", **nobody, "sharers": 2}
    assert data["lock"]["since"] is None
    assert "held by shared" not in text + page
    assert [each.count("several, who share it") for each in (text, detail)] == [5, 5]  # in the rows of the nodes
    assert [("2 holders, who share it" in each) for each in (text, listed, page, detail)] == [True] * 4
    # In Arabic, the number would otherwise move to the end.
    assert [("<bdi>2 holders, who share it</bdi>" in each) for each in (page, detail)] == [True] * 2


def test_a_shared_lock_without_an_end_is_said_to_be_kept(five, operator):
    """Its key does not say who shares the lock, so redlock_clear never deletes it. No page says that it does."""
    lock("orders:7", shared=True, renew=False).acquire()
    for node in five:
        node.store.put("{orders:7}", node.store.records.holders["{orders:7}"][0], None)
    text = run("redlock_inspect", "orders:7")[0]
    run("redlock_clear", "--no-input")

    assert "redlock_clear keeps it" in text
    assert "redlock_clear deletes it" not in text
    assert find_lock("orders:7").state == "no_expiry"


def test_those_who_left_a_shared_lock_are_not_counted(five):
    """A node that missed a release, or has not heard of a holder, does not change how many a quorum knows."""
    staying = lock("orders:7", shared=True, renew=False).acquire()
    for node in five[:1]:
        node.down = True
    leaving = lock("orders:7", shared=True, renew=False).acquire()
    five[0].down, five[1].down = False, True
    leaving.release(wait=False)
    five[1].down = False

    counted = [find_lock("orders:7").sharers]
    for node in five[1:3]:  # which have heard of no release, and will not
        node.store.records.shared["{orders:7}"]["f" * 32] = node.store.now() + 60
    counted.append(find_lock("orders:7").sharers)
    staying.release()

    assert counted == [1, 1]


def test_permits_are_named(five):
    """Of a lock with permits, the command says which are held, and describes them in that order, one block each."""
    for ttl, number in ((20.0, 1), (10.0, 2), (30.0, 10)):
        for node in five:
            node.store.put(f"{{pool}}#{number}", value(ttl=ttl), ttl)
    text = run("redlock_inspect", "pool")[0]

    assert text.startswith("pool: 3 permits are held (#1, #2, #10). The nodes do not report how many there are.\n")
    assert re.findall(r"\n\nLock: +(.*)", text) == ["pool #1", "pool #2", "pool #10"]


# The terminal


def columns_of(text: str) -> int:
    """Return how many columns of a terminal a line takes: Chinese characters take two each, accents none."""
    return sum(2 if east_asian_width(each) in "WF" else not combining(each) for each in text)


@pytest.fixture
def on_terminal(monkeypatch):
    """Return the lines that a command shows on a terminal of a width."""

    def show(width: int, command: str, out: StringIO | None = None) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        out = out or Terminal()
        call_command(*command.split(), stdout=out, stderr=StringIO(), no_color=True)
        return out.getvalue().splitlines()

    return show


@pytest.mark.parametrize(("width", "left_out"), [(60, {"REMAINING", "VOTES"}), (80, set())])
@pytest.mark.parametrize("command", ["redlock_list", "redlock_top --once"])
def test_lists_fit_the_terminal(five, on_terminal, command, width, left_out):
    """Long names are cut in the middle before the list leaves out who waits, and who holds a lock on how many nodes."""
    put(name := f"orders:{'very-long-' * 9}\u8f93\u5165\u76ee\u5f55e\N{COMBINING ACUTE ACCENT}t7")
    put("short", B)

    lines, wide = on_terminal(width, command), "".join(on_terminal(width, f"{command} --wide"))

    title, *rows = lines[-3:]
    assert max(map(columns_of, lines)) <= width
    assert {columns_of(row[: row.index(" held ") + 1]) for row in rows} == {title.index("STATE")}
    titles = set(re.split("  +", title))
    assert {"LOCK", "STATE", "HELD FOR", "WAITING", "REMAINING", "VOTES", "HOLDER"} - titles == left_out
    assert re.search(r"orders:\S*…\S*7 ", "".join(rows))
    assert [name in wide, "TOKEN" in wide] == [True, True]


@pytest.mark.parametrize(
    ("width", "titles", "unicode"),
    [
        *[(10, ["LOCK"], True), (20, ["LOCK"], True), (30, ["LOCK", "HOLDER"], True)],
        *[(42, ["LOCK", "STATE", "HOLDER"], True), (30, ["LOCK", "HOLDER"], False), (80, None, False)],
    ],
)
def test_narrow_terminal_breaks_no_line_of_the_list(five, on_terminal, width, titles, unicode):
    """The name is left to the last; signs that the terminal cannot show (``LC_ALL=C``) are escaped before."""
    put("b\u00fccher:\u8f93\u5165\u76ee\u5f55:7" if not unicode else "orders:very-long-name:7")
    put("short", B)
    out = Terminal()
    if not unicode:
        out = type("Ascii", (Terminal,), {"encoding": "ascii"})()

    lines = on_terminal(width, "redlock_list", out)

    title, *rows = lines[-3:]
    assert max(map(len, lines)) <= width
    assert titles in (title.split(), None)
    assert {row[:3] for row in rows} == {"ord" if unicode else "b\\x", "sho"}
    if not unicode:
        assert len({row.index("task") for row in rows} | {title.index("HOLDER")}) == 1
        assert any(row.startswith("b\\xfc") and "~" in row for row in rows)
        assert "".join(lines).isascii()


# Ctrl-C


class Interrupting(StringIO):
    """An output during which somebody presses Ctrl-C: when it shows a text, for the first or a later time."""

    def __init__(self, at: str, times: int = 1) -> None:
        super().__init__()
        self.at, self.times = at, times

    def write(self, text: str) -> int:
        super().write(text)
        if self.at in text:
            self.times -= 1
            if not self.times:
                raise KeyboardInterrupt
        return len(text)


@pytest.mark.parametrize("command", ["redlock_release orders:7", "redlock_clear"])
def test_interrupted_prompt_says_that_nothing_was_done(five, monkeypatch, command):
    """Ctrl-C at the question is one sentence, not a traceback."""
    put("orders:7", text="foreign", left=None) if command == "redlock_clear" else put("orders:7")

    def interrupt(question):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)

    with pytest.raises(CommandError, match=r"^Interrupted: nothing was (released|deleted)\.$") as ended:
        call_command(*command.split(), stdin=Terminal(), stdout=StringIO(), stderr=StringIO())

    assert ended.value.returncode == 130
    assert find_lock("orders:7")


def test_interrupted_release_says_what_was_done(five):
    """Ctrl-C while holders were asked to stop, and between two locks; a command that changes nothing says nothing."""

    def interrupted(*command: str, at: str, times: int = 1) -> str:
        with pytest.raises(CommandError) as ended:
            call_command(*command, stdout=Interrupting(at, times), stderr=StringIO())
        assert ended.value.returncode == 130
        return str(ended.value)

    with lock("a"), lock("b"):
        polite = ("redlock_release", "a", "b", "--polite=60", "--no-input")
        assert interrupted(*polite, at="its holder was asked", times=2) == (
            "Interrupted: nothing was released by force; 2 holders were asked to stop, and the request stands."
        )
    put("a")
    put("b", B)
    assert interrupted("redlock_list", at="a") == "Interrupted."
    said = interrupted("redlock_release", "a", "b", "--no-input", at=": released")
    assert said.startswith("Interrupted: 1 of 2 locks handled for certain, ")
    assert [bool(find_lock(name)) for name in "ab"].count(True) == 1


def test_top_leaves_the_lines_above_it_alone(five):
    """It uses the terminal's other screen, and goes back to the first one at its end."""

    class Leaving(Interrupting, Terminal):
        """A terminal."""

    put("orders:7")
    out = Leaving("orders:7")

    call_command("redlock_top", stdout=out, no_color=True)

    assert out.getvalue().startswith("\x1b[?1049h")
    assert out.getvalue().endswith("\x1b[?1049l")


def test_no_color(five, monkeypatch):
    """The environment variable ``NO_COLOR`` is honoured (https://no-color.org)."""
    five[0].down = True
    monkeypatch.setattr("django.core.management.color.supports_color", lambda: True)
    written = []
    for chosen in ("", "1"):
        monkeypatch.setenv("NO_COLOR", chosen)
        call_command("redlock_list", stdout=StringIO(), stderr=(err := Terminal()))
        written.append(err.getvalue())

    assert [("n0" in text, "\x1b" in text) for text in written] == [(True, True), (True, False)]


def test_a_full_disk_is_no_traceback(five):
    """What cannot be written is an error of the command that says why."""

    class Full(StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CommandError, match="could not be written: No space left on device"):
        call_command("redlock_list", stdout=Full(), stderr=StringIO())


# Bounds


def test_labels_are_bounded():
    """Metrics have five hundred templates of names at most; the rest is one label, and is counted."""
    labels = Labels()

    values = {labels.of(f"{first}{second}:7") for first in WORDS for second in WORDS}

    assert len(values) == MAX_LABELS + 1
    assert "*" in values
    assert labels.rest == len(WORDS) ** 2 - MAX_LABELS
    assert labels.of(f"{WORDS[0]}{WORDS[0]}:8") != "*"


def test_nobody_can_write_a_line_of_an_error_or_of_the_log(five, caplog):
    """Control characters are escaped in names, labels, reasons for a release, and in what a node replied."""
    lease = lock("orders:7\nERROR b", renew=False, label="c\nERROR d\x1b[2J").acquire()
    lease.on_lost(lambda _lease: 1 / 0)
    with pytest.raises(LockTakenError) as taken:
        lock("orders:7\nERROR b", wait=0).acquire()
    unavailable = QuorumUnavailableError("orders:7", nodes={"n0\r": "e\x1b[2J\u2028f"})
    lost = LockLostError("orders:7", "g\nh")
    [held] = held_locks().locks
    force_release(held, held.fingerprint, reason="a\nERROR b\x1b[2J")

    assert lease.extend() is False
    assert "a\\nERROR b\\x1b[2J" in caplog.text
    assert "a callback of lock orders:7\\nERROR b failed" in caplog.messages
    assert [text for text in map(str, (taken.value, unavailable, lost)) if not text.isprintable()] == []
    assert "c\\nERROR d\\x1b[2J" in str(taken.value)
    assert taken.value.holder["label"] == "c\nERROR d\x1b[2J"


# Passwords in Django's own reports of errors

SECRET = "hunter2"
LEAKY = {
    "default": {"NODES": [f"redis://locks:{SECRET}@lock-1:6379", f"redis://lock-2?password={SECRET}&db=1"]},
    "listed": {"NODES": f"redis://:{SECRET}@lock-1,redis://:{SECRET}@lock-2"},
    "sentinel": {"NODES": [{"SENTINELS": (f"redis://:{SECRET}@sentinel-1",), "SERVICE_NAME": "mymaster"}]},
    "wrong": {"NODES": [f"redis://:{SECRET}@lock-1:x"]},
}
MASKING = "django_redlock.contrib.error_reports.MaskingReporterFilter"


@pytest.mark.parametrize("debug", [True, False])
def test_reports_of_errors_show_no_password(debug):
    """With the filter, neither REDLOCK in a report nor the variables of its frames show a password."""
    get_default_exception_reporter_filter.cache_clear()  # Django keeps it for the life of a process
    other = {"SHOP_FEED": "https://shop:open@feed"}
    with override_settings(REDLOCK=LEAKY, DEBUG=debug, DEFAULT_EXCEPTION_REPORTER_FILTER=MASKING, **other):
        with pytest.raises(InvalidRedlockError) as error:
            locks["wrong"].lock("orders:7")
        reporter = ExceptionReporter(None, error.type, error.value, error.tb, is_email=True)
        reports = [reporter.get_traceback_text(), reporter.get_traceback_html()]
    ours = [frame for frame, _ in walk_tb(error.tb) if "django_redlock" in frame.f_code.co_filename]
    assert SECRET not in repr([frame.f_locals for frame in ours])  # which other programs report, too
    get_default_exception_reporter_filter.cache_clear()
    assert [report for report in reports if SECRET in report] == []
    for shown in ("redis://locks:********************@lock-1:6379", "mymaster", "https://shop:open@feed"):
        assert [report for report in reports if shown not in report] == []


LEAK = f"redis://locks:{SECRET}@lock-1"


def in_itself() -> dict[str, Any]:
    node: dict[str, Any] = {"url": LEAK, "API_KEY": SECRET}
    node["self"] = node
    return node


def nested(depth: int) -> list[Any]:
    value = [LEAK]
    for _ in range(depth):
        value = [value]  # type: ignore[list-item]
    return value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (in_itself(), "redis://locks:********************@lock-1"),
        (nested(5000), "not shown, because its passwords could not be masked"),
        ({"user": SimpleLazyObject(lambda: 1 / 0)}, "SimpleLazyObject"),
        ("://a:" * 100_000, "://a:://a:"),  # in linear time
        ([OrderedDict(url=LEAK)], "redis://locks:********************@lock-1"),
    ],
    ids=["cycle", "deep", "lazy", "long", "subclass"],
)
def test_reports_of_errors_are_made_whatever_a_frame_has(value, shown):
    """The filter raises no error of its own, which would hide the one that is reported."""
    get_default_exception_reporter_filter.cache_clear()
    with override_settings(DEFAULT_EXCEPTION_REPORTER_FILTER=MASKING):
        with pytest.raises(LookupError) as error:
            raise LookupError
        report = ExceptionReporter(None, error.type, error.value, error.tb).get_traceback_html()
    get_default_exception_reporter_filter.cache_clear()

    assert shown in report
    assert SECRET not in report


# Tasks and the doctor


def test_a_task_that_is_no_singleton_is_called_that(five, monkeypatch):
    """``redlock_inspect --task`` of a plain task says what it is, and suggests no other task."""
    app = Celery("shop", broker="memory://", set_as_current=False, fixups=[])
    app.task(name="shop.plain")(call_command)
    monkeypatch.setattr("django_redlock.celery.handle.get_current_app", lambda: app)

    _out, err, code = run("redlock_inspect", "--task", "shop.plain")

    assert ("'shop.plain' is not a singleton task" in err, code) == (True, 2)
