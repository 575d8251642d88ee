"""Everything that the demo runs: lock nodes, a broker, a worker, beat and the web server."""

import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.error import URLError

from django.core.management.base import CommandError

from django_redlock.testing import Server, ServerNotFoundError, ServerStartError
from django_redlock.testing.servers import spawn

from .nodes import Nodes
from .processes import GOODBYES, WORKER_GOODBYES, Goodbyes, Process, reserve_port
from .visitor import Visitor

PROJECT = Path(__file__).resolve().parents[2]
MANAGE = str(PROJECT / "manage.py")
START_TIMEOUT = 60.0  # seconds; 9 are usual
PAYMENT_SECONDS = 1.5
WORKER = ("-m", "celery", "-A", "shop_site", "worker", "--loglevel", "INFO", "--concurrency", "2")
BEAT = ("-m", "celery", "-A", "shop_site", "beat", "--loglevel", "INFO", "--schedule", "beat-schedule", "--pidfile=")
# A row of the page "Held locks": name, votes.
LOCK = re.compile(r'data-lock="([^"]*)".*?>(\d+)/\d+ ', re.DOTALL)
Found = TypeVar("Found")


class HeldLock(NamedTuple):
    """A lock as the admin shows it."""

    name: str
    votes: str


class Stack:
    """
    The shop and its servers.

    Args:
        folder: The folder for all files.
        nodes: The kind of lock nodes.
        port: The web server's port; 0 lets the system choose.
        import_seconds: How long an import of the catalogue takes.
        import_every: How often beat submits one, in seconds.

    Raises:
        CommandError: The port is taken, or the program of the nodes is not installed.
    """

    def __init__(
        self, folder: Path, nodes: type[Nodes], *, port: int, import_seconds: float, import_every: float
    ) -> None:
        self.folder = folder
        self.import_seconds = import_seconds
        self.password = secrets.token_urlsafe(9)
        self.processes: dict[str, Process] = {}
        tempfile.tempdir = str(folder)  # the parent of the servers' folders
        try:
            self.port, self._reservation = reserve_port(port)
        except (OSError, OverflowError) as error:
            raise CommandError(f"Port {port} cannot be used ({error}): name another, or none.") from None
        self.broker, self.nodes = Server(), nodes(folder)
        self.admin = Visitor(self.url)
        self.environment = {
            **os.environ,
            "CELERY_BROKER_URL": self.broker.url,
            "DJANGO_SETTINGS_MODULE": "shop_site.settings",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])),
            "PYTHONUNBUFFERED": "1",
            "REDLOCK_NODES": self.nodes.setting,
            **self.nodes.options,
            "SHOP_DATABASE": str(folder / "shop.sqlite3"),
            "SHOP_IMPORT_EVERY": str(import_every),
            "SHOP_IMPORT_SECONDS": str(import_seconds),
            "SHOP_PAYMENT_SECONDS": str(PAYMENT_SECONDS),
            "SHOP_PASSWORD": self.password,
            "SHOP_SECRET_KEY": secrets.token_urlsafe(32),
            "TMPDIR": str(folder),
        }

    @property
    def url(self) -> str:
        """The address of the shop."""
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """
        Start everything, and return when the first import runs.

        Raises:
            CommandError: Something did not start.
        """
        try:
            self.broker.start()
            self.nodes.start()
        except (ServerNotFoundError, ServerStartError) as error:
            raise CommandError(str(error)) from None
        votes_at = time.monotonic() + self.nodes.votes_after
        # The worker takes a while to start, and needs no tables before its first task.
        self.run("worker", *WORKER, goodbyes=WORKER_GOODBYES)
        self.manage("open_shop")
        self.run("web", MANAGE, "runserver", "--noreload", f"127.0.0.1:{self.port}")
        self.wait_for("the web server", self._answers)
        self.admin.log_in("admin", self.password)
        self.wait_for("the nodes to vote", lambda: time.monotonic() > votes_at)
        self.first_import: str = self.admin.post("import/").json()["task"]
        self.wait_for("the first import", lambda: self.admin.get().json()["imports"])
        self.run("beat", *BEAT)

    def run(self, name: str, *command: str, goodbyes: Goodbyes = GOODBYES) -> Process:
        """Start one more process of the shop."""
        self.processes[name] = Process(
            name, command, folder=self.folder, environment=self.environment, goodbyes=goodbyes
        )
        return self.processes[name]

    def stop(self) -> None:
        """End everything: the users of the servers before the servers."""
        for process in reversed(self.processes.values()):
            process.stop()
        self.nodes.stop()
        self.broker.stop()
        self._reservation.close()

    def check(self) -> None:
        """
        Check that every process of the shop is running.

        Raises:
            CommandError: One has ended; the message has the end of its log.
        """
        for process in self.processes.values():
            if process.missing:
                end = "\n".join(process.text().splitlines()[-20:])
                raise CommandError(f"The {process.name} has ended. Its log, {process.log}, ends with:\n{end}")

    def wait_for(self, what: str, look: Callable[[], Found | None], seconds: float = START_TIMEOUT) -> Found:
        """
        Return the result of *look* as soon as it has one.

        Raises:
            CommandError: There was none within *seconds*, or a process ended meanwhile.
        """
        deadline = time.monotonic() + seconds
        while not (found := look()):
            self.check()
            if time.monotonic() > deadline:
                raise CommandError(f"Waited {seconds:.0f} s for {what} in vain; the logs are in {self.folder}.")
            time.sleep(0.1)
        return found

    def held_locks(self) -> list[HeldLock]:
        """Return the locks on the admin's page, as its script gets them."""
        rows = self.admin.get("admin/redlock/heldlock/live/").json()["rows"].split("<tr>")
        return [HeldLock(*found.groups()) for row in rows if (found := LOCK.search(row))]

    def import_that_will_last(self) -> dict[str, Any] | None:
        """Return the newest import if it will run for a while."""
        newest: dict[str, Any] = self.admin.get().json()["imports"][0]
        return newest if newest["finished"] is None and newest["rows"] < 40 else None

    def manage(self, *command: str, check: bool = True) -> str:
        """
        Run a management command of the shop; return its standard output.

        Raises:
            CommandError: It failed, and *check* is true.
        """
        with spawn(
            [sys.executable, MANAGE, *command],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                output, errors = process.communicate(timeout=START_TIMEOUT)
            except BaseException:
                process.kill()
                raise
        if process.returncode and check:
            raise CommandError(f"manage.py {' '.join(command)} failed:\n{output.decode()}{errors.decode()}")
        return output.decode()

    def _answers(self) -> bool:
        try:
            return self.admin.get().status == 200
        except URLError:
            return False
