"""
A process that holds locks, or waits for one; run by :func:`holding`.

It reports each event as a line of JSON, and ends when its standard input does.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Queue
from typing import Any

CHECKOUT = Path(__file__).parents[1]


@contextmanager
def held_until_killed(command: Sequence[str]) -> Iterator[None]:
    """Run a program, which says ``held`` once it has a lock, and kill it at the end."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.kill()


class Holder:
    """The process, as a test sees it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self._said: Queue[dict[str, Any]] = Queue()
        self.listener = threading.Thread(target=self._listen, daemon=True)
        self.listener.start()

    def _listen(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                self._said.put(json.loads(line))
        self._said.put({"event": "end"})

    def hear(self, event: str) -> dict[str, Any]:
        """Wait for an event of the process; fail if it is a different one."""
        said = self._said.get(timeout=30)
        assert said["event"] == event, said
        return said

    def kill(self) -> None:
        """End the process with SIGKILL, as the kernel does when memory is short."""
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        """Let the process leave its block and end."""
        assert self.process.stdin
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait(30)


@contextmanager
def holding(
    urls: Sequence[str], name: str | list[str], options: dict[str, Any] | None = None, **how: Any
) -> Iterator[Holder]:
    """Let another process hold *name*; *options* are those of the settings, *how* the arguments of ``lock()``."""
    order = {"urls": list(urls), "options": {"restart_guard": False, **(options or {})}, "name": name, "how": how}
    command = [sys.executable, "-m", "tests.holder", json.dumps(order)]
    process = subprocess.Popen(command, cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    holder = Holder(process)
    try:
        yield holder
    finally:
        holder.kill()
        assert process.stdin
        process.stdin.close()
        holder.listener.join(30)


def say(event: str, **about: Any) -> None:
    print(json.dumps({"event": event, **about}), flush=True)


def main() -> None:
    """Hold the ordered locks until standard input ends, or until the lock is lost."""
    order = json.loads(sys.argv[1])
    from django.conf import settings

    settings.configure(REDLOCK={"default": {"NODES": order["urls"], "OPTIONS": order["options"]}})
    from django_redlock import LockLostError, lock

    names = order["name"] if isinstance(order["name"], list) else [order["name"]]
    leases = [lock(name, **order["how"]).acquire() for name in names]
    say("held", pid=os.getpid(), tokens=[lease.fencing_token for lease in leases])
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    leases[0].on_lost(lambda lease: (say("lost", reason=lease.reason), ended.set()))
    ended.wait()
    try:
        leases[0].ensure()
        outcomes = [lease.release() for lease in leases]
    except LockLostError as error:
        outcomes = [lease.release() for lease in leases]
        say("stopped", reason=error.reason)
    say("released", outcomes=outcomes)


if __name__ == "__main__":
    main()
