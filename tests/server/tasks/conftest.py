"""Real workers of django-tasks-db and django-tasks-rq, over real nodes."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import django
import pytest

from django_redlock.testing import Server, Servers
from django_redlock.testing.servers import spawn
from tests.managers import wait_until

collect_ignore_glob = [] if django.VERSION >= (6, 0) else ["test_*.py"]  # before that there are no such tasks

WORKERS = {
    "db": ("db_worker", "--interval=0.02", "--no-startup-delay", "--no-reload"),
    "rq": ("rqworker", "default", "--job-class=django_tasks_rq.backend.Job"),
}
BEGIN = (
    "import json, os, sys, time, django; django.setup(); from tests.server.tasks.project import *; "
    "from django_redlock import locks; from django_redlock.inventory import find_lock; "
)
SHELL = "\nfor line in sys.stdin: exec(json.loads(line)); print(flush=True)"


@pytest.fixture(scope="module")
def rq_server() -> Iterator[Server]:
    with Server() as server:
        yield server


def printed(process: subprocess.Popen[bytes]) -> Any:
    """Return what a process prints last, which is JSON."""
    return json.loads(process.communicate(timeout=120)[0].splitlines()[-1])


class Shop:
    """A project in processes of its own: its workers, its callers, and what the runs have noted."""

    def __init__(self, env: dict[str, str], notes: Path, backend: str) -> None:
        self.env = env
        self._notes = notes
        self._backend = backend
        self._processes: list[subprocess.Popen[bytes]] = []
        self._shell: subprocess.Popen[bytes] | None = None

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a program, which is killed at the end of the test."""
        log = None if os.environ.get("TEST_LOG") else subprocess.DEVNULL
        self._processes.append(spawn([sys.executable, *command], env=self.env, stdout=log, stderr=log))
        return self._processes[-1]

    def worker(self) -> subprocess.Popen[bytes]:
        return self.start("-m", "django", *WORKERS[self._backend])

    def reaper(self) -> subprocess.Popen[bytes]:
        return self.start("-m", "django", "redlock_reap_tasks", "--every=0.5")

    def run(self, code: str) -> Any:
        """Run code in one process with the project, unless its environment changes; return the JSON that it prints."""
        if self._shell is None or self._shell_env != self.env:
            self._shell, self._shell_env = self.call(SHELL, stdin=subprocess.PIPE), dict(self.env)
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.stdin.write(json.dumps(code).encode() + b"\n")
        self._shell.stdin.flush()
        said = self._shell.stdout.readline()
        assert self._shell.stdout.readline() == b"\n", "see its error"
        return json.loads(said)

    def call(self, code: str, **options: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", BEGIN + code]
        self._processes.append(spawn(command, env=self.env, stdout=subprocess.PIPE, **options))
        return self._processes[-1]

    def notes(self, what: str, word: str) -> list[list[str]]:
        """Return the lines of a subject that begin with a word."""
        path = self._notes / what
        lines = path.read_text().splitlines() if path.exists() else []
        return [line.split()[1:] for line in lines if line.startswith(word)]

    def go(self, what: str) -> None:
        (self._notes / f"{what}.go").touch()

    def row(self, task_id: str) -> tuple[str, int]:
        """Return the status of a row, and how many workers have begun it."""
        statement = "SELECT status, worker_ids FROM django_tasks_database_dbtaskresult WHERE id = ?"
        with closing(sqlite3.connect(self.env["TEST_DATABASE"], timeout=60)) as database:
            status, workers = database.execute(statement, [task_id.replace("-", "")]).fetchone()
        return status, len(json.loads(workers))

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()


Make = Callable[[str], Shop]


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes with an empty database that has its tables, which each test copies."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "DJANGO_SETTINGS_MODULE": "tests.server.tasks.task_settings",
        "TEST_BACKEND": "db",
        "TEST_DATABASE": str(tmp_path_factory.mktemp("tasks") / "db.sqlite3"),
        "TEST_NODES": "redis://127.0.0.1:1",
        "TEST_SERVER": "redis://127.0.0.1:1",
    }
    subprocess.run([sys.executable, "-m", "django", "migrate", "--verbosity=0"], env=env, check=True)
    return env


@pytest.fixture
def make(tmp_path: Path, nodes: Servers, rq_server: Server, migrated: dict[str, str]) -> Iterator[Make]:
    shops: list[Shop] = []

    def make(backend: str) -> Shop:
        env = migrated | {
            "TEST_BACKEND": backend,
            "TEST_DATABASE": shutil.copy(migrated["TEST_DATABASE"], tmp_path),
            "TEST_NODES": ",".join(nodes.urls[:3]),
            "TEST_NOTES": str(tmp_path),
            "TEST_SERVER": rq_server.url,
        }
        shops.append(Shop(env, tmp_path, backend))
        rq_server.reset()
        return shops[-1]

    yield make
    for shop in shops:
        shop.end()


@pytest.fixture(params=["db", "rq"])
def shop(request: pytest.FixtureRequest, make: Make) -> Shop:
    return make(request.param)


@pytest.fixture
def rows(make: Make) -> Shop:
    return make("db")


def begun(shop: Shop, what: str, count: int = 1) -> list[list[str]]:
    return wait_until(lambda: len(found := shop.notes(what, "began")) >= count and found)
