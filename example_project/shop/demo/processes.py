"""Start the shop's processes so that they stop on request, and do not outlive the demo."""

import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os import killpg
from pathlib import Path
from signal import SIGKILL, SIGQUIT, SIGTERM, Signals

from django_redlock.testing.servers import spawn

Goodbyes = Sequence[tuple[Signals, float]]
GOODBYES: Goodbyes = [(SIGTERM, 5.0)]
# A worker lets its task end (SIGTERM) unless that takes too long; then it drops the task (SIGQUIT).
WORKER_GOODBYES: Goodbyes = [(SIGTERM, 1.0), (SIGQUIT, 5.0)]


class Process:
    """
    One process of the shop: in a session of its own, tied to the life of the demo, its output in a file.

    Args:
        name: Its name for people; also the name of its log file.
        command: The command line after ``python``.
        folder: Its working folder, and that of its log.
        environment: All of its environment variables.
        goodbyes: The signals that end it, one after the other, with the seconds for each.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        folder: Path,
        environment: Mapping[str, str],
        goodbyes: Goodbyes,
    ) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._goodbyes = goodbyes
        self._told = False  # to end
        with self.log.open("ab") as log:
            self._process = spawn(
                [sys.executable, *command],
                cwd=folder,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether it is still running."""
        return self._process.poll() is None

    @property
    def missing(self) -> bool:
        """Whether it ended although it was not asked to."""
        return not (self.running or self._told)

    def text(self) -> str:
        """Return its output."""
        return self.log.read_text(errors="replace")

    def stop(self) -> None:
        """End it with its signals, and the rest of its session by force; a second call does nothing."""
        if self._told:
            return
        self._told = True
        for signal, patience in self._goodbyes:
            if self.running:
                self._process.send_signal(signal)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience)
        with suppress(ProcessLookupError):
            killpg(self.pid, SIGKILL)
        self._process.wait()


def reserve_port(port: int = 0) -> tuple[int, socket.socket]:
    """
    Bind a port that the system chooses, or *port*, without listening, so that no other process gets it.

    Linux lets a server listen on it all the same. On other systems it is free again at once.

    Raises:
        OSError: *port* is taken.
    """
    reservation = socket.socket()
    reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reservation.bind(("127.0.0.1", port))
    chosen: int = reservation.getsockname()[1]
    if sys.platform != "linux":
        reservation.close()
    return chosen, reservation
