"""
The tutorial, typed from its first line to its last, with real workers.

It waits most of the time: the imports of the page take twenty seconds each. It waits for conditions, which it reads
from the project's database.
"""

import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.cookiejar import CookieJar
from pathlib import Path
from signal import SIGCONT, SIGKILL
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, OpenerDirector, build_opener

import pytest

from django_redlock.testing.servers import reserve_port
from tests.managers import wait_until
from tests.typed import Reader, blocks, commands

pytest.importorskip("celery", reason="needs Celery: pip install celery")

PAGE = "docs/start/tutorial.md"
SLOT = "task:shop.tasks.import_deliveries"
CALL = 'python manage.py shell -v 0 -c "from shop.tasks import import_deliveries; import_deliveries.delay()"'
PATIENCE = 100.0  # seconds, for machines under load
INSTALLATION = ["python3 -m venv .venv", ". .venv/bin/activate", 'pip install "django-redlock[celery]"']

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the pages' workers are tested on Linux")


def readiness(log: Path) -> int:
    """Return how many workers have reported to a log that they are ready."""
    return log.read_text(encoding="utf-8").count(" ready.") if log.exists() else 0


class Student(Reader):
    """A reader of the tutorial, who looks into the database to know when to go on."""

    def follow(self, heading: str) -> Iterator[tuple[str, str]]:
        """Write the files of a section, type its commands, and yield each of them with its output."""
        for language, text in blocks(PAGE, heading):
            if language == "python":
                self.write(text)
            for command in commands(text) if language == "console" else []:
                yield command, "" if command in INSTALLATION else self.type(command)

    def type(self, command: str) -> str:
        """Run a command; a worker that it starts is ready when this returns, as it is for a reader who types."""
        logs = [self.folder / name for name in re.findall(r"--detach .*--logfile (\S+)", command)]
        before = [readiness(log) for log in logs]
        output = super().type(command)
        wait_until(lambda: all(readiness(log) > times for log, times in zip(logs, before, strict=True)))
        return output

    def rows(self, task: str = "%") -> int:
        return int(self.query("SELECT count(*) FROM shop_delivery WHERE task LIKE ?", task)[0][0])

    def query(self, statement: str, *values: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.folder / "db.sqlite3", timeout=PATIENCE)) as database:
            return database.execute(statement, values).fetchall()

    def tasks(self) -> set[str]:
        return {task for (task,) in self.query("SELECT DISTINCT task FROM shop_delivery")}

    def slot_is_free(self) -> bool:
        return "No locks." in self.type("python manage.py redlock_list")

    def is_busy(self) -> bool:
        """Return whether a process reads or writes one of the files at this moment."""
        for name in ("db.sqlite3", "locks.sqlite3"):
            with closing(sqlite3.connect(self.folder / name, timeout=1, isolation_level=None)) as database:
                try:
                    database.execute("BEGIN EXCLUSIVE")
                except sqlite3.OperationalError:
                    return True
                database.execute("ROLLBACK")
        return False

    def worker(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())


@pytest.fixture
def student(tmp_path: Path) -> Iterator[Student]:
    yield Student(tmp_path)
    for pid in (file.read_text().strip() for file in tmp_path.glob("*.pid")):
        with suppress(FileNotFoundError):  # a worker that was killed has left its file
            if b"celery" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(int(pid), SIGKILL)


def test_every_step_of_the_tutorial_ends_as_the_page_says(student: Student):
    """The import runs twice, once, is killed, is overtaken and is seen in the admin; the page's tests pass."""
    typed = list(student.follow("Prepare a project"))
    assert [command for command, _ in typed[:3]] == INSTALLATION

    twice(student)
    killed(student)
    overtaken(student)
    in_the_admin(student)
    list(student.follow("6. Write the test"))


def twice(student: Student) -> None:
    for command, output in student.follow("1. The import runs twice"):
        if "task.delay()" in command:
            wait_until(lambda: student.rows() == 40)
        if "count()" in command:
            assert output.strip() == "40"


def killed(student: Student) -> None:
    """Two calls of a singleton are one run, and a killed worker frees the slot."""
    *_, (_, ids) = student.follow("2. One at a time")
    (first,) = set(ids.split())
    wait_until(lambda: student.rows(first))

    steps = student.follow("3. Kill the worker")
    assert SLOT in next(steps)[1]
    killed = student.worker("one")
    assert next(steps)[0] == "kill -9 $(cat one.pid)"
    wait_until(lambda: not Path(f"/proc/{killed}/cmdline").read_bytes() if Path(f"/proc/{killed}").exists() else True)
    next(steps)
    wait_until(student.slot_is_free, pause=3)
    assert next(steps)[1].strip() == "No locks."
    *_, (_, duplicate) = steps
    assert duplicate.strip() == "False"


def overtaken(student: Student) -> None:
    """A run that was stopped for longer than its lease ends with an error, and books nothing after it."""
    steps = student.follow("4. Lose the lease in the middle")
    before = student.tasks()
    next(steps)
    wait_until(lambda: student.tasks() - before)
    (first,) = student.tasks() - before
    next(steps)
    while student.is_busy():  # the page says what to do then
        os.kill(student.worker("one"), SIGCONT)
        student.type("sleep 1; kill -STOP $(cat one.pid)")
    wait_until(student.slot_is_free, pause=3)
    booked = student.rows(first)

    next(steps)
    second = next(steps)[1].strip()
    wait_until(lambda: student.rows(second))
    assert next(steps)[0] == "kill -CONT $(cat one.pid)"
    # Its own clock shows that its lease has ended, or the database refuses it, if the signal came after that look.
    wait_until(lambda: re.search(r"(LockLost|StaleToken)Error:", (student.folder / "one.log").read_text()))
    assert SLOT in next(steps)[1]

    assert (student.rows(first), second != first) == (booked, True)


def in_the_admin(student: Student) -> None:
    """A user who logs in sees the slot of the run."""
    (create, serve), (url,) = commands_and_urls()
    student.type(create)
    port = reserve_port(student)
    with running(student, f"{serve} --noreload {port}"):
        url = url.replace("8000", str(port))
        browser = build_opener(HTTPCookieProcessor(CookieJar()))
        wait_until(lambda: SLOT in page_after_login(browser, url) or student.type(CALL), pause=1)


def commands_and_urls() -> tuple[list[str], list[str]]:
    """Return what the section on the admin has the reader type and open."""
    heading = "5. Look at it in the admin"
    typed = [command for _, text in blocks(PAGE, heading) for command in commands(text)]
    text = (Path(__file__).parents[2] / PAGE).read_text(encoding="utf-8").partition(heading)[2]
    return typed, re.findall(r"<(http://[^>]+)>", text)


@contextmanager
def running(student: Student, command: str) -> Iterator[None]:
    """Run a command of Python in the background for the length of the block."""
    argv, quiet = shlex.split(command), subprocess.DEVNULL
    with subprocess.Popen(argv, cwd=student.folder, env=student.environment, stdout=quiet, stderr=quiet) as process:
        try:
            yield
        finally:
            process.kill()


def page_after_login(browser: OpenerDirector, url: str) -> str:
    """Return the text of a page of the admin, after a login if it wants one; empty while the server is starting."""
    with suppress(URLError, ConnectionError):
        with browser.open(url) as response:
            page, form = response.read().decode(), response.url
        if token := re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', page) if "/login/" in form else None:
            data = {"csrfmiddlewaretoken": token[1], "username": "admin", "password": "secret"}
            with browser.open(form, urlencode(data).encode()) as response:
                return str(response.read().decode())
        return str(page)
    return ""
