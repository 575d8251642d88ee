"""
A process that holds locks and opens transactions on command, one line at a time, so that it can be stopped anywhere.

Run as ``python -m tests.server.fencing.holder``; ``HOLDER`` in its environment has its settings in JSON. Each command
gets one line as a reply: its result, or its failure with the name and text of the exception.
"""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Self

from django_redlock.testing.servers import spawn

from .counting import CounterTable

CHECKOUT = Path(__file__).parents[3]
TIMEOUT = 120.0  # seconds for a reply
SHORT = 2.2  # seconds, for a lease that is meant to end
FAILED = "failed with "


class Process:
    """A holder in a process of its own, as the test sees it."""

    def __init__(self, database: dict[str, Any], nodes: list[str]) -> None:
        settings = json.dumps({"database": database, "nodes": nodes}, default=str)
        self._process = spawn(
            [sys.executable, "-m", "tests.server.fencing.holder"],
            cwd=CHECKOUT,
            env={**os.environ, "HOLDER": settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, *command: object) -> None:
        """Send a command."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command).encode() + b"\n")

    def answer(self) -> str:
        """Return the reply to the last command."""
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], TIMEOUT)[0], "the holder does not answer"
        return self._process.stdout.readline().decode().strip()

    def ask(self, *command: object) -> str:
        """Send a command that must succeed; return its reply."""
        self.tell(*command)
        answer = self.answer()
        assert not answer.startswith(FAILED), f"{command}: {answer}"
        return answer

    def stop(self) -> None:
        """Stop the process (SIGSTOP) wherever it is, and return once it has stopped."""
        os.kill(self._process.pid, signal.SIGSTOP)
        self.await_stop()

    def await_stop(self) -> None:
        """Return once the process has stopped."""
        deadline = monotonic() + TIMEOUT
        while not os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT | os.WNOHANG):
            assert monotonic() < deadline, "the holder did not stop"
            sleep(0.01)

    def wake(self) -> None:
        """Let the process continue (SIGCONT)."""
        os.kill(self._process.pid, signal.SIGCONT)


class Holder:
    """The same holder inside its process: one method per command."""

    def __init__(self) -> None:
        self._lease: Any = None
        self._stack = ExitStack()

    def acquire(self, name: str, ttl: float, wait: float) -> str:
        from django_redlock import lock

        self._lease = lock(name, ttl=ttl, wait=wait).acquire()
        return "acquired"

    def reason(self) -> str:
        return str(self._lease.reason)

    def release(self) -> str:
        return self._lease.release()

    def shorten(self) -> str:
        """Make the lease end soon after its last renewal; until now it lasted, however busy the machine was."""
        return str(self._lease.extend(ttl=SHORT))

    def execute(self, sql: str) -> str:
        from django.db import connection

        connection.cursor().execute(sql)
        return "executed"

    def begin(self) -> str:
        """Open a fenced transaction."""
        from django_redlock import fenced

        self._stack.enter_context(fenced(self._lease))
        return "inside"

    def read(self) -> str:
        return str(CounterTable("default").read())

    def write(self, value: int) -> str:
        CounterTable("default").write(value)
        return "written"

    def commit(self) -> str:
        with self._stack.pop_all():
            pass
        return "committed"

    def stop_before_claiming(self) -> str:
        """From now on, stop (SIGSTOP) between the check of the clock and the first statement to the database."""
        from django.db import connection

        connection.ensure_connection()
        connection.execute_wrappers.append(self._stop)
        return "armed"

    def _stop(self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("UPDATE") and "redlock_fence" in sql:
            self.shorten()
            os.kill(os.getpid(), signal.SIGSTOP)
        return execute(sql, params, many, context)


def main() -> None:
    """Execute commands until the input ends."""
    configure(**json.loads(os.environ["HOLDER"]))
    holder = Holder()
    for line in sys.stdin:
        command, *values = json.loads(line)
        try:
            said = getattr(holder, command)(*values)
        except Exception as error:
            said = f"{FAILED}{type(error).__name__}: {error}".replace("\n", " ")
        print(said, flush=True)


def configure(database: dict[str, Any], nodes: list[str]) -> None:
    """Set Django up with this database and these nodes."""
    import django
    from django.conf import settings

    from tests.drivers import install_mysql

    if database["ENGINE"].endswith("mysql"):
        install_mysql()
    options = {"node_timeout": 0.5, "restart_guard": False}
    settings.configure(
        INSTALLED_APPS=["django_redlock"],
        DATABASES={"default": database},
        REDLOCK={"default": {"NODES": nodes, "OPTIONS": options}},
        USE_TZ=True,
    )
    django.setup()


if __name__ == "__main__":
    main()
